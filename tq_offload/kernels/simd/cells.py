"""Quantisation by table: which code a coordinate gets, from one table lookup and one comparison.

The axis, or its positive half, is cut into equal cells, so narrow that none holds two thresholds. A coordinate's cell
gives the number of thresholds below the cell and the one threshold inside it. Any cut gives the same codes, since the
comparison with the threshold itself decides.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tq_offload import codebook

__all__ = ["SIGNED_BITS", "Cells", "SignedCells", "cells", "signed_cells"]


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


SIGNED_BITS = (1, 2, 3, 4)  # their thresholds are few and lie far enough apart
_WIDTH, _COUNT = 0.25, 32


class SignedCells(NamedTuple):
    """Cells of the whole axis: of t, that number k of `width` to which t is rounded, at index k mod 32.

    Adding `shift` to a t within the limits rounds it so, and leaves k in the low bits of the sum.

    inside: f32 [32], the threshold in the cell, or Inf; base: i32 [32], thresholds in the cells below.
    """

    limit: float
    shift: float
    inside: npt.NDArray[np.float32]
    base: npt.NDArray[np.int32]


@cache
def signed_cells(bits: int) -> SignedCells:
    """The table of 32 cells for up to four bits."""
    thresholds = codebook.thresholds(bits).astype(np.float64) / _WIDTH
    cell = np.rint(thresholds).astype(np.int32)
    limit = _COUNT // 2 - 1
    if len(set(cell.tolist())) < len(cell) or np.abs(cell).max() >= limit or (np.abs(thresholds - cell) == 0.5).any():
        raise ValueError(f"the thresholds of {bits} bits do not fit {_COUNT} cells of {_WIDTH}")
    inside = np.full(_COUNT, np.inf, np.float32)
    inside[cell % _COUNT] = codebook.thresholds(bits)
    k = (np.arange(_COUNT) + _COUNT // 2) % _COUNT - _COUNT // 2
    base = np.searchsorted(cell, k, side="left").astype(np.int32)
    return SignedCells(limit * _WIDTH, 1.5 * 2.0**23 * _WIDTH, inside, base)
