"""Quantisation by table: which code a coordinate gets, from one table lookup and one comparison.

The positive half of the axis is cut into equal cells, so narrow that none holds two thresholds. A coordinate's cell
gives the number of thresholds below the cell and the one threshold inside it. Any cut gives the same codes, since the
comparison with the threshold itself decides.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tq_offload import codebook

__all__ = ["Cells", "cells"]


class Cells(NamedTuple):
    """Cell of |t| is min(int(|t| * density), n - 1).

    inside: i32 [n], bits of the threshold in the cell, or the largest integer; base: i32 [n], thresholds in the cells
    below.
    """

    density: float
    inside: npt.NDArray[np.int32]
    base: npt.NDArray[np.int32]


@cache
def cells(bits: int) -> Cells:
    """The smallest table, of a power of two of at least eight cells."""
    positive = codebook.thresholds(bits)[1 << (bits - 1) :]
    n = 8
    while True:
        for density in np.linspace(n / 32, n, 993, dtype=np.float32):
            cell = np.minimum((positive * density).astype(np.int32), n - 1)
            if len(set(cell.tolist())) == len(cell):
                return _table(float(density), n, cell, positive)
        n *= 2


def _table(density: float, n: int, cell: npt.NDArray[np.int32], positive: npt.NDArray[np.float32]) -> Cells:
    inside = np.full(n, np.iinfo(np.int32).max, np.int32)
    inside[cell] = positive.view(np.int32)
    base = np.searchsorted(cell, np.arange(n), side="left").astype(np.int32)
    return Cells(density, inside, base)
