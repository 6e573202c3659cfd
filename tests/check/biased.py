"""A model whose keys carry constant biases in a few RoPE channels, as those of Qwen2.5 do, made from one without."""

from __future__ import annotations

from typing import Any, Literal

import torch

Kind = Literal["low", "any"]
PAIRS = {"low": (26, 32), "any": (0, 20)}
"""RoPE pairs of a head of 64 among which two are chosen: slow ones, in which a bias stays nearly constant over the
tokens, or others, in which RoPE turns it so that no mean removes it."""


@torch.no_grad()
def add_key_bias(model: Any, ids: torch.Tensor, beta: float, kind: Kind) -> None:
    """Give k_proj of every layer of a Llama a bias of beta times the rms of the head's keys in two RoPE pairs a head.

    What softmax sees of a bias that turns depends on the distance alone, but it is large: `any` divides the rows of
    q_proj of those pairs by beta, so that the perplexity stays that of a language model.

    Args:
        model: Llama with head_dim 64, changed in place.
        ids: i64 [1, T], what the rms is measured on.
    """
    config = model.config
    heads, dim = config.num_key_value_heads, config.head_dim
    group = config.num_attention_heads // heads
    rms = _key_rms(model, ids, heads, dim)
    choose = torch.Generator().manual_seed(7)
    low, high = PAIRS[kind]
    for layer, scale in zip(model.model.layers, rms, strict=True):
        bias = torch.zeros(heads, dim)
        rows = layer.self_attn.q_proj.weight.view(heads, group, dim, -1)
        for head in range(heads):
            for pair in (low + torch.randperm(high - low, generator=choose)[:2]).tolist():
                for channel in (pair, pair + dim // 2):
                    sign = 1.0 if torch.rand(1, generator=choose) < 0.5 else -1.0
                    bias[head, channel] = sign * beta * scale[head]
                    if kind == "any":
                        rows[head, :, channel] /= beta
        layer.self_attn.k_proj.bias = torch.nn.Parameter(bias.flatten())


def _key_rms(model: Any, ids: torch.Tensor, heads: int, dim: int) -> torch.Tensor:
    """Of the keys before RoPE: f32 [L, H]."""
    seen: list[torch.Tensor] = []
    hooks = [
        layer.self_attn.k_proj.register_forward_hook(lambda module, args, out: seen.append(out))
        for layer in model.model.layers
    ]
    model(ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.stack([out[0].view(-1, heads, dim).square().mean((0, 2)).sqrt() for out in seen])
