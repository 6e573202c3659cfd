"""Under what a prefix is stored: its key, the model that made it, and the names of its entries."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from tq_offload.codec import cache_key_digest, model_fingerprint
from tq_offload.errors import CacheTypeError, ConfigError

__all__ = ["MANIFEST", "Identity", "device_of", "identify", "part_name", "tokens_of_key"]

MANIFEST = "manifest"
"""Name of the part that is written last and read first."""

# What decides how many elements K and V have, and what they mean.
_FIELDS = (
    "model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "layer_types",
    "sliding_window", "attention_chunk_size", "num_kv_shared_layers", "no_rope_layers",
)  # fmt: skip
_ROPE = ("rope_parameters", "rope_scaling")  # transformers 5 and 4


@dataclass(frozen=True)
class Identity:
    """A key and a model, as digests of 16 bytes."""

    key: bytes
    model: bytes

    def entry(self, part: str) -> str:
        """Key of an entry in the store."""
        return f"tq-prefix/{cache_key_digest(self.key, self.model).hex()}/{part}"

    def frame_key(self, part: str) -> bytes:
        """The digest that the frame of an entry carries, so that one entry cannot stand for another."""
        return cache_key_digest("tq_offload.prefix", self.key, part)


def part_name(index: int, side: str, number: int) -> str:
    """Name of the frame `number` of K or V of a layer."""
    return f"{index}{side}{number}"


def identify(key: Any, model: Any) -> Identity:
    """Digest what the user gives.

    Args:
        key: Text, or token ids [T], [B, T]: a list or a tensor; [1, T] is [T].
        model: A name, or a Hugging Face model: its name_or_path, commit, dtype, config, and a sample of its weights.

    Raises:
        ConfigError: Neither of these, or a model that has no name.
        CacheTypeError: A press has left a mask on the model.
    """
    return Identity(_key_digest(key), model_fingerprint(model if isinstance(model, str) else _describe(model)))


def device_of(model: Any) -> torch.device:
    """Where a model computes; the CPU for a name."""
    return torch.device(getattr(model, "device", "cpu"))


def _key_digest(key: Any) -> bytes:
    if isinstance(key, str):
        if key:
            return cache_key_digest("text", key.encode("utf-8", "surrogatepass"))
    else:
        try:
            ids = torch.as_tensor(key)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            ids = torch.empty(0)
        if ids.dim() == 2 and ids.shape[0] == 1:
            ids = ids[0]
        integers = not (ids.dtype.is_floating_point or ids.dtype.is_complex or ids.dtype == torch.bool)
        if ids.dim() in (1, 2) and ids.numel() and integers:
            data = ids.detach().cpu().to(torch.int64).contiguous().numpy().astype("<i8").tobytes()
            return cache_key_digest("ids", *ids.shape, data)
    raise ConfigError("key", key if isinstance(key, str) else type(key).__name__, "text, or token ids [T] or [B, T]")


def tokens_of_key(key: Any) -> int | None:
    """Tokens that a key of token ids names, for each row; None for a text."""
    return None if isinstance(key, str) else int(torch.as_tensor(key).shape[-1])


def _sample(model: Any) -> str:
    """Digest of the first elements of every weight: a merged adapter or further training is another model."""
    state = xxhash.xxh3_128()
    for name, weight in model.named_parameters():
        if weight.device.type != "meta":
            first = weight.detach().flatten()[:64].cpu().contiguous()
            state.update(name.encode() + first.view(torch.uint8).numpy().tobytes())
    return state.hexdigest()


def _describe(model: Any) -> str:
    """What a Hugging Face model is, as text."""
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "get_text_config") or not hasattr(model, "modules"):
        raise ConfigError("model", type(model).__name__, "a name or a Hugging Face model")
    if any(m.__dict__.get("masked_key_indices") is not None for m in model.modules()):
        raise CacheTypeError(
            "a press that masks tokens instead of evicting them (AdaKV, KVzip and the like) has left its mask on the "
            "model, and the mask is no part of the cache: save what a press that evicts has made, such as "
            "SnapKVPress; for anything else set masked_key_indices = None on the attention modules first"
        )
    if getattr(model, "peft_config", None) or getattr(model, "_hf_peft_config_loaded", False):
        raise ConfigError("model", type(model).__name__, "for a model with adapters a name of your own")
    name = getattr(model, "name_or_path", "") or getattr(config, "_name_or_path", "")
    if not name:
        raise ConfigError("model", type(model).__name__, "a name of your own, since this model has no name_or_path")
    text = config.get_text_config(decoder=True)
    facts = {field: getattr(text, field, None) for field in _FIELDS}
    facts["rope"] = {
        "rope_theta": getattr(text, "rope_theta", None),
        **next((dict(found) for field in _ROPE if (found := getattr(text, field, None))), {}),
    }
    facts["dtype"] = str(getattr(model, "dtype", None))
    facts["commit"] = getattr(config, "_commit_hash", None)
    facts["weights"] = _sample(model)
    return json.dumps(["hf", str(name), {k: v for k, v in facts.items() if v is not None}], sort_keys=True, default=str)
