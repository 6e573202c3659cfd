"""Loops over one row, f32 [D] in memory in natural order: D no power of two, a multiple of the lanes, from 40 on.

"Block" is the largest power of two below D. The rotation of docs/wire-format.md, section 3, transforms two overlapping
blocks twice, "low" ones from element 0 on and "high" ones up to the last element. Between any two of them the signs of
a stage and the norm of the block before are one factor for every element: a row of `RowTables.factors`.
"""

from __future__ import annotations

from typing import Any

from tq_offload.kernels.simd.butterflies import (
    RUN,
    lanes_of,
    radix2,
    radix4,
    radix8,
    scaled_transform32,
    scaled_transform64,
    transform32,
    transform64,
)
from tq_offload.kernels.simd.jit import jit
from tq_offload.kernels.simd.memory import put
from tq_offload.kernels.simd.row_steps import (
    clear,
    fold2,
    fold4,
    largest,
    merge_halves,
    multiply,
    scale_top,
    split,
    two_sums,
)

__all__ = ["LARGEST_BATCH", "batch_of", "inverse_rotate", "rotate", "row_room", "sums_of"]

LARGEST_BATCH = 8

TOPS = 4 * 16  # elements of the largest magnitudes that are found apart, for they wait for one another


@jit
def row_room(dim: Any) -> Any:
    """Elements from a row of work space or factors to the next: whole cache lines, and room to read past the end."""
    return (dim + 31) // 16 * 16


@jit
def batch_of(dim: Any) -> Any:
    """Vectors that go through a pass before the next one starts: latencies overlap, and their rows stay in the L1."""
    return max(2, min(LARGEST_BATCH, 1536 // dim))


@jit
def _strides(config: Any, at: Any, block: Any) -> None:
    """The passes of a transform from stride `RUN` on."""
    lanes, stride = lanes_of(config), RUN
    while stride < block:
        radix = min(block // stride, 8)
        for first in range(0, block, stride * radix):
            for i in range(first, first + stride, lanes):
                if radix == 8:
                    radix8(config, at + 4 * i, 4 * stride)
                elif radix == 4:
                    radix4(config, at + 4 * i, 4 * stride)
                else:
                    radix2(config, at + 4 * i, 4 * stride)
        stride *= radix


@jit
def _transform(config: Any, at: Any, block: Any) -> None:
    """Transform of a block in place, without the norm."""
    if block < RUN:
        transform32(config, at)
    for i in range(0, block - RUN + 1, RUN):
        transform64(config, at + 4 * i)
    _strides(config, at, block)


@jit
def _scaled_transform(config: Any, row: Any, factors: Any, first: Any, dim: Any, block: Any) -> None:
    """Row *= factors, then the transform of the block from element `first` on."""
    lanes, end = lanes_of(config), first + block
    if block < RUN:
        scaled_transform32(config, row + 4 * first, factors + 4 * first)
    for i in range(first, end - RUN + 1, RUN):
        scaled_transform64(config, row + 4 * i, factors + 4 * i)
    _strides(config, row + 4 * first, block)
    for i in range(0, first, lanes):
        multiply(config, row + 4 * i, factors + 4 * i)
    for i in range(end, dim, lanes):
        multiply(config, row + 4 * i, factors + 4 * i)


@jit
def _split(config: Any, row: Any, factors: Any, half: Any, out: Any) -> None:
    """out = products of row and factors, the even ones first; the last registers first, for they are not full."""
    lanes, odd = lanes_of(config), out + 4 * half
    whole = half // lanes * lanes
    for i in range(whole, half, lanes):
        split(config, row + 8 * i, factors + 8 * i, out + 4 * i, odd + 4 * i)
    for i in range(0, whole, lanes):
        split(config, row + 8 * i, factors + 8 * i, out + 4 * i, odd + 4 * i)


@jit
def rotate(config: Any, rows: Any, many: Any, factors: Any, dim: Any, block: Any, out: Any, tops: Any) -> None:
    """Rotation of rows that have the signs of stage 0, to `out`; the largest magnitudes, f32 [many], to `tops`.

    The rows are lost. factors: f32 [4, row_room(D)], for what comes between transforms and after the last one.
    """
    lanes, size, high = lanes_of(config), 4 * row_room(dim), dim - block
    for b in range(many):
        _transform(config, rows + b * size, block)
    for b in range(many):
        _scaled_transform(config, rows + b * size, factors, high, dim, block)
    for b in range(many):
        _split(config, rows + b * size, factors + size, dim // 2, out + b * size)
    for b in range(many):
        _transform(config, out + b * size, block)
    for b in range(many):
        _scaled_transform(config, out + b * size, factors + 2 * size, high, dim, block)
    for b in range(many):
        row = rows + b * size
        for i in range(0, TOPS, lanes):
            clear(config, row + 4 * i)
        for i in range(0, dim, lanes):
            scale_top(config, out + b * size + 4 * i, factors + 3 * size + 4 * i, row + 4 * (i % TOPS))
        put(tops, b, largest(config, row))


@jit
def inverse_rotate(config: Any, rows: Any, many: Any, factors: Any, dim: Any, block: Any, out: Any) -> None:
    """Undo the rotation, to `out`, without the last factors. Arguments as for `rotate`."""
    lanes, size, high, half = lanes_of(config), 4 * row_room(dim), dim - block, dim // 2
    for b in range(many):
        _transform(config, rows + b * size + 4 * high, block)
    for b in range(many):
        _scaled_transform(config, rows + b * size, factors, 0, dim, block)
    between, odd = factors + size, 4 * half
    for b in range(many):
        for i in range(0, half, lanes):
            even = rows + b * size + 4 * i
            merge_halves(config, even, between + 4 * i, even + odd, between + 4 * i + odd, out + b * size + 8 * i)
    for b in range(many):
        _transform(config, out + b * size + 4 * high, block)
    for b in range(many):
        _scaled_transform(config, out + b * size, factors + 2 * size, 0, dim, block)


@jit
def sums_of(config: Any, a: Any, b: Any, dim: Any, block: Any, out: Any) -> None:
    """`hsum` of two rows without negative elements, to f32 [2] at `out`; the rows are lost."""
    lanes = lanes_of(config)
    for i in range(0, dim - block, lanes):
        fold2(config, a + 4 * i, 4 * block)
        fold2(config, b + 4 * i, 4 * block)
    size = block
    while size >= 4 * lanes:
        size //= 4
        for i in range(0, size, lanes):
            fold4(config, a + 4 * i, 4 * size)
            fold4(config, b + 4 * i, 4 * size)
    if size == 2 * lanes:
        fold2(config, a, 4 * lanes)
        fold2(config, b, 4 * lanes)
    two_sums(config, a, b, out)
