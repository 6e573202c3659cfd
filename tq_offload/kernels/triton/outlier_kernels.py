"""Triton kernels of outlier channels: their statistics and coarse codes, and what these stand for.

As `tq_offload.outliers`, operation by operation. A slot is the number of an outlier channel among the K of its row
p*J + j.
"""

# Annotations are read by triton: no `from __future__ import annotations` here.
import triton
import triton.language as tl

from tq_offload.kernels.triton.steps import vectors_of, widen

__all__ = ["coarse_values", "outlier_code_kernel", "statistics_kernel"]

F32_TOP = tl.constexpr(3.4028234663852886e38)


@triton.jit(do_not_specialize=["tokens", "channels"])
def statistics_kernel(
    src: tl.tensor, out: tl.tensor, tokens: tl.tensor, channels: tl.tensor, plane_stride: tl.tensor,
    token_stride: tl.tensor, vector_stride: tl.tensor,
    D: tl.constexpr, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr, LIMIT: tl.constexpr, BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Of every channel over the tokens: sum of squares, half of the least and half of the largest value.

    out: f32 [3, P, J*D]. Program (p, i) takes the channels i*BLOCK and on, token after token.
    """
    plane = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = src + plane * plane_stride + (c // D).to(tl.int64) * vector_stride + c % D
    squares = tl.zeros((BLOCK,), tl.float32)
    low, high = tl.full((BLOCK,), float("inf"), tl.float32), tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in range(0, tokens, UNROLL):
        for k in tl.static_range(UNROLL):
            t = start + k
            raw = tl.load(at + t * tl.cast(token_stride, tl.int64), mask=(c < channels) & (t < tokens), other=0)
            value, bad = widen(raw, EXPONENT, MANTISSA, LIMIT)
            value = tl.where(bad, 0.0, value)  # the chunk is refused
            squares = squares + value * value
            half = value * 0.5
            low = tl.where((half < low) & (t < tokens), half, low)
            high = tl.where((half > high) & (t < tokens), half, high)
    size = tl.num_programs(0).to(tl.int64) * channels
    place = out + plane * channels + c
    tl.store(place, squares, mask=c < channels)
    tl.store(place + size, low, mask=c < channels)
    tl.store(place + 2 * size, high, mask=c < channels)


@triton.jit
def codes_of(
    src: tl.tensor, channels: tl.tensor, ranges: tl.tensor, row: tl.tensor, slot: tl.tensor, valid: tl.tensor,
    K: tl.constexpr, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr, LIMIT: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Coarse codes of slots, i32 of the shape of `slot`; 0 where not `valid`. src: the vectors' first elements."""
    valid = valid & (slot < K)
    at = row * K + slot
    channel = tl.load(channels + at, mask=valid, other=0)
    low, step = tl.load(ranges + 2 * at, mask=valid, other=0.0), tl.load(ranges + 2 * at + 1, mask=valid, other=0.0)
    value, bad = widen(tl.load(src + channel, mask=valid, other=0), EXPONENT, MANTISSA, LIMIT)
    half = tl.where(bad, 0.0, value) * 0.5  # not finite: the chunk is refused
    q = tl.where(step == 0, 0.0, tl.div_rn(half - low, tl.where(step == 0, 1.0, step)))
    return tl.minimum((q + 0.5).to(tl.int32), 15)


@triton.jit(do_not_specialize=["count", "tokens"])
def outlier_code_kernel(
    src: tl.tensor, channels: tl.tensor, ranges: tl.tensor, codes: tl.tensor, count: tl.tensor, tokens: tl.tensor,
    vectors: tl.tensor, plane_stride: tl.tensor, token_stride: tl.tensor, vector_stride: tl.tensor,
    K: tl.constexpr, PAIRS: tl.constexpr, N: tl.constexpr, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr,
    LIMIT: tl.constexpr,
) -> None:  # fmt: skip
    """Coarse codes of the outlier channels of N vectors, two in a byte; PAIRS: a power of two, at least ceil(K/2)."""
    n, inside, p, token, j = vectors_of(tl.program_id(0), count, tokens, vectors, N)
    pair = tl.arange(0, PAIRS)[None, :]
    SIZE: tl.constexpr = (K + 1) // 2
    valid = inside[:, None] & (pair < SIZE)
    first = src + (p * plane_stride + token * token_stride + j * vector_stride)[:, None]
    row = (p * vectors + j)[:, None]
    low = codes_of(first, channels, ranges, row, 2 * pair, valid, K, EXPONENT, MANTISSA, LIMIT)
    high = codes_of(first, channels, ranges, row, 2 * pair + 1, valid, K, EXPONENT, MANTISSA, LIMIT)
    tl.store(codes + n[:, None] * SIZE + pair, (low | (high << 4)).to(tl.uint8), mask=valid)


@triton.jit
def coarse_values(
    slots: tl.tensor, ranges: tl.tensor, codes: tl.tensor, n: tl.tensor, row: tl.tensor, valid: tl.tensor,
    D: tl.constexpr, P: tl.constexpr, K: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """What the coarse codes of vectors n, i64 [N], of rows `row` stand for, and in which channels: [N, P] f32, bool.

    slots: i8 [P, J, D], the slot of a channel or -1.
    """
    slot = tl.load(slots + row[:, None] * D + tl.arange(0, P)[None, :], mask=valid, other=-1).to(tl.int32)
    taken = slot >= 0
    at = row[:, None] * K + slot
    low, step = tl.load(ranges + 2 * at, mask=taken, other=0.0), tl.load(ranges + 2 * at + 1, mask=taken, other=0.0)
    pair = tl.load(codes + n[:, None] * ((K + 1) // 2) + (slot >> 1), mask=taken, other=0).to(tl.int32)
    code = (pair >> (4 * (slot & 1))) & 15
    value = (code.to(tl.float32) * step + low) * 2.0
    return tl.minimum(tl.maximum(value, -F32_TOP), F32_TOP), taken
