"""What the tests of the packed cache and of the press share: tiny random models, prompts, K and V."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from support import make_tensor


def small_llama(
    head_dim: int = 64, layers: int = 3, dtype: torch.dtype = torch.float32, attention: str = "sdpa", seed: int = 0
) -> Any:
    """A random Llama with 4 heads, 2 KV heads and sharp outputs, which never ends a text by itself."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        initializer_range=0.2,
        max_position_embeddings=8192,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
        attn_implementation=attention,
    )
    return LlamaForCausalLM(config).to(dtype).eval()


def ids(tokens: int, rows: int = 1, seed: int = 0) -> torch.Tensor:
    """A random prompt, i64 [rows, tokens]."""
    return torch.randint(3, 256, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def kv(
    tokens: int, *, rows: int = 1, heads: int = 2, dim: int = 64, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V, each [rows, heads, tokens, dim]."""
    shape = (rows, heads, tokens, dim)
    return make_tensor(shape, dtype, 10 * seed), make_tensor(shape, dtype, 10 * seed + 5)


def packed(cache: Any) -> Any:
    """The same cache, with nothing left that waits to be packed."""
    if hasattr(cache, "pack"):
        cache.pack()
    return cache


def unpacked(cache: Any) -> Any:
    """A `DynamicCache` that holds what the layers of another cache unpack to."""
    from transformers import DynamicCache

    plain = DynamicCache()
    for index, layer in enumerate(packed(cache).layers):
        plain.update(layer.keys.clone(), layer.values.clone(), index)
    return plain


def contents(cache: Any) -> list[torch.Tensor]:
    """K and V of every layer, in new tensors."""
    return [x.clone() for layer in packed(cache).layers for x in (layer.keys, layer.values)]


def parts(store: Any) -> list[torch.Tensor]:
    """Every tensor that a `LayerStore` holds: codes, scales, means, sketches, exact tokens."""
    found: list[torch.Tensor] = []
    for run in (*store.runs, store.tail, None if store.sinks is None else store.sinks.exact):
        if run is None:
            continue
        for side in (run.keys, run.values):
            if isinstance(side, torch.Tensor):
                found.append(side)
            else:
                found += [part for field in fields(side) if isinstance(part := getattr(side, field.name), torch.Tensor)]
    return found


def copies(cache: Any) -> list[torch.Tensor]:
    """Copies of every tensor that the packed layers of a cache hold."""
    return [part.clone() for layer in packed(cache).layers for part in parts(layer.store)]


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    """True if two lists of tensors are equal bit by bit."""
    return len(first) == len(second) and all(
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b) for a, b in zip(first, second, strict=True)
    )


def word_tokenizer(words: int = 256) -> Any:
    """A tokenizer whose words are `w3`, `w4`, ...: the text of token i is `wi`; three special tokens come first."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ("<pad>", "<bos>", "<unk>")
    names = {name: i for i, name in enumerate([*special, *(f"w{i}" for i in range(3, words))])}
    tokenizer = Tokenizer(models.WordLevel(names, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<bos>", pad_token="<pad>")


def text(tokens: int, seed: int = 0) -> str:
    """Words of `word_tokenizer`."""
    return " ".join(f"w{i}" for i in ids(tokens, seed=seed)[0].tolist())
