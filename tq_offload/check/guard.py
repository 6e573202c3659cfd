"""`check_model`: presets of the codec on a model, and the cheapest of them within bounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from tq_offload.check.memory import project
from tq_offload.check.profile import LayerProfile, findings, profile
from tq_offload.check.report import Bounds, PresetResult, Report, summary
from tq_offload.check.sample import Sample, cut, default_text, starts_with, token_ids
from tq_offload.check.scoring import Comparison, LayerError, Window, layer_errors, through_frames
from tq_offload.codec import TurboQuantCodec
from tq_offload.errors import CheckError
from tq_offload.spec import PRESETS, CodecSpec

__all__ = ["check_model"]

Progress = Callable[[str], None]


class _Model(NamedTuple):
    """What the first window shows of the model."""

    shapes: list[tuple[int, int]]
    layers: list[LayerProfile]


class _Candidate:
    """A preset and what it did to the windows so far."""

    def __init__(self, name: str, spec: CodecSpec) -> None:
        self.name, self.codec = name, TurboQuantCodec(spec)
        self.parts: list[Comparison] = []
        self.layers: list[list[LayerError]] = []
        self.stored = self.elements = 0

    def run(self, window: Window, chunk_tokens: int) -> None:
        keys, values, stored = through_frames(self.codec, window.keys, window.values, chunk_tokens)
        self.stored += stored
        self.elements += sum(x.numel() for side in (keys, values) for x in side)
        self.parts.append(window.compare(keys, values))
        self.layers.append(layer_errors(window, keys, values))

    def result(self, bounds: Bounds) -> PresetResult:
        bits = 8 * self.stored / self.elements
        return summary(self.name, self.codec.spec, bits, self.parts, self.layers, bounds)


def check_model(
    model: Any,
    tokenizer: Any = None,
    text: str | torch.Tensor | None = None,
    presets: Sequence[str] | Mapping[str, CodecSpec] | None = None,
    *,
    bounds: Bounds | None = None,
    sample: Sample | None = None,
    chunk_tokens: int = 256,
    name: str = "",
    progress: Progress = lambda line: None,
) -> Report:
    """Score presets on a model: prefixes go through frames, the tokens after them are predicted with what comes back.

    Args:
        model: A causal language model of transformers, in eval mode, whose K and V are in layers of full attention.
        tokenizer: Its tokenizer; not needed when `text` is tokens.
        text: A text, or tokens i64 [1, T]; None: the one that ships with the package.
        presets: Names of presets, or specs by name; None: all of `PRESETS`.
        bounds: KL 0.005 and 2 % of perplexity by default.
        sample: How many tokens; 768 scored after prefixes of 1,024 by default.
        chunk_tokens: Tokens of a chunk, as LMCache is set (256 by default there too).
        name: Of the model, for the report.
        progress: Called with a line for every step.

    Raises:
        CheckError: Text too short, no tokenizer, or a number out of range.
        ConfigError: An unknown preset.
        CacheTypeError: The model has no K and V that can be packed.
        NonFiniteError: NaN or Inf in K, V or the predictions.
    """
    bounds, sample = bounds or Bounds(), sample or Sample()
    if chunk_tokens < 1:
        raise CheckError(f"--chunk-tokens {chunk_tokens}: at least 1 token is needed")
    candidates = [_Candidate(n, s) for n, s in _specs(presets).items()]
    cuts = _windows(model, tokenizer, text, sample)
    first, losses = _run(model, cuts, candidates, sample.prefix, chunk_tokens, progress)
    results = sorted((c.result(bounds) for c in candidates), key=lambda r: r.bits)
    recommended = next((r for r in results if r.fits), None)
    best = min(results, key=lambda r: r.kl)
    return Report(
        model=name or type(model).__name__, own_text=text is not None, shapes=first.shapes,
        perplexity=math.exp(losses.double().mean().item()), prefix=sample.prefix, tokens=sample.tokens,
        windows=len(cuts), chunk_tokens=chunk_tokens, bounds=bounds, presets=results, profile=first.layers,
        findings=findings(first.layers), recommended=recommended.name if recommended else None, best=best.name,
        memory=project(first.shapes, (recommended or best).bits, chunk_tokens),
    )  # fmt: skip


def _run(
    model: Any,
    cuts: Sequence[torch.Tensor],
    candidates: Sequence[_Candidate],
    prefix: int,
    chunk_tokens: int,
    progress: Progress,
) -> tuple[_Model, torch.Tensor]:
    """Run every candidate on every window, one window in memory at a time. Returns the unquantised loss as well."""
    losses: list[torch.Tensor] = []
    for i, ids in enumerate(cuts):
        progress(f"window {i + 1} of {len(cuts)}: unquantised")
        window = Window(model, ids.to(model.device), prefix)
        losses.append(window.loss.cpu())
        if not i:
            first = _Model([(k.shape[1], k.shape[3]) for k in window.keys], profile(window, chunk_tokens))
        for candidate in candidates:
            progress(f"window {i + 1} of {len(cuts)}: {candidate.name}")
            candidate.run(window, chunk_tokens)
        del window  # before the next one is made
    return first, torch.cat(losses)


def _specs(presets: Sequence[str] | Mapping[str, CodecSpec] | None) -> Mapping[str, CodecSpec]:
    if isinstance(presets, Mapping):
        specs = presets
    else:
        specs = {name: CodecSpec.preset(name, setting="--preset") for name in (PRESETS if presets is None else presets)}
    if not specs:
        raise CheckError("no preset to check: name one with --preset")
    return specs


def _windows(model: Any, tokenizer: Any, text: str | torch.Tensor | None, sample: Sample) -> list[torch.Tensor]:
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if isinstance(text, torch.Tensor):
        return cut(text, sample, limit=limit)
    if tokenizer is None:
        raise CheckError("a tokenizer is needed to check with a text: pass one, or pass tokens")
    ids = token_ids(tokenizer, default_text() if text is None else text)
    return cut(ids, sample, first=starts_with(tokenizer, ids), limit=limit)
