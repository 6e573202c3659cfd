"""LMCache's in-process mode on a CPU: the copy between vLLM's paged KV cache in RAM and LMCache's memory objects.

LMCache has such a `GPUConnectorInterface` for every accelerator, but none for CPU. This one is for benchmarks and tests
only. vLLM keeps, per layer, ``[blocks, H, N, 2*D]`` with H KV heads, blocks of N tokens and head dim D. Inside a block
and head K comes first and then V, each of N*D elements in an order that suits the attention kernel of this CPU (K as
``[D, N]`` and V as ``[N, D]`` without AMX). The order is found out by letting vLLM write numbered elements, so that the
memory objects hold true K and V: KV_2LTD ``[2, L, T, H*D]``, layerwise KV_T2D ``[T, 2, H*D]``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from lmcache.utils import EngineType
from lmcache.v1.gpu_connector.gpu_connectors import GPUConnectorInterface, VLLMPagedMemLayerwiseGPUConnector
from lmcache.v1.memory_management import MemoryFormat, MemoryObj
from lmcache.v1.metadata import LMCacheMetadata

__all__ = ["CPUConnector", "CPULayerwiseConnector", "PagedCache", "create", "element_order"]

_DIGIT = 256  # bf16 and fp16 hold every integer up to here


class PagedCache:
    """The KV caches of all layers, addressed by slots: slot s is token s % N of block s // N."""

    def __init__(self, layers: Sequence[torch.Tensor]) -> None:
        self.layers = [layer.view(-1) for layer in layers]  # fails, rather than copies, where one is not contiguous
        _, self.num_kv_heads, self.block_tokens, double = layers[0].shape
        if len({layer.shape[1:] for layer in layers}) != 1:
            raise ValueError(f"layers of different shapes: {sorted({tuple(layer.shape[1:]) for layer in layers})}")
        self.head_dim = double // 2
        self._order = element_order(self.block_tokens, self.head_dim, layers[0].dtype)

    def places(self, slots: torch.Tensor) -> torch.Tensor:
        """Where the elements of these slots are in a flattened layer: ``[2, T, H*D]``, K and then V."""
        block, token = slots // self.block_tokens, slots % self.block_tokens
        span = self.block_tokens * self.head_dim
        run = (block[:, None] * self.num_kv_heads + torch.arange(self.num_kv_heads)) * 2  # [T, H], in runs of N*D
        k, v = (
            (run[..., None] + which) * span + self._order[which].view(self.block_tokens, 1, self.head_dim)[token]
            for which in (0, 1)
        )
        return torch.stack([k.flatten(1), v.flatten(1)])

    def read(self, layer: int, places: torch.Tensor, out: torch.Tensor) -> None:
        """Copy the elements at `places` into `out`, of the same shape."""
        out.copy_(torch.take(self.layers[layer], places))

    def write(self, layer: int, places: torch.Tensor, values: torch.Tensor) -> None:
        """Copy `values` to `places`."""
        self.layers[layer].put_(places, values)


def element_order(block_tokens: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Where vLLM's CPU attention keeps element (token, channel) of a block and head: ``[2, N*D]``, K and then V.

    Found by letting vLLM store the number of each element, one digit after the other.

    Raises:
        RuntimeError: What vLLM stored is not a rearrangement of what it was given.
    """
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    span = block_tokens * head_dim
    numbers, found, weight = torch.arange(span), torch.zeros(2, span, dtype=torch.int64), 1
    while weight < span:
        digit = (numbers // weight % _DIGIT).to(dtype).view(block_tokens, 1, head_dim)
        k, v = torch.zeros(1, 1, 2 * block_tokens, head_dim, dtype=dtype).chunk(2, dim=2)
        isa = _get_attn_isa(dtype, block_tokens, head_dim)
        ops.cpu_attn_reshape_and_cache(digit, digit, k, v, torch.arange(block_tokens), isa, 1.0, 1.0, "auto")
        found += torch.stack([k.reshape(-1), v.reshape(-1)]).to(torch.int64) * weight
        weight *= _DIGIT
    order = torch.argsort(found, dim=1)
    if not torch.equal(torch.gather(found, 1, order), numbers.expand(2, -1)):
        raise RuntimeError(f"vLLM's CPU attention does not keep {block_tokens} x {head_dim} {dtype} as they are")
    return order


class CPUConnector(GPUConnectorInterface):
    """Whole chunks, all layers at once: KV_2LTD ``[2, L, T, H*D]``."""

    def __init__(self, metadata: LMCacheMetadata) -> None:
        self.num_layers, _, _, num_kv_heads, head_dim = metadata.kv_shape
        self.hidden = num_kv_heads * head_dim
        self._cache: PagedCache | None = None

    def get_shape(self, num_tokens: int) -> torch.Size:
        """The shape of a memory object of so many tokens."""
        return torch.Size([2, self.num_layers, num_tokens, self.hidden])

    def from_gpu(self, memory_obj: MemoryObj, start: int, end: int, **kwargs: Any) -> None:
        """Copy tokens start to end of the paged cache into a memory object."""
        cache, tensor = self._paged(kwargs), _checked(memory_obj, MemoryFormat.KV_2LTD)
        places = cache.places(kwargs["slot_mapping"][start:end])
        for layer in range(self.num_layers):
            cache.read(layer, places, tensor[:, layer])

    def to_gpu(self, memory_obj: MemoryObj, start: int, end: int, **kwargs: Any) -> None:
        """Copy a memory object to tokens start to end of the paged cache."""
        cache, tensor = self._paged(kwargs), _checked(memory_obj, MemoryFormat.KV_2LTD)
        places = cache.places(kwargs["slot_mapping"][start:end])
        for layer in range(self.num_layers):
            cache.write(layer, places, tensor[:, layer])

    def batched_from_gpu(self, memory_objs: list[MemoryObj], starts: list[int], ends: list[int], **kwargs: Any) -> None:
        """`from_gpu` for each."""
        for memory_obj, start, end in zip(memory_objs, starts, ends, strict=True):
            self.from_gpu(memory_obj, start, end, **kwargs)

    def batched_to_gpu(self, memory_objs: list[MemoryObj], starts: list[int], ends: list[int], **kwargs: Any) -> None:
        """`to_gpu` for each."""
        for memory_obj, start, end in zip(memory_objs, starts, ends, strict=True):
            self.to_gpu(memory_obj, start, end, **kwargs)

    def _paged(self, kwargs: dict[str, Any]) -> PagedCache:
        if self._cache is None:
            self.kvcaches = kwargs["kvcaches"]  # LMCache's internal API looks for them here
            self._cache = PagedCache(self.kvcaches)
        return self._cache


class CPULayerwiseConnector(VLLMPagedMemLayerwiseGPUConnector):
    """Layer by layer (`use_layerwise`): KV_T2D ``[T, 2, H*D]`` for each layer.

    The base class is there because LMCache accepts none but its own; nothing of it is used.
    """

    def __init__(self, metadata: LMCacheMetadata) -> None:
        self.num_layers, _, _, num_kv_heads, head_dim = metadata.kv_shape
        self.hidden = num_kv_heads * head_dim
        self._cache: PagedCache | None = None

    def get_shape(self, num_tokens: int) -> torch.Size:
        """The shape of a memory object of so many tokens."""
        return torch.Size([num_tokens, 2, self.hidden])

    def batched_from_gpu(
        self, memory_objs: list[list[MemoryObj]], starts: list[int], ends: list[int], **kwargs: Any
    ) -> Iterator[None]:
        """Copy one layer into its memory objects at each step; one step more at the end."""
        cache, places = self._places(starts, ends, kwargs)
        for layer in range(self.num_layers):
            for memory_obj, where in zip(memory_objs[layer], places, strict=True):
                cache.read(layer, where, _checked(memory_obj, MemoryFormat.KV_T2D).transpose(0, 1))
            yield
        yield

    def batched_to_gpu(self, starts: list[int], ends: list[int], **kwargs: Any) -> Iterator[None]:
        """Copy the memory objects sent at each step to their layer; two steps more at the end."""
        cache, places = self._places(starts, ends, kwargs)
        for layer in range(self.num_layers):
            memory_objs = yield
            for memory_obj, where in zip(memory_objs, places, strict=True):
                cache.write(layer, where, _checked(memory_obj, MemoryFormat.KV_T2D).transpose(0, 1))
        yield
        yield

    def _places(
        self, starts: list[int], ends: list[int], kwargs: dict[str, Any]
    ) -> tuple[PagedCache, list[torch.Tensor]]:
        if self._cache is None:
            self._cache = PagedCache(kwargs["kvcaches"])
        slots = kwargs["slot_mapping"]
        return self._cache, [self._cache.places(slots[a:b]) for a, b in zip(starts, ends, strict=True)]


def create(
    config: Any, metadata: LMCacheMetadata, engine: EngineType, layout_hints: Any = None
) -> CPUConnector | CPULayerwiseConnector:
    """What is bound over `lmcache.v1.gpu_connector.CreateGPUConnector`.

    Raises:
        ValueError: Another engine than vLLM, or a model with MLA.
    """
    if engine != EngineType.VLLM or metadata.use_mla:
        raise ValueError(f"vLLM without MLA is what this connector is for; found {engine}, MLA {metadata.use_mla}")
    return CPULayerwiseConnector(metadata) if config.use_layerwise else CPUConnector(metadata)


def _checked(memory_obj: MemoryObj, wanted: MemoryFormat) -> torch.Tensor:
    found = memory_obj.metadata.fmt
    if memory_obj.tensor is None or found != wanted:
        raise ValueError(f"a memory object of {wanted} was expected, found {found}")
    return memory_obj.tensor
