"""Decoding speed on CPU: SmolLM2 with each cache, side by side in rounds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.press_caches import NO_EXACT, fp_cache, load_smollm2, quanto_cache, text_tokens, turboquant

__all__ = ["CONTEXT", "Rates", "ratio", "speed"]

CONTEXT, WARM_UP = 1500, 3


Rates = dict[str, list[float]]


class _Decoding:
    """One cache after prefill, and the greedy continuation of it."""

    def __init__(self, model: Any, ids: torch.Tensor, cache: Any, press: Any = None) -> None:
        self.model, self.cache = model, cache
        with press(model) if press is not None else torch.no_grad():
            logits = model(ids, past_key_values=cache, logits_to_keep=1).logits
        self.token = logits[:, -1].argmax(-1, keepdim=True)
        self.run(WARM_UP)

    def run(self, count: int) -> tuple[float, float]:
        """Decode `count` tokens: seconds by the clock, and of CPU time over all threads."""
        started = time.perf_counter(), time.process_time()
        for _ in range(count):
            logits = self.model(self.token, past_key_values=self.cache).logits
            self.token = logits[:, -1].argmax(-1, keepdim=True)
        return time.perf_counter() - started[0], time.process_time() - started[1]


@torch.no_grad()
def speed(dtype: torch.dtype, rounds: int, tokens: int, progress: Callable[[str], None]) -> tuple[Rates, Rates]:
    """Tokens per second, and per second of CPU time, of every way in every round.

    Each round decodes `tokens` tokens with one way after the other. CPU time is what a busy machine disturbs less.
    """
    from tq_offload.press import TurboQuantPress

    model, tokenizer = load_smollm2(dtype)
    ids = text_tokens(tokenizer)[:, :CONTEXT]
    config = model.config
    made = {
        "fp": lambda: _Decoding(model, ids, fp_cache(config)),
        "TurboQuantPress": lambda: _Decoding(model, ids, fp_cache(config), TurboQuantPress()),
        "TurboQuantCache": lambda: _Decoding(model, ids, turboquant()(config)),
        "TurboQuantPress, no exact tokens": lambda: _Decoding(
            model, ids, fp_cache(config), TurboQuantPress(**NO_EXACT)
        ),
        "quanto 4-bit": lambda: _Decoding(model, ids, quanto_cache(config)),
    }
    ways = {}
    for name, make in made.items():
        progress(f"speed, {dtype}: prefill for {name}")
        ways[name] = make()
    by_clock: Rates = {name: [] for name in ways}
    by_cpu: Rates = {name: [] for name in ways}
    for number in range(rounds):
        progress(f"speed, {dtype}: round {number + 1} of {rounds}")
        for name, way in ways.items():
            seconds, cpu_seconds = way.run(tokens)
            by_clock[name].append(tokens / seconds)
            by_cpu[name].append(tokens / cpu_seconds)
    return by_clock, by_cpu


def ratio(rates: Rates, name: str, base: str) -> float:
    """Median rate of one way by that of another."""
    return statistics.median(rates[name]) / statistics.median(rates[base])
