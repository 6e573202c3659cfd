"""Prefixes of caches that a press has made."""

from __future__ import annotations

import pytest
import torch
from packed_support import contents, ids, same, small_llama
from transformers import DynamicCache

from tq_offload.errors import CacheTypeError
from tq_offload.prefix import load_prefix, save_prefix
from tq_offload_connectors.memory import MemoryStore

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def test_a_press_that_evicts() -> None:
    from kvpress import SnapKVPress

    from tq_offload.press import TurboQuantPress

    model, cache, store = small_llama(), DynamicCache(), MemoryStore(1 << 30)
    with torch.no_grad():
        with TurboQuantPress(SnapKVPress(0.5), bits=3)(model):
            model(ids(600), past_key_values=cache)
        info = save_prefix(store, cache, ids(600), model="m", context_length=600)
        loaded = load_prefix(store, ids(600), model="m", config=model.config, strict=True)
        assert loaded is not None
        assert same(contents(loaded), contents(cache))
        assert (info.tokens, loaded.get_seq_length(), loaded.context_length) == (300, 300, 600)
        for step in range(3):  # the window of 124 exact tokens is packed meanwhile
            new = ids(90, seed=step)
            positions = torch.arange(600 + 90 * step, 690 + 90 * step)[None]
            logits = [model(new, past_key_values=c, position_ids=positions).logits for c in (cache, loaded)]
            assert torch.equal(*logits)


def test_a_press_that_masks() -> None:
    from kvpress import AdaKVPress, SnapKVPress

    from tq_offload.press import TurboQuantPress

    model, cache, store = small_llama(), DynamicCache(), MemoryStore(1 << 30)
    model.name_or_path = "org/small"
    with torch.no_grad():
        with TurboQuantPress(AdaKVPress(SnapKVPress(0.5)))(model):
            model(ids(600), past_key_values=cache)
        with pytest.raises(CacheTypeError, match="SnapKVPress"):
            save_prefix(store, cache, "k", model=model)
        assert list(store.keys()) == []
        with pytest.raises(CacheTypeError, match="masked_key_indices = None"):
            load_prefix(store, "k", model=model)
        cache = DynamicCache()
        with TurboQuantPress(SnapKVPress(0.5))(model):  # a new context: the mask is gone
            model(ids(600), past_key_values=cache)
    save_prefix(store, cache, "k", model=model, context_length=600)
    assert load_prefix(store, "k", model=model, strict=True) is not None
