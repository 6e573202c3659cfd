"""Geometry of a model's KV cache, from its config.json: a local folder or the local Hugging Face cache, no network."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["HeadGeometry", "ModelGeometry", "geometry_of", "has_key_bias", "load_geometry", "load_key_bias"]

_DCP_MARK = "##lmcache-dcp-layout-"  # LMCache appends it to the name under decode context parallelism
_TEXT_CONFIGS = ("text_config", "llm_config", "language_config", "thinker_config")
_RECURRENT_KEYS = ("mamba", "ssm_", "linear_", "rwkv", "lru_width", "state_size", "kda_")
_BIAS_FLAGS = ("attention_bias", "qkv_bias", "use_qkv_bias", "add_qkv_bias")
_BIASED_TYPES = ("qwen2",)
_RECURRENT_TYPES = ("linear_attention", "mamba", "recurrent", "conv", "gdn", "kda")


@dataclass(frozen=True)
class HeadGeometry:
    """Elements of a K or V vector, and how many KV heads a layer has (None: not known)."""

    head_dim: int
    num_kv_heads: int | None


@dataclass(frozen=True)
class ModelGeometry:
    """What a config says about the KV cache.

    Args:
        heads: Geometries that occur in the layers; several for models such as Gemma with global and local attention.
        latent_dim: Elements of an MLA latent; None for a model without MLA.
        recurrent: The model has layers whose state is no KV cache (Mamba, linear attention).
    """

    heads: tuple[HeadGeometry, ...]
    latent_dim: int | None = None
    recurrent: bool = False


def load_geometry(model_name: str) -> ModelGeometry | None:
    """Geometry of a model by the name that LMCache's keys carry; None if its config cannot be found or read."""
    config = _load(model_name)
    return None if config is None else geometry_of(config)


def load_key_bias(model_name: str) -> bool:
    """True if the model's config says that its keys have biases; False too if it cannot be found."""
    config = _load(model_name)
    return config is not None and has_key_bias(config)


def _load(model_name: str) -> dict[str, object] | None:
    path = _config_path(model_name.split(_DCP_MARK, 1)[0])
    if path is None:
        return None
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return config if isinstance(config, dict) else None


def _config_path(model_name: str) -> Path | None:
    folder = Path(model_name)
    try:
        if (folder / "config.json").is_file():
            return folder / "config.json"
    except (OSError, ValueError):
        return None
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    try:
        cached = try_to_load_from_cache(model_name, "config.json")
    except Exception:  # names that are no repository id raise HFValidationError
        return None
    return Path(cached) if isinstance(cached, str) else None


def geometry_of(config: Mapping[str, object]) -> ModelGeometry | None:
    """Geometry from a parsed config.json; None if it says nothing about heads."""
    for name in _TEXT_CONFIGS:
        nested = config.get(name)
        if isinstance(nested, Mapping):
            inner = geometry_of(nested)
            if inner is not None:
                return inner
    recurrent = _is_recurrent(config)
    rank, rope = _number(config, "kv_lora_rank"), _number(config, "qk_rope_head_dim")
    if rank and rope:
        return ModelGeometry((), rank + rope, recurrent)
    heads = _head_geometries(config)
    return ModelGeometry(heads, None, recurrent) if heads else None


def has_key_bias(config: Mapping[str, object]) -> bool:
    """Whether a config.json is of a model whose k_proj has a bias: Qwen2 and Qwen2.5 always, others by a flag."""
    nested = [part for name in _TEXT_CONFIGS if isinstance(part := config.get(name), Mapping)]
    flags = any(config.get(name) is True for name in _BIAS_FLAGS)
    return flags or str(config.get("model_type", "")).startswith(_BIASED_TYPES) or any(map(has_key_bias, nested))


def _head_geometries(config: Mapping[str, object]) -> tuple[HeadGeometry, ...]:
    num_heads = _number(config, "num_attention_heads", "n_head", "n_heads", "num_heads")
    head_dim = _number(config, "head_dim", "attention_head_dim", "kv_channels")
    if head_dim is None:
        hidden = _number(config, "hidden_size", "n_embd", "d_model")
        if not hidden or not num_heads or hidden % num_heads:
            return ()
        head_dim = hidden // num_heads
    found = [HeadGeometry(head_dim, _kv_heads(config, num_heads))]
    for dim_key, heads_key in (
        ("global_head_dim", "num_global_key_value_heads"),
        ("swa_head_dim", "swa_num_key_value_heads"),
    ):
        dim = _number(config, dim_key)
        if dim:
            found.append(HeadGeometry(dim, _number(config, heads_key) or found[0].num_kv_heads))
    return tuple(dict.fromkeys(found))


def _kv_heads(config: Mapping[str, object], num_heads: int | None) -> int | None:
    if config.get("multi_query") is True and not config.get("new_decoder_architecture"):
        return 1
    for name in ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num", "num_query_groups"):
        if config.get(name) is not None:
            return _number(config, name)  # a list: heads differ from layer to layer, not known for a group
    return num_heads


def _is_recurrent(config: Mapping[str, object]) -> bool:
    types = config.get("layer_types") or config.get("layers_block_type") or ()
    if isinstance(types, list) and any(isinstance(t, str) and t.startswith(_RECURRENT_TYPES) for t in types):
        return True
    return any(name.startswith(_RECURRENT_KEYS) and bool(value) for name, value in config.items())


def _number(config: Mapping[str, object], *names: str) -> int | None:
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None
