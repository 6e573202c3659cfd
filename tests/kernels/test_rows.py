"""Head dims that are no power of two: the SIMD kernels on rows in memory write the reference's bytes.

Eight and sixteen lanes, with the table permute of the CPU and without, are four different kernels each.
"""

from dataclasses import replace
from typing import Any

import numba
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from kernels.test_cpu_numba import (
    DEFAULTS,
    FLOATS,
    REFERENCE,
    address,
    assert_same,
    chunk,
    chunk_of,
    sections,
    special_values,
)
from support import one_torch_thread

from tq_offload import codebook
from tq_offload.bitpack import unpack
from tq_offload.errors import NonFiniteError
from tq_offload.kernels import numba_tables
from tq_offload.kernels.cpu_numba import ROW_DIMS, SIMD_BITS, SIMD_DIMS, NumbaBackend
from tq_offload.quantizer import hsum
from tq_offload.rotation import block_size

__all__ = ["one_torch_thread"]

NUMBA = NumbaBackend()
CELLS = pytest.mark.parametrize(("lanes", "permute"), [(8, True), (8, False), (16, True), (16, False)])
SOME_DIMS = (40, 48, 72, 80, 96, 136, 192, 576, 1000)  # 1 to 16 rows of 64 a block; whole and other halves


def test_which_dim_goes_where() -> None:
    assert {48, 80, 96, 112, 160, 192, 224, 320, 576} <= set(ROW_DIMS)
    assert not set(ROW_DIMS) & set(SIMD_DIMS)
    for dim in (80, 128, 576):
        assert NUMBA._covers(dim, DEFAULTS)
        assert not NumbaBackend(simd=False)._covers(dim, DEFAULTS)
        assert not NUMBA._covers(dim, replace(DEFAULTS, qjl=True))
    assert not any(NUMBA._covers(dim, DEFAULTS) for dim in (1, 24, 36, 84, 127, 1024))


@CELLS
def test_every_dim(lanes: int, permute: bool) -> None:
    backend = NumbaBackend(lanes=lanes, permute=permute)
    for dim in (*(dim for dim in ROW_DIMS if dim <= 576), 640, 768, 1000):
        params = replace(DEFAULTS, mean=dim % 3 > 0, outliers=dim % 5, seed=dim, fit_range=dim % 7 > 0)
        assert_same(chunk(2, 7, 3, dim, seed=dim), params, backend)


@CELLS
def test_three_bits_in_half_precision(lanes: int, permute: bool) -> None:
    backend = NumbaBackend(lanes=lanes, permute=permute)
    for dim in SOME_DIMS:
        params = replace(DEFAULTS, bits=3, dtype="float16", rule="norm", outliers=dim % 3)
        assert_same(chunk(1, 17, 2, dim, "float16", seed=dim), params, backend)


@pytest.mark.parametrize("bits", set(SIMD_BITS) - {3, 4})
@pytest.mark.parametrize("lanes", [8, 16])
def test_other_bits(bits: int, lanes: int) -> None:
    for dim in SOME_DIMS:
        params = replace(DEFAULTS, bits=bits, rule="unbiased", mean=bits != 2)
        assert_same(chunk(2, 9, 2, dim, seed=dim), params, NumbaBackend(lanes=lanes))


@pytest.mark.parametrize("dtype", ["float32", "float8_e4m3fn", "float8_e5m2"])
def test_other_dtypes(dtype: str) -> None:
    for dim, scale in ((80, 1e-3), (96, 2.0), (576, 150.0)):
        assert_same(chunk(2, 70, 2, dim, dtype, scale=scale), replace(DEFAULTS, dtype=dtype))
        assert_same(chunk(1, 7, 1, dim, dtype), replace(DEFAULTS, dtype=dtype, mean=False, outliers=4))


@pytest.mark.parametrize("dim", [72, 80, 96])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_special_values(dim: int, dtype: str) -> None:
    for name, x in special_values(dim).items():
        for mean in (False, True):
            for outliers in (0, 3):
                params = replace(DEFAULTS, dtype=dtype, mean=mean, outliers=outliers)
                try:
                    assert_same(chunk_of(x.to(getattr(torch, dtype))), params)
                except AssertionError as error:
                    raise AssertionError(f"{name}: {params}") from error


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_inf_are_refused(value: float) -> None:
    for dim, mean, outliers in ((80, True, 0), (576, False, 0), (72, True, 2)):
        for token, vector, element in ((0, 0, 0), (69, 1, -1), (30, 0, 17)):
            x = torch.ones(1, 70, 2, dim)
            x[0, token, vector, element] = value
            c, params = chunk_of(x.to(torch.bfloat16)), replace(DEFAULTS, mean=mean, outliers=outliers)
            with pytest.raises(NonFiniteError):
                NUMBA.encode(c.flat, c.stream, params, sections(c.stream, params))


def test_decoding_ranges_that_reach_the_clamp() -> None:
    for dtype in ("bfloat16", "float32"):
        params = replace(DEFAULTS, dtype=dtype, outliers=4)
        c = chunk(2, 9, 2, 80, dtype)
        s = sections(c.stream, params)
        REFERENCE.encode(c.flat, c.stream, params, s)
        assert s.outlier_ranges is not None
        s.outlier_ranges[0, ..., 0], s.outlier_ranges[0, ..., 1] = 1.69e38, 1e36
        first, second = c.flat.copy(), c.flat.copy()
        REFERENCE.decode(first, c.stream, params, s)
        NUMBA.decode(second, c.stream, params, s)
        np.testing.assert_array_equal(first.view(np.uint8), second.view(np.uint8))


@pytest.mark.parametrize("lanes", [8, 16])
def test_the_order_of_additions(lanes: int) -> None:
    """Few codes and scales show one addition in another order; the sums do."""
    from tq_offload.kernels.simd.config import KernelConfig
    from tq_offload.kernels.simd.rows import sums_of

    @numba.njit
    def both_sums(config, a, b, dim, block, out):  # type: ignore[no-untyped-def]
        sums_of(config, a, b, dim, block, out)

    config, random = KernelConfig(lanes=lanes), np.random.Generator(np.random.PCG64(6))
    for dim in SOME_DIMS:
        if dim % lanes == 0:
            rows = (random.standard_normal((2, dim)) ** 2).astype(np.float32)
            wanted, out = hsum(torch.from_numpy(rows.copy())).numpy(), np.zeros(2, np.float32)
            both_sums(config, address(rows[0]), address(rows[1]), dim, block_size(dim), address(out))
            np.testing.assert_array_equal(out, wanted, f"D = {dim}")


@CELLS
@pytest.mark.parametrize("bits", [3, 4, 8])
def test_ties_go_to_the_lower_code(bits: int, lanes: int, permute: bool) -> None:
    """Coordinates on a threshold and beside it, and both zeros, one register and 32 at a time."""
    from tq_offload.kernels.simd.code_steps import quantise, quantise32
    from tq_offload.kernels.simd.config import KernelConfig

    @numba.njit
    def quantise_all(config, y, n, tables, codes, width, work):  # type: ignore[no-untyped-def]
        one, inside, base, levels = np.float32(1), tables.inside, tables.base, tables.levels
        for i in range(0, n, 32):
            quantise32(config, y + 4 * i, one, inside, base, levels, codes + i // 8 * width, work, work + 4 * n)
            for k in range(i, i + 32, lanes):
                quantise(config, y + 4 * k, one, inside, base, levels, codes + (n + k) // 8 * width, work, work + 4 * n)

    thresholds = codebook.thresholds(bits)
    beside = [np.nextafter(thresholds, np.float32(x)) for x in (-10, 10)]
    t = np.concatenate([thresholds, *beside, np.float32([0.0, -0.0, 3.4, -3.4, 20, -20])]).astype(np.float32)
    t = np.resize(t, -(-len(t) // 32) * 32)
    wanted = np.searchsorted(thresholds, t, side="left").astype(np.uint8)
    tables, _held = numba_tables.row_tables(replace(DEFAULTS, bits=bits), 80, encoding=True)
    packed, work = np.zeros(2 * bits * len(t) // 8, np.uint8), np.zeros(2 * len(t), np.float32)
    config = KernelConfig(0, bits, lsq=True, permute=permute, lanes=lanes)
    quantise_all(config, address(t), len(t), tables, address(packed), bits, address(work))
    np.testing.assert_array_equal(unpack(packed, 2 * len(t), bits), np.tile(wanted, 2))


def test_sixteen_lanes_and_eight_are_different_code() -> None:
    from tq_offload.kernels.simd.row_decode import row_decode_stream

    for lanes in (8, 16):
        assert_same(chunk(1, 7, 2, 96), replace(DEFAULTS, mean=False), NumbaBackend(lanes=lanes))
    configs = {signature[0].config for signature in row_decode_stream.dispatcher.signatures}
    assert {8, 16} <= {config.lanes for config in configs}


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    data=hnp.arrays(np.float32, st.tuples(st.just(1), st.integers(1, 9), st.just(2), st.just(96)), elements=FLOATS),
    dim=st.sampled_from([40, 72, 80, 96]),
    dtype=st.sampled_from(["bfloat16", "float32"]),
    mean=st.booleans(),
    fit_range=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_finite_vectors(data: np.ndarray, dtype: str, dim: int, **changes: Any) -> None:
    x = torch.from_numpy(data[..., :dim].copy()).to(getattr(torch, dtype))
    x = torch.where(torch.isfinite(x), x, torch.zeros_like(x))
    assert_same(chunk_of(x), replace(DEFAULTS, dtype=dtype, **changes))
