"""PolarQuant as published (arXiv 2502.02617): random rotation, polar coordinates of pairs of pairs, coded angles."""

from __future__ import annotations

import math
from functools import cache

import torch

from benchmarks.quality.codecs import Vectors

__all__ = ["PAPER", "angle_levels", "from_polar", "polar", "rotation", "to_polar"]

PAPER = (4, 2, 2, 2)
"""Bits of an angle by level; with one fp16 radius for 16 elements 3.875 bits an element (section 4.2 of the paper)."""


@cache
def rotation(dim: int, seed: int = 0) -> torch.Tensor:
    """A random orthogonal matrix f32 [D, D]."""
    gaussian = torch.randn(dim, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    q, r = torch.linalg.qr(gaussian)
    return (q * r.diagonal().sign()).float()


def to_polar(x: torch.Tensor, depth: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Radii [N, D / 2**depth] and the angles of each level, [N, D / 2**level], in [0, 2 pi) and then [0, pi/2]."""
    angles, radius = [], x
    for level in range(depth):
        a, b = radius[..., 0::2], radius[..., 1::2]
        angle = torch.atan2(b, a)
        angles.append(angle.remainder(2 * math.pi) if level == 0 else angle)
        radius = torch.hypot(a, b)
    return radius, angles


def from_polar(radius: torch.Tensor, angles: list[torch.Tensor]) -> torch.Tensor:
    """Undo `to_polar`."""
    for angle in reversed(angles):
        radius = torch.stack((radius * angle.cos(), radius * angle.sin()), dim=-1).flatten(-2)
    return radius


@cache
def angle_levels(level: int, bits: int) -> torch.Tensor:
    """Lloyd-Max levels f32 [2**bits] of the angles of a level (0: uniform on the circle).

    Of a rotated vector, an angle of level l > 0 has the density sin(2 psi)^(2^l - 1) on [0, pi/2] (lemma 2).
    """
    count = 2**bits
    if level == 0:
        return ((torch.arange(count) + 0.5) * (2 * math.pi / count)).float()
    grid = (torch.arange(20_000, dtype=torch.float64) + 0.5) * (math.pi / 2 / 20_000)
    weight = (2 * grid).sin() ** (2**level - 1)
    table = grid[torch.searchsorted(weight.cumsum(0) / weight.sum(), (torch.arange(count) + 0.5).double() / count)]
    for _ in range(300):
        cell = torch.bucketize(grid, (table[1:] + table[:-1]) / 2)
        mass = torch.zeros(count, dtype=torch.float64).index_add_(0, cell, weight)
        table = torch.zeros(count, dtype=torch.float64).index_add_(0, cell, weight * grid) / mass
    return table.float()


def polar(bits: tuple[int, ...] = PAPER) -> Vectors:
    """Vectors of D elements, D a multiple of 2**len(bits); radii in fp16."""

    def code(x: torch.Tensor) -> tuple[torch.Tensor, float]:
        dim, turn = x.shape[-1], rotation(x.shape[-1])
        radius, angles = to_polar(x @ turn.T, len(bits))
        coded = []
        for level, (angle, b) in enumerate(zip(angles, bits, strict=True)):
            table = angle_levels(level, b)
            coded.append(table[torch.bucketize(angle, (table[1:] + table[:-1]) / 2)])
        rate = 16 / 2 ** len(bits) + sum(b / 2 ** (level + 1) for level, b in enumerate(bits))
        return from_polar(radius.half().float(), coded).view(-1, dim) @ turn, rate

    return code
