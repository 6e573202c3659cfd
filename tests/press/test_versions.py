"""The press on every shape of model, and kvpress's own presses on any supported transformers."""

from __future__ import annotations

import logging
from typing import Any

import kvpress
import pytest
import torch
from kv_cache.tiny_models import (
    CONTEXT,
    IDS,
    MODELS,
    OPTIONS,
    OWN_CACHE,
    PACKABLE,
    exact_cache,
    generated,
    logits_of,
    relative_error,
)  # fmt: skip

from tq_offload import press as press_module
from tq_offload.hf_compat import patched_kvpress
from tq_offload.kv_cache import TurboQuantCache, TurboQuantLayer
from tq_offload.press import TurboQuantPress


@pytest.mark.parametrize("name", PACKABLE)
def test_the_press_packs_what_is_claimed(name: str) -> None:
    tiny = MODELS[name]
    model = tiny.build()
    exact = logits_of(model, exact_cache(model, tiny), IDS, context=CONTEXT)
    cache = exact_cache(model, tiny)
    with TurboQuantPress(bits=8, **OPTIONS)(model):
        found = logits_of(model, cache, IDS, context=CONTEXT)
    assert relative_error(found, exact) < 0.03
    assert [isinstance(layer, TurboQuantLayer) for layer in cache.layers] == tiny.packed


@pytest.mark.parametrize("name", OWN_CACHE)
def test_a_cache_without_layers_is_left_with_one_warning(name: str, caplog: pytest.LogCaptureFixture) -> None:
    model = MODELS[name].build()
    plain = generated(model, None, IDS)
    press_module._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, "tq_offload"), TurboQuantPress(bits=4)(model):
        assert torch.equal(generated(model, None, IDS), plain)
    assert len([record for record in caplog.records if "packs nothing" in record.message]) == 1


def evicting() -> dict[str, Any]:
    """Presses of the installed kvpress that every release from 0.5.2 has."""
    return {
        "knorm": kvpress.KnormPress(0.5),
        "snapkv": kvpress.SnapKVPress(0.5, window_size=8),
        "streaming": kvpress.StreamingLLMPress(0.5, n_sink=2),
        "tova": kvpress.TOVAPress(0.5),
        "chunk": kvpress.ChunkPress(press=kvpress.KnormPress(0.5), chunk_length=16),
        "rerotation": kvpress.KeyRerotationPress(press=kvpress.KnormPress(0.5)),
        "composed": kvpress.ComposedPress([kvpress.KnormPress(0.5)]),
    }


@pytest.mark.parametrize("name", evicting())
def test_a_kvpress_press_evicts_and_the_rest_is_packed(name: str) -> None:
    model, tiny = MODELS["llama"].build(), MODELS["llama"]
    evicted, packed = exact_cache(model, tiny), exact_cache(model, tiny)
    with patched_kvpress(model), evicting()[name](model):
        exact = logits_of(model, evicted, IDS, context=CONTEXT)
    with TurboQuantPress(evicting()[name], bits=8, **OPTIONS)(model):
        found = logits_of(model, packed, IDS, context=CONTEXT)
    assert evicted.get_seq_length() == packed.get_seq_length() == CONTEXT // 2 + IDS.shape[1] - CONTEXT
    assert all(isinstance(layer, TurboQuantLayer) for layer in packed.layers)
    assert relative_error(found, exact) < 0.05


def test_a_press_that_evicts_while_decoding() -> None:
    """Its hook tells a context from a generated token by `cache_position`."""
    model, tiny = MODELS["llama"].build(), MODELS["llama"]
    cache = exact_cache(model, tiny)
    press = kvpress.DecodingPress(base_press=kvpress.KnormPress(), compression_interval=4, target_size=20)
    with patched_kvpress(model), press(model):
        logits_of(model, cache, IDS, context=CONTEXT)
    assert cache.get_seq_length() == 20


def test_plain_presses_work_with_a_packed_cache() -> None:
    model = MODELS["llama"].build()
    cache = TurboQuantCache(bits=8, config=model.config, **OPTIONS)
    with patched_kvpress(model), kvpress.KnormPress(0.5)(model):
        logits_of(model, cache, IDS, context=CONTEXT)
    assert cache.get_seq_length() == CONTEXT // 2 + IDS.shape[1] - CONTEXT
