"""Two straight lines through times by size: seconds against bytes, and their logarithms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["Line", "fit"]

_LEAST_POINTS = 3
_MOST_FIXED = 0.1  # of the time of a call in which the work dominates


@dataclass(frozen=True)
class Line:
    """What a sweep says of one direction.

    Args:
        fixed_s: Seconds of a call that do not grow, from seconds = fixed + bytes / rate through all sizes.
        rate: Bytes a second, from the same line.
        first: Index of the smallest size in which `fixed_s` is a tenth of the time at most; three sizes at least.
        slope: Of the logarithm of the time against that of the bytes, from that size on. 1: in proportion.
        worst: The largest distance of a time from that line, as a part of the line's.
    """

    fixed_s: float
    rate: float
    first: int
    slope: float
    worst: float


def fit(nbytes: Sequence[int], seconds: Sequence[float]) -> Line:
    """The lines through times by size, in ascending order of size.

    The first is the one of the smallest relative squared errors: every size weighs the same, so the small ones, which
    have the fixed cost in them, do too. A negative fixed cost is taken for none.

    Raises:
        ValueError: Fewer than three sizes.
    """
    if len(nbytes) < _LEAST_POINTS:
        raise ValueError(f"{len(nbytes)} sizes: a line needs {_LEAST_POINTS}")
    n, t = np.asarray(nbytes, float), np.asarray(seconds, float)
    (fixed, by_byte), *_ = np.linalg.lstsq(np.stack([1 / t, n / t], axis=1), np.ones(len(t)), rcond=None)
    fixed = max(0.0, float(fixed))
    dominated = np.flatnonzero(fixed > _MOST_FIXED * t)
    first = min(int(dominated[-1]) + 1 if len(dominated) else 0, len(t) - _LEAST_POINTS)
    x, y = np.log(n[first:]), np.log(t[first:])
    slope, base = np.polyfit(x, y, 1)
    worst = float(np.abs(np.exp(y - (slope * x + base)) - 1).max())
    return Line(fixed, float(1 / by_byte), first, float(slope), worst)
