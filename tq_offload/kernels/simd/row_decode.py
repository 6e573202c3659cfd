"""Decoding a stream of vectors as rows in memory: head dims that are no power of two (those are in `register_decode`).

D is chosen at run time: a kernel is compiled once for all dims. A vector that the kernels do not cover is marked in a
mask and left.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from tq_offload.kernels.grid_loops import TO_A_LINE, address_of, aligned, keep
from tq_offload.kernels.outlier_loops import channel_of, coarse_value, wild_ranges
from tq_offload.kernels.simd.butterflies import lanes_of
from tq_offload.kernels.simd.code_steps import expand, expand_last
from tq_offload.kernels.simd.config import Format
from tq_offload.kernels.simd.jit import jit, kernel
from tq_offload.kernels.simd.memory import get_u16, put, put_u8
from tq_offload.kernels.simd.register_decode import TOP, Place, job_of
from tq_offload.kernels.simd.row_steps import finish, finish2, itemsize_of
from tq_offload.kernels.simd.rows import batch_of, inverse_rotate, row_room
from tq_offload.kernels.vector_loops import block_of, from_bf16, store_vector

__all__ = ["RowTables", "load_means", "put_coarse", "row_decode_jobs", "row_decode_stream"]


class RowTables(NamedTuple):
    """Addresses of f32 [rows, row_room(D)] of factors in the order of their use, zeros after the last element of a row,
    and of the tables of `SimdTables`.
    """

    factors: int
    inside: int
    base: int
    levels: int


@jit
def load_means(means: Any, p: Any, vectors: Any, dim: Any, out: Any) -> None:
    """bf16 means of plane p to rows of f32."""
    for j in range(vectors):
        for i in range(dim):
            put(out + 4 * j * row_room(dim), i, from_bf16(get_u16(means, (p * vectors + j) * dim + i)))


@jit
def put_coarse(row: Any, coding: Any, column: Any, index: Any) -> None:
    """The coarse values of a vector, to its outlier channels in a row that is subtracted or added."""
    for i in range(coding.outliers):
        put(row, channel_of(coding, column, i), coarse_value(coding, column, index, i))


@jit
def _expand_codes(config: Any, codes: Any, bits: Any, levels: Any, dim: Any, out: Any) -> None:
    """Levels of the codes of a vector."""
    last = dim - lanes_of(config)
    for i in range(0, last, lanes_of(config)):
        expand(config, codes + i * bits // 8, levels, out + 4 * i)
    expand_last(config, codes + last * bits // 8, levels, out + 4 * last)


@jit
def _finish(config: Any, y: Any, factors: Any, gain: Any, mean: Any, out: Any, dim: Any) -> None:
    """Elements of a vector from its row."""
    lanes, itemsize = lanes_of(config), itemsize_of(config)
    whole = dim // (2 * lanes) * (2 * lanes)
    for i in range(0, whole, 2 * lanes):
        finish2(config, y + 4 * i, factors + 4 * i, gain, mean + 4 * i, out + itemsize * i)
    if whole < dim:
        i = whole
        finish(config, y + 4 * i, factors + 4 * i, gain, mean + 4 * i, out + itemsize * i)


@jit
def _begin_plane(grid: Any, coding: Any, p: Any, mean: Any, none: Any) -> Any:
    """Rows that are added to the vectors with and without a mean, and the least scale that is left; bf16 bits."""
    if coding.means:
        load_means(coding.means, p, grid.vectors, grid.dim, mean)
    top = TOP
    if coding.outliers:
        if wild_ranges(coding, p * grid.vectors, grid.vectors):
            top = np.uint16(0)
        for i in range(grid.vectors * row_room(grid.dim)):
            put(none, i, np.float32(-0.0))
    return top


@jit
def _decode_planes(config: Any, grid: Any, fmt: Any, coding: Any, tables: Any, left: Any) -> Any:
    """The loop of `row_decode_stream`. A vector that is left gets something, too."""
    dim, block, size, batch = grid.dim, block_of(grid.dim), 4 * row_room(grid.dim), batch_of(grid.dim)
    vectors, width, count = grid.tokens * grid.vectors, (dim * coding.bits) // 8, 0
    space = np.full((2 * batch + 1 + 2 * grid.vectors) * row_room(dim) + TO_A_LINE, np.float32(-0.0), np.float32)
    rows = aligned(space)
    turned, stage = rows + batch * size, rows + 2 * batch * size
    mean = stage + size
    none = mean + grid.vectors * size  # rows of the vectors without a mean
    for p in range(grid.planes):
        top = _begin_plane(grid, coding, p, mean, none)
        for start in range(0, vectors, batch):
            many, first = min(batch, vectors - start), p * vectors + start
            for b in range(many):
                codes = coding.codes + (first + b) * width
                _expand_codes(config, codes, coding.bits, tables.levels, dim, rows + b * size)
            inverse_rotate(config, rows, many, tables.factors, dim, block, turned)
            for b in range(many):
                bits, j = get_u16(coding.scales, first + b), (start + b) % grid.vectors
                magnitude = bits & np.uint16(0x7FFF)
                if magnitude >= top:
                    put_u8(left, first + b, np.uint8(1))
                    count += 1
                row = (none if bits == magnitude or not coding.means else mean) + j * size
                put_coarse(row, coding, p * grid.vectors + j, first + b)
                at, gain = address_of(grid, p, start + b), from_bf16(magnitude)
                _finish(
                    config, turned + b * size, tables.factors + 3 * size, gain, row, at if fmt is None else stage, dim
                )
                if fmt is not None:
                    store_vector(stage, fmt, dim, at)
    keep(space)
    return count


@kernel
def row_decode_stream(config: Any, grid: Any, fmt: Format | None, coding: Any, tables: RowTables, left: int) -> int:
    """Decode a stream in place. Arguments and result as for `simd_decode_stream`."""
    count: int = _decode_planes(config, grid, fmt, coding, tables, left)
    return count


@kernel
def row_decode_jobs(
    config: Any, jobs: int, count: int, place: Place, fmt: Format | None, coding: Any, tables: RowTables, left: int
) -> int:
    """Decode several runs of chunks in one call. Arguments and result as for `simd_decode_jobs`."""
    total = 0
    for i in range(count):
        grid, part, before = job_of(jobs, i, place, coding)
        total += _decode_planes(config, grid, fmt, part, tables, left + before)
    return total
