"""Tiny models with random weights, one of each shape of KV cache, and which of their layers a packed cache packs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import DynamicCache

from tq_offload.hf_compat import installed, model_keyword

VOCABULARY = 97
TRANSFORMERS = installed("transformers")
# Until 5.4 these models bring a cache class of their own, which has no `.layers`.
LINEAR_IN_DYNAMIC_CACHE = TRANSFORMERS >= (5, 5)
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
DROP = "not given"
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"


@dataclass(frozen=True)
class TinyModel:
    """A configuration.

    Args:
        kind: Prefix of transformers' classes.
        layers: What each layer is.
        settings: Beside SIZES; DROP removes one.
        own_cache: It needs its own kind of cache, which cannot be packed.
    """

    kind: str
    layers: tuple[str, ...]
    settings: dict[str, Any]
    own_cache: bool = False

    @property
    def packed(self) -> list[bool]:
        """The claim: full attention is packed, anything else is left."""
        return [layer == FULL for layer in self.layers]

    def build(self) -> Any:
        settings = {**SIZES, "num_hidden_layers": len(self.layers), **self.settings}
        settings = {name: value for name, value in settings.items() if value != DROP}
        config = getattr(transformers, f"{self.kind}TextConfig", None) or getattr(transformers, f"{self.kind}Config")
        torch.manual_seed(0)
        model = getattr(transformers, f"{self.kind}ForCausalLM")(config(**settings))
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "_proj" in name and weight.dim() == 2:
                    weight.mul_(5)  # with the usual 0.02 the cache would hardly matter to the logits
        model.generation_config.eos_token_id = None
        return model.eval()


MODELS = {
    "llama": TinyModel("Llama", (FULL, FULL), {}),
    "qwen3": TinyModel("Qwen3", (FULL, FULL), {}),
    "phi3": TinyModel("Phi3", (FULL, FULL), {"hidden_size": 128, "head_dim": DROP, "sliding_window": None}),
    "mistral": TinyModel("Mistral", (SLIDING, SLIDING), {"sliding_window": 16}),
    "gemma3": TinyModel(
        "Gemma3", (SLIDING, FULL), {"sliding_window": 16, "layer_types": [SLIDING, FULL], "query_pre_attn_scalar": 32}
    ),
    "gpt_oss": TinyModel(
        "GptOss",
        (SLIDING, FULL),
        {"sliding_window": 16, "layer_types": [SLIDING, FULL], "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "qwen3_next": TinyModel(
        "Qwen3Next",
        (LINEAR, FULL),
        {
            "layer_types": [LINEAR, FULL], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
            "linear_key_head_dim": 16, "linear_value_head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
        },
        own_cache=not LINEAR_IN_DYNAMIC_CACHE,
    ),
    "lfm2": TinyModel(
        "Lfm2",
        ("conv", FULL),
        {"layer_types": ["conv", FULL], "head_dim": DROP, "hidden_size": 128, "block_ff_dim": 64},
        own_cache=not LINEAR_IN_DYNAMIC_CACHE,
    ),
    # Until 5.14 K has 48 channels and V 32; from 5.15 K is the latent, 24 channels, and V the rotary key, 16.
    "deepseek_v3": TinyModel(
        "DeepseekV3",
        (FULL, FULL),
        {
            "head_dim": DROP, "num_key_value_heads": 4, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16,
            "v_head_dim": 32, "kv_lora_rank": 24, "q_lora_rank": None, "n_routed_experts": 4, "n_group": 2,
            "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1,
            "first_k_dense_replace": 1,
        },
    ),
}  # fmt: skip
PACKABLE = [name for name, tiny in MODELS.items() if not tiny.own_cache]
OWN_CACHE = [name for name, tiny in MODELS.items() if tiny.own_cache]


def exact_cache(model: Any, tiny: TinyModel) -> Any:
    """The cache that `generate` would make; None where only the model itself knows how."""
    return None if tiny.own_cache else DynamicCache(config=model.config)


def prompt(tokens: int = 60, rows: int = 2) -> torch.Tensor:
    """Token ids, i64 [rows, tokens]."""
    return torch.randint(3, VOCABULARY, (rows, tokens), generator=torch.Generator().manual_seed(1))


OPTIONS = {"sink_tokens": 2, "window": 8, "chunk_tokens": 16}
"""Of a cache or press, so that a short prompt has tokens of every kind."""

IDS, CONTEXT = prompt(56), 48


@torch.no_grad()
def logits_of(model: Any, cache: Any, ids: torch.Tensor, *, context: int) -> torch.Tensor:
    """Logits [B, T - context, V] of the tokens after the context, fed one by one."""
    keyword, out = model_keyword(model), []
    model(ids[:, :context], **{keyword: cache}, use_cache=True)
    for at in range(context, ids.shape[1]):
        positions = torch.full((ids.shape[0], 1), at)
        step = model(ids[:, at : at + 1], **{keyword: cache}, use_cache=True, position_ids=positions)
        out.append(step.logits[:, -1])
    return torch.stack(out, dim=1)


def generated(model: Any, cache: Any, ids: torch.Tensor, tokens: int = 8) -> torch.Tensor:
    """Greedy continuation, i64 [B, tokens]."""
    given = {} if cache is None else {model_keyword(model): cache}
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, pad_token_id=0, **given
    )
    return out[:, ids.shape[1] :]


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Root of the mean squared difference, over the standard deviation of the exact logits."""
    return float((found - exact).square().mean().sqrt() / exact.std())
