"""Steps of the Triton kernels on a tile of vectors, operation by operation docs/wire-format.md, sections 3 to 6.

A tile is f32 [N, P]: N vectors of D elements, padded to P = max(8, next power of two). Elements past D are 0 unless
said otherwise. Nothing here may be contracted: kernels are launched with `enable_fp_fusion=False`, and division and
square root are the correctly rounded ones. Sums are trees in a fixed order, never `tl.sum`.
"""

# Annotations are read by triton: no `from __future__ import annotations` here.
import triton
import triton.language as tl

__all__ = [
    "bf16_bits", "f32_of_bf16", "hsum", "inverse_rotate", "narrow", "pack", "power_of_two", "quantise", "rotate",
    "round_shift", "unpack", "vectors_of", "widen",
]  # fmt: skip

SIGN = tl.constexpr(-(1 << 31))
BF16_TOP = tl.constexpr(0x7F7F)
MAX_LOG = tl.constexpr(10)  # D is at most 1024


@triton.jit
def vectors_of(pid: tl.tensor, count: tl.tensor, tokens: tl.tensor, vectors: tl.tensor, N: tl.constexpr) -> tl.tensor:
    """The vectors of a program: (index [N], whether there is one [N], plane, token, vector of the token), all i64."""
    n = pid * N + tl.arange(0, N)
    row = n // vectors
    wide = tl.int64
    return n.to(wide), n < count, (row // tokens).to(wide), (row % tokens).to(wide), (n % vectors).to(wide)


@triton.jit
def widen(raw: tl.tensor, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr, LIMIT: tl.constexpr) -> tl.tensor:
    """Signed bits of elements to f32, exactly, and whether they are NaN or Inf: (f32 [...], bool [...]).

    EXPONENT and MANTISSA are the widths of the element type's fields; magnitudes from LIMIT on are not finite.
    """
    wide = raw.to(tl.int32)
    magnitude = wide & ((1 << (EXPONENT + MANTISSA)) - 1)
    value = (magnitude << (23 - MANTISSA)).to(tl.float32, bitcast=True)
    if EXPONENT < 8:
        value = value * (2.0 ** (128 - (1 << (EXPONENT - 1))))
    signed = value.to(tl.int32, bitcast=True) | (wide & SIGN)
    return signed.to(tl.float32, bitcast=True), magnitude >= LIMIT


@triton.jit
def round_shift(bits: tl.tensor, SHIFT: tl.constexpr) -> tl.tensor:
    """Bits >> SHIFT, rounded to nearest even; i32, not negative."""
    return (bits + ((1 << (SHIFT - 1)) - 1) + ((bits >> SHIFT) & 1)) >> SHIFT


@triton.jit
def narrow(x: tl.tensor, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr, LIMIT: tl.constexpr) -> tl.tensor:
    """F32, infinite ones too, clamped to the finite range of an element type and rounded: its bits in i32 [...]."""
    bits = x.to(tl.int32, bitcast=True)
    code = bits & 0x7FFFFFFF
    SHIFT: tl.constexpr = 23 - MANTISSA
    LEAST: tl.constexpr = 129 - (1 << (EXPONENT - 1))  # biased f32 exponent of the least normal value
    if EXPONENT < 8:
        magnitude = code.to(tl.float32, bitcast=True)
        scaled = (magnitude * (2.0 ** ((1 << (EXPONENT - 1)) - 128))).to(tl.int32, bitcast=True)
        # Subnormal: adding a power of two rounds at the right bit.
        low = (magnitude + 2.0 ** (LEAST + SHIFT - 127)).to(tl.int32, bitcast=True) - ((LEAST + SHIFT) << 23)
        code = tl.where(code < (LEAST << 23), low, round_shift(scaled, SHIFT))
    elif SHIFT > 0:
        code = round_shift(code, SHIFT)
    return tl.minimum(code, LIMIT - 1) | ((bits >> (31 - EXPONENT - MANTISSA)) & -(1 << (EXPONENT + MANTISSA)))


@triton.jit
def bf16_bits(x: tl.tensor) -> tl.tensor:
    """Bits of a f32 that is not negative, rounded to bf16, at most the largest finite one; i32 [...]."""
    return tl.minimum(round_shift(x.to(tl.int32, bitcast=True), 16), BF16_TOP)


@triton.jit
def f32_of_bf16(bits: tl.tensor) -> tl.tensor:
    """F32 of bf16 bits, i32 [...] of which the lower 16 bits count."""
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def power_of_two(k: tl.tensor) -> tl.tensor:
    """2**k as f32, k i32 in -126..127."""
    return ((k + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def hsum(x: tl.tensor, N: tl.constexpr, P: tl.constexpr) -> tl.tensor:
    """Sum along a row by halving: [N, P] to [N] (section 4)."""
    for i in tl.static_range(MAX_LOG):
        if (1 << i) < P:
            x = tl.sum(tl.reshape(x, (N, 2, P >> (i + 1))), 1)  # two terms: nothing to reorder
    return tl.reshape(x, (N,))


@triton.jit
def fwht(x: tl.tensor, B: tl.constexpr, N: tl.constexpr, P: tl.constexpr) -> tl.tensor:
    """Transform of every run of B elements, strides 1, 2, 4, up to B/2, unnormalised."""
    for i in tl.static_range(MAX_LOG):
        if (1 << i) < B:
            a, b = tl.split(tl.permute(tl.reshape(x, (N, P >> (i + 1), 2, 1 << i)), (0, 1, 3, 2)))
            x = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 1, 3, 2)), (N, P))
    return x


@triton.jit
def flip(x: tl.tensor, signs: tl.tensor, stage: tl.tensor, P: tl.constexpr) -> tl.tensor:
    """X times the signs of a stage; signs: f32 [8, P], 0 past D."""
    return x * tl.load(signs + stage * P + tl.arange(0, P))[None, :]


@triton.jit
def regroup(x: tl.tensor, index: tl.tensor, N: tl.constexpr, P: tl.constexpr, G: tl.constexpr) -> tl.tensor:
    """Rows cut into runs of G elements: run m of the result is run index[m] of x; index: i32 [P/G], modulo P/G.

    With P/G at most a warp this is one shuffle for an element, where a gather of single elements is many.
    """
    runs = tl.broadcast_to((index & (P // G - 1))[None, :, None], (N, P // G, G))
    return tl.reshape(tl.gather(tl.reshape(x, (N, P // G, G)), runs, 1), (N, P))


@triton.jit
def roll(x: tl.tensor, SHIFT: tl.constexpr, N: tl.constexpr, P: tl.constexpr, G: tl.constexpr) -> tl.tensor:
    """Element i of the result is element i + SHIFT modulo P, SHIFT a multiple of G."""
    return regroup(x, tl.arange(0, P // G) + SHIFT // G, N, P, G)


@triton.jit
def shuffle(x: tl.tensor, HALF: tl.constexpr, N: tl.constexpr, P: tl.constexpr) -> tl.tensor:
    """Even positions first, then, from HALF on, the odd ones; finite leftovers past D."""
    G: tl.constexpr = HALF & -HALF
    m = tl.arange(0, P // G)
    x = tl.reshape(tl.permute(tl.reshape(x, (N, P // 2, 2)), (0, 2, 1)), (N, P))
    return regroup(x, tl.where(m < HALF // G, m, m - HALF // G + P // 2 // G), N, P, G)


@triton.jit
def restore(x: tl.tensor, HALF: tl.constexpr, N: tl.constexpr, P: tl.constexpr) -> tl.tensor:
    """Undo `shuffle`."""
    G: tl.constexpr = HALF & -HALF
    m = tl.arange(0, P // G)
    x = regroup(x, tl.where(m < P // 2 // G, m, m + HALF // G - P // 2 // G), N, P, G)
    return tl.reshape(tl.permute(tl.reshape(x, (N, 2, P // 2)), (0, 2, 1)), (N, P))


@triton.jit
def head_block(x: tl.tensor, B: tl.constexpr, NORM: tl.constexpr, N: tl.constexpr, P: tl.constexpr) -> tl.tensor:
    """x[:B] = fwht(x[:B]) * NORM."""
    return tl.where((tl.arange(0, P) < B)[None, :], fwht(x, B, N, P) * NORM, x)


@triton.jit
def rotate(
    x: tl.tensor, signs: tl.tensor,
    STAGE: tl.constexpr, D: tl.constexpr, B: tl.constexpr, NORM: tl.constexpr, N: tl.constexpr, P: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Rotation of section 3 from sign stage STAGE on; NORM = f32(1/sqrt(B)), B the block size."""
    if B == D:
        x = fwht(flip(x, signs, STAGE, P), D, N, P)
    else:  # an else, since triton compiles what follows a `return`
        SHIFT: tl.constexpr = D - B
        G: tl.constexpr = SHIFT & -SHIFT
        for r in tl.static_range(2):
            x = head_block(flip(x, signs, STAGE + 2 * r, P), B, NORM, N, P)
            x = roll(flip(x, signs, STAGE + 2 * r + 1, P), SHIFT, N, P, G)
            x = roll(head_block(x, B, NORM, N, P), -SHIFT, N, P, G)
            if r == 0:
                x = shuffle(x, (D + 1) // 2, N, P)
    return x


@triton.jit
def inverse_rotate(
    x: tl.tensor, signs: tl.tensor,
    STAGE: tl.constexpr, D: tl.constexpr, B: tl.constexpr, NORM: tl.constexpr, N: tl.constexpr, P: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Undo `rotate`; for D a power of two without the division by D."""
    if B == D:
        x = flip(fwht(x, D, N, P), signs, STAGE, P)
    else:
        SHIFT: tl.constexpr = D - B
        G: tl.constexpr = SHIFT & -SHIFT
        for r in tl.static_range(2):
            x = head_block(roll(x, SHIFT, N, P, G), B, NORM, N, P)
            x = flip(roll(x, -SHIFT, N, P, G), signs, STAGE + 3 - 2 * r, P)
            x = flip(head_block(x, B, NORM, N, P), signs, STAGE + 2 - 2 * r, P)
            if r == 0:
                x = restore(x, (D + 1) // 2, N, P)
    return x


@triton.jit
def quantise(t: tl.tensor, thresholds: tl.tensor, BITS: tl.constexpr) -> tl.tensor:
    """Number of thresholds, f32 [2**BITS - 1] in memory, that are less than t: i32 [N, P], by bisection."""
    code = tl.zeros_like(t).to(tl.int32)
    for i in tl.static_range(BITS):
        half = 1 << (BITS - 1 - i)
        code += tl.where(tl.load(thresholds + code + (half - 1)) < t, half, 0)
    return code


@triton.jit
def pack(
    codes: tl.tensor, out: tl.tensor, n: tl.tensor, inside: tl.tensor,
    BITS: tl.constexpr, D: tl.constexpr, WORDS: tl.constexpr, N: tl.constexpr, P: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Store codes, i32 [N, P] and 0 past D, least significant bit first, as rows n (i64 [N]) where `inside`.

    out: u8 rows of ceil(D*BITS/8); with WORDS (D a multiple of 8, BITS 1, 2, 4 or 8) integers of BITS bytes, of eight
    codes each.
    """
    low, high = tl.split(tl.reshape(codes, (N, P // 2, 2)))
    low, high = tl.split(tl.reshape(low | (high << BITS), (N, P // 4, 2)))
    low, high = tl.split(tl.reshape(low.to(tl.int64) | (high.to(tl.int64) << (2 * BITS)), (N, P // 8, 2)))
    word = low | (high << (4 * BITS))
    group = tl.arange(0, P // 8)
    if WORDS:
        at = out + n[:, None] * (D // 8) + group[None, :]
        tl.store(at, word.to(out.dtype.element_ty), mask=inside[:, None] & (group < D // 8)[None, :])
    else:
        SIZE: tl.constexpr = (D * BITS + 7) // 8
        k = tl.arange(0, 8)
        place = group[:, None] * BITS + k[None, :]
        fits = (k < BITS)[None, :] & (place < SIZE)
        byte = (word[:, :, None] >> (8 * k.to(tl.int64))[None, None, :]) & 0xFF
        at = out + n[:, None, None] * SIZE + place[None, :, :]
        tl.store(at, byte.to(tl.uint8), mask=inside[:, None, None] & fits[None, :, :])


@triton.jit
def unpack(
    codes: tl.tensor, n: tl.tensor, inside: tl.tensor, BITS: tl.constexpr, D: tl.constexpr, P: tl.constexpr
) -> tl.tensor:
    """Codes of the rows n (i64 [N]) of u8 rows in memory: i32 [N, P], 0 past D and where not `inside`."""
    SIZE: tl.constexpr = (D * BITS + 7) // 8
    i = tl.arange(0, P)
    first, shift = i * BITS // 8, i * BITS % 8
    at = codes + n[:, None] * SIZE + first[None, :]
    valid = inside[:, None] & (i < D)[None, :]
    word = tl.load(at, mask=valid, other=0).to(tl.int32)
    if 8 % BITS != 0:
        crossing = valid & (shift + BITS > 8)[None, :]
        word |= tl.load(at + 1, mask=crossing, other=0).to(tl.int32) << 8
    return (word >> shift[None, :]) & ((1 << BITS) - 1)
