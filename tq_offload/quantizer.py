"""The pure-torch reference of the vector codec: the oracle that every kernel is tested against.

It follows docs/wire-format.md, sections 4 to 6, operation by operation, in f32, and is written to be read. TurboQuant
(arXiv 2504.19874): random rotation, Lloyd-Max scalar quantisation, one scale per vector, optionally a QJL sketch of
the residual (arXiv 2406.03482). The mean of a chunk is taken off a vector only where that makes it shorter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tq_offload import codebook
from tq_offload.bitpack import pack, unpack
from tq_offload.rotation import SKETCH_STAGE, inverse_rotate, is_power_of_two, rotate

__all__ = ["EncodedVectors", "chunk_mean", "decode_vectors", "encode_vectors", "hsum", "to_bf16_bits"]

Array = npt.NDArray[Any]

_LOW, _HIGH = 2.0**-80, 2.0**80
_SKETCH_TOP = 2.0**60
_BF16_MAX = float(torch.finfo(torch.bfloat16).max)
_SQRT_HALF_PI = float(np.float32(math.sqrt(math.pi / 2)))


@dataclass(frozen=True)
class EncodedVectors:
    """N encoded vectors of D elements.

    scales u16 [N] (bit 15: the mean was subtracted), codes u8 [N, ceil(D*bits/8)]; with QJL sketch_scales u16 [N] and
    sketch u8 [N, ceil(D/8)], otherwise None.
    """

    scales: Array
    codes: Array
    sketch_scales: Array | None
    sketch: Array | None


def hsum(a: torch.Tensor) -> torch.Tensor:
    """Sum along the last axis by halving: f32 [..., D] to f32 [...] (section 4)."""
    size = 1 << max(a.shape[-1] - 1, 0).bit_length()
    a = torch.nn.functional.pad(a, (0, size - a.shape[-1]))
    while size > 1:
        size //= 2
        a = a[..., :size] + a[..., size : 2 * size]
    return a[..., 0]


def _sqrt(x: torch.Tensor) -> torch.Tensor:
    """Correctly rounded square root; torch's own may be one unit off in the last place (vendor math libraries)."""
    return torch.from_numpy(np.sqrt(x.numpy()))


def chunk_mean(x: torch.Tensor) -> torch.Tensor:
    """Mean over tokens of every channel, rounded to bf16.

    Args:
        x: f32 [P, T, J, D], T > 0.

    Returns:
        f32 [P, J, D] holding bf16 values; a mean that is not finite is 0.
    """
    total = torch.zeros_like(x[:, 0])
    for t in range(x.shape[1]):
        total = total + x[:, t]
    mean = (total * float(np.float32(1.0 / x.shape[1]))).to(torch.bfloat16).to(torch.float32)
    return torch.where(torch.isfinite(mean), mean, torch.zeros_like(mean))


def to_bf16_bits(x: torch.Tensor) -> Array:
    """Round f32 [...] to bf16 and return its bits as u16 [...]."""
    return x.to(torch.bfloat16).contiguous().view(torch.int16).numpy().view(np.uint16)


def _from_bf16_bits(bits: Array) -> torch.Tensor:
    return torch.from_numpy((bits.astype(np.uint32) << 16).view(np.float32))


def _power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """2**exponent as f32, exact, exponents in -126..126."""
    return ((exponent + 127) << 23).to(torch.int32).view(torch.float32)


def _choose(v: torch.Tensor, u: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Take the mean off where that shortens the vector: (w [N, D], n [N], flag [N], norms in the safe range [N])."""
    nv = hsum(v * v)
    inside = (nv >= _LOW) & (nv <= _HIGH)
    if u is None:
        return v, nv, torch.zeros_like(nv, dtype=torch.bool), inside
    nu = hsum(u * u)
    flag = nu < nv
    return torch.where(flag[:, None], u, v), torch.where(flag, nu, nv), flag, inside & (nu >= _LOW) & (nu <= _HIGH)


def _rescaled(v: torch.Tensor, u: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Step 2 for vectors whose squared norm leaves the safe range: (w, n, flag, k)."""
    top = v.abs().amax(dim=-1)
    exponent = torch.frexp(top.clamp_min(2.0**-149))[1].to(torch.int32) - 1
    k = exponent.clamp(-126, 126)
    factor = _power_of_two(-k)[:, None]
    w, n, flag, _ = _choose(v * factor, None if u is None else u * factor)
    return w, n, flag, k


def _pick_vector(
    v: torch.Tensor, mean: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Steps 1 to 3: w [N, D], its squared norm n [N], the mean flag [N] and the exponent k [N]."""
    u = None if mean is None else v - mean
    w, n, flag, inside = _choose(v, u)
    k = torch.zeros_like(n, dtype=torch.int32)
    outside = ~inside
    if outside.any():
        w, n, flag = w.clone(), n.clone(), flag.clone()
        w[outside], n[outside], flag[outside], k[outside] = _rescaled(v[outside], None if u is None else u[outside])
    return w, n, flag, k


def _capped_bits(x: torch.Tensor) -> Array:
    return to_bf16_bits(x.clamp(max=_BF16_MAX))


def encode_vectors(
    v: torch.Tensor,
    mean: torch.Tensor | None,
    *,
    bits: int,
    seed: int,
    rule: str,
    fit_range: bool = True,
    qjl: bool = False,
) -> EncodedVectors:
    """Encode vectors (section 5).

    Args:
        v: f32 [N, D], finite.
        mean: f32 [N, D], the mean that belongs to each vector (bf16 values), or None.
        bits: Bits of a code, 1..8.
        seed: Rotation seed, u32.
        rule: `lsq`, `norm` or `unbiased`.
        fit_range: Stretch the quantizer by the largest coordinate.
        qjl: Also sketch the residual.
    """
    dim = v.shape[-1]
    w, n, flag, k = _pick_vector(v, mean)
    empty = n == 0
    safe = torch.where(empty, torch.ones_like(n), n)
    inv_dim = float(np.float32(1.0 / dim))
    sigma = _sqrt(safe * inv_dim)
    inverse = 1.0 / _sqrt(safe) if is_power_of_two(dim) else 1.0 / sigma
    y = rotate(w, seed)
    if fit_range:
        alpha, beta = (float(np.float32(v)) for v in codebook.RANGE_FIT[bits])
        stretch = (y.abs().amax(dim=-1) * inverse) * beta + alpha
        sigma, inverse = sigma * stretch, inverse / stretch
    t = y * inverse[:, None]
    t = torch.where(empty[:, None], torch.zeros_like(t), t)

    codes = torch.bucketize(t, torch.from_numpy(codebook.thresholds(bits).copy()), right=False)
    c = torch.from_numpy(codebook.levels(bits).copy())[codes]
    if rule == "lsq":
        q = hsum(t * c) / hsum(c * c)
    elif rule == "norm":
        q = _sqrt(hsum(t * t) / hsum(c * c))
    else:
        q = torch.where(empty, torch.zeros_like(n), hsum(t * t) / hsum(t * c))
    unscale = _power_of_two(k)
    magnitude = torch.where(empty, torch.zeros_like(n), (q * sigma) * unscale)
    scales = _capped_bits(magnitude) | (flag.numpy().astype(np.uint16) << 15)

    packed = pack(codes.to(torch.uint8).numpy(), bits)
    if not qjl:
        return EncodedVectors(scales, packed, None, None)
    r = t - q[:, None] * c
    residual = (_sqrt(hsum(r * r) * inv_dim) * sigma) * unscale
    residual = torch.where(empty, torch.zeros_like(n), residual)
    sketch = (rotate(r, seed, stage=SKETCH_STAGE) < 0) & ~empty[:, None]
    return EncodedVectors(
        scales, packed, _capped_bits(residual), np.packbits(sketch.numpy(), axis=-1, bitorder="little")
    )


def decode_vectors(e: EncodedVectors, mean: torch.Tensor | None, *, dim: int, bits: int, seed: int) -> torch.Tensor:
    """Decode vectors (section 6) up to the rounding to the target dtype.

    Args:
        e: N encoded vectors.
        mean: f32 [N, D] or None.
        dim: D.

    Returns:
        f32 [N, D], not yet clamped; elements that left the range of f32 are infinite.
    """
    scale = _from_bf16_bits(e.scales & 0x7FFF)[:, None]
    codes = torch.from_numpy(unpack(e.codes, dim, bits)).to(torch.int64)
    y = torch.from_numpy(codebook.levels(bits).copy())[codes]
    power = is_power_of_two(dim)
    inv_sqrt = float(np.float32(1.0 / math.sqrt(dim)))
    if e.sketch is not None and e.sketch_scales is not None:
        amount = _from_bf16_bits(e.sketch_scales)[:, None] * _SQRT_HALF_PI
        if power:
            amount = amount * inv_sqrt
        amount = torch.where(scale > 0, amount / scale, torch.zeros_like(scale)).clamp(-_SKETCH_TOP, _SKETCH_TOP)
        bit = np.unpackbits(e.sketch, axis=-1, count=dim, bitorder="little")
        direction = inverse_rotate(torch.from_numpy(1.0 - 2.0 * bit.astype(np.float32)), seed, stage=SKETCH_STAGE)
        y = y + amount * direction
    out = inverse_rotate(y, seed) * (scale * inv_sqrt if power else scale)
    if mean is None:
        return out
    flag = torch.from_numpy((e.scales >> 15).astype(bool))
    return torch.where(flag[:, None], out + mean, out)
