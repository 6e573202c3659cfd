"""Resident memory at the peak of a call, beyond source, frame and destination; in a process of its own.

usage: python -m benchmarks.growth.memory CORES [--short]     prints a line of JSON
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from benchmarks.growth.cases import Case, cases
from benchmarks.growth.work import Work
from benchmarks.peak_memory import MALLOC, extra_bytes

__all__ = ["Extra", "measure_extra"]

_CALLS = 3


@dataclass(frozen=True)
class Extra:
    """Bytes of a call at its peak, the most of three."""

    encode: int
    decode: int


def measure_extra(wanted: Sequence[Case], cores: int, *, short: bool) -> dict[Case, Extra]:
    """What `main` finds for `cases(cores, short=short)`; nothing where the kernel does not let the peak be reset."""
    argv = [sys.executable, "-m", "benchmarks.growth.memory", str(cores), *(["--short"] if short else [])]
    done = subprocess.run(argv, env={**os.environ, **MALLOC}, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    if any(None in pair for pair in found):
        return {}
    return {case: Extra(*pair) for case, pair in zip(wanted, found, strict=True)}


def _most(call: Callable[[], object]) -> int | None:
    """The most of a few calls."""
    seen = [extra_bytes(call) for _ in range(_CALLS)]
    return max((one for one in seen if one is not None), default=None)


def main(argv: Sequence[str]) -> None:
    """Measure every case after one call of it."""
    torch.set_num_threads(1)
    wanted = cases(int(argv[0]), short="--short" in argv)
    work = Work(wanted)
    found = []
    for case in wanted:
        calls = work.calls(case)
        for call in calls:
            call()
        found.append([_most(call) for call in calls])
    work.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
