"""Times in rounds: every round measures every case, so that a busy machine slows all of them alike."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.growth.cases import Case
from benchmarks.growth.work import Work
from benchmarks.samples import Quantiles

__all__ = ["Times", "measure_times"]

_LEAST_S = 0.003  # short calls are repeated in a round until they take that long together
_MOST_CALLS = 100


@dataclass(frozen=True)
class Times:
    """Seconds of a call."""

    encode: Quantiles
    decode: Quantiles


def measure_times(cases: Sequence[Case], rounds: int, say: Callable[[str], None]) -> dict[Case, Times]:
    """The times of all cases. Every case is encoded, decoded and compared once before.

    Raises:
        SystemExit: What came back is not what was encoded.
    """
    work = Work(cases)
    try:
        say("warm-up")
        for case in cases:
            work.check(case)
        calls = [(case, way, call) for case in cases for way, call in enumerate(work.calls(case))]
        repeats = [_repeats(call) for _, _, call in calls]
        found: dict[tuple[Case, int], list[float]] = {}
        for number in range(rounds):
            if number % 5 == 0:
                say(f"round {number + 1} of {rounds}")
            for (case, way, call), count in zip(calls, repeats, strict=True):
                found.setdefault((case, way), []).append(_seconds(call, count))
        return {case: Times(Quantiles.of(found[case, 0]), Quantiles.of(found[case, 1])) for case in cases}
    finally:
        work.close()


def _repeats(call: Callable[[], object]) -> int:
    return min(_MOST_CALLS, math.ceil(_LEAST_S / _seconds(call, 1)))


def _seconds(call: Callable[[], object], count: int) -> float:
    """Wall time of a call, the mean of so many."""
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) / count
