"""Runs the rows: predictions and attention on windows of text, on biased models, and the pass keys."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.quality import needle
from benchmarks.quality.biased import CHECKED_BETA, Variant, biased
from benchmarks.quality.codecs import Codec
from benchmarks.quality.texts import TUNED_ON, Place, Sizes, rounded, window
from tq_offload.check.scoring import Window, layer_errors

__all__ = ["BiasedModel", "Score", "on_biased_models", "on_pass_keys", "on_text"]

Progress = Callable[[str], None]


@dataclass
class Score:
    """One codec over all windows.

    `bits`: bits an element as stored. `kl`: mean KL to the unquantised predictions, nats a token; `error` its standard
    error over the tokens; `unseen` the mean over the texts on which nothing was tuned. `perplexity`: relative change.
    `top1`: share of tokens with the same most probable token. `attention`: relative error of the attention output, by
    layer; `key`, `value`: error energy over centred K energy and over V energy, means over layers. `missing`: why there
    is nothing.
    """

    name: str
    family: str
    note: str = ""
    missing: str = ""
    bits: float = math.nan
    kl: float = math.nan
    error: float = math.nan
    unseen: float = math.nan
    perplexity: float = math.nan
    top1: float = math.nan
    key: float = math.nan
    value: float = math.nan
    attention: list[float] = field(default_factory=list)
    same_answer: float = math.nan
    key_found: float = math.nan

    @property
    def attention_mean(self) -> float:
        """Mean over the layers."""
        return sum(self.attention) / len(self.attention) if self.attention else math.nan


@dataclass
class BiasedModel:
    """A changed model: its perplexity unquantised, and the rows."""

    variant: str
    perplexity: float
    scores: list[Score]


def _coded(codec: Codec, found: Window) -> tuple[list[torch.Tensor], list[torch.Tensor], float]:
    """K and V after the codec, each f32 [1, H, P, D] by layer, rounded to bf16; and bits an element."""
    k, v = rounded(found)
    keys, values, stored = codec.run(k, v)
    sides = ([layer.bfloat16().float()[None] for layer in side] for side in (keys, values))
    return *sides, 8 * stored / (k.numel() + v.numel())


def on_text(
    model: Any, texts: dict[str, torch.Tensor], where: list[Place], sizes: Sizes, rows: list[Codec], say: Progress
) -> list[Score]:
    """Score every codec on every window; the attention on the first window of each text."""
    scores = {codec.name: Score(codec.name, codec.family, codec.note) for codec in rows}
    kl: dict[str, list[torch.Tensor]] = {codec.name: [] for codec in rows}
    loss: dict[str, list[torch.Tensor]] = {codec.name: [] for codec in rows}
    same: dict[str, list[torch.Tensor]] = {codec.name: [] for codec in rows}
    layers: dict[str, list[list[tuple[float, float, float]]]] = {codec.name: [] for codec in rows}
    for number, place in enumerate(where):
        say(f"window {number + 1} of {len(where)} ({place.text}, token {place.start})")
        found = window(model, texts, place, sizes)
        for codec in rows:
            score = scores[codec.name]
            if score.missing:
                continue
            try:
                keys, values, score.bits = _coded(codec, found)
            except Exception as problem:  # a row of another package says what is wrong, the others go on
                if codec.family == "ours":
                    raise
                score.missing = f"{type(problem).__name__}: {problem}".splitlines()[0]
                continue
            result = found.compare(keys, values)
            kl[codec.name].append(result.kl)
            loss[codec.name].append(result.loss_change)
            same[codec.name].append(result.top1)
            if place.start == 0:
                errors = layer_errors(found, keys, values)
                layers[codec.name].append([(e.attention, e.key, e.value) for e in errors])
    for name, score in scores.items():
        if not score.missing:
            _summarise(score, kl[name], loss[name], same[name])
            unseen = [x for x, place in zip(kl[name], where, strict=True) if place.text != TUNED_ON]
            score.unseen = torch.cat(unseen).mean().item() if unseen else math.nan
            by_layer = torch.tensor(layers[name]).mean(dim=0)  # [L, 3]
            score.attention = by_layer[:, 0].tolist()
            score.key, score.value = by_layer[:, 1].mean().item(), by_layer[:, 2].mean().item()
    return list(scores.values())


def _summarise(score: Score, kl: list[torch.Tensor], loss: list[torch.Tensor], same: list[torch.Tensor]) -> None:
    every = torch.cat(kl)
    score.kl, score.error = every.mean().item(), every.std().item() / math.sqrt(every.numel())
    change = torch.cat(loss).mean().item()
    score.perplexity = math.expm1(change) if change < 700 else math.inf
    score.top1 = torch.cat(same).mean().item()


def on_biased_models(
    model: Any,
    rms: torch.Tensor,
    kinds: list[Variant],
    texts: dict[str, torch.Tensor],
    where: list[Place],
    sizes: Sizes,
    rows: list[Codec],
    say: Progress,
) -> Iterator[BiasedModel]:
    """Score the codecs on every changed model, against that model unquantised; one window where no check looks."""
    for variant in kinds:
        say(f"biased keys: {variant.name}")
        changed = biased(model, rms, variant)
        some = where if variant.beta == CHECKED_BETA else where[:1]
        windows = [window(changed, texts, place, sizes) for place in some]
        perplexity = math.exp(torch.cat([w.loss for w in windows]).mean().item())
        say(f"its perplexity, unquantised: {perplexity:.2f}")
        scores = []
        for codec in rows:
            score = Score(codec.name, codec.family, codec.note)
            results = []
            try:
                for found in windows:
                    keys, values, score.bits = _coded(codec, found)
                    results.append(found.compare(keys, values))
            except Exception as problem:
                if codec.family == "ours":
                    raise
                score.missing = f"{type(problem).__name__}: {problem}".splitlines()[0]
            else:
                _summarise(score, [r.kl for r in results], [r.loss_change for r in results], [r.top1 for r in results])
            scores.append(score)
        yield BiasedModel(variant.name, perplexity, scores)


def on_pass_keys(
    model: Any, tokenizer: Any, text: torch.Tensor, rows: list[Codec], scores: list[Score], short: bool, say: Progress
) -> dict[str, Any]:
    """Fill `same_answer` and `key_found` of the scores; returns what was asked and how the fp cache answers."""
    asked, right = [], []
    for case, found in needle.cases(model, tokenizer, text, short=short):
        asked.append(case)
        right.append(found)
    say(f"pass keys: {len(asked)} cases, the fp cache finds {sum(right)}")
    for codec, score in zip(rows, scores, strict=True):
        if not score.missing:
            got = needle.recall(tokenizer, asked, codec)
            score.same_answer, score.key_found = got.same, got.found
    cases = [{"length": c.length, "depth": c.depth, "fp": f} for c, f in zip(asked, right, strict=True)]
    return {"cases": cases, "fp_found": sum(right) / len(right)}
