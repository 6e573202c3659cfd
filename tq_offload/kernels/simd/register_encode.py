"""Encoding a stream of vectors that fit the registers: head dims that are a power of two (others are in `row_encode`).

The passes are over batches of vectors: square roots and divisions between them then do not wait for one another.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tq_offload.kernels.grid_loops import TO_A_LINE, aligned, keep
from tq_offload.kernels.outlier_loops import no_means_of_outliers
from tq_offload.kernels.simd.batch import (
    BATCH,
    BATCH_SIZE,
    INVERSE,
    NU_PARTS,
    NV_PARTS,
    PART_ROW,
    PARTS_AT,
    fit_ranges,
    fold_largest,
    fold_norms,
    fold_products,
    out_of_range,
    scale_bits,
    shortened,
)
from tq_offload.kernels.simd.config import Format
from tq_offload.kernels.simd.encode import (
    TOGETHER,
    add_one,
    add_together,
    quantise,
    rotate,
    squared_norm,
    squared_norms,
)
from tq_offload.kernels.simd.jit import jit, kernel
from tq_offload.kernels.simd.memory import get, get_i64, get_u16, paired_index, prefetch, put, put_i64, put_u8, put_u16
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
    together = grid.tokens - grid.tokens % TOGETHER if fmt is None else 0
    for t in range(0, together, TOGETHER):
        for j in range(grid.vectors):
            at = grid.address + p * grid.plane_stride + t * grid.token_stride + j * grid.vector_stride
            for row in range(TOGETHER, 2 * TOGETHER):
                prefetch(config, at + row * grid.token_stride)
            add_together(config, at, grid.token_stride, sums + 4 * grid.dim * j)
    for t in range(together, grid.tokens):
        for j in range(grid.vectors):
            at = grid.address + p * grid.plane_stride + t * grid.token_stride + j * grid.vector_stride
            add_one(config, elements(at, fmt, grid.dim, stage), grid.token_stride, sums + 4 * grid.dim * j)
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
    indices = 8  # f32's worth: three i64 and a u16 a vector
    space = np.zeros(size + dim + BATCH_SIZE + BATCH * (4 * dim + indices) + TO_A_LINE, np.float32)
    mean = aligned(space)
    none = mean + 4 * size  # the row of the vectors without a mean
    y = none + 4 * dim
    stage = y + 4 * BATCH * dim
    own = stage + 4 * BATCH * dim  # for outliers: two rows a vector, with and without the mean, with coarse values
    batch = own + 8 * BATCH * dim
    parts = batch + PARTS_AT
    sources = batch + 4 * BATCH_SIZE
    rows, bare = sources + 8 * BATCH, sources + 16 * BATCH
    scales = sources + 24 * BATCH
    ahead = (BATCH + grid.vectors - 1) // grid.vectors * grid.token_stride
    for b in range(BATCH):
        put_i64(bare, b, none)
    for p in range(grid.planes):
        if coding.means:
            plane_means(config, grid, fmt, coding, p, mean, stage)
        token = at = grid.address + p * grid.plane_stride
        j = 0
        for start in range(0, vectors, BATCH):
            many, first = min(BATCH, vectors - start), p * vectors + start
            for b in range(many):
                prefetch(config, at + ahead)
                put_i64(sources, b, elements(at, fmt, dim, stage + 4 * dim * b))
                put_i64(rows, b, mean + 4 * dim * j)
                if coding.outliers:
                    row = own + 8 * dim * b
                    copy(row, mean + 4 * dim * j, dim)
                    copy(row + 4 * dim, none, dim)
                    put_coarse(config, row, coding, p * grid.vectors + j, first + b)
                    put_coarse(config, row + 4 * dim, coding, p * grid.vectors + j, first + b)
                    put_i64(rows, b, row)
                    put_i64(bare, b, row + 4 * dim)
                j += 1
                at += grid.vector_stride
                if j == grid.vectors:
                    token += grid.token_stride
                    at, j = token, 0
            for b in range(many):
                source, row, part = get_i64(sources, b), get_i64(rows, b), parts + PART_ROW * b
                if coding.outliers:
                    squared_norm(config, source, get_i64(bare, b), part + NV_PARTS)
                    squared_norm(config, source, row, part + NU_PARTS)
                else:
                    squared_norms(config, source, row, part)
            fold_norms(config, batch)
            flags = shortened(batch)
            for b in range(many):
                row = get_i64(rows, b) if (flags >> b) & 1 else get_i64(bare, b)
                rotate(config, get_i64(sources, b), row, tables.signs, y + 4 * dim * b, parts + PART_ROW * b)
            fold_largest(config, batch)
            fit_ranges(config, batch, coding.alpha, coding.beta)
            for b in range(many):
                inside, base, levels = tables.inside, tables.base, tables.levels
                codes, inverse = coding.codes + (first + b) * width, get(batch, BATCH * INVERSE + b)
                quantise(config, y + 4 * dim * b, inverse, inside, base, levels, codes, parts + PART_ROW * b)
            fold_products(config, batch)
            scale_bits(config, coding.rule, batch, flags, scales)
            wild = out_of_range(batch)
            for b in range(many):
                put_u16(coding.scales, first + b, get_u16(scales, b))
                if (wild >> b) & 1:
                    put_u8(left, first + b, np.uint8(1))
                    count += 1
    keep(space)
    return count
