"""Decoding a stream of vectors that fit the registers: head dims that are a power of two (others are in `row_decode`).

A vector that the kernels do not cover is marked in a mask and left to the generic loops.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from tq_offload.kernels.grid_loops import TO_A_LINE, Coding, Grid, aligned, keep
from tq_offload.kernels.outlier_loops import channel_of, coarse_value, wild_ranges
from tq_offload.kernels.simd.config import Format
from tq_offload.kernels.simd.decode import decode_vector
from tq_offload.kernels.simd.jit import jit, kernel
from tq_offload.kernels.simd.memory import get_i64, get_u16, paired_index, prefetch, put, put_u8
from tq_offload.kernels.vector_loops import from_bf16, store_vector

__all__ = [
    "JOB_FIELDS", "TOP", "Place", "SimdTables", "job_of", "load_means", "put_coarse", "simd_decode_jobs",
    "simd_decode_stream",
]  # fmt: skip

JOB_FIELDS = 12
TOP = np.uint16(0x5D80)  # bf16 2**60: beyond, a decoded element might need a clamp


class SimdTables(NamedTuple):
    """Addresses of the sign bits u32 [D], paired; the tables of `cells`, i32 [n]; and levels, f32:
    all of them to decode, the positive ones to encode. "Paired": of every two registers' worth of elements
    first the even, then the odd ones.
    """

    signs: int
    inside: int
    base: int
    levels: int


@jit
def load_means(config: Any, means: Any, p: Any, size: Any, out: Any) -> None:
    """bf16 means of plane p, [J*D], to f32, paired."""
    for i in range(size):
        put(out, paired_index(config, i), from_bf16(get_u16(means, p * size + i)))


@jit
def put_coarse(config: Any, row: Any, coding: Any, column: Any, index: Any) -> None:
    """The coarse values of a vector, to its outlier channels in a row that is subtracted or added, paired."""
    for i in range(coding.outliers):
        put(row, paired_index(config, channel_of(coding, column, i)), coarse_value(coding, column, index, i))


@jit
def decode_planes(config: Any, grid: Any, fmt: Any, coding: Any, tables: Any, left: Any) -> Any:
    """The loop of `simd_decode_stream`."""
    size, count = grid.vectors * grid.dim, 0
    space = np.full(2 * size + grid.dim + TO_A_LINE, np.float32(-0.0), np.float32)
    mean = aligned(space)
    none = mean + 4 * size  # rows of the vectors without a mean
    stage = none + 4 * size
    width = (grid.dim * coding.bits) // 8
    inverse_sqrt = np.float32(1.0 / math.sqrt(grid.dim))
    for p in range(grid.planes):
        if coding.means:
            load_means(config, coding.means, p, size, mean)
        top = TOP
        if coding.outliers:
            if wild_ranges(coding, p * grid.vectors, grid.vectors):
                top = np.uint16(0)
            for i in range(size):
                put(none, i, np.float32(-0.0))
        for t in range(grid.tokens):
            for j in range(grid.vectors):
                index = (p * grid.tokens + t) * grid.vectors + j
                bits = get_u16(coding.scales, index)
                magnitude = bits & np.uint16(0x7FFF)
                if magnitude >= top:
                    put_u8(left, index, np.uint8(1))
                    count += 1
                    continue
                row = (none if bits == magnitude or not coding.means else mean) + 4 * j * grid.dim
                if coding.outliers:
                    put_coarse(config, row, coding, p * grid.vectors + j, index)
                at = grid.address + p * grid.plane_stride + t * grid.token_stride + j * grid.vector_stride
                prefetch(config, at + grid.token_stride)
                decode_vector(
                    config,
                    coding.codes + index * width,
                    from_bf16(magnitude) * inverse_sqrt,
                    row,
                    tables.signs,
                    tables.levels,
                    at if fmt is None else stage,
                )
                if fmt is not None:
                    store_vector(stage, fmt, grid.dim, at)
    keep(space)
    return count


@kernel
def simd_decode_stream(config: Any, grid: Any, fmt: Format | None, coding: Any, tables: SimdTables, left: int) -> int:
    """Decode a stream in place.

    Args:
        config: `KernelConfig`.
        grid: `Grid`.
        fmt: How elements that are not bfloat16 are converted (`config.staged`); None for bfloat16.
        coding: `Coding`.
        tables: Signs and levels.
        left: Address of u8 [P*T*J], zeros; 1 is written for a vector that is left to the generic loops.

    Returns:
        Number of vectors left.
    """
    count: int = decode_planes(config, grid, fmt, coding, tables, left)
    return count


class Place(NamedTuple):
    """A tensor [rows, J, tokens, D] in bytes: address of its first element, D, and strides."""

    address: int
    dim: int
    row_stride: int
    vector_stride: int
    token_stride: int


@jit
def job_of(jobs: Any, i: Any, place: Any, coding: Any) -> Any:
    """Grid and coding of job i of `simd_decode_jobs`, and how many vectors the jobs before have."""
    job = jobs + 8 * JOB_FIELDS * i
    tokens = get_i64(job, 3)
    grid = Grid(
        place.address + get_i64(job, 0) * place.row_stride + get_i64(job, 1) * place.token_stride,
        get_i64(job, 2), tokens, get_i64(job, 4), place.dim, tokens * place.token_stride, place.token_stride,
        place.vector_stride,
    )  # fmt: skip
    part = Coding(
        coding.bits, coding.rule, coding.alpha, coding.beta, coding.outliers, get_i64(job, 5), get_i64(job, 6),
        get_i64(job, 7), get_i64(job, 8), get_i64(job, 9), get_i64(job, 10), 0,
    )  # fmt: skip
    return grid, part, get_i64(job, 11)


@kernel
def simd_decode_jobs(
    config: Any, jobs: int, count: int, place: Place, fmt: Format | None, coding: Any, tables: SimdTables, left: int
) -> int:
    """Decode several runs of chunks in one call.

    Args:
        config: `KernelConfig`.
        jobs: Address of i64 [count, JOB_FIELDS]: row, first token, chunks, tokens of one, J, the addresses of means,
            scales, codes, outlier channels, ranges and codes, and how many vectors the jobs before have.
        count: How many.
        place: Where they go.
        fmt: As for `simd_decode_stream`.
        coding: `Coding` without addresses.
        tables: Signs and levels.
        left: Address of u8 [vectors of all jobs], zeros, as for `simd_decode_stream`.

    Returns:
        Number of vectors left, of all jobs.
    """
    total = 0
    for i in range(count):
        grid, part, before = job_of(jobs, i, place, coding)
        total += decode_planes(config, grid, fmt, part, tables, left + before)
    return total
