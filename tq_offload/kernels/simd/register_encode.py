"""Encoding a stream of vectors that fit the registers: head dims that are a power of two (others are in `row_encode`).

The passes are over batches of vectors: square roots and divisions between them then do not wait for one another.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tq_offload.kernels.grid_loops import address, keep
from tq_offload.kernels.outlier_loops import no_means_of_outliers
from tq_offload.kernels.simd.batch import (
    BATCH,
    FIELD_BYTES,
    FIELDS,
    INVERSE,
    LARGEST,
    NU,
    NV,
    fit_ranges,
    out_of_range,
    scale_bits,
    shortened,
)  # fmt: skip
from tq_offload.kernels.simd.config import Format
from tq_offload.kernels.simd.encode import add_elements, quantise, rotate, squared_norms
from tq_offload.kernels.simd.jit import jit, kernel
from tq_offload.kernels.simd.memory import get, get_i64, get_u16, paired_index, put, put_i64, put_u8, put_u16
from tq_offload.kernels.simd.register_decode import SimdTables, load_means, put_coarse
from tq_offload.kernels.stream_loops import mean_bits
from tq_offload.kernels.vector_loops import ZERO, copy, load_vector

__all__ = ["elements", "simd_encode_stream"]


@jit
def elements(at: Any, fmt: Any, dim: Any, stage: Any) -> Any:
    """Address of the elements at `at` as the kernels want them: in place, or converted to f32 at `stage`."""
    if fmt is None:
        return at
    load_vector(at, fmt, dim, stage)
    return stage


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
    space = np.zeros(size + dim + BATCH * (4 * dim + FIELDS + 8), np.float32)  # 8: three i64 and a u16 a vector
    mean = address(space)
    none = mean + 4 * size  # the row of the vectors without a mean
    y = none + 4 * dim
    stage = y + 4 * BATCH * dim
    own = stage + 4 * BATCH * dim  # for outliers: two rows a vector, with and without the mean, with coarse values
    batch = own + 8 * BATCH * dim
    sources = batch + FIELD_BYTES * FIELDS
    rows, bare = sources + 8 * BATCH, sources + 16 * BATCH
    scales = sources + 24 * BATCH
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
                squared_norms(config, get_i64(sources, b), get_i64(rows, b), batch + 4 * b)
                if coding.outliers:
                    nu = get(batch, BATCH * NU + b)
                    squared_norms(config, get_i64(sources, b), get_i64(bare, b), batch + 4 * b)
                    put(batch, BATCH * NV + b, get(batch, BATCH * NU + b))
                    put(batch, BATCH * NU + b, nu)
            flags = shortened(batch)
            for b in range(many):
                row = get_i64(rows, b) if (flags >> b) & 1 else get_i64(bare, b)
                put(batch, BATCH * LARGEST + b, rotate(config, get_i64(sources, b), row, tables.signs, y + 4 * dim * b))
            fit_ranges(config, batch, coding.alpha, coding.beta)
            for b in range(many):
                inside, base, levels = tables.inside, tables.base, tables.levels
                at, inverse = coding.codes + (first + b) * width, get(batch, BATCH * INVERSE + b)
                quantise(config, y + 4 * dim * b, inverse, inside, base, levels, at, batch + 4 * b)
            scale_bits(config, coding.rule, batch, flags, scales)
            wild = out_of_range(batch)
            for b in range(many):
                put_u16(coding.scales, first + b, get_u16(scales, b))
                if (wild >> b) & 1:
                    put_u8(left, first + b, np.uint8(1))
                    count += 1
    keep(space)
    return count
