"""Warnings at the start about settings that may cost quality."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tq_offload.integrations.lmcache import advice
from tq_offload.integrations.lmcache.log import logger
from tq_offload.integrations.lmcache.model_config import has_key_bias
from tq_offload.spec import PRESETS, CodecSpec


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[Any]:
    advice._warn.cache_clear()
    log = logger()  # LMCache's does not propagate
    log.addHandler(caplog.handler)
    yield lambda: [m for m in caplog.messages if "check" in m]
    log.removeHandler(caplog.handler)


@pytest.mark.parametrize(
    ("config", "biased"),
    [
        ({"model_type": "qwen2"}, True),
        ({"model_type": "qwen2_5_vl", "text_config": {"model_type": "qwen2_5_vl_text"}}, True),
        ({"model_type": "llava", "text_config": {"model_type": "qwen2"}}, True),
        ({"model_type": "llama", "attention_bias": True}, True),
        ({"model_type": "llama", "attention_bias": False}, False),
        ({"model_type": "qwen3", "attention_bias": False}, False),
        ({"model_type": "llama"}, False),
        ({}, False),
    ],
)
def test_models_with_biased_keys(config: dict[str, Any], biased: bool) -> None:
    assert has_key_bias(config) is biased


def test_a_biased_model_is_named_once_with_the_remedy(tmp_path: Path, lines: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    for _ in range(2):
        advice.advise_model(str(tmp_path), CodecSpec())
    assert len(lines()) == 1
    assert "TQ_OFFLOAD_PRESET=turboquant_robust" in lines()[0]


@pytest.mark.parametrize("spec", [PRESETS["turboquant_robust"], PRESETS["turboquant_k8v4"]])
def test_presets_that_hold_biased_keys(tmp_path: Path, lines: Any, spec: CodecSpec) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    advice.advise_model(str(tmp_path), spec)
    advice.advise_model(str(tmp_path / "missing"), CodecSpec())
    assert lines() == []


def test_risky_presets(lines: Any) -> None:
    advice.advise(PRESETS["turboquant"])
    assert lines() == []
    advice.advise(PRESETS["turboquant_3bit_nc"])
    assert len(lines()) == 1


def test_the_server_warns_when_it_sees_the_model(tier: Any, model: str, tools: Any, lines: Any) -> None:
    path = Path(model) / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": "qwen2"}))
    keys = tools.make_keys(model, 2)
    objects = tier.objects(keys)
    tools.fill(objects)
    assert tier.store(keys, objects)
    assert len(lines()) == 1
