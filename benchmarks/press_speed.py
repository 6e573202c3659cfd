"""Decoding speed on CPU: SmolLM2 with each cache, side by side in rounds."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.press_caches import NO_EXACT, fill, fp_cache, load_smollm2, quanto_cache, text_tokens, turboquant
from benchmarks.samples import within_rounds
from tq_offload.spec import PRESETS

__all__ = ["CONTEXT", "Rates", "preset_speed", "ratio", "speed"]

CONTEXT, WARM_UP = 1500, 3


Rates = dict[str, list[float]]


class _Decoding:
    """One cache after prefill, and the greedy continuation of it."""

    def __init__(self, model: Any, cache: Any, token: torch.Tensor) -> None:
        self.model, self.cache, self.token = model, cache, token
        self.run(WARM_UP)

    def run(self, count: int) -> tuple[float, float]:
        """Decode `count` tokens: seconds by the clock, and of CPU time over all threads."""
        started = time.perf_counter(), time.process_time()
        for _ in range(count):
            logits = self.model(self.token, past_key_values=self.cache).logits
            self.token = logits[:, -1].argmax(-1, keepdim=True)
        return time.perf_counter() - started[0], time.process_time() - started[1]


def _prefilled(model: Any, ids: torch.Tensor, cache: Any, press: Any = None) -> _Decoding:
    with press(model) if press is not None else contextlib.nullcontext():
        logits = model(ids, past_key_values=cache, logits_to_keep=1).logits
    return _Decoding(model, cache, logits[:, -1].argmax(-1, keepdim=True))


def _measure(
    ways: dict[str, _Decoding], rounds: int, tokens: int, progress: Callable[[str], None]
) -> tuple[Rates, Rates]:
    """Tokens per second, and per second of CPU time, of every way in every round.

    Each round decodes `tokens` tokens with one way after the other. CPU time is what a busy machine disturbs less.
    """
    by_clock: Rates = {name: [] for name in ways}
    by_cpu: Rates = {name: [] for name in ways}
    for number in range(rounds):
        progress(f"speed: round {number + 1} of {rounds}")
        for name, way in ways.items():
            seconds, cpu_seconds = way.run(tokens)
            by_clock[name].append(tokens / seconds)
            by_cpu[name].append(tokens / cpu_seconds)
    return by_clock, by_cpu


@torch.no_grad()
def speed(dtype: torch.dtype, rounds: int, tokens: int, progress: Callable[[str], None]) -> tuple[Rates, Rates]:
    """The rates (see `_measure`) of the press and the cache with the default preset, of quanto and of the fp cache."""
    from tq_offload.press import TurboQuantPress

    model, tokenizer = load_smollm2(dtype)
    ids = text_tokens(tokenizer)[:, :CONTEXT]
    config = model.config
    made: dict[str, tuple[Any, Any]] = {
        "fp": (fp_cache(config), None),
        "TurboQuantPress": (fp_cache(config), TurboQuantPress()),
        "TurboQuantCache": (turboquant()(config), None),
        "TurboQuantPress, no exact tokens": (fp_cache(config), TurboQuantPress(**NO_EXACT)),
        "quanto 4-bit": (quanto_cache(config), None),
    }
    ways = {}
    for name, (cache, press) in made.items():
        progress(f"speed, {dtype}: prefill for {name}")
        ways[name] = _prefilled(model, ids, cache, press)
    return _measure(ways, rounds, tokens, progress)


@torch.no_grad()
def preset_speed(rounds: int, tokens: int, progress: Callable[[str], None]) -> tuple[Rates, Rates]:
    """The rates (see `_measure`) of the fp cache and of a `TurboQuantCache` with every preset, in float32.

    All get the K and V of one prefill.
    """
    model, tokenizer = load_smollm2(torch.float32)
    ids = text_tokens(tokenizer)[:, :CONTEXT]
    progress("speed of the presets: prefill")
    reference = fp_cache(model.config)
    token = model(ids, past_key_values=reference, logits_to_keep=1).logits[:, -1].argmax(-1, keepdim=True)
    made = {"fp": fp_cache, **{preset: turboquant(preset) for preset in PRESETS}}
    ways = {name: _Decoding(model, fill(make(model.config), reference), token) for name, make in made.items()}
    return _measure(ways, rounds, tokens, progress)


def ratio(rates: Rates, name: str, base: str) -> float:
    """Rate of one way by that of another in the same round, the median."""
    return within_rounds(rates[name], rates[base])
