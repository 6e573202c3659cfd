"""Resident bytes of the packed cache against the length of the context, for the plot of `bench_press`."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.press_caches import NO_EXACT, fill, fp_cache, load_smollm2, text_tokens, turboquant
from tq_offload.kv_cache import resident_bytes

__all__ = ["LENGTHS", "curves"]

LENGTHS = (256, 512, 1024, 2048, 4096)


@torch.no_grad()
def curves() -> dict[str, list[int]]:
    """Resident bytes of each cache at each of LENGTHS: the K and V of one prefill of SmolLM2, given to it in bf16.

    The prefill runs in float32, which is several times faster on CPUs without bf16 arithmetic.
    """
    model, tokenizer = load_smollm2(torch.float32)
    ids = torch.cat([text_tokens(tokenizer), text_tokens(tokenizer, "../prompt.txt")], dim=1)
    prefilled = fp_cache(model.config)
    model.model(ids[:, : LENGTHS[-1]], past_key_values=prefilled)
    made = {
        "full precision (bf16)": fp_cache,
        "4 bits, 128 tokens exact (default)": turboquant(),
        "4 bits": turboquant(**NO_EXACT),
        "3 bits": turboquant("turboquant_3bit_nc", **NO_EXACT),
    }
    taken: dict[str, list[int]] = {name: [] for name in made}
    for length in LENGTHS:
        part = _first(prefilled, length, model.config)
        for name, make in made.items():
            taken[name].append(resident_bytes(fill(make(model.config), part)))
    return taken


def _first(prefilled: Any, length: int, config: Any) -> Any:
    """The first tokens of a cache, in bf16."""
    part = fill(fp_cache(config), prefilled, dtype=torch.bfloat16)
    for layer in part.layers:
        layer.keys, layer.values = layer.keys[:, :, :length].clone(), layer.values[:, :, :length].clone()
    return part
