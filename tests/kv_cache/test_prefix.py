"""What is saved is loaded bit by bit, and goes on as the saved cache would."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_support import contents, ids, kv, parts, same, small_llama
from transformers import DynamicCache
from transformers.cache_utils import DynamicSlidingWindowLayer

from tq_offload.codec import TurboQuantCodec
from tq_offload.errors import CacheTypeError, ConfigError, LayoutError
from tq_offload.kv_cache import TurboQuantCache, resident_bytes
from tq_offload.prefix import PrefixInfo, load_prefix, save_prefix
from tq_offload.spec import CodecSpec
from tq_offload_connectors.memory import MemoryStore

SPECS = {
    "4 bits": CodecSpec(),
    "K3 V8": CodecSpec(key_bits=3, value_bits=8, value_rule="norm"),
    "K8 V3": CodecSpec(key_bits=8, value_bits=3, key_rule="unbiased", seed=7),
    "QJL": CodecSpec(key_bits=3, qjl=True),
    "outliers": CodecSpec(key_outliers=4),
    "no means": CodecSpec(mean=False, fit_range=False),
}


def store() -> MemoryStore:
    return MemoryStore(1 << 30)


def filled(spec: CodecSpec, *, tokens: int, **form: Any) -> TurboQuantCache:
    cache = TurboQuantCache(spec, chunk_tokens=64, window=20)
    for index in range(2):
        cache.update(*kv(tokens, seed=index, **form), index)
    return cache


def state(layer: Any) -> list[Any]:
    """Everything that decides what a packed layer does next, but its tensors."""
    held = layer.store
    sinks = None if held.sinks is None else (held.sinks.starts, held.sinks.counts)
    runs = [(type(run), run.length, getattr(run.keys, "params", None)) for run in held.runs]
    flags = layer.waiting, layer._fresh, layer.last, layer.is_initialized
    return [layer.options, layer.dtype, held.length, held.starts, sinks, runs, held.tail is None, flags]


def assert_same(loaded: Any, saved: Any) -> None:
    assert len(loaded.layers) == len(saved.layers)
    for new, old in zip(loaded.layers, saved.layers, strict=True):
        assert state(new) == state(old)
        assert same(parts(new.store), parts(old.store))
    assert same(contents(loaded), contents(saved))


def there_and_back(cache: Any, **given: Any) -> tuple[TurboQuantCache, PrefixInfo]:
    kept = store()
    info = save_prefix(kept, cache, "prompt", model="m", **given)
    loaded = load_prefix(kept, "prompt", model="m", strict=True)
    assert loaded is not None
    assert set(info.entries) == set(kept.keys())
    assert info.nbytes == kept.usage().nbytes
    return loaded, info


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_every_setting(spec: CodecSpec, dtype: torch.dtype) -> None:
    cache = filled(spec, tokens=300, rows=2, dtype=dtype)
    loaded, info = there_and_back(cache)
    assert_same(loaded, cache)
    assert (info.tokens, info.context_length, loaded.context_length) == (300, 300, 300)
    for held in (cache, loaded):  # the next tokens are packed alike
        for index in range(2):
            held.update(*kv(100, rows=2, dtype=dtype, seed=5 + index), index)
    assert_same(loaded, cache)


def test_mla_and_large_batches() -> None:
    cache = TurboQuantCache(chunk_tokens=64, window=8)
    keys, _ = kv(130, rows=37, heads=1, dim=192, seed=1)
    _, values = kv(130, rows=37, heads=1, dim=128, seed=2)
    cache.update(keys, values, 0)
    cache.pack()
    loaded, _ = there_and_back(cache)
    assert_same(loaded, cache)
    assert loaded.layers[0].values.shape == (37, 1, 130, 128)


def test_the_codec_reads_the_frames() -> None:
    """They are frames of the wire format: planes are chunks, vectors are rows and heads."""
    spec, kept = SPECS["K3 V8"], store()
    cache = filled(replace(spec, qjl=True), tokens=148, rows=3)  # two chunks and a window of 20
    info = save_prefix(kept, cache, "k", model="m")
    for name, whole in zip(info.entries, contents(cache), strict=False):
        decoded = TurboQuantCodec().decode(kept.get(name))[0]
        packed = decoded.view(2, 64, 3, 2, 64).permute(2, 3, 0, 1, 4).reshape(3, 2, 128, 64)
        assert torch.equal(packed[:, :, 4:], whole[:, :, 4:128])  # the sinks are exact


def test_left_padding() -> None:
    for tokens in (200, 20):  # packed, and all exact as yet
        cache = TurboQuantCache(chunk_tokens=64, window=20)
        cache.update(*kv(tokens, rows=3), 0)
        cache.layers[0].store.starts = (5, 0, 11)
        loaded, _ = there_and_back(cache)
        assert loaded.layers[0].store.starts == (5, 0, 11)
        assert_same(loaded, cache)
        loaded.crop(8 - tokens)
        cache.crop(8 - tokens)
        assert_same(there_and_back(loaded)[0], cache)


def test_bytes_are_those_of_the_cache() -> None:
    cache = TurboQuantCache()
    for index in range(4):
        cache.update(*kv(4096, heads=4, dim=128, dtype=torch.bfloat16, seed=index), index)
    loaded, info = there_and_back(cache)
    assert cache.nbytes <= info.nbytes < 1.001 * cache.nbytes
    assert info.elements == 4 * 2 * 4 * 4096 * 128
    assert 4.2 < info.bits < 4.7  # 4 bits, scales, means, and 128 exact tokens of 4096
    assert resident_bytes(loaded) < 1.001 * cache.nbytes


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_history(data: st.DataObject) -> None:
    rows, heads = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    dim = data.draw(st.sampled_from([1, 5, 16, 64, 80]))
    cache = TurboQuantCache(
        bits=data.draw(st.integers(1, 8)),
        qjl=data.draw(st.booleans()),
        key_outliers=data.draw(st.sampled_from([0, 3])),
        sink_tokens=data.draw(st.integers(0, 6)),
        window=data.draw(st.integers(0, 40)),
        chunk_tokens=data.draw(st.sampled_from([16, 64])),
    )
    for seed in range(data.draw(st.integers(1, 5))):
        tokens = data.draw(st.integers(1, 90))
        held = kv(tokens, rows=rows, heads=heads, dim=dim, seed=seed)
        cache.update(*held, 0)
        action = data.draw(st.sampled_from(["", "crop", "select", "finish"]))
        length = cache.get_seq_length()
        if action == "crop":
            cache.layers[0]._crop_to(data.draw(st.integers(1, length)))
        elif action == "select":
            cache.layers[0].reorder_cache(torch.randint(0, rows, (rows,)))
        elif action == "finish":
            cache.layers[0].finish()
    loaded, _ = there_and_back(cache)
    assert_same(loaded, cache)
    more = kv(data.draw(st.integers(1, 90)), rows=rows, heads=heads, dim=dim, seed=99)
    first, second = cache.update(*more, 0), loaded.update(*more, 0)
    assert same(list(first), list(second))
    assert_same(loaded, cache)


def test_long_chats_take_several_frames() -> None:
    cache = TurboQuantCache(chunk_tokens=64, window=0, sink_tokens=0)
    for turn in range(270):
        cache.update(*kv(16 + turn % 2, heads=1, dim=16, seed=turn), 0)
        cache.layers[0].finish()
    runs = len(cache.layers[0].store.runs)
    assert runs > 256
    loaded, info = there_and_back(cache)
    assert_same(loaded, cache)
    assert len(info.entries) == 5


def test_the_model_goes_on_alike() -> None:
    model = small_llama()
    cache = TurboQuantCache(config=model.config)
    with torch.no_grad():
        model(ids(500, rows=2), past_key_values=cache)
        model(ids(30, rows=2, seed=1), past_key_values=cache)
        loaded, _ = there_and_back(cache)
        assert_same(loaded, cache)
        for step in range(5):
            new = ids(1 + 60 * (step == 2), rows=2, seed=step + 2)
            assert torch.equal(model(new, past_key_values=cache).logits, model(new, past_key_values=loaded).logits)
    assert_same(loaded, cache)


def test_saving_leaves_the_cache_as_it_is_and_loading_shares_nothing() -> None:
    cache = filled(SPECS["QJL"], tokens=200)
    before = [part.clone() for layer in copy.deepcopy(cache).layers for part in parts(layer.store)]
    kept = store()
    save_prefix(kept, cache, "k", model="m")
    first, second = (load_prefix(kept, "k", model="m", strict=True) for _ in range(2))
    assert first is not None
    assert second is not None
    for layer in first.layers:
        for part in parts(layer.store):
            part.view(torch.uint8)[...] = 255
    assert same([part for layer in cache.layers for part in parts(layer.store)], before)
    assert same([part for layer in second.layers for part in parts(layer.store)], before)


def test_layers_that_are_not_packed_stay_exact() -> None:
    cache = TurboQuantCache(replace(CodecSpec(), protect_first=1, protect_last=1), config=small_llama(layers=4).config)
    cache.layers[2] = DynamicSlidingWindowLayer(sliding_window=33)
    for index in range(3):  # the last one stays empty
        cache.update(*kv(200, seed=index), index)
    loaded, info = there_and_back(cache)
    assert [type(layer) for layer in loaded.layers] == [type(layer) for layer in cache.layers]
    assert same(contents_of_filled(loaded), contents_of_filled(cache))
    assert loaded.layers[2].sliding_window == 33
    assert loaded.layers[2].get_seq_length() == 200
    assert loaded.options == cache.options
    assert loaded.get_seq_length() == info.tokens == 200
    for index in range(4):
        more = kv(40, seed=7 + index)
        assert same(list(cache.update(*more, index)), list(loaded.update(*more, index)))


def contents_of_filled(cache: Any) -> list[torch.Tensor]:
    return [x.clone() for layer in cache.layers if layer.is_initialized for x in (layer.keys, layer.values)]


def test_an_exact_cache_can_be_stored() -> None:
    cache = DynamicCache()
    cache.update(*kv(50, dtype=torch.bfloat16), 0)
    loaded, info = there_and_back(cache, context_length=80)
    assert same(contents(loaded), contents(cache))
    assert loaded.context_length == 80
    assert (info.tokens, info.context_length) == (50, 80)


def test_what_cannot_be_stored() -> None:
    with pytest.raises(LayoutError, match="no tokens"):
        save_prefix(store(), TurboQuantCache(), "k", model="m")
    with pytest.raises(CacheTypeError, match=r"use TurboQuantCache"):
        save_prefix(store(), object(), "k", model="m")
    cache = filled(SPECS["4 bits"], tokens=40)
    for length in (39, 40.0, True, 1 << 60):
        with pytest.raises(ConfigError, match="at least 40"):
            save_prefix(store(), cache, "k", model="m", context_length=length)
    cache.layers[1].keys = cache.layers[1].keys + 1
    cache.layers[1].values = cache.layers[1].values[:, :, :9]
    kept = store()
    with pytest.raises(LayoutError, match="layer 1"):
        save_prefix(kept, cache, "k", model="m")
    assert list(kept.keys()) == []


def test_states_of_linear_attention_are_refused() -> None:
    kinds = pytest.importorskip("transformers.cache_utils")
    if not hasattr(kinds, "LinearAttentionLayer"):
        pytest.skip("this transformers has no such layers")
    cache = filled(SPECS["4 bits"], tokens=40)
    cache.layers.append(kinds.LinearAttentionLayer())
    with pytest.raises(CacheTypeError, match="LinearAttentionLayer"):
        save_prefix(store(), cache, "k", model="m")


def test_token_ids_must_be_those_of_the_cache() -> None:
    cache = TurboQuantCache(window=8, sink_tokens=0, chunk_tokens=32)
    cache.update(torch.randn(1, 2, 90, 16), torch.randn(1, 2, 90, 16), 0)
    store = MemoryStore(1 << 20)
    with pytest.raises(ConfigError, match="90 tokens"):
        save_prefix(store, cache, list(range(80)), model="m")
    with pytest.raises(ConfigError, match="context_length"):
        save_prefix(store, cache, list(range(100)), model="m")
    assert save_prefix(store, cache, list(range(100)), model="m", context_length=100).context_length == 100
    assert save_prefix(store, cache, list(range(90)), model="m").context_length == 90
