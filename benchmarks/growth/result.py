"""What bench_growth measured: in a process, and as its results file has it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from benchmarks.growth.cases import FITTED, Case
from benchmarks.growth.fit import Line, fit
from benchmarks.growth.memory import Extra
from benchmarks.growth.times import Times
from benchmarks.samples import Quantiles
from benchmarks.transfer.chunks import Shape

__all__ = ["WAYS", "Result", "read"]

WAYS = ("encode", "decode")


@dataclass(frozen=True)
class Result:
    """What was measured: times and extra bytes by case, rounds, seconds, load average before and after.

    ``extra`` is empty where the kernel does not let the peak be reset.
    """

    times: Mapping[Case, Times]
    extra: Mapping[Case, Extra]
    rounds: int
    seconds: float
    load: tuple[float, float]

    def of(self, sweep: str) -> list[Case]:
        """The cases of a sweep, in ascending order."""
        return [case for case in self.times if case.sweep == sweep]

    def time(self, case: Case, way: str) -> Quantiles:
        """Seconds of a call; ``way`` is a field of `Times`."""
        found: Quantiles = getattr(self.times[case], way)
        return found

    @cached_property
    def lines(self) -> dict[tuple[str, str], Line]:
        """Fits through the medians of the times without the wait for a core, by sweep and way."""
        out = {}
        for sweep in FITTED:
            cases = self.of(sweep)
            for way in WAYS:
                out[sweep, way] = fit([c.nbytes for c in cases], [self.time(c, f"{way}_alone").p50 for c in cases])
        return out


def read(results: Mapping[str, Any]) -> Result:
    """A results file. Times without the wait for a core are those by the clock where they were not noted."""
    times, extra = {}, {}
    for row in results["rows"]:
        shape = Shape("", row["layers"], row["heads"], row["head_dim"], row["tokens"])
        case = Case(row["sweep"], row["size"], shape, row["threads"], row["chunks"])
        clock = [Quantiles(**row[f"{way}_s"]) for way in WAYS]
        times[case] = Times(*clock, *(Quantiles(**row.get(f"{way}_alone_s", row[f"{way}_s"])) for way in WAYS))
        if row["encode_extra_bytes"] is not None:
            extra[case] = Extra(*(row[f"{way}_extra_bytes"] for way in WAYS))
    run = results["run"]
    return Result(times, extra, run["rounds"], run["seconds"], tuple(run["load"]))
