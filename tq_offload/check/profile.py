"""What K and V of a model look like, layer by layer: biased keys and outlier channels show here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tq_offload.check.scoring import Window

__all__ = ["LayerProfile", "SideProfile", "findings", "profile"]

OUTLIER_SHARE = 0.75
"""Share of the energy of K in a sixteenth of its channels from which a layer is named."""

TURNING_SHARE = 0.5
"""The same after the chunk's mean of every channel is taken off, as the codec does: energy that means do not see."""


@dataclass(frozen=True)
class SideProfile:
    """K or V of a layer over the tokens of a prefix, means over the KV heads.

    `norm`: mean norm of a vector. `mean_norm`: norm of the vector of channel means. `top_share`: share of the energy in
    the `top_channels` channels (D / 16) that have most of it; `centred_top_share`: the same with the mean of each chunk
    taken off.
    """

    norm: float
    mean_norm: float
    top_share: float
    centred_top_share: float


@dataclass(frozen=True)
class LayerProfile:
    """One layer: `layer` is its index in the model, `channels` is D."""

    layer: int
    channels: int
    top_channels: int
    keys: SideProfile
    values: SideProfile


def profile(window: Window, chunk_tokens: int = 256) -> list[LayerProfile]:
    """The layers of a window; `chunk_tokens` share a mean."""
    return [
        LayerProfile(layer, k.shape[-1], _top(k.shape[-1]), _side(k, chunk_tokens), _side(v, chunk_tokens))
        for layer, k, v in zip(window.layers, window.keys, window.values, strict=True)
    ]


def findings(layers: Sequence[LayerProfile]) -> list[str]:
    """A line for every layer whose keys have outlier channels, the layer with the largest share first.

    A line says as well whether the energy is constant over a chunk, so that the means of the codec take it off, or
    turns: a bias of k_proj in channels that RoPE turns fast, against which bits or `key_outliers` help.
    """
    hit = [p for p in layers if p.keys.top_share >= OUTLIER_SHARE or p.keys.centred_top_share >= TURNING_SHARE]
    return [_finding(p) for p in sorted(hit, key=lambda p: p.keys.top_share, reverse=True)]


def _finding(p: LayerProfile) -> str:
    share, centred = 100 * p.keys.top_share, 100 * p.keys.centred_top_share
    turns = p.keys.centred_top_share >= TURNING_SHARE
    why = "they change from token to token" if turns else "most of it is constant over a chunk"
    return (
        f"layer {p.layer}: {share:.0f} % of key energy lies in {p.top_channels} of {p.channels} channels "
        f"({centred:.0f} % without the means: {why})"
    )


def _top(channels: int) -> int:
    return max(1, channels // 16)


def _side(x: torch.Tensor, chunk_tokens: int) -> SideProfile:
    """K or V [1, H, P, D]."""
    v = x[0].float()
    centred = torch.cat([c - c.mean(dim=1, keepdim=True) for c in torch.split(v, chunk_tokens, dim=1)], dim=1)
    norm, mean_norm = v.norm(dim=-1).mean().item(), v.mean(dim=1).norm(dim=-1).mean().item()
    return SideProfile(norm, mean_norm, _top_share(v), _top_share(centred))


def _top_share(v: torch.Tensor) -> float:
    """Of f32 [H, P, D]; zero where there is no energy."""
    energy = v.square().sum(dim=1)
    top = energy.topk(_top(v.shape[-1]), dim=-1).values.sum(dim=-1)
    return (top / energy.sum(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)).mean().item()
