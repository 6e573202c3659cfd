"""The numba backend writes the reference's bytes: means, scales, codes, sketch, and decoded bits."""

import os
import subprocess
import sys
import threading
from dataclasses import dataclass, fields, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from support import one_torch_thread

from tq_offload import codebook
from tq_offload.bitpack import unpack
from tq_offload.buffers import all_finite
from tq_offload.errors import LayoutError, NonFiniteError
from tq_offload.kernels import Sections, Stream, VectorParams, cpu_numba, numba_tables
from tq_offload.kernels.cpu_numba import NumbaBackend
from tq_offload.kernels.reference import ReferenceBackend

__all__ = ["one_torch_thread"]

DIMS = (1, 16, 36, 64, 80, 96, 112, 127, 128, 192, 256, 576)
BITS = tuple(range(1, 9))
DTYPES = ("bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2")
TOKENS = (0, 1, 15, 17, 255, 256, 257)
RULES = ("lsq", "norm", "unbiased")
DEFAULTS = VectorParams("bfloat16", 4, 0, "lsq", mean=True, fit_range=True, qjl=False)
BIT_TYPES = {1: torch.uint8, 2: torch.int16, 4: torch.float32}

ROOT = Path(__file__).parents[2]
REFERENCE = ReferenceBackend()
NUMBA = NumbaBackend()
GENERIC = NumbaBackend(simd=False)


@dataclass
class Chunk:
    """Flat bits of a group, and a stream over them."""

    flat: np.ndarray
    stream: Stream


def bits_of(x: torch.Tensor) -> np.ndarray:
    array = x.contiguous().reshape(-1).view(BIT_TYPES[x.itemsize]).numpy()
    return array.view(np.uint16) if x.itemsize == 2 else array


def chunk(
    planes: int, tokens: int, vectors: int, dim: int, dtype: str = "bfloat16", seed: int = 0, scale: float = 2.0
) -> Chunk:
    """Normal vectors with a mean for every channel; contiguous."""
    random = np.random.Generator(np.random.PCG64(seed))
    x = scale * random.standard_normal((planes, tokens, vectors, dim)) + 3 * random.standard_normal((vectors, dim))
    return chunk_of(torch.from_numpy(x.astype(np.float32)).to(getattr(torch, dtype)))


def chunk_of(x: torch.Tensor) -> Chunk:
    """A contiguous [P, T, J, D] tensor."""
    P, T, J, D = x.shape
    return Chunk(bits_of(x), Stream(P, T, J, D, 0, T * J * D, J * D, D))


def sections(stream: Stream, params: VectorParams) -> Sections:
    """Filled with ones, so that a byte that is not written shows."""
    P, T, J, D = stream.planes, stream.tokens, stream.vectors, stream.dim
    k = params.outliers

    def full(dtype: Any, *shape: int) -> np.ndarray:
        return np.full(shape, 0xFF, dtype)

    return Sections(
        means=full(np.uint16, P, J, D) if params.mean else None,
        scales=full(np.uint16, P, T, J),
        codes=full(np.uint8, P, T, J, (D * params.bits + 7) // 8),
        sketch_scales=full(np.uint16, P, T, J) if params.qjl else None,
        sketch=full(np.uint8, P, T, J, (D + 7) // 8) if params.qjl else None,
        outlier_channels=full(np.uint16, P, J, k) if k else None,
        outlier_ranges=full(np.float32, P, J, k, 2) if k else None,
        outlier_codes=full(np.uint8, P, T, J, (k + 1) // 2) if k else None,
    )


def assert_same(c: Chunk, params: VectorParams, backend: Any = NUMBA, oracle: Any = REFERENCE) -> None:
    """Encode and decode by both; every byte must be equal, the bytes between the vectors included."""
    wanted, found = sections(c.stream, params), sections(c.stream, params)
    oracle.encode(c.flat, c.stream, params, wanted)
    backend.encode(c.flat, c.stream, params, found)
    for name in (f.name for f in fields(Sections)):
        np.testing.assert_array_equal(getattr(found, name), getattr(wanted, name), f"{name} of {c.stream} {params}")
    first, second = (np.full(c.flat.nbytes, 7, np.uint8).view(c.flat.dtype) for _ in range(2))
    oracle.decode(first, c.stream, params, wanted)
    backend.decode(second, c.stream, params, wanted)
    np.testing.assert_array_equal(second.view(np.uint8), first.view(np.uint8), f"decoding {c.stream} {params}")


@pytest.mark.parametrize("dim", DIMS)
def test_generic_loops_over_the_whole_table(dim: int) -> None:
    for bits, tokens in product(BITS, TOKENS):
        params = replace(DEFAULTS, bits=bits, mean=tokens >= 64, rule=RULES[(bits + tokens) % 3], seed=tokens)
        assert_same(chunk(1, tokens, 2, dim, seed=bits + dim), params, GENERIC)


@pytest.mark.parametrize(
    ("dim", "bits"), [*product((32, 64), cpu_numba.SIMD_BITS), *product((16, 128, 256, 512), (4,))]
)
def test_simd_kernels_over_the_token_counts(dim: int, bits: int) -> None:
    for tokens in TOKENS:
        params = replace(DEFAULTS, bits=bits, mean=tokens >= 64, seed=tokens)
        assert_same(chunk(2, tokens, 3, dim, seed=bits + dim), params)


@pytest.mark.parametrize("bits", [5, 6, 7])
def test_simd_kernels_that_are_switched_off(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_numba, "SIMD_BITS", BITS)
    assert_same(chunk(1, 70, 3, 64, seed=bits), replace(DEFAULTS, bits=bits))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1e-3, 2.0, 150.0])
def test_dtypes(dtype: str, scale: float) -> None:
    for dim, backend in ((64, NUMBA), (64, GENERIC), (36, NUMBA), (80, GENERIC), (127, NUMBA)):
        assert_same(chunk(2, 70, 2, dim, dtype, scale=scale), replace(DEFAULTS, dtype=dtype), backend)
    assert_same(chunk(1, 20, 2, 80, dtype, scale=scale), replace(DEFAULTS, dtype=dtype, mean=False, qjl=True))


@pytest.mark.parametrize(("rule", "fit_range", "mean"), list(product(RULES, (False, True), (False, True))))
def test_rules(rule: str, fit_range: bool, mean: bool) -> None:
    for dim, bits in ((64, 4), (64, 3), (36, 3)):
        assert_same(
            chunk(1, 70, 3, dim, seed=dim), replace(DEFAULTS, bits=bits, rule=rule, fit_range=fit_range, mean=mean)
        )


@pytest.mark.parametrize("dim", DIMS)
def test_qjl(dim: int) -> None:
    for bits, rule in ((2, "lsq"), (3, "unbiased")):
        assert_same(chunk(1, 70, 2, dim), replace(DEFAULTS, bits=bits, rule=rule, qjl=True, mean=bits == 3))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [16, 36, 64, 80, 128, 576])
def test_outlier_channels(dim: int, dtype: str) -> None:
    for tokens, count, mean in ((1, 1, False), (15, 4, False), (70, 3, True), (257, 8, True)):
        x = chunk(2, tokens, 3, dim, dtype, seed=dim + tokens, scale=0.5)
        params = replace(DEFAULTS, dtype=dtype, outliers=min(count, dim // 4), mean=mean)
        for backend in (NUMBA, GENERIC):
            assert_same(x, params, backend)
    assert_same(x, replace(params, bits=3, rule="unbiased", qjl=True))
    assert_same(x, replace(params, bits=2, rule="norm", fit_range=False))


@pytest.mark.parametrize("dim", [64, 80])
@pytest.mark.parametrize("scale", [0.0, 1e-38, 1e-42, 1e30, 3e38])
def test_outlier_channels_of_any_size(scale: float, dim: int) -> None:
    for dtype in ("bfloat16", "float32"):
        x = torch.randn(2, 70, 2, dim, generator=torch.Generator().manual_seed(1)).clamp(-1, 1)
        x[..., 5] *= scale
        x[..., 7] = scale  # a constant: no range
        x[:, :3] *= 1e-3
        assert_same(chunk_of(x.to(getattr(torch, dtype))), replace(DEFAULTS, dtype=dtype, outliers=4))


def test_outlier_channels_of_equal_energy_are_the_first_ones() -> None:
    c = chunk_of(torch.ones(1, 20, 1, 64, dtype=torch.bfloat16))
    params = replace(DEFAULTS, outliers=5, mean=False)
    assert_same(c, params)
    out = sections(c.stream, params)
    NUMBA.encode(c.flat, c.stream, params, out)
    assert out.outlier_channels is not None
    assert out.outlier_channels.tolist() == [[[0, 1, 2, 3, 4]]]


def test_outlier_channels_with_both_zeros() -> None:
    """Which of -0 and +0 a minimum gives depends on the order in which it is taken."""
    for dtype in ("bfloat16", "float8_e5m2"):
        x = torch.randn(2, 66, 4, 64, generator=torch.Generator().manual_seed(0)).relu()
        x = torch.where((x == 0) & (torch.rand(x.shape, generator=torch.Generator().manual_seed(1)) < 0.5), -x, x)
        x[..., 3] = 0.0
        x[::2, ::3, :, 3] = -0.0
        c, params = chunk_of(x.to(getattr(torch, dtype))), replace(DEFAULTS, dtype=dtype, outliers=16)
        assert_same(c, params)
        out = sections(c.stream, params)
        REFERENCE.encode(c.flat, c.stream, params, out)
        assert out.outlier_ranges is not None
        assert not np.signbit(out.outlier_ranges[out.outlier_ranges == 0]).any()
    assert_same(chunk_of(torch.zeros(1, 5, 1, 64, dtype=torch.bfloat16).neg()), replace(DEFAULTS, outliers=3))


@pytest.mark.parametrize("backend", [NUMBA, GENERIC, REFERENCE], ids=["simd", "generic", "reference"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_outlier_channels(backend: Any, value: float) -> None:
    for t, channel in ((0, 5), (69, 5), (30, 40)):
        x = torch.randn(1, 70, 2, 64).to(torch.bfloat16)
        x[..., 5] += 50
        x[0, t, 1, channel] = value
        c, params = chunk_of(x), replace(DEFAULTS, outliers=2)
        with pytest.raises(NonFiniteError):
            backend.encode(c.flat, c.stream, params, sections(c.stream, params))


def refuses_channels(backend: Any, channels: list[int]) -> None:
    c, params = chunk(1, 20, 1, 64), replace(DEFAULTS, outliers=2, mean=False)
    out = sections(c.stream, params)
    REFERENCE.encode(c.flat, c.stream, params, out)
    out.outlier_channels[...] = channels
    with pytest.raises(LayoutError, match="ascend"):
        backend.decode(c.flat.copy(), c.stream, params, out)


@pytest.mark.parametrize("channels", [[64, 65], [3, 3], [9, 2]])
def test_channels_that_no_encoder_writes_are_refused(channels: list[int]) -> None:
    refuses_channels(NUMBA, channels)


def layouts(L: int, T: int, H: int, D: int) -> dict[str, list[tuple[int, int, int, int]]]:
    """Offset, plane, token and vector stride of K and of V for L layers, T tokens, H heads of D elements."""
    C = H * D
    return {
        "kv_first": [(kv * L * T * C, T * C, C, D) for kv in (0, 1)],
        "packed": [(kv * D, T * 2 * C, 2 * C, 2 * D) for kv in (0, 1)],
        "latent": [(0, T * C, C, D)],
        "token_kv": [(kv * C, T * 2 * C, 2 * C, D) for kv in (0, 1)],
        "padded": [(5, T * (C + 40) + 3, C + 40, D)],
    }


@pytest.mark.parametrize("kind", layouts(1, 1, 1, 1))
@pytest.mark.parametrize("dim", [64, 36])
def test_layouts(kind: str, dim: int) -> None:
    L, T, H = 3, 65, 2
    flat = chunk(1, 1, 1, 2 * L * T * (H * dim + 60)).flat
    for offset, plane, token, vector in layouts(L, T, H, dim)[kind]:
        assert_same(Chunk(flat, Stream(L, T, H, dim, offset, plane, token, vector)), DEFAULTS)


def special_values(dim: int = 64) -> dict[str, torch.Tensor]:
    random = torch.from_numpy(np.random.Generator(np.random.PCG64(3)).standard_normal((1, 70, 2, dim))).float()
    one_hot = torch.zeros(1, 70, 2, dim)
    one_hot[0, torch.arange(70), :, torch.arange(70) % dim] = 1.0
    mixed = random.clone()
    mixed[0, 3], mixed[0, 9], mixed[0, 11], mixed[0, 12, 0] = 3e38, 1e-38, 0.0, 1e5
    ties = torch.ones(1, 70, 2, dim) * torch.sign(random)
    return {
        "zeros": torch.zeros(1, 70, 2, dim),
        "minus zeros": -torch.zeros(1, 70, 2, dim),
        "one-hot": one_hot,
        "1e5": random * 1e5,
        "3e38": torch.sign(random) * 3e38,
        "1e-38": random * 1e-38,
        "subnormal": random * 1e-40,
        "constant channels": torch.ones(1, 70, 2, 1) * random[:, :1],
        "one constant": torch.full((1, 70, 2, dim), 2.5),
        "huge beside normal": mixed,
        "signs": ties,
        "alternating extremes": torch.sign(random) * torch.where(random > 0, 3e38, 1e-38),
    }


@pytest.mark.parametrize("name", special_values())
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_special_values(name: str, dtype: str) -> None:
    x = special_values()[name].to(getattr(torch, dtype))
    for mean, qjl, bits in ((True, False, 4), (False, False, 4), (True, True, 4), (False, False, 1)):
        assert_same(chunk_of(x), replace(DEFAULTS, dtype=dtype, mean=mean, qjl=qjl, bits=bits))
    assert_same(chunk_of(x[..., :36].contiguous()), replace(DEFAULTS, dtype=dtype))


@pytest.mark.parametrize(("dim", "step"), [(64, 1), (80, 7)])
def test_decoding_scales_that_reach_the_clamp(dim: int, step: int) -> None:
    """Every magnitude, or every seventh, that a frame may hold, with and without the mean."""
    magnitudes = np.arange(0, 0x7F80, step, dtype=np.uint16)
    stream = Stream(1, 2 * len(magnitudes), 1, dim, 0, 2 * len(magnitudes) * dim, dim, dim)
    params = DEFAULTS
    s = sections(stream, params)
    assert s.means is not None
    s.scales[...] = np.concatenate([magnitudes, magnitudes | 0x8000]).reshape(s.scales.shape)
    random = np.random.Generator(np.random.PCG64(4))
    s.codes[...] = random.integers(0, 256, s.codes.shape)
    s.means[...] = random.integers(0, 0x7F80, s.means.shape)
    for dtype in ("bfloat16", "float16"):
        first, second = (np.zeros(stream.plane_stride, np.uint16) for _ in range(2))
        REFERENCE.decode(first, stream, replace(params, dtype=dtype), s)
        NUMBA.decode(second, stream, replace(params, dtype=dtype), s)
        np.testing.assert_array_equal(first, second)


def assert_sketch_scales_of_any_size(backend: Any, dim: int, dtype: str) -> None:
    """Every pair of a magnitude and a sketch scale that leaves the range of f32 or not, subnormal ones too."""
    pairs = list(product((0, 1, 0x7F, 0x80, 0x3F80, 0x7F7F), (0, 1, 0x80, 0x3F80, 0x5F80, 0x7F7F, 0x8001, 0xFF7F)))
    params = replace(DEFAULTS, dtype=dtype, bits=3, mean=False, qjl=True)
    c = chunk(1, len(pairs), 1, dim, dtype)
    s = sections(c.stream, params)
    REFERENCE.encode(c.flat, c.stream, params, s)
    assert s.sketch_scales is not None
    s.scales[...], s.sketch_scales[...] = (np.reshape(some, s.scales.shape) for some in zip(*pairs, strict=True))
    first, second = (np.zeros_like(c.flat) for _ in range(2))
    REFERENCE.decode(first, c.stream, params, s)
    backend.decode(second, c.stream, params, s)
    np.testing.assert_array_equal(second, first)
    assert all_finite(first, dtype)


@pytest.mark.parametrize("dim", [16, 50, 64, 96])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sketch_scales_of_any_size(dim: int, dtype: str) -> None:
    assert_sketch_scales_of_any_size(NUMBA, dim, dtype)


def address(array: np.ndarray) -> int:
    return int(array.ctypes.data)


@pytest.mark.parametrize("bits", BITS)
def test_ties_go_to_the_lower_code(bits: int) -> None:
    """Coordinates on a threshold and beside it, and both zeros, in the SIMD and in the generic quantiser."""
    import numba

    from tq_offload.kernels.simd.batch import BATCH_SIZE, PARTS_AT
    from tq_offload.kernels.simd.config import KernelConfig
    from tq_offload.kernels.simd.encode import quantise as simd_quantise
    from tq_offload.kernels.stream_loops import quantise

    @numba.njit
    def quantise_all(config, y, n, dim, tables, codes, width, parts):  # type: ignore[no-untyped-def]
        for i in range(n):
            inside, base, levels = tables.inside, tables.base, tables.levels
            simd_quantise(config, y + 4 * dim * i, np.float32(1), inside, base, levels, codes + width * i, parts)

    thresholds = codebook.thresholds(bits)
    beside = [np.nextafter(thresholds, np.float32(x)) for x in (-10, 10)]
    t = np.concatenate([thresholds, *beside, np.float32([0.0, -0.0, 3.4, -3.4, 20, -20])]).astype(np.float32)
    t = np.resize(t, -(-len(t) // 32) * 32)
    wanted = np.searchsorted(thresholds, t, side="left").astype(np.uint8)

    tables, _held = numba_tables.loop_tables(replace(DEFAULTS, bits=bits), 16)
    codes, levels = np.zeros(len(t), np.uint8), np.zeros(len(t), np.float32)
    quantise(address(t), tables, bits, len(t), address(codes), address(levels))
    np.testing.assert_array_equal(codes, wanted)
    np.testing.assert_array_equal(levels, codebook.levels(bits)[wanted])

    packed, batch = np.zeros(bits * len(t) // 8, np.uint8), np.zeros(BATCH_SIZE, np.float32)
    for config in (KernelConfig(16, bits), KernelConfig(16, bits, permute=False), KernelConfig(32, bits, lanes=16)):
        packed[:] = 0
        simd_tables, _kept = numba_tables.register_tables(replace(DEFAULTS, bits=bits), config, encoding=True)
        vectors, width = len(t) // config.dim, config.dim * bits // 8
        quantise_all(
            config, address(t), vectors, config.dim, simd_tables, address(packed), width, address(batch) + PARTS_AT
        )
        np.testing.assert_array_equal(unpack(packed, len(t), bits), wanted)


@pytest.mark.parametrize("dtype", DTYPES)
def test_conversions(dtype: str) -> None:
    """Every bit pattern of an element to f32; and back from values on, and next to, what lies halfway."""
    from tq_offload.kernels.simd.config import FORMATS
    from tq_offload.kernels.vector_loops import load_vector, store_vector

    torch_dtype, random = getattr(torch, dtype), np.random.Generator(np.random.PCG64(5))
    if torch_dtype.itemsize == 4:
        raw = torch.from_numpy(random.integers(0, 2**32, 5000, dtype=np.uint32).view(np.float32))
    else:
        kind = {1: np.uint8, 2: np.int16}[torch_dtype.itemsize]
        raw = torch.from_numpy(np.arange(2 ** (8 * torch_dtype.itemsize)).astype(kind)).view(torch_dtype)
    values, found = raw.float().numpy(), np.zeros(len(raw), np.float32)
    finite = np.isfinite(values)
    for start, stop in ((0, len(raw)), (0, 15), (len(raw) - 33, len(raw))):  # whole registers, and the rest of them
        load_vector(raw.data_ptr() + raw.itemsize * start, FORMATS[dtype], stop - start, address(found))
        np.testing.assert_array_equal(np.isfinite(found[: stop - start]), finite[start:stop])
        ok = finite[start:stop]
        same = found[: stop - start].view(np.uint32)[ok] == values[start:stop].view(np.uint32)[ok]
        assert same.all()

    exact = np.sort(values[finite])
    halfway = ((exact[1:].astype(np.float64) + exact[:-1]) / 2).astype(np.float32)
    around = [np.nextafter(halfway, np.float32(x)) for x in (-np.inf, np.inf)]
    x = np.concatenate([exact, halfway, *around, np.float32([np.inf, -np.inf, 0.0, -0.0])])
    top = torch.finfo(torch_dtype).max
    wanted = bits_of(torch.from_numpy(x).clamp(-top, top).to(torch_dtype)).view(np.uint8)
    out = np.zeros_like(wanted)
    for start in (0, len(x) - 15):
        store_vector(address(x[start:]), FORMATS[dtype], len(x) - start, address(out[start * raw.itemsize :]))
        np.testing.assert_array_equal(out, wanted)
        out[-15 * raw.itemsize :] = 0


@pytest.mark.parametrize("backend", [NUMBA, GENERIC], ids=["simd", "generic"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mean", [False, True])
def test_nan_and_inf_are_refused(backend: NumbaBackend, dtype: str, mean: bool) -> None:
    values = [float("nan"), -float("nan")] + ([] if dtype == "float8_e4m3fn" else [float("inf"), -float("inf")])
    for dim, value, (token, vector, element) in product((64, 33), values, ((0, 0, 0), (69, 1, -1), (30, 0, 17))):
        x = torch.ones(1, 70, 2, dim)
        x[0, token, vector, element] = value
        c = chunk_of(x.to(getattr(torch, dtype)))
        params = replace(DEFAULTS, dtype=dtype, mean=mean)
        with pytest.raises(NonFiniteError):
            backend.encode(c.flat, c.stream, params, sections(c.stream, params))


FLOATS = st.one_of(st.floats(width=32, allow_nan=False, allow_infinity=False), st.sampled_from([0.0, -0.0, 1.0, 1e-45]))


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
@given(
    data=hnp.arrays(np.float32, st.tuples(st.just(1), st.integers(1, 5), st.just(2), st.just(64)), elements=FLOATS),
    bits=st.sampled_from([2, 4]),
    dim=st.sampled_from([1, 3, 16, 36, 48, 64]),
    dtype=st.sampled_from(["bfloat16", "float32"]),
    rule=st.sampled_from(RULES),
    mean=st.booleans(),
    qjl=st.booleans(),
    fit_range=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_finite_vectors(data: np.ndarray, dtype: str, dim: int, **changes: Any) -> None:
    x = torch.from_numpy(data[..., :dim].copy()).to(getattr(torch, dtype))
    x = torch.where(torch.isfinite(x), x, torch.zeros_like(x))
    assert_same(chunk_of(x), replace(DEFAULTS, dtype=dtype, **changes), NUMBA if dim == 64 else GENERIC)


@pytest.mark.parametrize(("dim", "bits"), [(64, 1), (64, 2), (64, 3), (64, 4), (32, 4)])
def test_select_tree_and_permute(dim: int, bits: int) -> None:
    assert_same(chunk(1, 70, 2, dim), replace(DEFAULTS, bits=bits), NumbaBackend(permute=False), NUMBA)


@pytest.mark.parametrize(("lanes", "permute"), [(8, True), (16, True), (16, False)])
def test_registers_of_eight_and_of_sixteen_lanes(lanes: int, permute: bool) -> None:
    backend = NumbaBackend(lanes=lanes, permute=permute)
    for bits, dtype, rule in ((4, "bfloat16", "lsq"), (3, "float32", "norm")):
        for dim, tokens in ((128, 70), (128, 3), (64, 67), (32, 66)) if bits == 4 else ((256, 70), (64, 67)):
            x = chunk(2, tokens, 3, dim, dtype, seed=dim + bits)
            assert_same(x, replace(DEFAULTS, bits=bits, dtype=dtype, rule=rule, mean=tokens >= 64, outliers=5), backend)


@pytest.mark.parametrize("bits", [2, 8])
def test_lanes_of_four_codes(bits: int) -> None:
    x = chunk(2, 70, 3, 64, "float16", seed=bits)
    assert_same(x, replace(DEFAULTS, bits=bits, dtype="float16"), NumbaBackend(lanes=16))


def test_select_tree_and_permute_are_different_code() -> None:
    from tq_offload.kernels.simd.config import KernelConfig
    from tq_offload.kernels.simd.register_decode import simd_decode_stream

    for permute in (True, False):
        assert_same(chunk(1, 70, 2, 64), replace(DEFAULTS, bits=3), NumbaBackend(permute=permute))
    configs = {signature[0].config for signature in simd_decode_stream.dispatcher.signatures}
    assert {KernelConfig(64, 3, permute=p) for p in (True, False)} <= configs


def test_misaligned_buffers() -> None:
    c = chunk(2, 70, 2, 64)
    for shift in (1, 3):
        raw = np.zeros(c.flat.nbytes + shift, np.uint8)
        raw[shift:] = c.flat.view(np.uint8)
        moved = np.frombuffer(raw.data, np.uint16, offset=shift)
        wanted, found = sections(c.stream, DEFAULTS), sections(c.stream, DEFAULTS)
        NUMBA.encode(c.flat, c.stream, DEFAULTS, wanted)
        NUMBA.encode(moved, c.stream, DEFAULTS, found)
        np.testing.assert_array_equal(found.codes, wanted.codes)
        back, target = np.zeros_like(c.flat), np.zeros_like(raw)
        NUMBA.decode(back, c.stream, DEFAULTS, wanted)
        NUMBA.decode(np.frombuffer(target.data, np.uint16, offset=shift), c.stream, DEFAULTS, wanted)
        np.testing.assert_array_equal(target[shift:], back.view(np.uint8))


def test_source_is_not_written_and_may_be_read_only() -> None:
    c = chunk(1, 70, 2, 64)
    before = c.flat.copy()
    c.flat.flags.writeable = False
    NUMBA.encode(c.flat, c.stream, DEFAULTS, sections(c.stream, DEFAULTS))
    np.testing.assert_array_equal(c.flat, before)
    with pytest.raises(LayoutError, match="read-only"):
        NUMBA.decode(c.flat, c.stream, DEFAULTS, sections(c.stream, DEFAULTS))


@pytest.mark.parametrize(
    "wrong",
    [
        {"offset": 1},
        {"offset": -1},
        {"planes": 3},
        {"token_stride": 129},
        {"vector_stride": -64},
        {"dim": 65},
    ],
)
def test_a_stream_that_leaves_its_buffer_is_refused(wrong: dict[str, int]) -> None:
    c = chunk(2, 70, 2, 64)
    stream = replace(c.stream, **wrong)
    for call in (NUMBA.encode, NUMBA.decode):
        with pytest.raises(LayoutError):
            call(c.flat, stream, DEFAULTS, sections(stream, DEFAULTS))


@pytest.mark.parametrize("name", ["means", "scales", "codes"])
def test_sections_that_do_not_fit_are_refused(name: str) -> None:
    c = chunk(2, 70, 2, 64)
    good = sections(c.stream, DEFAULTS)
    array = getattr(good, name)
    for bad in (array[1:], array.astype(np.int32), np.swapaxes(array, 0, 1), None):
        for call in (NUMBA.encode, NUMBA.decode):
            with pytest.raises(LayoutError, match=name):
                call(c.flat, c.stream, DEFAULTS, replace(good, **{name: bad}))


IMPORTS_ONLY = """
import sys, torch
import tq_offload.codec, tq_offload.kernels.cpu_numba
tq_offload.kernels.get_backend("numba")
assert not any(m in sys.modules for m in ("numba", "llvmlite"))
"""
DECODE_ONCE = """
import numpy as np
from tq_offload.kernels import Sections, Stream, VectorParams, get_backend
scales, codes = np.full((1, 2, 1), 0x3F80, np.uint16), np.full((1, 2, 1, 2), 0xA5, np.uint8)
out = np.zeros(32, np.uint16)
params = VectorParams("bfloat16", 1, 0, "lsq", False, True, False)
get_backend("numba").decode(out, Stream(1, 2, 1, 16, 0, 32, 16, 16), params, Sections(None, scales, codes, None, None))
assert out.any()
"""


def run_python(code: str, **env: str) -> str:
    """Run in a new process; returns what it logged."""
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT), **env}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_importing_and_choosing_compile_nothing() -> None:
    run_python(IMPORTS_ONLY)


def test_no_cache_folder_can_be_written() -> None:
    run_python("import numba.core.caching as c; c.CacheImpl._locator_classes = []\n" + DECODE_ONCE)


def test_compiled_kernels_are_kept_and_damage_is_survived(tmp_path: Path) -> None:
    env = {"NUMBA_CACHE_DIR": str(tmp_path)}
    run_python(DECODE_ONCE, **env)
    first = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.nb*")}
    assert len(first) == 2  # one index, one version
    run_python(DECODE_ONCE, **env)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.nb*")} == first
    for path in first:
        path.write_bytes(path.read_bytes()[:100])
    assert "cache of simd_decode_stream is not used" in run_python(DECODE_ONCE, **env)


def test_two_threads_at_once() -> None:
    chunks = [chunk(2, 256, 4, 64, seed=s) for s in range(2)]
    wanted = []
    for c in chunks:
        wanted.append(sections(c.stream, DEFAULTS))
        REFERENCE.encode(c.flat, c.stream, DEFAULTS, wanted[-1])
    failures = []

    def work(c: Chunk, expected: Sections) -> None:
        for _ in range(20):
            found = sections(c.stream, DEFAULTS)
            NUMBA.encode(c.flat, c.stream, DEFAULTS, found)
            back = np.zeros_like(c.flat)
            NUMBA.decode(back, c.stream, DEFAULTS, found)
            if not np.array_equal(found.codes, expected.codes) or not np.array_equal(found.scales, expected.scales):
                failures.append(c)

    threads = [threading.Thread(target=work, args=pair) for pair in zip(chunks, wanted, strict=True)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures


def test_the_gil_is_released() -> None:
    """A Python thread goes on counting while one long stream is encoded and decoded."""
    c = chunk(8, 512, 8, 64)
    s = sections(c.stream, DEFAULTS)
    NUMBA.encode(c.flat, c.stream, DEFAULTS, s)
    NUMBA.decode(c.flat, c.stream, DEFAULTS, s)
    running, done = threading.Event(), threading.Event()
    ticks = 0

    def work() -> None:
        running.set()
        NUMBA.encode(c.flat, c.stream, DEFAULTS, s)
        NUMBA.decode(c.flat, c.stream, DEFAULTS, s)
        done.set()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(10.0)  # nobody takes the GIL from a thread that does not give it up
    try:
        thread = threading.Thread(target=work)
        thread.start()
        running.wait()
        while not done.wait(0.0001):
            ticks += 1
        thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert ticks >= 3
