"""What a codec is to this benchmark, and the references that are a few lines of torch: TurboQuant as published, int8.

A codec takes K and V of a prefix, bf16 [L, H, P, D], and gives back both, and the bytes that it would store.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tq_offload.codebook import levels, thresholds
from tq_offload.rotation import fwht, signs

__all__ = ["Codec", "Decoded", "Vectors", "gaussian_sketch", "int8", "per_vector", "plain", "rotated", "with_qjl"]

Decoded = tuple[torch.Tensor, torch.Tensor, int]
"""K and V [L, H, P, D] in any floating dtype, and the bytes stored for both."""

Vectors = Callable[[torch.Tensor], tuple[torch.Tensor, float]]
"""Codes vectors f32 [N, D] each on its own: what comes back, and bits an element with all side data."""


@dataclass(frozen=True)
class Codec:
    """A row of the tables. `family`: `ours`, `TurboQuant` (the paper and what others made of it) or `other`."""

    name: str
    family: str
    run: Callable[[torch.Tensor, torch.Tensor], Decoded]
    note: str = ""


def per_vector(keys: Vectors, values: Vectors | None = None) -> Callable[[torch.Tensor, torch.Tensor], Decoded]:
    """A codec that knows nothing but one vector at a time; V as K where `values` is None."""

    def run(k: torch.Tensor, v: torch.Tensor) -> Decoded:
        out, bits = [], 0.0
        for x, code in ((k, keys), (v, values or keys)):
            decoded, rate = code(x.float().reshape(-1, x.shape[-1]))
            out.append(decoded.view(x.shape))
            bits += rate * x.numel()
        return out[0], out[1], math.ceil(bits / 8)

    return run


def rotated(x: torch.Tensor, seed: int = 0, *, inverse: bool = False) -> torch.Tensor:
    """Orthonormal randomised Hadamard rotation of vectors [N, D], D a power of two."""
    sign, norm = torch.from_numpy(signs(seed, 0, x.shape[-1]).copy()), x.shape[-1] ** -0.5
    return fwht(x) * sign * norm if inverse else fwht(x * sign) * norm


def _lloyd_max(x: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Norms f32 [N, 1] and, in the rotated domain, the levels of the vectors over these norms."""
    norm = x.norm(dim=-1, keepdim=True)
    t = rotated(x) / norm.clamp_min(1e-30) * math.sqrt(x.shape[-1])
    codes = torch.bucketize(t, torch.from_numpy(thresholds(bits).copy()))
    return norm, torch.from_numpy(levels(bits).copy())[codes] / math.sqrt(x.shape[-1])


def plain(bits: int) -> Vectors:
    """TurboQuant for squared error (arXiv 2504.19874, algorithm 1): the scale is the norm of the vector, in fp16."""

    def code(x: torch.Tensor) -> tuple[torch.Tensor, float]:
        norm, levels_of = _lloyd_max(x, bits)
        return rotated(levels_of, inverse=True) * norm.half().float(), bits + 16 / x.shape[-1]

    return code


def gaussian_sketch(dim: int, seed: int = 0) -> torch.Tensor:
    """The random projection of QJL: f32 [D, D] of N(0, 1)."""
    return torch.randn(dim, dim, generator=torch.Generator().manual_seed(seed))


def with_qjl(bits: int) -> Vectors:
    """TurboQuant for inner products (algorithm 2): `bits - 1` as above, one bit of QJL for the residual, two fp16."""

    def code(x: torch.Tensor) -> tuple[torch.Tensor, float]:
        dim = x.shape[-1]
        norm, levels_of = _lloyd_max(x, bits - 1)
        coarse = rotated(levels_of, inverse=True) * norm.half().float()
        residual, sketch = x - coarse, gaussian_sketch(dim)
        sign = torch.where(residual @ sketch.T < 0, -1.0, 1.0)
        length = residual.norm(dim=-1, keepdim=True).half().float()
        return coarse + (sign @ sketch) * length * (math.sqrt(math.pi / 2) / dim), bits + 32 / dim

    return code


def int8(x: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Rounded to 8 bits by the largest element of the vector; the scale is bf16."""
    scale = (x.abs().amax(dim=-1, keepdim=True) / 127).bfloat16().float().clamp_min(1e-30)
    return (x / scale).round().clamp(-127, 127) * scale, 8 + 16 / x.shape[-1]
