"""Outlier channels on the CPU: choosing them, their coarse codes, and what those stand for.

As `tq_offload.outliers`, operation by operation. A *column* is a vector's place in a token of a plane: p*J + j.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tq_offload.kernels.grid_loops import Coding, Grid, address, address_of, keep
from tq_offload.kernels.simd.config import Format
from tq_offload.kernels.simd.jit import jit, kernel
from tq_offload.kernels.simd.memory import add8, get, get_u8, get_u16, mul8, put, put_u8, put_u16
from tq_offload.kernels.vector_loops import ZERO, load_element, load_vector, padded

__all__ = [
    "add_coarse", "channel_of", "coarse_value", "no_means_of_outliers", "split_outliers", "take_coarse", "wild_ranges",
]  # fmt: skip

HALF, TWO = np.float32(0.5), np.float32(2)
LAST_CODE = np.float32(15)
F32_TOP = np.float32(3.4028234663852886e38)
WILD = np.float32(2.0**60)


@jit
def code_bytes(coding: Any) -> Any:
    """Bytes of the coarse codes of a vector."""
    return (coding.outliers + 1) >> 1


@jit
def coarse_value(coding: Any, column: Any, index: Any, i: Any) -> Any:
    """What the coarse code of outlier channel i of vector `index` stands for."""
    code = get_u8(coding.outlier_codes, index * code_bytes(coding) + (i >> 1)) >> np.uint8(4 * (i & 1))
    k = 2 * (column * coding.outliers + i)
    value = (np.float32(code & np.uint8(15)) * get(coding.outlier_ranges, k + 1) + get(coding.outlier_ranges, k)) * TWO
    return min(max(value, -F32_TOP), F32_TOP)


@jit
def channel_of(coding: Any, column: Any, i: Any) -> Any:
    """Number of outlier channel i."""
    return np.int64(get_u16(coding.outlier_channels, column * coding.outliers + i))


@jit
def take_coarse(vector: Any, coding: Any, column: Any, index: Any) -> None:
    """Subtract the coarse values from f32 [D] at an address."""
    for i in range(coding.outliers):
        at = channel_of(coding, column, i)
        put(vector, at, get(vector, at) - coarse_value(coding, column, index, i))


@jit
def add_coarse(vector: Any, coding: Any, column: Any, index: Any) -> None:
    """Add them."""
    for i in range(coding.outliers):
        at = channel_of(coding, column, i)
        put(vector, at, get(vector, at) + coarse_value(coding, column, index, i))


@jit
def no_means_of_outliers(coding: Any, dim: Any, column: Any) -> None:
    """The means of outlier channels are 0: bf16 section at `coding.means`."""
    for i in range(coding.outliers):
        put_u16(coding.means, column * dim + channel_of(coding, column, i), np.uint16(0))


@jit
def wild_ranges(coding: Any, first: Any, count: Any) -> Any:
    """True if a coarse value of those columns might need a clamp."""
    for k in range(2 * first * coding.outliers, 2 * (first + count) * coding.outliers):
        if not abs(get(coding.outlier_ranges, k)) < WILD:
            return True
    return False


@jit
def choose_channels(energy: Any, dim: Any, count: Any, channels: Any) -> None:
    """The channels of highest energy, f32 [D], in ascending order to u16 [count]; of equal ones the first."""
    found = 0
    for i in range(dim):
        above = 0
        for other in range(dim):
            e = get(energy, other)
            above += e > get(energy, i) or (e == get(energy, i) and other < i)
        if above < count and found < count:
            put_u16(channels, found, np.uint16(i))
            found += 1
    for i in range(found, count):  # only with NaN among the elements: the chunk is refused
        put_u16(channels, i, np.uint16(dim - count + i))


@jit
def plane_energies(grid: Any, fmt: Any, p: Any, work: Any) -> Any:
    """Energies of the channels of plane p, f32 rows [J, padded D]; returns their address in the work space."""
    row = 4 * padded(grid.dim)
    v, energies = work, work + row
    for i in range(padded(grid.dim) * grid.vectors):
        put(energies, i, ZERO)
    for n in range(grid.tokens * grid.vectors):
        load_vector(address_of(grid, p, n), fmt, grid.dim, v)
        at = energies + row * (n % grid.vectors)
        for i in range(0, 4 * grid.dim, 32):
            mul8(v + i, v + i, v + i)
            add8(at + i, at + i, v + i)
    return energies


@jit
def code_channel(grid: Any, fmt: Any, coding: Any, p: Any, j: Any, i: Any) -> Any:
    """Range and codes of outlier channel i of vector j in plane p; False if an element is NaN or Inf."""
    k = (p * grid.vectors + j) * coding.outliers + i
    channel = np.int64(get_u16(coding.outlier_channels, k))
    first = grid.address + p * grid.plane_stride + j * grid.vector_stride
    low = high = load_element(first, fmt, channel) * HALF
    finite = ZERO
    for t in range(grid.tokens):
        x = load_element(first + t * grid.token_stride, fmt, channel) * HALF
        low, high = min(low, x), max(high, x)
        finite += x * ZERO
    if finite != ZERO:
        return False
    low, high = low + ZERO, high + ZERO  # never -0
    step = (high - low) / LAST_CODE
    put(coding.outlier_ranges, 2 * k, low)
    put(coding.outlier_ranges, 2 * k + 1, step)
    for t in range(grid.tokens):
        x = load_element(first + t * grid.token_stride, fmt, channel) * HALF
        q = ZERO if step == ZERO else (x - low) / step
        code = np.uint8(min(q + HALF, LAST_CODE))
        at = ((p * grid.tokens + t) * grid.vectors + j) * code_bytes(coding) + (i >> 1)
        put_u8(coding.outlier_codes, at, code if i & 1 == 0 else np.uint8(get_u8(coding.outlier_codes, at) | code << 4))
    return True


@kernel
def split_outliers(_config: Any, grid: Grid, fmt: Format, coding: Coding) -> bool:
    """Choose and code the outlier channels of a stream. False: an element of one is NaN or Inf."""
    space = np.zeros((1 + grid.vectors) * padded(grid.dim), np.float32)
    for p in range(grid.planes):
        energies = plane_energies(grid, fmt, p, address(space))
        for j in range(grid.vectors):
            column = p * grid.vectors + j
            channels = coding.outlier_channels + 2 * column * coding.outliers
            choose_channels(energies + 4 * padded(grid.dim) * j, grid.dim, coding.outliers, channels)
            for i in range(coding.outliers):
                if not code_channel(grid, fmt, coding, p, j, i):
                    return False
    keep(space)
    return True
