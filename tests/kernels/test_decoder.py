"""`Backend.decoder`, one call for many chunks, writes what `Backend.decode` writes, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from packed_support import kv

from tq_offload.errors import LayoutError
from tq_offload.kernels import Chunks, Sections, VectorParams
from tq_offload.kernels.cpu_numba import SIMD_DIMS, NumbaBackend
from tq_offload.kernels.reference import ReferenceBackend
from tq_offload.kv_cache.packed import PackedTokens

DIMS = (1, 16, 36, 64, 80, 96, 112, 127, 128, 192, 256, 576)
BITS = tuple(range(1, 9))
DTYPES = ("bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2")
DEFAULTS = VectorParams("bfloat16", 4, 0, "lsq", mean=True, fit_range=True, qjl=False)
ITEMS = {"bfloat16": np.uint16, "float16": np.uint16, "float32": np.float32}
REFERENCE, NUMBA, GENERIC = ReferenceBackend(), NumbaBackend(), NumbaBackend(simd=False)

ROWS, HEADS, TOKENS = 2, 2, 40  # of the tensor that is decoded into
BACKENDS = pytest.mark.parametrize("backend", [REFERENCE, NUMBA, GENERIC], ids=["reference", "simd", "generic"])


def chunks_of(dim: int, params: VectorParams) -> list[Chunks]:
    """Two rows: two chunks of 16 tokens, the second one used in part; and, after a gap of three tokens, one of 9."""
    dtype = getattr(torch, params.dtype)
    found: list[Chunks] = []
    for start, tokens, length, mean in ((0, 32, 20, params.mean), (23, 9, 9, False)):
        x = kv(tokens, rows=ROWS, heads=HEADS, dim=dim, seed=dim + start)[0].clamp(-20, 20).to(dtype)
        packed = PackedTokens.encode(GENERIC, x, replace(params, mean=mean), 16)
        found += replace(packed, length=length).chunks(start)
    return found


def target(dim: int, dtype: str, order: str) -> tuple[np.ndarray, tuple[int, int, int]]:
    """Memory with a pattern in it, and strides of rows, heads and tokens: heads first or tokens first."""
    size = ROWS * HEADS * TOKENS * dim
    flat = np.full(size * np.dtype(ITEMS.get(dtype, np.uint8)).itemsize, 7, np.uint8).view(ITEMS.get(dtype, np.uint8))
    inner = (TOKENS * dim, dim) if order == "heads first" else (dim, HEADS * dim)
    return flat, (HEADS * TOKENS * dim, *inner)


def one_by_one(chunks: list[Chunks], dim: int, dtype: str, order: str) -> np.ndarray:
    flat, strides = target(dim, dtype, order)
    for part in chunks:
        REFERENCE.decode(flat, part.stream(dim, strides), part.params, part.sections)
    return flat


def check(backend: Any, dim: int, params: VectorParams, order: str = "heads first") -> None:
    chunks = chunks_of(dim, params)
    assert {(c.row, c.planes, c.tokens) for c in chunks} == {(r, 1, t) for r in range(ROWS) for t in (16, 4, 9)}
    wanted = one_by_one(chunks, dim, params.dtype, order)
    flat, strides = target(dim, params.dtype, order)
    decode = backend.decoder(dim, chunks)
    decode(flat, strides)
    np.testing.assert_array_equal(flat.view(np.uint8), wanted.view(np.uint8), f"{dim} {params} {order}")
    again, strides = target(dim, params.dtype, order)
    decode(again, strides)
    np.testing.assert_array_equal(again.view(np.uint8), wanted.view(np.uint8))


@pytest.mark.parametrize("dim", DIMS)
def test_over_the_whole_table(dim: int) -> None:
    for bits, dtype in product(BITS, DTYPES):
        covered = NUMBA._covers(dim, replace(DEFAULTS, bits=bits))
        if covered and bits != 4 and ((dim in SIMD_DIMS and dim != 64) or dtype != "bfloat16"):
            continue  # each of these would be compiled on its own
        params = replace(DEFAULTS, dtype=dtype, bits=bits, mean=bits % 2 == 0, seed=bits)
        check(NUMBA, dim, params, "heads first" if bits % 3 else "tokens first")
    check(REFERENCE, dim, DEFAULTS)


@BACKENDS
@pytest.mark.parametrize("order", ["heads first", "tokens first"])
@pytest.mark.parametrize("mean", [True, False])
def test_backends_orders_and_means(backend: Any, order: str, mean: bool) -> None:
    for dim in (36, 64, 80, 96):
        check(backend, dim, replace(DEFAULTS, mean=mean), order)


@BACKENDS
def test_qjl(backend: Any) -> None:
    check(backend, 64, replace(DEFAULTS, bits=3, qjl=True))


def with_scale(part: Chunks, bits: int) -> Chunks:
    part.sections.scales[0, 3, 1] = bits
    return part


@pytest.mark.parametrize("dim", [64, 80])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_vectors_that_the_fast_kernels_leave(dtype: str, dim: int) -> None:
    """Scales at both ends of their range, and zero, which an encoder writes for zero vectors only."""
    for scale in (0x0000, 0x0001, 0x8001, 0x7F7F, 0xFF7F):
        params = replace(DEFAULTS, dtype=dtype)
        chunks = [with_scale(part, scale) for part in chunks_of(dim, params)]
        flat, strides = target(dim, dtype, "heads first")
        NUMBA.decoder(dim, chunks)(flat, strides)
        wanted = one_by_one(chunks, dim, dtype, "heads first")
        np.testing.assert_array_equal(flat.view(np.uint8), wanted.view(np.uint8), hex(scale))


@BACKENDS
def test_no_chunks(backend: Any) -> None:
    flat, strides = target(64, "bfloat16", "heads first")
    before = flat.copy()
    backend.decoder(64, [])(flat, strides)
    np.testing.assert_array_equal(flat, before)


@pytest.mark.parametrize("backend", [NUMBA, GENERIC], ids=["simd", "generic"])
@pytest.mark.parametrize(
    "wrong", [{"start": -1}, {"start": TOKENS - 3, "row": 1}, {"row": -1}, {"row": ROWS}, {"start": 1 << 40}]
)
def test_chunks_that_leave_the_buffer_are_refused(backend: NumbaBackend, wrong: dict[str, int]) -> None:
    part = chunks_of(64, DEFAULTS)[0]
    flat, strides = target(64, "bfloat16", "heads first")
    before = flat.copy()
    with pytest.raises(LayoutError, match="leave"):
        backend.decoder(64, [part, replace(part, **wrong)])(flat, strides)
    if backend is NUMBA:  # one by one, the first chunk is written
        np.testing.assert_array_equal(flat, before)


@pytest.mark.parametrize("backend", [NUMBA, GENERIC], ids=["simd", "generic"])
def test_buffers_that_do_not_fit_are_refused(backend: NumbaBackend) -> None:
    decode = backend.decoder(64, chunks_of(64, DEFAULTS))
    flat, (row, head, token) = target(64, "bfloat16", "heads first")
    read_only = flat.copy()
    read_only.flags.writeable = False
    for buffer, strides in (
        (flat[: flat.size // 2], (row, head, token)),
        (flat, (row, head, -token)),
        (flat, (row, head, 2 * token)),
        (flat.view(np.float32), (row, head, token)),
        (flat.view(np.uint8), (row, head, token)),
        (flat[::2], (row // 2, head // 2, token // 2)),
        (flat.reshape(2, -1), (row, head, token)),
        (read_only, (row, head, token)),
    ):
        with pytest.raises(LayoutError):
            decode(buffer, strides)
    decode(flat, (row, head, token))


@pytest.mark.parametrize("name", ["means", "scales", "codes"])
def test_sections_that_do_not_fit_are_refused(name: str) -> None:
    good = chunks_of(64, DEFAULTS)
    array = getattr(good[1].sections, name)
    for bad in (array[1:], array.astype(np.int32), np.swapaxes(array, 0, 1), None):
        sections: Sections = replace(good[1].sections, **{name: bad})
        with pytest.raises(LayoutError, match=name):
            NUMBA.decoder(64, [good[0], replace(good[1], sections=sections)])


@pytest.mark.parametrize("change", [{"bits": 3}, {"dtype": "float16"}, {"seed": 5}])
def test_chunks_of_another_kind_are_refused(change: dict[str, Any]) -> None:
    """They would be read with the settings of the first one."""
    first, other = chunks_of(64, DEFAULTS)[0], chunks_of(64, replace(DEFAULTS, **change))[0]
    with pytest.raises(LayoutError, match="together"):
        NUMBA.decoder(64, [first, other])


def test_the_function_keeps_its_sections_alive() -> None:
    chunks = chunks_of(64, DEFAULTS)
    wanted = one_by_one(chunks, 64, "bfloat16", "heads first")
    decode = NUMBA.decoder(64, chunks)
    del chunks
    noise = [np.full(1 << 10, 255, np.uint8) for _ in range(200)]
    flat, strides = target(64, "bfloat16", "heads first")
    decode(flat, strides)
    np.testing.assert_array_equal(flat, wanted)
    assert len(noise) == 200
