"""The tables by which coordinates are quantised give the code that counting thresholds gives, also next to them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from tq_offload import codebook
from tq_offload.kernels.simd.cells import SIGNED_BITS, cells, signed_cells

F32 = npt.NDArray[np.float32]


def coordinates(bits: int) -> F32:
    """Thresholds, edges of cells of every width, their neighbours, and everything else."""
    edges = np.arange(-64, 65, dtype=np.float32) / 8
    at = np.concatenate([codebook.thresholds(bits), edges, edges * np.float32(1 / cells(bits).density)])
    near = [at, *(np.nextafter(at, np.float32(to)) for to in (-np.inf, np.inf))]
    rest = np.random.default_rng(bits).normal(0, 3, 100_000).astype(np.float32)
    extremes = np.array([0.0, -0.0, 1e-45, -1e-45, 22.6, -22.6, 1e30, -1e30], np.float32)
    return np.concatenate([*near, rest, extremes])


@pytest.mark.parametrize("bits", SIGNED_BITS)
def test_signed_cells(bits: int) -> None:
    t, table = coordinates(bits), signed_cells(bits)
    near = np.clip(t, np.float32(-table.limit), np.float32(table.limit))
    cell = (near + np.float32(table.shift)).view(np.int32) & 31
    codes = table.base[cell] + (t > table.inside[cell])
    assert np.array_equal(codes, np.searchsorted(codebook.thresholds(bits), t, side="left"))


@pytest.mark.parametrize("bits", range(codebook.MIN_BITS, codebook.MAX_BITS + 1))
def test_cells_of_the_positive_half(bits: int) -> None:
    table, half = cells(bits), 1 << (bits - 1)
    t = np.abs(coordinates(bits))
    cell = np.minimum(t * np.float32(table.density), np.float32(len(table.base) - 1)).astype(np.int32)
    above = t.view(np.int32) > table.inside[cell]
    positive = codebook.thresholds(bits)[half:]
    assert np.array_equal(table.base[cell] + above, np.searchsorted(positive, t, side="left"))
