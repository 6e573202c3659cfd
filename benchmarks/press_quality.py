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
from tq_offload.check.scoring import Window
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


def _prefix(window: Window) -> Any:
    """An unquantised cache with the prefix of a window."""
    cache = fp_cache(window.model.config)
    for i, k, v in zip(window.layers, window.keys, window.values, strict=True):
        cache.update(k, v, i)
    return cache


def _attended(cache: Any, window: Window) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """K and V [1, H, P, D] of the prefix by layer as attention gets them: what the cache gives with a token more."""
    keys, values = [], []
    for i, k0 in zip(window.layers, window.keys, strict=True):
        token = torch.zeros_like(k0[:, :, :1])
        k, v = cache.update(token, token.clone(), i)
        keys.append(k[:, :, :-1].clone())
        values.append(v[:, :, :-1].clone())
    return keys, values


def _ratio(make: CacheMaker, reference: Any, config: Any) -> float:
    """How many times fewer bytes the prefix takes than as bf16."""
    taken = [resident_bytes(fill(one(config), reference, dtype=torch.bfloat16)) for one in (fp_cache, make)]
    return taken[0] / taken[1]


@torch.no_grad()
def quality(only: str = "") -> Iterator[Quality]:
    """Measure every row whose name contains `only`; weights and K, V in float32, so that nothing else rounds."""
    model, tokenizer = load_smollm2(torch.float32)
    ids = text_tokens(tokenizer)
    windows = [Window(model, ids[:, start : start + PREFIX + SCORED + 1], PREFIX) for start in STARTS]
    prefixes = [_prefix(window) for window in windows]
    for name, make in rows():
        if only not in name:
            continue
        found = [
            window.compare(*_attended(fill(make(model.config), prefix), window))
            for window, prefix in zip(windows, prefixes, strict=True)
        ]
        kl = torch.cat([one.kl for one in found])
        loss, same = (
            torch.cat([getattr(one, what) for one in found]).mean().item() for what in ("loss_change", "top1")
        )
        error = kl.std().item() / math.sqrt(kl.numel())
        ratio = _ratio(make, prefixes[0], model.config)
        yield Quality(name, math.expm1(loss), kl.mean().item(), error, same, ratio)
