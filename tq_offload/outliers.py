"""Outlier channels in pure torch: the reference (docs/wire-format.md, sections 5 and 6, "Outlier channels").

Keys of some models have a few channels of large energy, which a rotation spreads over all the others (Qwen2.5: biases
of k_proj; where they turn with RoPE no mean removes them). A fixed number of channels gets a coarse code first, four
bits over the range that the channel has in the chunk; what that leaves is rotated and coded with the other channels.
The TurboQuant paper (section 4.3), KIVI and QAQ treat outlier channels apart too, without the second step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tq_offload.bitpack import pack, unpack
from tq_offload.spec import OUTLIER_BITS

__all__ = ["Outliers", "add_coarse", "split_outliers", "take_coarse"]

Array = npt.NDArray[Any]

_LAST_CODE = float(2**OUTLIER_BITS - 1)
_TOP = float(torch.finfo(torch.float32).max)


@dataclass(frozen=True)
class Outliers:
    """k channels of J vectors over P planes and T tokens: channels u16 [P, J, k], ranges f32 [P, J, k, 2] (half the
    least value, half the step between two codes), codes u8 [P, T, J, ceil(k/2)].
    """

    channels: Array
    ranges: Array
    codes: Array


def _energy(v: torch.Tensor) -> torch.Tensor:
    """Energy of every channel over the tokens: f32 [P, J, D]."""
    squares = torch.zeros_like(v[:, 0])
    for t in range(v.shape[1]):
        squares = squares + v[:, t] * v[:, t]
    return squares


def split_outliers(v: torch.Tensor, count: int) -> Outliers:
    """Choose and code the channels of highest energy.

    Args:
        v: f32 [P, T, J, D], finite, T > 0.
        count: k.
    """
    order = torch.sort(_energy(v), dim=-1, descending=True, stable=True).indices
    channels = order[..., :count].sort(dim=-1).values  # [P, J, k]
    half = v.gather(-1, channels[:, None].expand(-1, v.shape[1], -1, -1)) * 0.5
    low, high = half.amin(dim=1) + 0.0, half.amax(dim=1) + 0.0  # never -0: which zero is the least is not defined
    step = (high - low) / _LAST_CODE
    q = (half - low[:, None]) / step[:, None]
    q = torch.where(step[:, None] == 0, torch.zeros_like(q), q)
    codes = (q + 0.5).clamp(max=_LAST_CODE).to(torch.uint8)
    packed = pack(codes.reshape(-1, count).numpy(), OUTLIER_BITS).reshape(*codes.shape[:3], -1)
    return Outliers(channels.numpy().astype(np.uint16), torch.stack([low, step], dim=-1).numpy(), packed)


def take_coarse(v: torch.Tensor, outliers: Outliers) -> torch.Tensor:
    """Vectors f32 [P, T, J, D] without what the coarse codes stand for."""
    channels, values = _coarse(outliers)
    return v.scatter(-1, channels, v.gather(-1, channels) - values)


def add_coarse(v: torch.Tensor, outliers: Outliers) -> torch.Tensor:
    """Undo `take_coarse`."""
    channels, values = _coarse(outliers)
    return v.scatter(-1, channels, v.gather(-1, channels) + values)


def _coarse(outliers: Outliers) -> tuple[torch.Tensor, torch.Tensor]:
    """Channels, i64, and what the codes stand for, f32, both [P, T, J, k]."""
    grid, count = outliers.codes.shape[:3], outliers.channels.shape[-1]
    codes = unpack(outliers.codes.reshape(-1, outliers.codes.shape[-1]), count, OUTLIER_BITS)
    low, step = (part[:, None] for part in torch.from_numpy(outliers.ranges.copy()).unbind(dim=-1))
    values = (torch.from_numpy(codes).reshape(*grid, count).to(torch.float32) * step + low) * 2.0
    channels = torch.from_numpy(outliers.channels.astype(np.int64))[:, None].expand(*grid, count)
    return channels, values.clamp(-_TOP, _TOP)
