"""Encoding a stream of vectors as rows in memory: head dims that are no power of two (those are in `register_encode`).

As there, the passes are over batches of vectors: square roots and divisions then do not wait for one another. The
numbered steps are those of docs/wire-format.md, section 5.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from tq_offload.kernels.grid_loops import LSQ, NORM, TO_A_LINE, address_of, aligned, keep
from tq_offload.kernels.outlier_loops import no_means_of_outliers
from tq_offload.kernels.simd.butterflies import lanes_of
from tq_offload.kernels.simd.code_steps import quantise, quantise32
from tq_offload.kernels.simd.config import Format
from tq_offload.kernels.simd.jit import jit, kernel
from tq_offload.kernels.simd.memory import get, get_i64, put, put_i64, put_u8, put_u16
from tq_offload.kernels.simd.register_encode import elements
from tq_offload.kernels.simd.row_decode import RowTables, load_means, put_coarse
from tq_offload.kernels.simd.row_steps import accumulate, itemsize_of, squares, take
from tq_offload.kernels.simd.rows import batch_of, rotate, row_room, sums_of
from tq_offload.kernels.stream_loops import in_range, mean_bits
from tq_offload.kernels.vector_loops import ONE, ZERO, block_of, copy, to_bf16

__all__ = ["row_encode_stream"]


@jit
def _plane_means(config: Any, grid: Any, fmt: Any, coding: Any, p: Any, sums: Any, stage: Any) -> None:
    """Means of plane p: bf16 to their section, and f32 rows [J, row_room(D)] to `sums`."""
    dim, room, itemsize = grid.dim, row_room(grid.dim), itemsize_of(config)
    for i in range(grid.vectors * room):
        put(sums, i, ZERO)
    for t in range(grid.tokens):
        for j in range(grid.vectors):
            at = grid.address + p * grid.plane_stride + t * grid.token_stride + j * grid.vector_stride
            source = elements(at, fmt, dim, stage)
            for i in range(0, dim, lanes_of(config)):
                accumulate(config, source + itemsize * i, sums + 4 * (j * room + i))
    count = np.float32(1.0 / grid.tokens)
    for j in range(grid.vectors):
        for i in range(dim):
            mean = mean_bits(get(sums, j * room + i) * count)
            put_u16(coding.means, (p * grid.vectors + j) * dim + i, mean)
        no_means_of_outliers(coding, dim, p * grid.vectors + j)
    load_means(coding.means, p, grid.vectors, dim, sums)


@jit
def _squared_norms(config: Any, source: Any, mean: Any, dim: Any, block: Any, rows: Any, out: Any) -> None:
    """hsum(v*v) and hsum((v - mean)**2) to f32 [2] at `out`; rows: two rows of work space."""
    itemsize, other = itemsize_of(config), rows + 4 * row_room(dim)
    for i in range(0, dim, lanes_of(config)):
        squares(config, source + itemsize * i, mean + 4 * i, rows + 4 * i, other + 4 * i)
    sums_of(config, rows, other, dim, block, out)


@jit
def _quantised(
    config: Any, y: Any, inverse: Any, tables: Any, coding: Any, dim: Any, block: Any, codes: Any, rows: Any, sums: Any
) -> None:
    """Step 5: codes of t = y * inverse; the sums of t*c and c*c, and but for `lsq` of t*t, to f32 [4] at `sums`.

    y is lost; rows: two rows of work space.
    """
    inside, base, levels, whole = tables.inside, tables.base, tables.levels, dim & ~31
    other = rows + 4 * row_room(dim)
    for i in range(0, whole, 32):
        at, k = codes + i * coding.bits // 8, 4 * i
        quantise32(config, y + k, inverse, inside, base, levels, at, rows + k, other + k)
    for i in range(whole, dim, lanes_of(config)):
        at, k = codes + i * coding.bits // 8, 4 * i
        quantise(config, y + k, inverse, inside, base, levels, at, rows + k, other + k)
    sums_of(config, rows, other, dim, block, sums)
    if coding.rule != LSQ:
        sums_of(config, y, other, dim, block, sums + 8)


class _Work(NamedTuple):
    """Addresses of work space: rows of row_room(D), and what is known of the vectors of a batch.

    Rows: `y`, `taken` and `stage` [batch], `own` [batch, 2] (a vector's coarse values, without the mean and with it),
    `pair` [2], `none` zeros, `mean` [J]. Of each vector: `norms` f32 [2], `inverses` and `sigmas` f32, `sums` f32 [4],
    `sources`, `rows` (what is subtracted with the mean) and `bare` (without) addresses.
    """

    y: int
    taken: int
    stage: int
    own: int
    pair: int
    none: int
    mean: int
    norms: int
    inverses: int
    sigmas: int
    sums: int
    sources: int
    rows: int
    bare: int


KNOWN = 14  # f32 of what is known of a vector


@jit
def _work_size(dim: Any, vectors: Any) -> Any:
    """Size of the work space, f32."""
    batch = batch_of(dim)
    return (5 * batch + 3 + vectors) * row_room(dim) + KNOWN * batch + TO_A_LINE


@jit
def _work_in(space: Any, dim: Any, vectors: Any) -> Any:
    y, size, batch = aligned(space), 4 * row_room(dim), batch_of(dim)
    many, each = batch * size, 4 * batch
    pair = y + 5 * many
    known = pair + (3 + vectors) * size
    return _Work(
        y, y + many, y + 2 * many, y + 3 * many, pair, pair + 2 * size, pair + 3 * size,
        known, known + 2 * each, known + 3 * each, known + 4 * each, known + 8 * each, known + 10 * each,
        known + 12 * each,
    )  # fmt: skip


@jit
def _begin(grid: Any, fmt: Any, coding: Any, work: Any, p: Any, start: Any, many: Any) -> None:
    """Sources of a batch, and the rows to subtract."""
    dim, size = grid.dim, 4 * row_room(grid.dim)
    for b in range(many):
        j = (start + b) % grid.vectors
        put_i64(work.sources, b, elements(address_of(grid, p, start + b), fmt, dim, work.stage + b * size))
        put_i64(work.rows, b, work.mean + j * size)
        put_i64(work.bare, b, work.none)
        if coding.outliers:
            column, index = p * grid.vectors + j, p * grid.tokens * grid.vectors + start + b
            bare, row = work.own + 2 * b * size, work.own + (2 * b + 1) * size
            copy(bare, work.none, dim)
            copy(row, work.mean + j * size, dim)
            put_coarse(bare, coding, column, index)
            put_coarse(row, coding, column, index)
            put_i64(work.rows, b, row)
            put_i64(work.bare, b, bare)


@jit
def _norms(config: Any, coding: Any, work: Any, dim: Any, block: Any, many: Any) -> None:
    """Steps 1 and 2: squared norms of a batch."""
    for b in range(many):
        source, norms = get_i64(work.sources, b), work.norms + 8 * b
        if coding.outliers:
            _squared_norms(config, source, get_i64(work.bare, b), dim, block, work.pair, norms)
            bare = get(norms, 1)
        _squared_norms(config, source, get_i64(work.rows, b), dim, block, work.pair, norms)
        if coding.outliers:
            put(norms, 0, bare)


@jit
def _take(config: Any, work: Any, factors: Any, dim: Any, many: Any) -> None:
    """Step 3: w of a batch, times the signs of stage 0."""
    for b in range(many):
        shorter = get(work.norms, 2 * b + 1) < get(work.norms, 2 * b)
        source, row = get_i64(work.sources, b), get_i64(work.rows if shorter else work.bare, b)
        out = work.taken + 4 * b * row_room(dim)
        for i in range(0, dim, lanes_of(config)):
            take(config, source + itemsize_of(config) * i, row + 4 * i, factors + 4 * i, out + 4 * i)


@jit
def _stretch(coding: Any, work: Any, dim: Any, many: Any) -> None:
    """Step 4 after the rotation: sigma, and the inverse from the largest magnitude."""
    for b in range(many):
        sigma = math.sqrt(min(get(work.norms, 2 * b), get(work.norms, 2 * b + 1)) * np.float32(1.0 / dim))
        inverse = ONE / sigma
        stretch = (get(work.inverses, b) * inverse) * coding.beta + coding.alpha
        put(work.sigmas, b, sigma * stretch)
        put(work.inverses, b, inverse / stretch)


@jit
def _scale_bits(rule: Any, sums: Any, sigma: Any, flag: Any) -> Any:
    """Steps 6 and 7: the scale, with the flag that the mean was taken off."""
    tc, cc, tt = get(sums, 0), get(sums, 1), get(sums, 2)
    if rule == LSQ:
        q = tc / cc
    elif rule == NORM:
        q = math.sqrt(tt / cc)
    else:
        q = tt / tc
    return np.uint16(to_bf16(q * sigma) | np.uint16(32768 if flag else 0))


@kernel
def row_encode_stream(config: Any, grid: Any, fmt: Format | None, coding: Any, tables: RowTables, left: int) -> int:
    """Encode a stream: means and vectors. Arguments and result as for `simd_encode_stream`."""
    dim, block, size, batch = grid.dim, block_of(grid.dim), 4 * row_room(grid.dim), batch_of(grid.dim)
    width, vectors, count = (dim * coding.bits) // 8, grid.tokens * grid.vectors, 0
    space = np.zeros(_work_size(dim, grid.vectors), np.float32)
    work = _work_in(space, dim, grid.vectors)
    for p in range(grid.planes):
        if coding.means:
            _plane_means(config, grid, fmt, coding, p, work.mean, work.stage)
        for start in range(0, vectors, batch):
            many, first = min(batch, vectors - start), p * vectors + start
            _begin(grid, fmt, coding, work, p, start, many)
            _norms(config, coding, work, dim, block, many)
            for b in range(many):
                if not (in_range(get(work.norms, 2 * b)) and in_range(get(work.norms, 2 * b + 1))):
                    put_u8(left, first + b, np.uint8(1))
                    count += 1
            _take(config, work, tables.factors, dim, many)
            rotate(config, work.taken, many, tables.factors + size, dim, block, work.y, work.inverses)
            _stretch(coding, work, dim, many)
            for b in range(many):
                codes, sums, y = coding.codes + (first + b) * width, work.sums + 16 * b, work.y + b * size
                inverse = get(work.inverses, b)
                _quantised(config, y, inverse, tables, coding, dim, block, codes, work.pair, sums)
            for b in range(many):
                flag = get(work.norms, 2 * b + 1) < get(work.norms, 2 * b)
                put_u16(
                    coding.scales, first + b, _scale_bits(coding.rule, work.sums + 16 * b, get(work.sigmas, b), flag)
                )
    keep(space)
    return count
