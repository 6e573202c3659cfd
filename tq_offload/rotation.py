"""Randomised Hadamard rotation for any head_dim (docs/wire-format.md, section 3).

The random signs come from a counter-based generator (SplitMix64), so that every machine, device and library
version makes the same rotation; no global random state is read or written.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["SKETCH_STAGE", "block_size", "fwht", "inverse_rotate", "is_power_of_two", "rotate", "signs"]

SKETCH_STAGE = 4

_MASK = (1 << 64) - 1


def _splitmix64(x: int) -> int:
    z = (x + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


@cache
def signs(seed: int, stage: int, dim: int) -> npt.NDArray[np.float32]:
    """Signs of one stage of the rotation: f32 [dim] of +1 and -1; read-only.

    Args:
        seed: u32 from the codec spec.
        stage: 0 to 3 for the rotation, 4 to 7 for the QJL sketch.
        dim: Number of elements of a vector.
    """
    base = (seed << 32) + (stage << 16)
    table = np.array([-1.0 if _splitmix64(base + i) >> 63 else 1.0 for i in range(dim)], dtype=np.float32)
    table.flags.writeable = False
    return table


def is_power_of_two(dim: int) -> bool:
    """True for 1, 2, 4, and so on."""
    return dim & (dim - 1) == 0


def block_size(dim: int) -> int:
    """Largest power of two that is not above `dim`."""
    return 1 << (dim.bit_length() - 1)


def fwht(x: torch.Tensor) -> torch.Tensor:
    """Unnormalised fast Walsh-Hadamard transform along the last axis.

    Args:
        x: f32 [..., B], B a power of two. Not modified.

    Returns:
        f32 [..., B]. The order of the butterflies is part of the wire format: strides 1, 2, 4, up to B/2.
    """
    size = x.shape[-1]
    y = x
    h = 1
    while h < size:
        pair = y.reshape(*x.shape[:-1], size // (2 * h), 2, h)
        a, b = pair[..., 0, :], pair[..., 1, :]
        y = torch.stack((a + b, a - b), dim=-2).reshape(x.shape)
        h *= 2
    return y.clone() if y is x else y


def _signs_tensor(seed: int, stage: int, dim: int) -> torch.Tensor:
    return torch.from_numpy(signs(seed, stage, dim).copy())


def rotate(x: torch.Tensor, seed: int, stage: int = 0) -> torch.Tensor:
    """Rotate vectors along the last axis.

    Args:
        x: f32 [..., D].
        seed: u32 rotation seed.
        stage: First sign stage: 0 for the codes, SKETCH_STAGE for the QJL sketch.

    Returns:
        f32 [..., D]. D a power of two: unnormalised, norms grow by sqrt(D). Otherwise orthonormal: two rounds of
        overlapping blocks of the largest power of two, with a shuffle in between so that every element mixes.
    """
    dim = x.shape[-1]
    if is_power_of_two(dim):
        return fwht(x * _signs_tensor(seed, stage, dim))
    block, norm = block_size(dim), _block_norm(dim)
    y = x
    for r in (0, 1):
        y = y * _signs_tensor(seed, stage + 2 * r, dim)
        y[..., :block] = fwht(y[..., :block]) * norm
        y = y * _signs_tensor(seed, stage + 2 * r + 1, dim)
        y[..., dim - block :] = fwht(y[..., dim - block :]) * norm
        if r == 0:
            y = torch.cat((y[..., 0::2], y[..., 1::2]), dim=-1)
    return y


def inverse_rotate(y: torch.Tensor, seed: int, stage: int = 0) -> torch.Tensor:
    """Undo `rotate`, f32 [..., D] to f32 [..., D]; for D a power of two without the division by D."""
    dim = y.shape[-1]
    if is_power_of_two(dim):
        return fwht(y) * _signs_tensor(seed, stage, dim)
    block, norm = block_size(dim), _block_norm(dim)
    x = y.clone()
    for r in (1, 0):
        x[..., dim - block :] = fwht(x[..., dim - block :]) * norm
        x = x * _signs_tensor(seed, stage + 2 * r + 1, dim)
        x[..., :block] = fwht(x[..., :block]) * norm
        x = x * _signs_tensor(seed, stage + 2 * r, dim)
        if r == 1:
            unshuffled = torch.empty_like(x)
            half = (dim + 1) // 2
            unshuffled[..., 0::2] = x[..., :half]
            unshuffled[..., 1::2] = x[..., half:]
            x = unshuffled
    return x


def _block_norm(dim: int) -> float:
    return float(np.float32(1.0 / math.sqrt(block_size(dim))))
