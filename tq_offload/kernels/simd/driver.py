"""The loops over a stream around the SIMD kernels. A vector that these do not cover is marked in a mask and left."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from tq_offload.kernels.grid_loops import LSQ, NORM, Coding, Grid, address, keep
from tq_offload.kernels.outlier_loops import channel_of, coarse_value, no_means_of_outliers, wild_ranges
from tq_offload.kernels.simd.config import Format
from tq_offload.kernels.simd.decode import decode_vector
from tq_offload.kernels.simd.encode import add_elements, quantise, rotate, squared_norms
from tq_offload.kernels.simd.jit import jit, kernel
from tq_offload.kernels.simd.memory import get, get_i64, get_u16, paired_index, put, put_i64, put_u8, put_u16
from tq_offload.kernels.stream_loops import in_range, mean_bits
from tq_offload.kernels.vector_loops import ONE, ZERO, copy, from_bf16, load_vector, store_vector, to_bf16

__all__ = [
    "JOB_FIELDS", "TOP", "Place", "SimdTables", "elements", "job_of", "scale_bits", "simd_decode_jobs",
    "simd_decode_stream", "simd_encode_stream",
]  # fmt: skip

JOB_FIELDS = 12
BATCH = 8  # vectors that go through a pass before the next pass starts
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
    space = np.full(2 * size + grid.dim, np.float32(-0.0), np.float32)
    mean = address(space)
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
                put_coarse(config, row, coding, p * grid.vectors + j, index)
                at = grid.address + p * grid.plane_stride + t * grid.token_stride + j * grid.vector_stride
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
        coding.bits, coding.rule, get_i64(job, 5), get_i64(job, 6), get_i64(job, 7), 0, coding.alpha, coding.beta,
        coding.outliers, get_i64(job, 8), get_i64(job, 9), get_i64(job, 10),
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


@jit
def elements(at: Any, fmt: Any, dim: Any, stage: Any) -> Any:
    """Address of the elements at `at` as the kernels want them: in place, or converted to f32 at `stage`."""
    if fmt is None:
        return at
    load_vector(at, fmt, dim, stage)
    return stage


@jit
def scale_bits(rule: Any, sums: Any, sigma: Any, flag: Any) -> Any:
    """Steps 6 and 7: the scale, with the flag that the mean was taken off."""
    tc, cc, tt = get(sums, 0), get(sums, 1), get(sums, 2)
    if rule == LSQ:
        q = tc / cc
    elif rule == NORM:
        q = math.sqrt(tt / cc)
    else:
        q = tt / tc
    return np.uint16(to_bf16(q * sigma) | np.uint16(32768 if flag else 0))


@jit
def plane_means(config: Any, grid: Any, fmt: Any, coding: Any, p: Any, sums: Any, stage: Any) -> None:
    """Means of plane p: bf16 to their section, and f32 [J*D], paired, to `sums`."""
    size = grid.vectors * grid.dim
    for i in range(size):
        put(sums, i, ZERO)
    for t in range(grid.tokens):
        for j in range(grid.vectors):
            at = grid.address + p * grid.plane_stride + t * grid.token_stride + j * grid.vector_stride
            add_elements(config, elements(at, fmt, grid.dim, stage), sums + 4 * grid.dim * j)
    count = np.float32(1.0 / grid.tokens)
    for i in range(size):
        put_u16(coding.means, p * size + i, mean_bits(get(sums, paired_index(config, i)) * count))
    for j in range(grid.vectors):
        no_means_of_outliers(coding, grid.dim, p * grid.vectors + j)
    load_means(config, coding.means, p, size, sums)


@kernel
def simd_encode_stream(config: Any, grid: Any, fmt: Format | None, coding: Any, tables: SimdTables, left: int) -> int:
    """Encode a stream: means and vectors. Arguments as for `simd_decode_stream`.

    Returns:
        Number of vectors left: those that need rescaling, and those with NaN or Inf.
    """
    size, dim, count = grid.vectors * grid.dim, grid.dim, 0
    vectors, width = grid.tokens * grid.vectors, (grid.dim * coding.bits) // 8
    space = np.zeros(size + dim + BATCH * (4 * dim + 13), np.float32)
    mean = address(space)
    none = mean + 4 * size  # the row of the vectors without a mean
    y = none + 4 * dim
    stage = y + 4 * BATCH * dim
    norms = stage + 4 * BATCH * dim
    sums, inverses, sigmas = norms + 8 * BATCH, norms + 20 * BATCH, norms + 24 * BATCH
    sources, rows, bare = norms + 28 * BATCH, norms + 36 * BATCH, norms + 44 * BATCH
    own = norms + 52 * BATCH  # for outliers two rows a vector, with and without the mean, that hold its coarse values
    for p in range(grid.planes):
        if coding.means:
            plane_means(config, grid, fmt, coding, p, mean, stage)
        t, j = 0, 0
        for start in range(0, vectors, BATCH):
            many, first = min(BATCH, vectors - start), p * vectors + start
            for b in range(many):
                at = grid.address + p * grid.plane_stride + t * grid.token_stride + j * grid.vector_stride
                put_i64(sources, b, elements(at, fmt, dim, stage + 4 * dim * b))
                put_i64(rows, b, mean + 4 * dim * j)
                put_i64(bare, b, none)
                if coding.outliers:
                    row = own + 8 * dim * b
                    copy(row, mean + 4 * dim * j, dim)
                    copy(row + 4 * dim, none, dim)
                    put_coarse(config, row, coding, p * grid.vectors + j, first + b)
                    put_coarse(config, row + 4 * dim, coding, p * grid.vectors + j, first + b)
                    put_i64(rows, b, row)
                    put_i64(bare, b, row + 4 * dim)
                j += 1
                if j == grid.vectors:
                    t, j = t + 1, 0
            for b in range(many):
                squared_norms(config, get_i64(sources, b), get_i64(rows, b), norms + 8 * b)
                if coding.outliers:
                    squared_norms(config, get_i64(sources, b), get_i64(bare, b), sums)
                    put(norms, 2 * b, get(sums, 1))
            for b in range(many):
                nv, nu = get(norms, 2 * b), get(norms, 2 * b + 1)
                if not (in_range(nv) and in_range(nu)):
                    put_u8(left, first + b, np.uint8(1))
                    count += 1
                row = get_i64(rows, b) if nu < nv else get_i64(bare, b)
                put(inverses, b, rotate(config, get_i64(sources, b), row, tables.signs, y + 4 * dim * b))
            for b in range(many):
                n = min(get(norms, 2 * b), get(norms, 2 * b + 1))
                inverse = ONE / math.sqrt(n)
                stretch = (get(inverses, b) * inverse) * coding.beta + coding.alpha
                put(sigmas, b, math.sqrt(n * np.float32(1.0 / dim)) * stretch)
                put(inverses, b, inverse / stretch)
            for b in range(many):
                inside, base, levels = tables.inside, tables.base, tables.levels
                at = coding.codes + (first + b) * width
                quantise(config, y + 4 * dim * b, get(inverses, b), inside, base, levels, at, sums + 12 * b)
            for b in range(many):
                flag = get(norms, 2 * b + 1) < get(norms, 2 * b)
                put_u16(coding.scales, first + b, scale_bits(coding.rule, sums + 12 * b, get(sigmas, b), flag))
    keep(space)
    return count
