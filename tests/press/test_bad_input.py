"""What bad input gets: an error of ours that names the remedy, and a model and a cache that are as they were."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest
import torch
from kvpress import ComposedPress, DecodingPress, KnormPress, SnapKVPress, ThinKPress
from packed_support import contents, copies, ids, same, small_llama
from transformers import DynamicCache, StaticCache

from tq_offload import press as press_module
from tq_offload.errors import CacheTypeError, ConfigError, LayoutError, NonFiniteError, PressOrderError
from tq_offload.hf_compat import patched_kvpress
from tq_offload.kv_cache import TurboQuantCache, TurboQuantLayer
from tq_offload.press import TurboQuantPress

CONTEXT = 300


@pytest.fixture(scope="module")
def model() -> Any:
    return small_llama()


@pytest.fixture(autouse=True)
def _no_hooks_are_left(model: Any) -> Any:
    yield
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def run(model: Any, press: Any, cache: Any, prompt: torch.Tensor | None = None, **settings: Any) -> Any:
    with torch.no_grad(), patched_kvpress(model), press(model):
        return model(ids(CONTEXT) if prompt is None else prompt, past_key_values=cache, **settings)


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"bits": 0}, "bits"), ({"bits": 9}, "bits"), ({"bits": 3.5}, "bits"), ({"bits": "int4"}, "bits"),
        ({"key_bits": -1}, "key_bits"), ({"value_bits": True}, "value_bits"), ({"preset": "kivi"}, "preset"),
        ({"preset": 4}, "preset"), ({"window": -1}, "window"), ({"window": 0.1}, "window"),
        ({"window": "128"}, "window"), ({"sink_tokens": None}, "sink_tokens"), ({"chunk_tokens": 8}, "chunk_tokens"),
    ],
)  # fmt: skip
def test_settings_that_are_not_understood(settings: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError, match=name) as raised:
        TurboQuantPress(**settings)
    assert "allowed" in str(raised.value)


def test_settings_that_are_changed_later(model: Any) -> None:
    press = TurboQuantPress()
    press.bits = 12
    with pytest.raises(ConfigError, match="bits=12"):
        run(model, press, DynamicCache())


@pytest.mark.parametrize("inner", [0.5, "snapkv", SnapKVPress, [SnapKVPress(0.5)]])
def test_what_is_no_press(inner: Any) -> None:
    with pytest.raises(CacheTypeError, match=r"give an instance, such as SnapKVPress\(0.5\)"):
        TurboQuantPress(press=inner)


@pytest.mark.parametrize(
    "inner", [TurboQuantPress(), ComposedPress([SnapKVPress(0.5), TurboQuantPress()])], ids=["press", "composed"]
)
def test_packing_twice(inner: Any) -> None:
    with pytest.raises(CacheTypeError, match="use one TurboQuantPress, around the other presses"):
        TurboQuantPress(press=inner)


@pytest.mark.parametrize("second", [SnapKVPress(0.5), ThinKPress(0.5)])
def test_packing_before_a_press_that_needs_exact_tensors(model: Any, second: Any) -> None:
    with pytest.raises(PressOrderError, match="put TurboQuantPress last in ComposedPress, or around the other press"):
        run(model, ComposedPress([TurboQuantPress(), second]), DynamicCache())


def test_compress_is_not_its_way(model: Any) -> None:
    with pytest.raises(CacheTypeError, match="through its hook"):
        TurboQuantPress().compress(model, None, None, None, None, {})


def test_presses_that_the_pipeline_would_not_see(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        TurboQuantPress(press=DecodingPress(KnormPress()))
    assert "cache=TurboQuantCache()" in caplog.text


def test_a_static_cache(model: Any) -> None:
    cache = StaticCache(config=model.config, max_cache_len=512)
    with pytest.raises(CacheTypeError, match=r"use DynamicCache\(\) or TurboQuantCache\(\)"):
        run(model, TurboQuantPress(), cache)
    with pytest.raises(CacheTypeError, match="neither cache_implementation"), TurboQuantPress()(model):
        model.generate(ids(20), max_new_tokens=2, cache_implementation="static")


def test_a_quantized_cache(model: Any) -> None:
    """transformers' own, without its optional backends: a layer that quantises by rounding."""
    from transformers.cache_utils import QuantizedLayer

    class Rounding(QuantizedLayer):
        def _quantize(self, tensor: torch.Tensor, axis: int) -> torch.Tensor:
            return tensor.round()

        def _dequantize(self, q_tensor: torch.Tensor) -> torch.Tensor:
            return q_tensor

    cache = DynamicCache()
    cache.layers = [Rounding() for _ in range(3)]
    with pytest.raises(CacheTypeError, match=r"Rounding cannot be packed: use DynamicCache\(\)"):
        run(model, TurboQuantPress(), cache)


def test_a_model_without_layers() -> None:
    with pytest.raises(CacheTypeError, match=r"Linear has no model.layers: give TurboQuantCache\(\)"):
        TurboQuantPress()(torch.nn.Linear(2, 2)).__enter__()


def test_a_model_in_float64() -> None:
    wide = small_llama(dtype=torch.float64)
    with pytest.raises(LayoutError, match="load the model in bfloat16, float16 or float32"):
        run(wide, TurboQuantPress(), DynamicCache())
    assert not any(m._forward_hooks for m in wide.modules())


def test_a_cache_without_layers_is_said_once(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    class Strange:
        """As the caches of some models with their own code."""

    press_module._warn_once.cache_clear()
    kwargs = {"past_key_values": Strange(), "hidden_states": torch.zeros(1, 1, 4)}
    with caplog.at_level(logging.WARNING):
        for layer in model.model.layers:
            assert TurboQuantPress().forward_hook(layer.self_attn, [], kwargs, ["out"]) == ["out"]
    assert caplog.text.count("a Strange has no layers that could be replaced") == 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize(("projection", "side"), [("k_proj", "keys"), ("v_proj", "values")])
@pytest.mark.parametrize("press", [TurboQuantPress(), ComposedPress([TurboQuantPress()]), None], ids=str)
def test_nan_in_the_context_names_the_layer(bad: float, projection: str, side: str, press: Any) -> None:
    """Of layer 1, at a token that is packed. Layer 0 is sound."""
    model = small_llama()

    def break_it(_module: Any, _inputs: Any, out: torch.Tensor) -> torch.Tensor:
        out = out.clone()
        out[0, 60, 70] = bad
        return out

    handle = getattr(model.model.layers[1].self_attn, projection).register_forward_hook(break_it)
    cache = DynamicCache() if press else TurboQuantCache()
    if press:
        with pytest.raises(NonFiniteError, match=f"{side} of layer 1"), torch.no_grad(), press(model):
            model(ids(CONTEXT), past_key_values=cache)
    else:
        with pytest.raises(NonFiniteError, match=f"{side} of layer 1"), torch.no_grad():
            model(ids(CONTEXT), past_key_values=cache)
    handle.remove()
    layer = cache.layers[1]
    assert (~torch.isfinite(getattr(layer, side))).any(dim=3).nonzero()[:, 2].unique().tolist() == [60]
    assert torch.isfinite(contents_of(cache.layers[0])[0]).all()
    assert not any(m._forward_hooks for m in model.modules())
    cache.reset()
    with torch.no_grad(), TurboQuantPress()(model):
        model(ids(CONTEXT), past_key_values=cache)
    assert all(torch.isfinite(x).all() for x in contents(cache))


def contents_of(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return layer.keys, layer.values


def test_nan_while_decoding_leaves_the_context(model: Any) -> None:
    cache = DynamicCache()
    run(model, TurboQuantPress(), cache)
    before = copies(cache)

    def break_it(_module: Any, _inputs: Any, out: torch.Tensor) -> torch.Tensor:
        return torch.full_like(out, float("nan"))

    handle = model.model.layers[2].self_attn.v_proj.register_forward_hook(break_it)
    with torch.no_grad(), pytest.raises(NonFiniteError, match="values of layer 2"):
        model(ids(500), past_key_values=cache)
    handle.remove()
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[:, :, :CONTEXT], layer.values[:, :, :CONTEXT]
    assert same(copies(cache), before)
    with torch.no_grad():
        assert torch.isfinite(model(ids(5), past_key_values=cache).logits).all()


@pytest.mark.parametrize("tokens", [1, 2, 5, 123, 124, 125, 127, 128])
@pytest.mark.parametrize("inner", [None, KnormPress(0.0)])
def test_contexts_that_fit_the_exact_tokens(model: Any, tokens: int, inner: Any) -> None:
    cache, plain = DynamicCache(), DynamicCache()
    run(model, TurboQuantPress(press=inner), cache, ids(tokens))
    with torch.no_grad():
        model(ids(tokens), past_key_values=plain)
    assert same(contents(cache), contents(plain))
    assert all(isinstance(layer, TurboQuantLayer) for layer in cache.layers)


def test_nothing_happens_inside(model: Any) -> None:
    cache = DynamicCache()
    with TurboQuantPress()(model):
        pass
    assert len(cache.layers) == 0


@pytest.mark.parametrize("chunk", [16, 17, 1 << 20])
def test_chunk_sizes_at_the_ends(model: Any, chunk: int) -> None:
    cache = DynamicCache()
    run(model, TurboQuantPress(chunk_tokens=chunk, bits=8), cache)
    plain = DynamicCache()
    with torch.no_grad():
        model(ids(CONTEXT), past_key_values=plain)
    for found, wanted in zip(contents(cache), contents(plain), strict=True):
        assert (found - wanted).pow(2).mean() < 1e-3 * wanted.pow(2).mean()


def test_protected_layers(model: Any) -> None:
    for press in (
        TurboQuantPress(protect_first=2, protect_last=2),
        ComposedPress([TurboQuantPress(protect_first=2, protect_last=2)]),
    ):
        tall = small_llama(layers=5)
        cache = DynamicCache()
        run(tall, press, cache)
        assert [isinstance(layer, TurboQuantLayer) for layer in cache.layers] == [False, False, True, False, False]


def test_without_a_cache(model: Any) -> None:
    with torch.no_grad():
        wanted = model(ids(CONTEXT), use_cache=False).logits
        with TurboQuantPress(press=None)(model):
            assert torch.equal(model(ids(CONTEXT), use_cache=False).logits, wanted)
            out = model(ids(CONTEXT))
    assert torch.equal(out.logits, wanted)
    assert all(isinstance(layer, TurboQuantLayer) for layer in out.past_key_values.layers)


def test_errors_inside_leave_no_hooks(model: Any) -> None:
    cache = DynamicCache()

    def fail(*_args: Any) -> None:
        raise RuntimeError("mine")

    handle = model.lm_head.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="mine"), torch.no_grad(), TurboQuantPress(press=SnapKVPress(0.5))(model):
        model(ids(CONTEXT), past_key_values=cache)
    handle.remove()
    assert cache.get_seq_length() == CONTEXT // 2
    with torch.no_grad():
        assert torch.isfinite(model(ids(2), past_key_values=cache).logits).all()


def test_two_caches_in_two_threads(model: Any) -> None:
    """Each with its own context manager, on one model."""
    wanted, found = [], {}
    for seed in range(2):
        cache = DynamicCache()
        run(model, TurboQuantPress(), cache, ids(CONTEXT, seed=seed))
        wanted.append(copies(cache))

    def work(seed: int) -> None:
        for _ in range(3):
            cache = DynamicCache()
            run(model, TurboQuantPress(), cache, ids(CONTEXT, seed=seed))
            found[seed] = copies(cache)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(same(found[seed], wanted[seed]) for seed in range(2))


def test_presses_of_two_threads_keep_to_their_own_caches(model: Any) -> None:
    both_open, caches = threading.Barrier(2), {3: DynamicCache(), 8: DynamicCache()}

    def work(bits: int) -> None:
        with torch.no_grad(), TurboQuantPress(bits=bits)(model):
            both_open.wait(60)
            model(ids(CONTEXT), past_key_values=caches[bits])
            both_open.wait(60)

    threads = [threading.Thread(target=work, args=(bits,)) for bits in caches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for bits, cache in caches.items():
        assert [layer.options.spec.key_bits for layer in cache.layers] == [bits] * 3


def test_a_thread_without_a_press_uses_those_of_others(model: Any) -> None:
    """As when `generate` runs in a thread and its text is streamed."""
    cache = DynamicCache()
    with torch.no_grad(), TurboQuantPress()(model):
        thread = threading.Thread(target=lambda: model(ids(CONTEXT), past_key_values=cache))
        thread.start()
        thread.join()
    assert [type(layer) for layer in cache.layers] == [TurboQuantLayer] * 3
