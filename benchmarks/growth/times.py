"""Times in rounds: every round measures every case, so that a busy machine slows all of them alike."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.growth.cases import Case
from benchmarks.growth.work import Work
from benchmarks.run_delay import run_delay
from benchmarks.samples import Quantiles

__all__ = ["Times", "measure_times"]

_LEAST_S = 0.003  # short calls are repeated in a round until they take that long together
_MOST_CALLS = 100


@dataclass(frozen=True)
class Times:
    """Seconds of a call, as the clock has them, and without its wait for a core that another process had.

    The second is for one thread only: waits are summed over threads. On a quiet machine it is the first.
    """

    encode: Quantiles
    decode: Quantiles
    encode_alone: Quantiles
    decode_alone: Quantiles


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
        found: dict[tuple[Case, int], list[tuple[float, float]]] = {}
        for number in range(rounds):
            if number % 5 == 0:
                say(f"round {number + 1} of {rounds}")
            for (case, way, call), count in zip(calls, repeats, strict=True):
                found.setdefault((case, way), []).append(_seconds(call, count))
        return {case: _times(found[case, 0], found[case, 1]) for case in cases}
    finally:
        work.close()


def _times(encode: Sequence[tuple[float, float]], decode: Sequence[tuple[float, float]]) -> Times:
    walls = [Quantiles.of(wall for wall, _ in seen) for seen in (encode, decode)]
    return Times(*walls, *(Quantiles.of(alone for _, alone in seen) for seen in (encode, decode)))


def _repeats(call: Callable[[], object]) -> int:
    return min(_MOST_CALLS, math.ceil(_LEAST_S / _seconds(call, 1)[1]))


def _seconds(call: Callable[[], object], count: int) -> tuple[float, float]:
    """Seconds of a call, the mean of so many: by the clock, and without its wait for a core; the CPU time at least."""
    waited, cpu, start = run_delay(), time.process_time(), time.perf_counter()
    for _ in range(count):
        call()
    wall, spent = time.perf_counter() - start, time.process_time() - cpu
    alone = max(wall - (run_delay() - waited), spent)
    return wall / count, alone / count
