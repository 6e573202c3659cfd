import runpy
from pathlib import Path

import numpy as np
import pytest

from tq_offload.codebook import RANGE_FIT, RELATIVE_MSE, levels, thresholds

TOOL = Path(__file__).parents[2] / "tools" / "make_codebook.py"


@pytest.mark.parametrize("bits", range(1, 9))
def test_literals_are_the_lloyd_max_levels(bits: int) -> None:
    tool = runpy.run_path(str(TOOL))
    table = levels(bits)
    positive = table[2 ** (bits - 1) :].astype(np.float64)
    # Lloyd-Max conditions: levels are the centroids of their cells, thresholds are midpoints.
    np.testing.assert_allclose(tool["centroids"](positive), positive, rtol=3e-7)
    assert tool["relative_mse"](positive) == pytest.approx(RELATIVE_MSE[bits], rel=1e-4)


@pytest.mark.parametrize("bits", range(1, 9))
def test_tables_are_antisymmetric_ascending_and_read_only(bits: int) -> None:
    table, edges = levels(bits), thresholds(bits)
    assert table.shape == (2**bits,)
    assert edges.shape == (2**bits - 1,)
    assert table.dtype == edges.dtype == np.float32
    np.testing.assert_array_equal(table, -table[::-1])
    np.testing.assert_array_equal(edges, -edges[::-1])
    assert (np.diff(table) > 0).all()
    assert ((table[:-1] < edges) & (edges < table[1:])).all()
    with pytest.raises(ValueError, match="read-only"):
        table[0] = 0


def test_published_values_of_max_1960() -> None:
    # J. Max, Quantizing for minimum distortion, table I: 4 and 16 levels.
    np.testing.assert_allclose(levels(2)[2:], [0.4528, 1.510], atol=5e-4)
    expected = [0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733]
    np.testing.assert_allclose(levels(4)[8:], expected, atol=5e-4)


def test_range_fit_is_positive_for_every_vector() -> None:
    assert set(RANGE_FIT) == set(range(1, 9))
    assert all(alpha > 0 and beta >= 0 for alpha, beta in RANGE_FIT.values())
