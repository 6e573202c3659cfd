"""The generic CPU loops over a stream: every dim, bits, dtype, rule and QJL, chosen at run time (compiled once).

Also the second pass over the few vectors that the SIMD kernels leave: those whose norms need rescaling. The numbered
steps are those of docs/wire-format.md, section 5.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from tq_offload.kernels.grid_loops import LSQ, NORM, UNBIASED, Coding, Grid, address, address_of, keep
from tq_offload.kernels.outlier_loops import add_coarse, no_means_of_outliers, take_coarse
from tq_offload.kernels.simd.config import Format
from tq_offload.kernels.simd.jit import jit, kernel
from tq_offload.kernels.simd.memory import (
    add8,
    bits_of,
    get,
    get_i32,
    get_u8,
    get_u16,
    put,
    put_u8,
    put_u16,
    sub8,
    top8,
)
from tq_offload.kernels.vector_loops import (
    ALL_ZERO,
    NOT_FINITE,
    ONE,
    ZERO,
    copy,
    dot,
    exponent_of,
    from_bf16,
    inverse_rotate,
    load_vector,
    pack,
    padded,
    power_of_two,
    rotate,
    round_shift,
    scale_vector,
    store_vector,
    to_bf16,
    unpack,
)

__all__ = ["Sketch", "Tables", "decode_stream", "encode_stream", "mean_stream"]

ONE_BIT = np.int64(1)
LOW, HIGH = np.float32(2.0**-80), np.float32(2.0**80)
SQRT_HALF_PI = np.float32(math.sqrt(math.pi / 2))
SKETCH_TOP = np.float32(2.0**60)


class Sketch(NamedTuple):
    """Addresses of the sections of the QJL sketch. Kernels take None instead where it is off, and compile faster."""

    scales: int
    bits: int


class Work(NamedTuple):
    """Addresses of work space: f32 [padded D] each; `sums` f32 of the next power of two; `codes` u8; `means` f32
    [J, padded D].
    """

    v: int
    u: int
    t: int
    c: int
    sums: int
    codes: int
    means: int


class Tables(NamedTuple):
    """Addresses of the signs, f32 [8, padded D] (four stages of the rotation, four of the sketch), of the levels and
    of the tables of `simd.cells`, with their size and density.
    """

    signs: int
    levels: int
    inside: int
    base: int
    cells: int
    density: np.float32


@jit
def work_in(space: Any, dim: Any) -> Any:
    """Lay out work space in f32 [8*padded D + J*padded D]; it starts as zeros and stays finite."""
    at, row = address(space), 4 * padded(dim)
    return Work(at, at + row, at + 2 * row, at + 3 * row, at + 4 * row, at + 6 * row, at + 8 * row)


@jit
def load_means(means: Any, p: Any, vectors: Any, dim: Any, out: Any) -> None:
    """bf16 means of plane p to rows of f32; zeros if there are none."""
    if means:
        for j in range(vectors):
            for i in range(dim):
                bits = get_u16(means, (p * vectors + j) * dim + i)
                put(out, j * padded(dim) + i, from_bf16(bits))


@jit
def mean_bits(mean: Any) -> Any:
    """Bits of a mean rounded to bf16; 0 if it is not finite."""
    bits = bits_of(mean)
    magnitude = round_shift(np.uint32(bits & np.uint32(0x7FFFFFFF)), 16)
    if magnitude >= np.uint32(0x7F80):
        return np.uint16(0)
    return np.uint16(magnitude | ((bits >> np.uint32(16)) & np.uint32(0x8000)))


@kernel
def mean_stream(_config: Any, grid: Grid, fmt: Format, coding: Coding) -> None:
    """Means of every plane, vector and channel over the tokens: bf16 [P, J, D] at address `coding.means`."""
    size = grid.vectors * grid.dim
    space = np.empty(grid.dim + size, np.float32)
    v, count = address(space), np.float32(1.0 / grid.tokens)
    total = v + 4 * grid.dim
    for p in range(grid.planes):
        for i in range(size):
            put(total, i, ZERO)
        for n in range(grid.tokens * grid.vectors):
            load_vector(address_of(grid, p, n), fmt, grid.dim, v)
            row = total + 4 * grid.dim * (n % grid.vectors)
            for i in range(grid.dim):
                put(row, i, get(row, i) + get(v, i))
        for i in range(size):
            put_u16(coding.means, p * size + i, mean_bits(get(total, i) * count))
        for j in range(grid.vectors):
            no_means_of_outliers(coding, grid.dim, p * grid.vectors + j)
    keep(space)


@jit
def quantise(t: Any, tables: Any, bits: Any, dim: Any, codes: Any, c: Any) -> None:
    """Step 5: codes, u8 [D], and their levels, f32 [D], of t, f32 [D]; ties go to the lower code.

    As `simd.encode`: one cell and one comparison of integers (see `simd.cells`).
    """
    half, last = 1 << (bits - 1), tables.cells - 1
    for i in range(dim):
        x = get(t, i)
        negative = np.int64(x <= ZERO)
        cell = min(np.int64(abs(x) * tables.density), last)
        above = np.int64(bits_of(abs(x))) + negative > get_i32(tables.inside, cell)
        k = get_i32(tables.base, cell) + np.int64(above)
        code = k ^ (half ^ (-negative & (2 * half - 1)))  # half + k, or half - 1 - k, without a branch
        put_u8(codes, i, np.uint8(code))
        put(c, i, get(tables.levels, code))
    for i in range(dim, (dim + 7) & ~7):
        put_u8(codes, i, np.uint8(0))


@jit
def scale_factor(rule: Any, work: Any, dim: Any) -> Any:
    """Step 6: q of work.t and work.c."""
    top, bottom = work.c, work.c
    if rule != LSQ:
        top = work.t
    if rule == UNBIASED:
        bottom = work.t
    q = dot(work.t, top, dim, work.sums) / dot(bottom, work.c, dim, work.sums)
    return math.sqrt(q) if rule == NORM else q


@jit
def in_range(n: Any) -> Any:
    """Whether a squared norm needs no rescaling; False for NaN."""
    return LOW <= n <= HIGH


@jit
def choose(work: Any, has_mean: Any, dim: Any) -> Any:
    """Steps 1 to 3: (n, flag, k), and w in work.t. k is NOT_FINITE if an element is NaN or Inf."""
    k, factor = 0, ONE
    for attempt in range(2):
        if attempt:
            scale_vector(work.v, factor, dim)
            scale_vector(work.u, factor, dim)
        nv = dot(work.v, work.v, dim, work.sums)
        nu = dot(work.u, work.u, dim, work.sums)
        if attempt or (in_range(nv) and in_range(nu)):
            break
        k = exponent_of(work.v, dim)
        if k == NOT_FINITE:
            return ZERO, False, k
        if k == ALL_ZERO:
            k = 0
        factor = power_of_two(-k)
    flag = has_mean and nu < nv
    copy(work.t, work.u if flag else work.v, dim)
    return (nu if flag else nv), flag, k


@jit
def sketch_residual(work: Any, q: Any, sigma: Any, unscale: Any, sketch: Any, index: Any, signs: Any, dim: Any) -> None:
    """Step 8. Destroys t. For an empty vector r = 0, and so are all bits and the scale."""
    r = work.t
    for i in range(dim):
        put(r, i, get(r, i) - q * get(work.c, i))
    residual = math.sqrt(dot(r, r, dim, work.sums) * np.float32(1.0 / dim)) * sigma
    put_u16(sketch.scales, index, to_bf16(residual * unscale))
    rotate(r, signs + 16 * padded(dim), dim, work.sums)
    for i in range((dim + 7) & ~7):
        put_u8(work.codes, i, np.uint8(i < dim and get(r, i) < ZERO))
    pack(work.codes, ONE_BIT, dim, sketch.bits + index * ((dim + 7) // 8))


@jit
def normalise(work: Any, n: Any, coding: Any, signs: Any, dim: Any) -> Any:
    """Step 4: t in work.t; returns sigma."""
    t = work.t
    sigma = math.sqrt(n * np.float32(1.0 / dim))
    rotate(t, signs, dim, work.sums)
    inverse = ONE / (math.sqrt(n) if dim & (dim - 1) == 0 else sigma)
    top = ZERO
    for i in range(0, dim, 8):
        top = max(top, top8(t + 4 * i))
    stretch = (top * inverse) * coding.beta + coding.alpha
    inverse = inverse / stretch
    scale_vector(t, inverse, dim)
    return sigma * stretch


@jit
def encode_vector(work: Any, coding: Any, sketch: Any, index: Any, tables: Any, dim: Any) -> Any:
    """Steps 1 to 8 for work.v and work.u; False if an element is NaN or Inf."""
    n, flag, k = choose(work, coding.means != 0, dim)
    if k == NOT_FINITE:
        return False
    sigma, unscale = ZERO, power_of_two(k)
    if n == ZERO:
        for i in range(dim):
            put(work.t, i, ZERO)
    else:
        sigma = normalise(work, n, coding, tables.signs, dim)
    quantise(work.t, tables, coding.bits, dim, work.codes, work.c)
    pack(work.codes, coding.bits, dim, coding.codes + index * ((dim * coding.bits + 7) // 8))
    q = ZERO if n == ZERO else scale_factor(coding.rule, work, dim)
    bits = to_bf16((q * sigma) * unscale)
    put_u16(coding.scales, index, np.uint16(bits | np.uint16(32768 if flag else 0)))
    if sketch is not None:
        sketch_residual(work, q, sigma, unscale, sketch, index, tables.signs, dim)
    return True


@kernel
def encode_stream(_config: Any, grid: Grid, fmt: Format, coding: Coding, sketch: Sketch | None, tables: Tables) -> bool:
    """Encode the vectors of a stream; the means are read from their section. False: an element is NaN or Inf."""
    dim = grid.dim
    space = np.zeros((8 + grid.vectors) * padded(dim), np.float32)
    work = work_in(space, dim)
    for p in range(grid.planes):
        load_means(coding.means, p, grid.vectors, dim, work.means)
        for n in range(grid.tokens * grid.vectors):
            index = p * grid.tokens * grid.vectors + n
            if coding.only and not get_u8(coding.only, index):
                continue
            load_vector(address_of(grid, p, n), fmt, dim, work.v)
            take_coarse(work.v, coding, p * grid.vectors + n % grid.vectors, index)
            row = work.means + 4 * padded(dim) * (n % grid.vectors)
            for i in range(0, dim, 8):
                sub8(work.u + 4 * i, work.v + 4 * i, row + 4 * i)
            if not encode_vector(work, coding, sketch, index, tables, dim):
                return False
    keep(space)
    return True


@jit
def add_sketch(work: Any, sketch: Any, index: Any, scale: Any, signs: Any, dim: Any) -> None:
    """Section 6: add the sketched residual to work.t."""
    amount = from_bf16(get_u16(sketch.scales, index)) * SQRT_HALF_PI
    if dim & (dim - 1) == 0:
        amount *= np.float32(1.0 / math.sqrt(dim))
    amount = min(max(amount / scale, -SKETCH_TOP), SKETCH_TOP) if scale > ZERO else ZERO
    unpack(sketch.bits + index * ((dim + 7) // 8), ONE_BIT, dim, work.codes)
    for i in range(dim):
        put(work.u, i, -ONE if get_u8(work.codes, i) else ONE)
    inverse_rotate(work.u, signs + 16 * padded(dim), dim, work.sums)
    for i in range(dim):
        put(work.t, i, get(work.t, i) + amount * get(work.u, i))


@kernel
def decode_stream(_config: Any, grid: Grid, fmt: Format, coding: Coding, sketch: Sketch | None, tables: Tables) -> None:
    """Decode the vectors of a stream in place."""
    dim = grid.dim
    space = np.zeros((8 + grid.vectors) * padded(dim), np.float32)
    work = work_in(space, dim)
    inverse_sqrt = np.float32(1.0 / math.sqrt(dim)) if dim & (dim - 1) == 0 else ONE
    for p in range(grid.planes):
        load_means(coding.means, p, grid.vectors, dim, work.means)
        for n in range(grid.tokens * grid.vectors):
            index = p * grid.tokens * grid.vectors + n
            if coding.only and not get_u8(coding.only, index):
                continue
            bits = get_u16(coding.scales, index)
            scale = from_bf16(bits & np.uint16(0x7FFF))
            unpack(coding.codes + index * ((dim * coding.bits + 7) // 8), coding.bits, dim, work.codes)
            for i in range(dim):
                put(work.t, i, get(tables.levels, get_u8(work.codes, i)))
            if sketch is not None:
                add_sketch(work, sketch, index, scale, tables.signs, dim)
            inverse_rotate(work.t, tables.signs, dim, work.sums)
            scale_vector(work.t, scale * inverse_sqrt, dim)
            if coding.means and bits >= np.uint16(0x8000):
                row = work.means + 4 * padded(dim) * (n % grid.vectors)
                for i in range(0, dim, 8):
                    add8(work.t + 4 * i, work.t + 4 * i, row + 4 * i)
            add_coarse(work.t, coding, p * grid.vectors + n % grid.vectors, index)
            store_vector(work.t, fmt, dim, address_of(grid, p, n))
    keep(space)
