"""The connector with which benchmarks run LMCache's in-process mode on a CPU: true K and V, whatever vLLM's order."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.skipif(importlib.util.find_spec("lmcache") is None, reason="LMCache is not installed"),
]

LAYERS, HEADS, HEAD_DIM, BLOCK, BLOCKS, TOKENS = 3, 2, 64, 32, 12, 150
DTYPES = [torch.bfloat16, torch.float32]


def new_caches(dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.zeros(BLOCKS, HEADS, BLOCK, 2 * HEAD_DIM, dtype=dtype) for _ in range(LAYERS)]


def slots() -> torch.Tensor:
    """150 tokens in blocks out of order, the last one not full."""
    return torch.cat([torch.arange(block * BLOCK, (block + 1) * BLOCK) for block in (7, 2, 11, 0, 5)])[:TOKENS]


def written_by_vllm(dtype: torch.dtype) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Paged caches as vLLM's CPU attention fills them, and what it was given: `[2, L, T, H*D]`."""
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    caches = new_caches(dtype)
    true = torch.randn(2, LAYERS, TOKENS, HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(1)).to(dtype)
    for layer, cache in enumerate(caches):
        k, v = cache.view(BLOCKS, HEADS, 2 * BLOCK, HEAD_DIM).chunk(2, dim=2)
        isa = _get_attn_isa(dtype, BLOCK, HEAD_DIM)
        ops.cpu_attn_reshape_and_cache(true[0, layer], true[1, layer], k, v, slots(), isa, 1.0, 1.0, "auto")
    return caches, true.flatten(3)


def memory_object(shape: torch.Size, dtype: torch.dtype, fmt: Any) -> Any:
    return SimpleNamespace(tensor=torch.zeros(shape, dtype=dtype), metadata=SimpleNamespace(fmt=fmt))


def metadata() -> Any:
    return SimpleNamespace(kv_shape=(LAYERS, 2, 64, HEADS, HEAD_DIM), use_mla=False)


@pytest.mark.parametrize("dtype", DTYPES)
def test_chunks_hold_true_kv_and_come_back(dtype: torch.dtype) -> None:
    from lmcache.v1.memory_management import MemoryFormat

    from benchmarks.cpu_gpu_connector import CPUConnector

    caches, true = written_by_vllm(dtype)
    connector, starts, ends = CPUConnector(metadata()), [0, 64, 128], [64, 128, TOKENS]
    objects = [
        memory_object(connector.get_shape(b - a), dtype, MemoryFormat.KV_2LTD)
        for a, b in zip(starts, ends, strict=True)
    ]
    connector.batched_from_gpu(objects, starts, ends, kvcaches=caches, slot_mapping=slots())
    assert torch.equal(torch.cat([one.tensor for one in objects], dim=2), true)

    copies = new_caches(dtype)
    CPUConnector(metadata()).batched_to_gpu(objects, starts, ends, kvcaches=copies, slot_mapping=slots())
    assert all(torch.equal(a, b) for a, b in zip(caches, copies, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_layerwise_in_as_many_steps_as_lmcache_takes(dtype: torch.dtype) -> None:
    from lmcache.v1.gpu_connector.utils import assert_layerwise_gpu_connector
    from lmcache.v1.memory_management import MemoryFormat

    from benchmarks.cpu_gpu_connector import CPULayerwiseConnector

    caches, true = written_by_vllm(dtype)
    connector, starts, ends = CPULayerwiseConnector(metadata()), [0, 64], [64, TOKENS]
    assert_layerwise_gpu_connector(connector)
    objects = [
        [
            memory_object(connector.get_shape(b - a), dtype, MemoryFormat.KV_T2D)
            for a, b in zip(starts, ends, strict=True)
        ]
        for _ in range(LAYERS)
    ]
    assert len(list(connector.batched_from_gpu(objects, starts, ends, kvcaches=caches, slot_mapping=slots()))) == (
        LAYERS + 1
    )
    for layer in range(LAYERS):
        found = torch.cat([one.tensor for one in objects[layer]])
        assert torch.equal(found.transpose(0, 1), true[:, layer])

    copies = new_caches(dtype)
    loading: Any = CPULayerwiseConnector(metadata()).batched_to_gpu(starts, ends, kvcaches=copies, slot_mapping=slots())
    next(loading)
    for layer in range(LAYERS):
        loading.send(objects[layer])
    next(loading)
    assert all(torch.equal(a, b) for a, b in zip(caches, copies, strict=True))


def test_another_engine_is_refused() -> None:
    from lmcache.utils import EngineType

    from benchmarks.cpu_gpu_connector import create

    with pytest.raises(ValueError, match="vLLM without MLA"):
        create(SimpleNamespace(use_layerwise=False), metadata(), EngineType.SGLANG)
