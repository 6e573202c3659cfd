"""What packing does to the predictions of SmolLM2: perplexity, KL divergence, top-1 agreement."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.press_caches import (
    NO_EXACT,
    CacheMaker,
    Int8Cache,
    fill,
    fp_cache,
    load_smollm2,
    quanto_cache,
    text_tokens,
    turboquant,
)  # fmt: skip
from tq_offload.kv_cache import resident_bytes
from tq_offload.spec import PRESETS

__all__ = ["CHUNKS", "PREFIX", "SCORED", "Quality", "quality", "rows"]

PREFIX, SCORED = 1536, 384
STARTS = (0, 770)
"""Where the prefix starts in the text: two windows of 1,536 + 384 tokens; figures are means over both."""

CHUNKS = (128, 256, 512, 1024)


@dataclass(frozen=True)
class Quality:
    """Against the unquantised cache: relative change of perplexity, mean KL in nats a token, share of equal top-1.

    `error` is the standard error of the mean KL; `ratio` is bf16 bytes of the prefix's K and V by `resident_bytes`.
    """

    name: str
    perplexity: float
    kl: float
    error: float
    top1: float
    ratio: float


def rows() -> Iterator[tuple[str, CacheMaker]]:
    """What is measured, in the order of the table."""
    yield "int8 per vector (reference)", lambda config: Int8Cache(config=config)
    yield "quanto 4-bit", quanto_cache
    for preset in PRESETS:
        yield preset, turboquant(preset)
        yield f"{preset}, no exact tokens", turboquant(preset, **NO_EXACT)
    for chunk in CHUNKS:
        yield f"turboquant, chunk_tokens={chunk}", turboquant(chunk_tokens=chunk)
        yield f"turboquant, chunk_tokens={chunk}, no exact tokens", turboquant(chunk_tokens=chunk, **NO_EXACT)


class _Window:
    """The unquantised run over a prefix and the tokens after it."""

    def __init__(self, model: Any, ids: torch.Tensor) -> None:
        self.model, self.ids = model, ids
        cache = fp_cache(model.config)
        model(ids[:, :PREFIX], past_key_values=cache, logits_to_keep=1)
        self.prefix = fill(fp_cache(model.config), cache)
        self.targets = ids[0, PREFIX + 1 :]
        self.expected = self._score(cache)
        self.loss = self._loss(self.expected)

    def _score(self, cache: Any) -> torch.Tensor:
        """Log probabilities f32 [SCORED, V] of the tokens after the prefix, in one forward pass."""
        logits = self.model(self.ids[:, PREFIX:-1], past_key_values=cache).logits[0]
        return torch.log_softmax(logits.float(), dim=-1)

    def _loss(self, scores: torch.Tensor) -> torch.Tensor:
        return -scores.gather(1, self.targets[:, None])[:, 0]

    def compare(self, make: CacheMaker) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Difference of the loss, KL and agreement of every scored token, each f32 [SCORED]."""
        scores = self._score(fill(make(self.model.config), self.prefix))
        kl = (self.expected.exp() * (self.expected - scores)).sum(dim=-1)
        same = (scores.argmax(-1) == self.expected.argmax(-1)).float()
        return self._loss(scores) - self.loss, kl, same

    def ratio(self, make: CacheMaker) -> float:
        """How many times fewer bytes the prefix takes than as bf16."""
        fp = resident_bytes(fill(fp_cache(self.model.config), self.prefix, dtype=torch.bfloat16))
        return fp / resident_bytes(fill(make(self.model.config), self.prefix, dtype=torch.bfloat16))


@torch.no_grad()
def quality(only: str = "") -> Iterator[Quality]:
    """Measure every row whose name contains `only`; weights and K, V in float32, so that nothing else rounds."""
    model, tokenizer = load_smollm2(torch.float32)
    ids = text_tokens(tokenizer)
    windows = [_Window(model, ids[:, start : start + PREFIX + SCORED + 1]) for start in STARTS]
    for name, make in rows():
        if only not in name:
            continue
        parts = [torch.stack(window.compare(make)) for window in windows]
        loss, kl, same = torch.cat(parts, dim=1)
        yield Quality(
            name, math.exp(loss.mean()) - 1, kl.mean().item(), kl.std().item() / math.sqrt(kl.numel()),
            same.mean().item(), windows[0].ratio(make),
        )  # fmt: skip
