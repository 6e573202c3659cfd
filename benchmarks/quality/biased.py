"""SmolLM2 with keys as Qwen2.5 has them: large constant biases of k_proj, or a few heavy channels.

Attention must still see what it saw. A bias on a RoPE pair of low frequency is nearly the same for all keys and drops
out of the softmax. A bias on a pair that turns does not: there the rows of q_proj are divided by beta, so that what the
bias adds to the scores stays of the size of a key. Heavy channels are exact: rows of k_proj times beta, of q_proj
divided by it.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["CHECKED_BETA", "Variant", "biased", "key_rms", "variants"]

_LOW, _TURNING = range(26, 32), range(20)
"""RoPE pairs of head_dim 64 (channels p and p + 32): below a 20th of a turn in 1,024 tokens, and well above."""

CHECKED_BETA = 20.0
_PAIRS = 2
_SEED = 7


@dataclass(frozen=True)
class Variant:
    """`kind`: low, turning (two pairs of every KV head), all (every channel) or heavy; `beta` in rms of the keys."""

    kind: str
    beta: float

    @property
    def name(self) -> str:
        """`turning, 20x`."""
        return f"{self.kind}, {self.beta:g}x"


def variants(short: bool) -> list[Variant]:
    """All of them, or the two that the checks need."""
    betas = (CHECKED_BETA,) if short else (5.0, CHECKED_BETA, 50.0)
    kinds = ("low", "turning") if short else ("low", "turning", "all")
    return [Variant(kind, beta) for kind in kinds for beta in betas] + (
        [] if short else [Variant("heavy", CHECKED_BETA)]
    )


@torch.no_grad()
def key_rms(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Root mean square of the keys before RoPE, f32 [L, H], over the tokens i64 [T]."""
    dim, found = model.config.head_dim, []
    hooks = [
        layer.self_attn.k_proj.register_forward_hook(lambda module, args, out: found.append(out[0]))
        for layer in model.model.layers
    ]
    model(ids[None], use_cache=False, logits_to_keep=1)
    for hook in hooks:
        hook.remove()
    return torch.stack([x.unflatten(-1, (-1, dim)).square().mean(dim=(0, 2)).sqrt() for x in found])


@torch.no_grad()
def biased(model: Any, rms: torch.Tensor, variant: Variant) -> Any:
    """A copy of the model, changed; the pairs and signs are the same for every beta."""
    model, draw = copy.deepcopy(model), torch.Generator().manual_seed(_SEED)
    dim, half = model.config.head_dim, model.config.head_dim // 2
    for layer, scale in zip(model.model.layers, rms, strict=True):
        attention = layer.self_attn
        heads = len(scale)
        queries = attention.q_proj.weight.view(heads, -1, dim, attention.q_proj.in_features)  # [H, group, D, hidden]
        keys = attention.k_proj.weight.view(heads, dim, -1)
        bias = torch.zeros(heads, dim)
        for head in range(heads):
            pairs = _pairs(variant.kind, draw)
            channels = torch.cat((pairs, pairs + half))
            if variant.kind == "heavy":
                keys[head, channels] *= variant.beta
            else:
                sign = torch.randint(2, (len(channels),), generator=draw) * 2.0 - 1
                bias[head, channels] = sign * variant.beta * scale[head]
            turning = channels if variant.kind == "heavy" else channels[channels % half < min(_LOW)]
            queries[head, :, turning] /= variant.beta
        if variant.kind != "heavy":
            attention.k_proj.bias = torch.nn.Parameter(bias.flatten())
    return model


def _pairs(kind: str, draw: torch.Generator) -> torch.Tensor:
    if kind == "all":
        return torch.arange(_LOW.stop)
    among = {"low": _LOW, "turning": _TURNING, "heavy": range(_LOW.stop)}[kind]
    return torch.tensor(among)[torch.randperm(len(among), generator=draw)[:_PAIRS]]
