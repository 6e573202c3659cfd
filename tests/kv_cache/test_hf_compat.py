"""The compatibility module, on the transformers that is installed."""

from __future__ import annotations

import importlib.metadata
import logging
import subprocess
import sys
from typing import Any

import pytest
import torch
from kv_cache.tiny_models import MODELS, PACKABLE, TRANSFORMERS, exact_cache, generated, prompt
from transformers import DynamicCache, StaticCache, cache_utils

from tq_offload import hf_compat
from tq_offload.errors import IncompatibleError
from tq_offload.hf_compat import (
    attention_modules,
    check_versions,
    complete_hook_kwargs,
    hook_cache,
    installed,
    layer_kind,
    model_keyword,
    patched_kvpress,
)  # fmt: skip


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Set what is said to be installed."""

    def set_versions(**found: str | None) -> None:
        def version(package: str) -> str:
            value = found.get(package)
            if value is None:
                raise importlib.metadata.PackageNotFoundError(package)
            return value

        monkeypatch.setattr(importlib.metadata, "version", version)
        installed.cache_clear()
        check_versions.cache_clear()

    yield set_versions
    monkeypatch.undo()
    installed.cache_clear()
    check_versions.cache_clear()


@pytest.mark.parametrize(
    ("found", "text"),
    [
        ({"transformers": "4.56.2", "kvpress": "0.5.5"}, "transformers 4.56.2 is installed; tested: 4.57 to 5.24"),
        ({"transformers": "5.2.0", "kvpress": "0.5.1"}, "kvpress 0.5.1 is installed; tested: 0.5.2 to 0.5.5"),
        ({"transformers": "5.2.0"}, "kvpress is not installed"),
        ({"kvpress": "0.5.5"}, "transformers is not installed"),
    ],
)
def test_too_old_or_absent_is_one_clear_error(versions: Any, found: dict[str, str], text: str) -> None:
    versions(**found)
    with pytest.raises(IncompatibleError, match=text):
        check_versions()


def test_newer_than_tested_is_said_once(versions: Any, caplog: pytest.LogCaptureFixture) -> None:
    versions(transformers="5.25.0", kvpress="0.5.5")
    with caplog.at_level(logging.WARNING):
        check_versions()
        check_versions()
    assert [record.message for record in caplog.records] == ["transformers 5.25.0 is installed; tested: 4.57 to 5.24"]


@pytest.mark.parametrize("transformers", ["4.57.0", "4.57.6", "5.0.0", "5.24.3", "5.24.0.dev0"])
def test_supported_versions_pass_in_silence(versions: Any, caplog: pytest.LogCaptureFixture, transformers: str) -> None:
    versions(transformers=transformers, kvpress="0.5.2")
    check_versions()
    check_versions("transformers")
    assert not caplog.records


def test_importing_it_imports_neither_transformers_nor_kvpress() -> None:
    code = "import sys, tq_offload.hf_compat; print(sorted({'transformers', 'kvpress'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_all_is_what_there_is() -> None:
    assert all(hasattr(hf_compat, name) for name in hf_compat.__all__)


@pytest.mark.parametrize("name", PACKABLE)
def test_layer_kinds_of_dynamic_caches(name: str) -> None:
    model, words = MODELS[name].build(), {"full_attention": "full", "sliding_attention": "sliding"}
    kinds = [layer_kind(layer) for layer in exact_cache(model, MODELS[name]).layers]
    assert kinds == [words.get(layer, "linear") for layer in MODELS[name].layers]


def test_layer_kinds_of_other_caches() -> None:
    config = MODELS["gemma3"].build().config
    assert {layer_kind(layer) for layer in StaticCache(config=config, max_cache_len=32).layers} == {"static"}
    quantized = object.__new__(cache_utils.QuantoQuantizedLayer)  # its __init__ needs a backend
    assert layer_kind(quantized) == "quantized"
    assert layer_kind(object()) == "other"
    for name, kind in {
        "LinearAttentionAndFullAttentionLayer": "linear", "DynamicIndexedLayer": "other", "DummyLayer": "other"
    }.items():  # fmt: skip
        known = getattr(cache_utils, name, None)  # none of them before 5.5
        assert known is None or layer_kind(known()) == kind


def test_the_cache_is_found_under_either_name() -> None:
    cache = DynamicCache()  # empty, so not true
    assert hook_cache({"past_key_values": cache}) is hook_cache({"cache": cache, "past_key_values": None}) is cache
    assert hook_cache({}) is None


def test_the_keyword_of_a_model() -> None:
    assert model_keyword(MODELS["llama"].build()) == ("cache" if TRANSFORMERS >= (5, 24) else "past_key_values")


@pytest.mark.parametrize(
    ("positions", "tokens", "expected"),
    [
        ([[0, 1, 2]], 3, [0, 1, 2]),  # a context
        ([[1, 1, 0, 1], [0, 1, 2, 3]], 4, [0, 1, 2, 3]),  # one row with left padding
        ([[1, 1, 0, 1]], 4, [0, 1, 2, 3]),  # all rows with padding: still a context
        ([[7]], 1, [7]),  # a generated token, whatever has been evicted
        ([[5], [9]], 1, [9]),
    ],
)
def test_the_position_is_put_back(positions: list[list[int]], tokens: int, expected: list[int]) -> None:
    kwargs: dict[str, Any] = {"hidden_states": torch.zeros(1, tokens, 8), "position_ids": torch.tensor(positions)}
    complete_hook_kwargs(kwargs)
    assert kwargs["cache_position"].tolist() == expected
    assert "past_key_values" not in kwargs


def test_what_is_there_is_not_changed() -> None:
    given = {"cache_position": torch.tensor([3]), "past_key_values": DynamicCache()}
    kwargs = {"hidden_states": torch.zeros(1, 1, 8), "position_ids": torch.tensor([[9]]), **given}
    complete_hook_kwargs(kwargs)
    assert all(kwargs[name] is value for name, value in given.items())


@pytest.mark.parametrize("name", PACKABLE)
def test_hooks_see_what_kvpress_reads_and_nothing_is_left_behind(name: str) -> None:
    model, seen = MODELS[name].build(), []
    plain = generated(model, None, prompt(20))

    def hook(module: Any, _inputs: Any, kwargs: dict[str, Any], _output: Any) -> None:
        seen.append((module.layer_idx, kwargs["cache_position"].tolist(), kwargs["past_key_values"]))

    modules = attention_modules(model)
    assert len(modules) == sum(layer in ("full_attention", "sliding_attention") for layer in MODELS[name].layers)
    handles = [module.register_forward_hook(hook, with_kwargs=True) for module in modules]
    cache = exact_cache(model, MODELS[name])
    with patched_kvpress(model):
        assert torch.equal(generated(model, cache, prompt(20), tokens=8), plain)
    expected = [list(range(20)), *([at] for at in range(20, 27))]
    indices = [module.layer_idx for module in modules]
    assert [(index, position) for index, position, _ in seen] == [(i, step) for step in expected for i in indices]
    assert all(held is cache for *_, held in seen)
    for handle in handles:
        handle.remove()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_the_old_keyword_works_without_a_warning() -> None:
    """Warnings are errors here; kvpress's pipeline calls the model with `past_key_values`."""
    model, cache = MODELS["llama"].build(), DynamicCache()
    with patched_kvpress(model), torch.no_grad():
        model(prompt(5), past_key_values=cache)
        model.model(input_ids=prompt(5), past_key_values=cache)
    assert cache.get_seq_length() == 10


def test_a_press_that_replaces_the_forward_of_the_decoder_gets_the_cache_by_its_old_name() -> None:
    """As KVzip does, whoever calls the model and however."""
    model, cache, seen = MODELS["llama"].build(), DynamicCache(), []
    with patched_kvpress(model), torch.no_grad():
        original = model.model.forward

        def replaced(**kwargs: Any) -> Any:
            seen.append(kwargs["past_key_values"])
            return original(**kwargs)

        model.model.forward = replaced
        model(prompt(5), **{model_keyword(model): cache})
        model.model.forward = original
    assert seen == [cache]
    assert cache.get_seq_length() == 5
