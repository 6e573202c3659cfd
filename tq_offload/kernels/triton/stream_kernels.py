"""The three Triton kernels: means of a stream, encoding and decoding of its vectors; all planes, tokens and heads each.

A program of the last two codes N vectors. Pointers to elements are of signed integers; sections are as in `Sections`.
"""

# Annotations are read by triton: no `from __future__ import annotations` here.
import triton
import triton.language as tl

from tq_offload.kernels.triton.outlier_kernels import coarse_values
from tq_offload.kernels.triton.steps import (
    bf16_bits,
    f32_of_bf16,
    hsum,
    inverse_rotate,
    narrow,
    pack,
    power_of_two,
    quantise,
    rotate,
    round_shift,
    unpack,
    vectors_of,
    widen,
)

__all__ = ["RULES", "decode_kernel", "encode_kernel", "mean_kernel"]

RULES = ("lsq", "norm", "unbiased")

LOW, HIGH = tl.constexpr(2.0**-80), tl.constexpr(2.0**80)
SKETCH_STAGE = tl.constexpr(4)
SQRT_HALF_PI = tl.constexpr(1.2533141374588013)  # as f32
SKETCH_TOP = tl.constexpr(2.0**60)
INFINITE = tl.constexpr(0x7F800000)


@triton.jit(do_not_specialize=["tokens", "channels"])
def mean_kernel(
    src: tl.tensor, means: tl.tensor, tokens: tl.tensor, channels: tl.tensor, plane_stride: tl.tensor,
    token_stride: tl.tensor, vector_stride: tl.tensor, inverse_tokens: tl.tensor,
    D: tl.constexpr, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr, LIMIT: tl.constexpr, BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
) -> None:  # fmt: skip
    """Means over tokens, bf16 bits [P, J*D]: program (p, i) sums the channels i*BLOCK and on, token after token."""
    plane = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = src + plane * plane_stride + (c // D).to(tl.int64) * vector_stride + c % D
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, tokens, UNROLL):
        for k in tl.static_range(UNROLL):  # loads that do not wait for each other; +0 past the end changes no sum
            t = start + k
            raw = tl.load(at + t * tl.cast(token_stride, tl.int64), mask=(c < channels) & (t < tokens), other=0)
            value, _ = widen(raw, EXPONENT, MANTISSA, LIMIT)
            total = total + value
    bits = (total * inverse_tokens).to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    mean = round_shift(magnitude, 16)
    mean = tl.where((magnitude >= INFINITE) | (mean >= INFINITE >> 16), 0, mean | ((bits >> 16) & -(1 << 15)))
    tl.store(means + plane * channels + c, mean.to(means.dtype.element_ty), mask=c < channels)


@triton.jit
def load_means(means: tl.tensor, row: tl.tensor, valid: tl.tensor, D: tl.constexpr, P: tl.constexpr) -> tl.tensor:
    """The mean that belongs to each vector, f32 [N, P]; row: i64 [N], p*J + j."""
    return f32_of_bf16(tl.load(means + row[:, None] * D + tl.arange(0, P)[None, :], mask=valid, other=0))


@triton.jit
def choose(v: tl.tensor, u: tl.tensor, N: tl.constexpr, P: tl.constexpr) -> tl.tensor:
    """Steps 1 to 3 of section 5: (w [N, P], its squared norm n, the mean flag, the exponent k; [N] each).

    Squared norms outside of the safe range are rare: only a program that has one pays for step 2.
    """
    nv, nu = hsum(v * v, N, P), hsum(u * u, N, P)
    outside = (nv < LOW) | (nv > HIGH) | (nu < LOW) | (nu > HIGH)
    k = tl.zeros((N,), tl.int32)
    if tl.max(outside.to(tl.int32), 0) > 0:
        top = tl.max(tl.abs(v), 1).to(tl.int32, bitcast=True)
        k = tl.where(outside, tl.minimum(tl.maximum((top >> 23) - 127, -126), 126), 0)
        factor = power_of_two(-k)[:, None]
        v, u = v * factor, u * factor
        nv, nu = hsum(v * v, N, P), hsum(u * u, N, P)
    flag = nu < nv
    return tl.where(flag[:, None], u, v), tl.where(flag, nu, nv), flag, k


@triton.jit
def scale_factor(
    t: tl.tensor, c: tl.tensor, empty: tl.tensor, RULE: tl.constexpr, N: tl.constexpr, P: tl.constexpr
) -> tl.tensor:
    """Step 6: q [N], 0 for zero vectors. RULE: index in `RULES`."""
    if RULE == 0:
        q = tl.div_rn(hsum(t * c, N, P), hsum(c * c, N, P))
    elif RULE == 1:
        q = tl.sqrt_rn(tl.div_rn(hsum(t * t, N, P), hsum(c * c, N, P)))
    else:
        q = tl.div_rn(hsum(t * t, N, P), tl.where(empty, 1.0, hsum(t * c, N, P)))
    return q


@triton.jit(do_not_specialize=["count", "tokens"])
def encode_kernel(
    src: tl.tensor, means: tl.tensor, scales: tl.tensor, codes: tl.tensor, sketch_scales: tl.tensor, sketch: tl.tensor,
    not_finite: tl.tensor, slots: tl.tensor, ranges: tl.tensor, coarse: tl.tensor, signs: tl.tensor, levels: tl.tensor,
    thresholds: tl.tensor, count: tl.tensor, tokens: tl.tensor, vectors: tl.tensor, plane_stride: tl.tensor,
    token_stride: tl.tensor, vector_stride: tl.tensor,
    D: tl.constexpr, B: tl.constexpr, P: tl.constexpr, N: tl.constexpr, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr,
    LIMIT: tl.constexpr, BITS: tl.constexpr, RULE: tl.constexpr, MEAN: tl.constexpr, QJL: tl.constexpr,
    K: tl.constexpr, WORDS: tl.constexpr, SKETCH_WORDS: tl.constexpr, ALPHA: tl.constexpr, BETA: tl.constexpr,
    INVERSE_D: tl.constexpr, NORM: tl.constexpr,
) -> None:  # fmt: skip
    """Encode N vectors (section 5). Stores 1 in `not_finite` where an element is NaN or Inf.

    K: number of outlier channels, whose slots, ranges and coarse codes are there.
    """
    n, inside, p, token, j = vectors_of(tl.program_id(0), count, tokens, vectors, N)
    i = tl.arange(0, P)
    valid = inside[:, None] & (i < D)[None, :]
    start = p * plane_stride + token * token_stride + j * vector_stride
    v, bad = widen(tl.load(src + start[:, None] + i[None, :], mask=valid, other=0), EXPONENT, MANTISSA, LIMIT)
    v = tl.where(bad, 0.0, v)
    tl.store(not_finite, 1, mask=tl.max(tl.max(bad.to(tl.int32), 1), 0) > 0)
    row = p * vectors + j
    if K > 0:
        value, taken = coarse_values(slots, ranges, coarse, n, row, valid, D, P, K)
        v = tl.where(taken, v - value, v)
    u = v
    if MEAN:
        u = v - load_means(means, row, valid, D, P)
    w, norm, flag, k = choose(v, u, N, P)
    empty = norm == 0
    safe = tl.where(empty, 1.0, norm)
    sigma = tl.sqrt_rn(safe * INVERSE_D)
    inverse = tl.div_rn(1.0, tl.sqrt_rn(safe) if B == D else sigma)
    y = rotate(w, signs, 0, D, B, NORM, N, P)
    stretch = (tl.max(tl.abs(y), 1) * inverse) * BETA + ALPHA
    sigma, inverse = sigma * stretch, tl.div_rn(inverse, stretch)
    t = tl.where(empty[:, None], 0.0, y * inverse[:, None])

    code = tl.where((i < D)[None, :], quantise(t, thresholds, BITS), 0)
    pack(code, codes, n, inside, BITS, D, WORDS, N, P)
    c = tl.where((i < D)[None, :], tl.load(levels + code), 0.0)
    q = scale_factor(t, c, empty, RULE, N, P)
    unscale = power_of_two(k)
    magnitude = tl.where(empty, 0.0, (q * sigma) * unscale)
    bits = bf16_bits(magnitude) | (flag.to(tl.int32) << 15)
    tl.store(scales + n, bits.to(scales.dtype.element_ty), mask=inside)
    if QJL:
        r = t - q[:, None] * c
        residual = (tl.sqrt_rn(hsum(r * r, N, P) * INVERSE_D) * sigma) * unscale
        amount = bf16_bits(tl.where(empty, 0.0, residual))
        tl.store(sketch_scales + n, amount.to(sketch_scales.dtype.element_ty), mask=inside)
        negative = (rotate(r, signs, SKETCH_STAGE, D, B, NORM, N, P) < 0) & (empty == 0)[:, None] & (i < D)[None, :]
        pack(negative.to(tl.int32), sketch, n, inside, 1, D, SKETCH_WORDS, N, P)


@triton.jit
def sketched_residual(
    sketch_scales: tl.tensor, sketch: tl.tensor, n: tl.tensor, inside: tl.tensor, scale: tl.tensor, signs: tl.tensor,
    D: tl.constexpr, B: tl.constexpr, P: tl.constexpr, N: tl.constexpr, INVERSE_SQRT_D: tl.constexpr,
    NORM: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """What the sketch adds in the rotated domain (section 6): f32 [N, P]."""
    amount = f32_of_bf16(tl.load(sketch_scales + n, mask=inside, other=0)) * SQRT_HALF_PI
    if B == D:
        amount = amount * INVERSE_SQRT_D
    amount = tl.where(scale > 0, tl.div_rn(amount, tl.where(scale > 0, scale, 1.0)), 0.0)
    amount = tl.minimum(tl.maximum(amount, -SKETCH_TOP), SKETCH_TOP)
    e = 1.0 - 2.0 * unpack(sketch, n, inside, 1, D, P).to(tl.float32)
    e = tl.where((tl.arange(0, P) < D)[None, :], e, 0.0)
    return amount[:, None] * inverse_rotate(e, signs, SKETCH_STAGE, D, B, NORM, N, P)


@triton.jit(do_not_specialize=["count", "tokens"])
def decode_kernel(
    dst: tl.tensor, means: tl.tensor, scales: tl.tensor, codes: tl.tensor, sketch_scales: tl.tensor, sketch: tl.tensor,
    slots: tl.tensor, ranges: tl.tensor, coarse: tl.tensor, signs: tl.tensor, levels: tl.tensor, count: tl.tensor,
    tokens: tl.tensor, vectors: tl.tensor, plane_stride: tl.tensor, token_stride: tl.tensor, vector_stride: tl.tensor,
    D: tl.constexpr, B: tl.constexpr, P: tl.constexpr, N: tl.constexpr, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr,
    LIMIT: tl.constexpr, BITS: tl.constexpr, MEAN: tl.constexpr, QJL: tl.constexpr, K: tl.constexpr,
    INVERSE_SQRT_D: tl.constexpr, NORM: tl.constexpr,
) -> None:  # fmt: skip
    """Decode N vectors in place (section 6)."""
    n, inside, p, token, j = vectors_of(tl.program_id(0), count, tokens, vectors, N)
    i = tl.arange(0, P)
    valid = inside[:, None] & (i < D)[None, :]
    bits = tl.load(scales + n, mask=inside, other=0).to(tl.int32)
    scale = f32_of_bf16(bits & 0x7FFF)
    y = tl.where((i < D)[None, :], tl.load(levels + unpack(codes, n, inside, BITS, D, P)), 0.0)
    if QJL:
        y = y + sketched_residual(sketch_scales, sketch, n, inside, scale, signs, D, B, P, N, INVERSE_SQRT_D, NORM)
    factor = scale
    if B == D:
        factor = scale * INVERSE_SQRT_D
    out = inverse_rotate(y, signs, 0, D, B, NORM, N, P) * factor[:, None]
    row = p * vectors + j
    if MEAN:
        shifted = out + load_means(means, row, valid, D, P)
        out = tl.where(((bits & 0x8000) != 0)[:, None], shifted, out)
    if K > 0:
        value, taken = coarse_values(slots, ranges, coarse, n, row, valid, D, P, K)
        out = tl.where(taken, out + value, out)
    start = p * plane_stride + token * token_stride + j * vector_stride
    elements = narrow(out, EXPONENT, MANTISSA, LIMIT).to(dst.dtype.element_ty)
    tl.store(dst + start[:, None] + i[None, :], elements, mask=valid)
