"""Real KV cache of SmolLM2-135M, for quality: the cache of one English prompt, cut into chunks like LMCache's."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.model import prepare_model

__all__ = ["CHUNK_TOKENS", "PROMPT_TOKENS", "kv_chunks"]

CHUNK_TOKENS, PROMPT_TOKENS = 256, 1024
_PROMPT = Path(__file__).parent / "prompt.txt"


def kv_chunks(model: Path | None = None) -> list[torch.Tensor]:
    """Run the model over the first 1,024 tokens of the demo's prompt on CPU in bf16.

    Returns:
        Four chunks, bf16 [2, L, 256, H*D] with L = 30 layers, H = 3 KV heads, D = 64.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = model or prepare_model()
    tokens = AutoTokenizer.from_pretrained(folder)(_PROMPT.read_text(), return_tensors="pt").input_ids[
        :, :PROMPT_TOKENS
    ]
    net = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    with torch.no_grad():
        layers = net(tokens, use_cache=True).past_key_values.layers
    sides = [torch.stack([getattr(layer, side)[0] for layer in layers]) for side in ("keys", "values")]
    cache = torch.stack(sides).transpose(2, 3).flatten(3)  # [2, L, H, T, D] to [2, L, T, H*D]
    return [chunk.contiguous() for chunk in cache.split(CHUNK_TOKENS, dim=2)]
