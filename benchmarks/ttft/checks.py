"""What must hold of the runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.samples import Check
from benchmarks.ttft.link import Rate
from benchmarks.ttft.measure import Run, rate_name
from benchmarks.ttft.ways import WAYS

__all__ = ["By", "Ratio", "by_way", "checks", "ratio"]

By = Mapping[tuple[str, int], Run]
"""Runs by way and prompt tokens."""

_SLOW = 100.0
_MIN_NAIVE = ((3000, 3.0), (1000, 2.5))  # from so many tokens on, so many times sooner
_MIN_FP8, _FP8_FROM = 1.4, 1000
_MOST_UNSHAPED = 1.10
_LEAST_LOAD_S = 0.01
_NAIVE = (("naive", "turboquant"), ("mp-naive", "mp-turboquant"))
_FP8 = (("mp-fp8", "mp-turboquant"), ("mp-fp8", "turboquant"))
_LINK = (0.85, 1.02)
_STRAY_BYTES = 65536  # statistics and lookups; a frame of one chunk is 25 times as large


def by_way(runs: Mapping[str, Sequence[Run]]) -> By:
    """The same runs, by way and tokens."""
    return {(name, run.tokens): run for name, found in runs.items() for run in found}


def checks(runs: Mapping[str, Sequence[Run]], link: Mapping[Rate, float]) -> list[Check]:
    """All that can be said of the ways that were run; ``link``: measured Mbit/s by rate."""
    found = by_way(runs)
    lengths = sorted({tokens for _, tokens in found})
    out = [*_link(link)]
    for tokens in lengths:
        out += _slow(found, tokens)
    for tokens in lengths:
        out += _unshaped(found, tokens)
    return [*out, *(_places(one) for one in runs.values() if one)]


@dataclass(frozen=True)
class Ratio:
    """How many times sooner than another way: the whole time to the first token, and loading alone.

    ``load`` is None where one of the two loads too fast to be told from the noise of what every hit pays.
    """

    whole: float
    load: float | None

    def __str__(self) -> str:
        return f"{self.whole:.2f}× ({_times(self.load)})"


def ratio(found: By, base: str, ours: str, tokens: int, rate: Rate) -> Ratio | None:
    """How many times sooner ``ours`` is than ``base`` from Redis. None: not both were run."""
    runs, place = [found.get((name, tokens)) for name in (base, ours)], f"redis {rate_name(rate)}"
    pair = [run for run in runs if run is not None and place in run.hits]
    if len(pair) < 2:
        return None
    whole = [run.hits[place].median_s for run in pair]
    load = [run.load_s(place) for run in pair]
    return Ratio(whole[0] / whole[1], load[0] / load[1] if min(load) >= _LEAST_LOAD_S else None)


def _times(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}×"


def _link(link: Mapping[Rate, float]) -> Iterator[Check]:
    for rate, seen in link.items():
        if rate is not None:
            name = f"the link of {rate_name(rate)} passes {_LINK[0]:.2f} to {_LINK[1]:.2f} of that"
            yield Check(name, _LINK[0] <= seen / rate <= _LINK[1], f"{seen:.1f} Mbit/s")


def _slow(found: By, tokens: int) -> Iterator[Check]:
    least = next((factor for from_tokens, factor in _MIN_NAIVE if tokens >= from_tokens), None)
    wanted: list[tuple[str, str, float]] = [(*pair, least) for pair in _NAIVE] if least else []
    wanted += [(*pair, _MIN_FP8) for pair in _FP8] if tokens >= _FP8_FROM else []
    for base, ours, factor in wanted:
        seen = ratio(found, base, ours, tokens, _SLOW)
        if seen is not None:
            what = f"{WAYS[ours].label}, {tokens:,} tokens, Redis at {rate_name(_SLOW)}"
            name = f"{what}: first token {factor}× sooner than {WAYS[base].label}"
            yield Check(name, seen.whole >= factor, f"{seen.whole:.2f}×; loading alone {_times(seen.load)}")


def _unshaped(found: By, tokens: int) -> Iterator[Check]:
    for base, ours in _NAIVE:
        seen = ratio(found, base, ours, tokens, None)
        if seen is not None:
            name = (
                f"{WAYS[ours].label}, {tokens:,} tokens, Redis unshaped: first token after at most {_MOST_UNSHAPED:.2f}"
            )
            load = None if seen.load is None else 1 / seen.load
            seen_text = f"{1 / seen.whole:.2f}; loading alone {_times(load)}"
            yield Check(f"{name} of naive's time", 1 / seen.whole <= _MOST_UNSHAPED, seen_text)


def _places(runs: Sequence[Run]) -> Check:
    """Every hit found all but the last token, and Redis sent chunks for the hits from Redis alone."""
    wrong, count = [], 0
    for run in runs:
        for place, hits in {"vLLM": run.fixed, **run.hits}.items():
            count += len(hits.tokens)
            if set(hits.tokens) != {run.tokens - 1}:
                wrong.append(f"{run.tokens:,} tokens, {place}: {hits.tokens} found")
            if any((sent > _STRAY_BYTES) != place.startswith("redis") for sent in hits.redis_bytes):
                wrong.append(f"{run.tokens:,} tokens, {place}: Redis sent {hits.redis_bytes} bytes")
    name = f"{runs[0].way.label}: every hit finds all tokens but one, in the place that it is to be from"
    return Check(name, not wrong, "; ".join(wrong) or f"{count} hits")
