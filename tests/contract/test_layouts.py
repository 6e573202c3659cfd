"""Which layout an object gets: head_dim and MLA from the model's config, never from dimension 0; else a safe one."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tq_offload.integrations.lmcache.layouts import LayoutResolver
from tq_offload.integrations.lmcache.model_config import HeadGeometry, ModelGeometry, geometry_of, load_geometry

BF16 = torch.bfloat16
LLAMA = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}
DEEPSEEK = {"hidden_size": 7168, "num_attention_heads": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
GEMMA = {
    "text_config": {
        "head_dim": 256, "num_attention_heads": 32, "num_key_value_heads": 16, "global_head_dim": 512,
        "num_global_key_value_heads": 4,
    }
}  # fmt: skip
QWEN_NEXT = {
    "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
    "layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 32,
}  # fmt: skip


def _group(
    config: dict[str, Any] | None, shape: tuple[int, ...], dtype: Any = BF16, world: int = 1, **kwargs: Any
) -> Any:
    resolver = LayoutResolver(load=lambda name: geometry_of(config) if config else None, **kwargs)
    resolver.models_known = True
    key = SimpleNamespace(model_name="m", kv_rank=world << 24)
    (group,) = resolver.resolve([shape], [dtype], key).groups
    return group.kind, group.head_dim


@pytest.mark.parametrize(
    ("config", "shape", "world", "expected"),
    [
        (LLAMA, (1, 32, 256, 8 * 256), 1, ("packed", 128)),
        (LLAMA, (32, 256, 8 * 256), 1, ("packed", 128)),
        (LLAMA, (1, 32, 256, 2 * 256), 4, ("packed", 128)),
        (LLAMA, (1, 32, 256, 1 * 256), 16, ("packed", 128)),
        (LLAMA, (2, 32, 256, 8 * 128), 1, ("kv_first", 128)),
        (LLAMA, (2, 256, 8 * 256), 1, ("packed", 128)),  # two layers, not K and V of one
        (LLAMA, (1, 32, 256, 3 * 256), 1, ("latent", 64)),  # 3 heads are no share of 8
        (LLAMA, (1, 32, 256, 200), 1, ("latent", 100)),
        (DEEPSEEK, (1, 61, 256, 576), 1, ("latent", 576)),
        (DEEPSEEK, (61, 256, 576), 8, ("latent", 576)),
        (DEEPSEEK, (1, 61, 256, 128), 1, ("latent", 64)),  # the indexer's cache
        (GEMMA, (1, 50, 256, 16 * 512), 1, ("packed", 256)),
        (GEMMA, (1, 10, 256, 4 * 1024), 1, ("packed", 512)),
        (GEMMA, (1, 50, 256, 8 * 512), 2, ("packed", 256)),
        (QWEN_NEXT, (1, 12, 256, 2 * 512), 1, ("packed", 256)),
        (QWEN_NEXT, (1, 36, 1, 12345), 1, ("opaque", 0)),  # recurrent state: bit-exact
        (None, (1, 32, 256, 2048), 1, ("latent", 64)),
        (None, (2, 32, 256, 1024), 1, ("kv_first", 64)),
        (LLAMA, (7, 9), 1, ("opaque", 0)),
    ],
)
def test_from_the_config(config: Any, shape: Any, world: int, expected: Any) -> None:
    assert _group(config, shape, world=world) == expected


def test_an_explicit_head_dim_wins() -> None:
    assert _group(LLAMA, (1, 32, 256, 2048), head_dim=64) == ("packed", 64)
    assert _group(None, (1, 32, 256, 2048), head_dim=128) == ("packed", 128)
    assert _group(None, (1, 61, 256, 576), head_dim=576) == ("latent", 576)
    assert _group(DEEPSEEK, (1, 61, 256, 576), head_dim=64) == ("latent", 64)
    assert _group(None, (1, 32, 256, 2048), head_dim=96) == ("latent", 64), "it does not divide the channels"


def test_uint8() -> None:
    assert _group(LLAMA, (1, 32, 256, 2048), torch.uint8) == ("opaque", 0)
    assert _group(LLAMA, (1, 32, 256, 2048), torch.uint8, uint8_as="float8_e5m2") == ("packed", 128)


def test_without_an_adapter_the_model_is_not_used() -> None:
    """LMCache's own wrapper asks for the size without a key: size and frame must agree."""
    resolver = LayoutResolver(load=lambda name: geometry_of(LLAMA))
    key = SimpleNamespace(model_name="m", kv_rank=1 << 24)
    shape = (1, 32, 256, 2048)
    assert resolver.resolve([shape], [BF16], key) == resolver.resolve([shape], [BF16])


def test_the_key_of_the_thread_is_forgotten_afterwards() -> None:
    resolver = LayoutResolver(load=lambda name: geometry_of(LLAMA))
    resolver.models_known = True
    shape = (1, 32, 256, 2048)
    with resolver.for_key(SimpleNamespace(model_name="m", kv_rank=1 << 24)):
        assert resolver.resolve([shape], [BF16]).groups[0].kind == "packed"
    assert resolver.resolve([shape], [BF16]).groups[0].kind == "latent"


def test_an_unknown_head_dim_is_said_once_with_the_setting(caplog: pytest.LogCaptureFixture) -> None:
    from tq_offload.integrations.lmcache.log import logger

    logger().addHandler(caplog.handler)
    try:
        resolver = LayoutResolver(load=lambda name: None)
        resolver.models_known = True
        for world in (1, 2):
            resolver.resolve([(1, 2, 64, 256)], [BF16], SimpleNamespace(model_name="some/model", kv_rank=world << 24))
    finally:
        logger().removeHandler(caplog.handler)
    messages = {r.getMessage() for r in caplog.records}
    assert len(messages) == 1
    assert "head_dim of model 'some/model' is not known" in messages.pop()


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LLAMA, ModelGeometry((HeadGeometry(128, 8),))),
        ({"n_embd": 768, "n_head": 12}, ModelGeometry((HeadGeometry(64, 12),))),
        ({"hidden_size": 4544, "num_attention_heads": 71, "multi_query": True}, ModelGeometry((HeadGeometry(64, 1),))),
        ({"head_dim": 64, "num_key_value_heads": [3, 4, 4]}, ModelGeometry((HeadGeometry(64, None),))),
        (DEEPSEEK, ModelGeometry((), 576)),
        ({"kv_lora_rank": None, **LLAMA}, ModelGeometry((HeadGeometry(128, 8),))),
        (GEMMA, ModelGeometry((HeadGeometry(256, 16), HeadGeometry(512, 4)))),
        ({"vision_config": {"hidden_size": 10}, "text_config": LLAMA}, ModelGeometry((HeadGeometry(128, 8),))),
        ({"hidden_size": 100, "num_attention_heads": 3}, None),
        ({"head_dim": True}, None),
        ({}, None),
    ],
)
def test_geometry(config: Any, expected: Any) -> None:
    assert geometry_of(config) == expected


def test_recurrent_layers_are_seen() -> None:
    geometry = geometry_of(QWEN_NEXT)
    assert geometry is not None
    assert geometry.recurrent


def test_configs_are_found_locally_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert load_geometry(str(tmp_path)) == geometry_of(LLAMA)
    assert load_geometry(f"{tmp_path}##lmcache-dcp-layout-v1-d2-interleave1") == geometry_of(LLAMA)
    assert load_geometry(f"{tmp_path}##query") is None, "queries are no KV"
    (tmp_path / "config.json").write_text("{broken")
    assert load_geometry(str(tmp_path)) is None
    assert load_geometry("not a repository id!") is None
    assert load_geometry("no-such-org/no-such-model") is None
    assert load_geometry("x" * 10_000) is None

    hub = tmp_path / "hub"
    snapshot = hub / "models--org--name" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(LLAMA))
    refs = hub / "models--org--name" / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub))
    assert load_geometry("org/name") == geometry_of(LLAMA)


@pytest.mark.parametrize(("dtype", "text"), [(torch.uint8, "set TQ_OFFLOAD_UINT8_AS"), (torch.int8, "no codec")])
def test_kv_of_one_byte_that_is_stored_as_it_is_is_said_once_for_each_model(
    dtype: torch.dtype, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    from tq_offload.integrations.lmcache.log import logger

    logger().addHandler(caplog.handler)
    try:
        resolver = LayoutResolver(load=lambda name: geometry_of(LLAMA))
        resolver.models_known = True
        for model in ("a", "b"):
            for tokens in (256, 128):
                shapes = [(2, 32, tokens, 1024), (32, tokens, 2048)]
                resolver.resolve(shapes, [dtype] * 2, SimpleNamespace(model_name=model, kv_rank=1 << 24))
        resolver.resolve([(64,)], [dtype], SimpleNamespace(model_name="c", kv_rank=1 << 24))
        told = LayoutResolver(uint8_as="float8_e4m3fn", load=lambda name: geometry_of(LLAMA))
        told.resolve([(2, 32, 256, 1024)], [torch.uint8])
    finally:
        logger().removeHandler(caplog.handler)
    messages = [r.getMessage() for r in caplog.records if "stored as they are" in r.getMessage()]
    assert len(messages) == 2
    assert all(f"of model {model!r}" in message for model, message in zip("ab", messages, strict=True))
    assert all(text in message for message in messages)
    if dtype == torch.uint8:
        assert "float8_e4m3fn or float8_e5m2" in messages[0]
