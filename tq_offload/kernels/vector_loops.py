"""Steps of the generic CPU loops on one vector: every dim, bits and dtype of the format, chosen at run time.

Operation by operation docs/wire-format.md, sections 3 to 6, in f32 and without fast-math. Vectors are addresses of f32
[D] unless said otherwise (see `simd.memory`), with room up to a multiple of eight, since whole registers are used.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tq_offload.kernels.simd.config import Format
from tq_offload.kernels.simd.elements import narrow16, widen16
from tq_offload.kernels.simd.jit import jit
from tq_offload.kernels.simd.memory import (
    add8,
    bits_of,
    butterfly8,
    butterfly_lanes,
    f32_of,
    get,
    get_i64,
    get_u8,
    get_u16,
    get_u32,
    mul8,
    put,
    put_i64,
    put_u8,
    put_u16,
    scale8,
)

BF16_TOP = np.float32(3.3895313892515355e38)
ZERO, ONE = np.float32(0), np.float32(1)
NOT_FINITE, ALL_ZERO = -2000, -1000


@jit
def load_vector(address: Any, fmt: Format, dim: Any, out: Any) -> None:
    """Convert the elements at an address to f32; what is not finite stays so."""
    whole = dim & ~15
    for i in range(0, whole, 16):
        widen16(address + fmt.itemsize * i, fmt.kind, out + 4 * i)
    for i in range(whole, dim):
        put(out, i, load_element(address, fmt, i))


@jit
def load_element(address: Any, fmt: Format, i: Any) -> Any:
    """Element i of those at an address as f32; NaN if it is not finite."""
    top_bit = np.uint32(8 * fmt.itemsize - 1)
    below = np.uint32((1 << top_bit) - 1)
    if fmt.itemsize == 2:
        raw = np.uint32(get_u16(address, i))
    elif fmt.itemsize == 4:
        raw = get_u32(address, i)
    else:
        raw = np.uint32(get_u8(address, i))
    magnitude = np.uint32(raw & below)
    value = f32_of(np.uint32(magnitude << np.uint32(fmt.shift))) * fmt.rescale
    if magnitude >= fmt.limit:
        value = np.float32(np.nan)
    return -value if raw >> top_bit else value


@jit
def round_shift(x: Any, shift: Any) -> Any:
    """x >> shift, rounded to nearest even; u32, shift > 0."""
    odd = (x >> np.uint32(shift)) & np.uint32(1)
    return np.uint32((x + np.uint32((1 << (shift - 1)) - 1) + odd) >> np.uint32(shift))


@jit
def store_vector(values: Any, fmt: Format, dim: Any, address: Any) -> None:
    """Clamp to the finite range of the element type, round to nearest even and store."""
    whole = dim & ~15
    for i in range(0, whole, 16):
        narrow16(values + 4 * i, fmt.kind, address + fmt.itemsize * i)
    for i in range(whole, dim):
        x = get(values, i)
        sign = bits_of(x) >> np.uint32(31)
        x = min(abs(x), fmt.top)
        if fmt.itemsize == 4:
            put(address, i, -x if sign else x)
            continue
        if x < fmt.min_normal and fmt.rounder:  # subnormal: adding a power of two rounds at the right bit
            code = np.uint32(bits_of(x + fmt.rounder) - bits_of(fmt.rounder))
        else:
            code = round_shift(bits_of(x * (ONE / fmt.rescale)), fmt.shift)
        if fmt.itemsize == 2:
            put_u16(address, i, np.uint16(code | (sign << np.uint32(15))))
        else:
            put_u8(address, i, np.uint8(code | (sign << np.uint32(7))))


@jit
def to_bf16(x: Any) -> Any:
    """Bits of a non-negative f32 rounded to bf16, at most the largest finite one; u16."""
    return np.uint16(round_shift(bits_of(min(x, BF16_TOP)), 16))


@jit
def from_bf16(bits: Any) -> Any:
    """F32 of bf16 bits."""
    return f32_of(np.uint32(np.uint32(bits) << np.uint32(16)))


@jit
def dot(a: Any, b: Any, dim: Any, work: Any) -> Any:
    """hsum(a*b); `work` is f32 of the next power of two, at least 8."""
    for i in range(0, dim, 8):
        mul8(work + 4 * i, a + 4 * i, b + 4 * i)
    n = 1
    while n < dim:
        n *= 2
    for i in range(dim, n):
        put(work, i, ZERO)
    while n > 1:
        n >>= 1
        if n >= 8:
            for i in range(0, n, 8):
                add8(work + 4 * i, work + 4 * i, work + 4 * (i + n))
        else:
            for i in range(n):
                put(work, i, get(work, i) + get(work, i + n))
    return get(work, 0)


@jit
def fwht(a: Any, size: Any, norm: Any) -> None:
    """Transform of f32 [size] in place, strides 1, 2, 4, up to size/2, times `norm`."""
    h = 1
    if size >= 8:
        for i in range(0, size, 8):
            butterfly_lanes(a + 4 * i)
        h = 8
    while h < size:
        for i in range(0, size, 2 * h):
            if h >= 8:
                for k in range(i, i + h, 8):
                    butterfly8(a + 4 * k, a + 4 * (k + h))
            else:
                for k in range(i, i + h):
                    x, y = get(a, k), get(a, k + h)
                    put(a, k, x + y)
                    put(a, k + h, x - y)
        h *= 2
    if norm == ONE:
        return
    if size >= 8:
        for i in range(0, size, 8):
            scale8(a + 4 * i, a + 4 * i, norm)
    else:
        for i in range(size):
            put(a, i, get(a, i) * norm)


@jit
def flip_signs(a: Any, signs: Any, dim: Any) -> None:
    """a *= signs."""
    for i in range(0, dim, 8):
        mul8(a + 4 * i, a + 4 * i, signs + 4 * i)


@jit
def scale_vector(a: Any, factor: Any, dim: Any) -> None:
    """a *= factor."""
    for i in range(0, dim, 8):
        scale8(a + 4 * i, a + 4 * i, factor)


@jit
def padded(dim: Any) -> Any:
    """D up to a multiple of eight: the length of a row of signs, of means and of work space."""
    return (dim + 7) & ~7


@jit
def copy(to: Any, source: Any, dim: Any) -> None:
    """to = source."""
    for i in range(0, dim, 2):
        put_i64(to, i // 2, get_i64(source, i // 2))


@jit
def block_of(dim: Any) -> Any:
    """Largest power of two that is not above `dim`."""
    block = 1
    while 2 * block <= dim:
        block *= 2
    return block


@jit
def rotate(w: Any, signs: Any, dim: Any, work: Any) -> None:
    """Rotation in place. signs: f32 [4, padded D], the stages; work: f32 [D]."""
    block = block_of(dim)
    if block == dim:
        flip_signs(w, signs, dim)
        fwht(w, dim, ONE)
        return
    norm, half = np.float32(1.0 / math.sqrt(block)), (dim + 1) // 2
    for r in range(2):
        flip_signs(w, signs + 8 * r * padded(dim), dim)
        fwht(w, block, norm)
        flip_signs(w, signs + (8 * r + 4) * padded(dim), dim)
        fwht(w + 4 * (dim - block), block, norm)
        if r == 0:
            copy(work, w, dim)
            for i in range(half):
                put(w, i, get(work, 2 * i))
            for i in range(dim // 2):
                put(w, half + i, get(work, 2 * i + 1))


@jit
def inverse_rotate(y: Any, signs: Any, dim: Any, work: Any) -> None:
    """Undo `rotate` in place; for D a power of two without the division by D."""
    block = block_of(dim)
    if block == dim:
        fwht(y, dim, ONE)
        flip_signs(y, signs, dim)
        return
    norm, half = np.float32(1.0 / math.sqrt(block)), (dim + 1) // 2
    for r in range(1, -1, -1):
        fwht(y + 4 * (dim - block), block, norm)
        flip_signs(y, signs + (8 * r + 4) * padded(dim), dim)
        fwht(y, block, norm)
        flip_signs(y, signs + 8 * r * padded(dim), dim)
        if r == 1:
            copy(work, y, dim)
            for i in range(half):
                put(y, 2 * i, get(work, i))
            for i in range(dim // 2):
                put(y, 2 * i + 1, get(work, half + i))


@jit
def field_masks(bits: Any) -> Any:
    """Eight codes of `bits` bits in bytes, merged two by two: masks of the lower of each pair, for three steps."""
    one = np.uint64(1)
    return (
        ((one << np.uint64(bits)) - one) * np.uint64(0x0001000100010001),
        ((one << np.uint64(2 * bits)) - one) * np.uint64(0x0000000100000001),
        (one << np.uint64(4 * bits)) - one,
    )


@jit
def merge(x: Any, mask: Any, used: Any, width: Any) -> Any:
    """Move the upper of each pair of fields of `width` bits down, next to the `used` bits of the lower one."""
    return (x & mask) | ((x >> np.uint64(width - used)) & (mask << np.uint64(used)))


@jit
def split(x: Any, mask: Any, used: Any, width: Any) -> Any:
    """Undo `merge`."""
    return (x & mask) | ((x & (mask << np.uint64(used))) << np.uint64(width - used))


@jit
def pack(codes: Any, bits: Any, dim: Any, address: Any) -> None:
    """Pack codes, u8 [D and zeros up to a multiple of 8], least significant bit first."""
    m1, m2, m3 = field_masks(bits)
    end = (dim * bits + 7) // 8
    for i in range(0, dim, 8):
        x = np.uint64(get_i64(codes + i, 0))
        x = merge(merge(merge(x, m1, bits, 8), m2, 2 * bits, 16), m3, 4 * bits, 32)
        at = i // 8 * bits
        for n in range(at, min(at + bits, end)):
            put_u8(address, n, np.uint8(x & np.uint64(0xFF)))
            x >>= np.uint64(8)


@jit
def unpack(address: Any, bits: Any, dim: Any, codes: Any) -> None:
    """Undo `pack`."""
    m1, m2, m3 = field_masks(bits)
    end = (dim * bits + 7) // 8
    for i in range(0, dim, 8):
        x, at = np.uint64(0), i // 8 * bits
        for n in range(at, min(at + bits, end)):
            x |= np.uint64(get_u8(address, n)) << np.uint64(8 * (n - at))
        x = split(split(split(x, m3, 4 * bits, 32), m2, 2 * bits, 16), m1, bits, 8)
        put_i64(codes + i, 0, np.int64(x))


@jit
def exponent_of(v: Any, dim: Any) -> Any:
    """Step 2 of section 5: k, or ALL_ZERO, or NOT_FINITE."""
    top, finite = ZERO, ZERO
    for i in range(dim):
        finite += abs(get(v, i)) * ZERO  # NaN if the element is not finite
        top = max(top, abs(get(v, i)))
    if finite != ZERO:
        return NOT_FINITE
    if top == ZERO:
        return ALL_ZERO
    return min(max(np.int64(bits_of(top) >> np.uint32(23)) - 127, -126), 126)


@jit
def power_of_two(k: Any) -> Any:
    """2**k as f32, k in -126..127."""
    return f32_of(np.uint32(np.uint32(k + 127) << np.uint32(23)))
