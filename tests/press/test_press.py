"""`TurboQuantPress` swaps cache layers in place, around every kind of press, and keeps exact what it says it does."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kvpress
import pytest
import torch
from kvpress import (
    AdaKVPress,
    BasePress,
    ComposedPress,
    DMSPress,
    ExpectedAttentionPress,
    KeyRerotationPress,
    KnormPress,
    KVzipPress,
    SnapKVPress,
    StreamingLLMPress,
    ThinKPress,
)
from packed_support import contents, copies, ids, same, small_llama, unpacked, word_tokenizer
from transformers import DynamicCache

from tq_offload.errors import IncompatibleError
from tq_offload.hf_compat import installed, patched_kvpress
from tq_offload.kv_cache import TurboQuantCache, TurboQuantLayer, resident_bytes
from tq_offload.press import TurboQuantPress

CONTEXT = 300


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """With a tokenizer on disk, which KVzip loads by the model's name."""
    folder: Path = tmp_path_factory.mktemp("model")
    llama = small_llama()
    llama.config.save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    llama.config.name_or_path = str(folder)
    return llama


@pytest.fixture(autouse=True)
def _no_masked_keys(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.masked_key_indices = None


def prefill(model: Any, press: Any, tokens: int = CONTEXT, cache: Any = None, seed: int = 0) -> Any:
    cache = DynamicCache(config=model.config) if cache is None else cache
    with torch.no_grad(), patched_kvpress(model), press(model):
        model.model(input_ids=ids(tokens, seed=seed), past_key_values=cache)
    return cache


def logits(model: Any, cache: Any, tokens: int = 4, seed: int = 7) -> torch.Tensor:
    with torch.no_grad():
        position = torch.arange(CONTEXT, CONTEXT + tokens)[None]
        found: torch.Tensor = model(ids(tokens, seed=seed), past_key_values=cache, position_ids=position).logits
    return found


def hooks(model: Any) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_layers_are_swapped_in_place_and_stay(model: Any) -> None:
    cache, before = DynamicCache(config=model.config), hooks(model)
    layers = list(cache.layers)
    assert prefill(model, TurboQuantPress(), cache=cache) is cache
    assert type(cache) is DynamicCache
    assert all(isinstance(layer, TurboQuantLayer) for layer in cache.layers)
    assert not any(a is b for a, b in zip(layers, cache.layers, strict=True))
    assert [layer.last for layer in cache.layers] == [False, False, True]
    assert len({id(layer.workspace) for layer in cache.layers}) == 1
    assert hooks(model) == before
    plain = unpacked(cache)
    for seed in range(3):
        assert torch.equal(logits(model, cache, seed=seed), logits(model, plain, seed=seed))
    assert cache.get_seq_length() == CONTEXT + 12


def test_same_as_the_cache(model: Any) -> None:
    """The press and `TurboQuantCache` hold the same bytes for the same context."""
    cache = TurboQuantCache(config=model.config)
    with torch.no_grad():
        model(ids(CONTEXT), past_key_values=cache)
    assert same(copies(prefill(model, TurboQuantPress())), copies(cache))
    assert same(copies(prefill(model, TurboQuantPress(), cache=TurboQuantCache())), copies(cache))


def test_a_context_in_pieces_is_packed_as_one(model: Any) -> None:
    cache = DynamicCache()
    with torch.no_grad(), TurboQuantPress()(model):
        for at in range(0, 1000, 90):
            model.model(input_ids=ids(1000)[:, at : at + 90], past_key_values=cache)
    found = [[(type(r).__name__, r.length) for r in layer.store.runs] for layer in cache.layers]
    assert found == [[("PackedRun", 768), ("PackedRun", 108), ("ExactRun", 124)]] * 3


INNER: dict[str, Callable[[], BasePress]] = {
    "snapkv": lambda: SnapKVPress(0.5, window_size=16),
    "expected attention": lambda: ExpectedAttentionPress(0.4),
    "think": lambda: ThinKPress(0.5),
    "adakv": lambda: AdaKVPress(KnormPress(0.4)),
    "key rerotation": lambda: KeyRerotationPress(KnormPress(0.5)),
    "streaming": lambda: StreamingLLMPress(0.5),
    "kvzip": lambda: KVzipPress(0.4),
    "kvgrad": lambda: kvpress.KVgradPress(0.4),
    "kvcompose": lambda: kvpress.KVComposePress(compression_ratio=0.4),
    "kvcompose unstructured": lambda: kvpress.KVComposePress(compression_ratio=0.4, structured=False),
    "dms": lambda: DMSPress(KnormPress(), threshold=-8.0, sliding_window_size=32),
    "composed": lambda: ComposedPress([SnapKVPress(0.3), ThinKPress(0.3)]),
}
# What tells of a press that does nothing: the part of the tokens that is left, None where tokens are masked instead.
LEFT = {"snapkv": 0.5, "expected attention": 0.6, "key rerotation": 0.5, "streaming": 0.5}


def make(name: str) -> BasePress:
    for start, wanted in (("kvgrad", "KVgradPress"), ("kvcompose", "KVComposePress")):
        if name.startswith(start) and not hasattr(kvpress, wanted):
            pytest.skip(f"this kvpress has no {wanted}")
    if name == "kvgrad" and installed("transformers") >= (5, 24):
        with pytest.raises(IncompatibleError, match=r"5\.23"), TurboQuantPress(press=INNER[name]())(small_llama()):
            pass
        pytest.skip("kvpress's KVgradPress does not run with this transformers, and TurboQuantPress says so")
    return INNER[name]()


@pytest.mark.parametrize("name", INNER)
def test_around_another_press(model: Any, name: str) -> None:
    """With everything exact: the same K and V (in another order) and the same logits. With 8 bits: nearly so."""
    alone, tokens = prefill(model, make(name)), 1 if name == "kvcompose" else 4  # it leaves layers of other lengths
    masks = [copy.deepcopy(layer.self_attn.masked_key_indices) for layer in model.model.layers]
    wanted = logits(model, alone, tokens)
    exact = prefill(model, TurboQuantPress(press=make(name), window=1 << 20))
    assert all(isinstance(layer, TurboQuantLayer) for layer in exact.layers)
    lengths = [layer.get_seq_length() - tokens for layer in alone.layers]
    assert [layer.get_seq_length() for layer in exact.layers] == lengths
    if name in LEFT:
        assert exact.layers[0].get_seq_length() == int(CONTEXT * LEFT[name])
    for layer, mask in zip(model.model.layers, masks, strict=True):
        found = layer.self_attn.masked_key_indices
        assert (found is None) == (mask is None)
        assert found is None or all(torch.equal(a, b) for a, b in zip(found, mask, strict=True))
    assert torch.allclose(logits(model, exact, tokens), wanted, atol=2e-3)
    packed = prefill(model, TurboQuantPress(press=make(name), bits=8, window=16))
    assert all(any(type(r).__name__ == "PackedRun" for r in layer.store.runs) for layer in packed.layers)
    error = (logits(model, packed, tokens) - wanted).pow(2).mean() / wanted.pow(2).mean()
    assert error < (0.1 if name.startswith("kv") else 0.01)  # those run the model again, on what is packed by then


@pytest.mark.parametrize("window", [16, 124])
@pytest.mark.parametrize("composed", [False, True])
def test_sinks_and_recent_tokens_of_each_head_are_exact_after_an_eviction(
    model: Any, window: int, composed: bool
) -> None:
    """KnormPress leaves tokens in the order of their scores, others in every head."""
    plain = prefill(model, lambda _: contextlib.nullcontext())
    alone = prefill(model, KnormPress(0.4))
    inner = ComposedPress([KnormPress(0.4)]) if composed else KnormPress(0.4)
    cache = prefill(model, TurboQuantPress(press=inner, window=window, bits=2))
    out_of_order = 0
    for layer, twin, whole in zip(cache.layers, alone.layers, plain.layers, strict=True):
        for head in range(2):
            full = {tuple(k.tolist()): i for i, k in enumerate(whole.keys[0, head])}
            kept = [full[tuple(k.tolist())] for k in twin.keys[0, head]]
            out_of_order += kept != sorted(kept)
            sinks = sorted(i for i in kept if i < 4)
            recent = sorted(i for i in kept if i >= CONTEXT - window)
            for side in ("keys", "values"):
                found, exact = getattr(layer, side)[0, head], getattr(whole, side)[0, head]
                assert torch.equal(found[: len(sinks)], exact[sinks])
                assert torch.equal(found[len(found) - len(recent) :], exact[recent])
                others = [i for i in kept if i not in sinks and i not in recent]
                middle = found[len(sinks) : len(found) - len(recent)]
                assert (middle - exact[others]).pow(2).mean() < 0.3 * exact.pow(2).mean()
    assert out_of_order == 6


def test_last_in_a_composed_press(model: Any) -> None:
    """It comes after the eviction: tokens of an unknown order, so none are exact but the context itself is packed."""
    cache = prefill(model, ComposedPress([SnapKVPress(0.5), TurboQuantPress(bits=8)]))
    assert [layer.get_seq_length() for layer in cache.layers] == [CONTEXT // 2] * 3
    for layer in cache.layers:
        assert [type(run).__name__ for run in layer.store.runs] == ["PackedRun"]
        assert layer.store.sinks is None
    wanted = logits(model, prefill(model, SnapKVPress(0.5)))
    assert (logits(model, cache) - wanted).pow(2).mean() / wanted.pow(2).mean() < 0.01


def test_alone_in_a_composed_press(model: Any) -> None:
    assert same(copies(prefill(model, ComposedPress([TurboQuantPress()]))), copies(prefill(model, TurboQuantPress())))


def test_masks_of_head_wise_presses_need_the_wrapper(model: Any) -> None:
    press = TurboQuantPress(press=AdaKVPress(SnapKVPress(0.5)))
    assert press.compression_ratio == 0.5
    press.compression_ratio = 0.25
    assert press.press.press.compression_ratio == 0.25
    bare = TurboQuantPress()
    assert bare.compression_ratio == 0.0
    bare.compression_ratio = 0.5
    assert bare.compression_ratio == 0.0
    assert TurboQuantPress(press=DMSPress(KnormPress(), threshold=0.0)) is not None


@pytest.mark.parametrize("inside", [True, False])
def test_generating_packs_as_it_goes(model: Any, inside: bool) -> None:
    cache, prompt = DynamicCache(config=model.config), ids(CONTEXT)
    settings = {"do_sample": False, "max_new_tokens": 620, "past_key_values": cache}
    with TurboQuantPress()(model):
        if inside:
            model.generate(prompt, **settings)
        else:
            with torch.no_grad():
                model(prompt[:, :-1], past_key_values=cache)
    if not inside:
        model.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)
    assert cache.get_seq_length() == CONTEXT + 619
    runs = [(type(r).__name__, r.length) for r in cache.layers[1].store.runs]
    if inside:  # all of it is one context
        assert runs == [("PackedRun", 768), ("PackedRun", 27), ("ExactRun", 124)]
    else:  # the context's window stays
        assert runs == [("PackedRun", 175), ("ExactRun", 124), ("PackedRun", 256)]
        assert cache.layers[1].store.tail.length == 620 - 256
    assert torch.equal(logits(model, unpacked(cache)), logits(model, cache))


@pytest.mark.parametrize(
    "settings", [{"num_beams": 3}, {"do_sample": True}, {"num_return_sequences": 2, "num_beams": 2}]
)
def test_generate_inside(model: Any, settings: dict[str, Any]) -> None:
    """With everything exact the answers are those of the model alone."""
    answers = []
    for press in (None, TurboQuantPress(window=1 << 20)):
        torch.manual_seed(3)
        with press(model) if press else torch.no_grad():
            answers.append(model.generate(ids(60, rows=2), max_new_tokens=15, **settings))
    assert torch.equal(answers[0], answers[1])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_sinks_of_a_batch_with_padding_on_the_left(attention: str) -> None:
    model = small_llama(attention=attention)
    prompt, mask = ids(CONTEXT, rows=3), torch.ones(3, CONTEXT, dtype=torch.long)
    paddings = (0, 40, 150)
    for row, padding in enumerate(paddings):
        prompt[row, :padding], mask[row, :padding] = 0, 0
    cache, plain = DynamicCache(config=model.config), DynamicCache(config=model.config)
    with torch.no_grad():
        model(prompt, attention_mask=mask, past_key_values=plain)
    for _ in range(2):  # and once more after a reset
        with torch.no_grad(), TurboQuantPress(bits=2, window=20)(model):
            model(prompt, attention_mask=mask, past_key_values=cache)
        for layer, twin in zip(cache.layers, plain.layers, strict=True):
            alike = (layer.keys == twin.keys).all(dim=3).all(dim=1)
            for row, padding in enumerate(paddings):
                assert set(alike[row].nonzero().flatten().tolist()) >= {*range(padding, padding + 4)}
                assert not alike[row, padding + 4 : CONTEXT - 20].any()
        cache.reset()


def test_resident_bytes_at_4096_tokens() -> None:
    model = small_llama(128, layers=1, dtype=torch.bfloat16)
    full = 2 * 4096 * 2 * 128 * 2
    for press, ratio in (
        (TurboQuantPress(sink_tokens=0, window=0), 3.8),
        (TurboQuantPress(), 3.5),
        (TurboQuantPress(press=SnapKVPress(0.5), sink_tokens=0, window=0), 7.5),
        (ComposedPress([SnapKVPress(0.5), TurboQuantPress()]), 7.5),
    ):
        cache = prefill(model, press, 4096)
        assert full / resident_bytes(cache) >= ratio
        logits(model, cache, 1)
        assert full / resident_bytes(cache) >= ratio * 0.99
        assert cache.layers[0].workspace.nbytes == 0


def test_nothing_exact_is_held_by_press_or_model(model: Any) -> None:
    press = TurboQuantPress(press=SnapKVPress(0.5))
    idle = resident_bytes(model, press)
    cache = prefill(model, press, 1000)
    held = resident_bytes(cache)
    assert held - sum(layer.nbytes for layer in cache.layers) < 1000
    assert resident_bytes(model, press, cache) - idle - held < 1000


def test_a_cache_that_is_used_again_after_a_reset(model: Any) -> None:
    """The other press works on exact K and V the second time too, in layers that are packed ones already."""
    press = TurboQuantPress(press=KnormPress(0.5), bits=2)
    cache = prefill(model, press)
    before = copies(cache)
    cache.reset()
    assert same(copies(prefill(model, press, cache=cache)), before)


def test_copies_go_their_own_way(model: Any) -> None:
    cache = prefill(model, TurboQuantPress(press=SnapKVPress(0.5)))
    before = copies(cache)
    clone = copy.deepcopy(cache)
    for seed in range(100):
        logits(model, clone, 5, seed)
    assert same(copies(cache), before)
    assert torch.equal(
        logits(model, cache), logits(model, copy.deepcopy(prefill(model, TurboQuantPress(SnapKVPress(0.5)))))
    )


def test_a_second_context_behind_the_first(model: Any) -> None:
    cache = prefill(model, TurboQuantPress())
    first = contents(cache)
    prefill(model, TurboQuantPress(), 200, cache, seed=1)
    runs = [(type(r).__name__, r.length) for r in cache.layers[0].store.runs]
    assert cache.get_seq_length() == 500
    assert runs[-1] == ("ExactRun", 124)
    for before, after in zip(first, contents(cache), strict=True):
        assert torch.equal(after[:, :, :176], before[:, :, :176])  # never packed twice


def test_the_same_press_again_and_in_two_models(model: Any) -> None:
    press, other = TurboQuantPress(), small_llama(128, layers=2, seed=1)
    wanted = copies(prefill(model, press)), copies(prefill(other, press))
    first, second = DynamicCache(), DynamicCache()
    with torch.no_grad(), press(model), press(other):
        model(ids(CONTEXT), past_key_values=first)
        other(ids(CONTEXT), past_key_values=second)
    assert same(copies(first), wanted[0])
    assert same(copies(second), wanted[1])
    with torch.no_grad(), press(model), press(model):
        again = model(ids(CONTEXT)).past_key_values
    assert same(copies(again), wanted[0])
    assert hooks(model) == hooks(other) == 0


def test_a_new_model_each_time_for_gradients() -> None:
    """A pass with gradients through a packed past gives the new tokens the gradients of the unpacked K and V."""
    model, new, found = small_llama(), ids(6, seed=1), []
    cache = prefill(model, TurboQuantPress())
    for held in (unpacked(cache), cache):
        model(new, past_key_values=held, labels=new).loss.backward()
        found.append([p.grad.clone() for p in model.parameters()])
        model.zero_grad()
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in zip(*found, strict=True))
