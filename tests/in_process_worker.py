"""A worker of LMCache's in-process mode around our backend, with LMCache's own memory."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from support import make_tensor, relative_mse

from tq_offload_connectors.in_process import TurboQuantBackend

CHUNK = 64
LAYERS, HEADS, DIM = 2, 2, 64
MODEL = "some/model"


def metadata(**changes: Any) -> LMCacheMetadata:
    fields: dict[str, Any] = {
        "model_name": MODEL, "world_size": 1, "local_world_size": 1, "worker_id": 0, "local_worker_id": 0,
        "kv_dtype": torch.bfloat16, "kv_shape": (LAYERS, 2, CHUNK, HEADS, DIM), "chunk_size": CHUNK, "role": "worker",
    }  # fmt: skip
    return LMCacheMetadata(**(fields | changes))


def config(extra: dict[str, Any], **changes: Any) -> Any:
    fields = {"chunk_size": CHUNK, "local_cpu": False, "max_local_cpu_size": 0.02, "extra_config": extra}
    return LMCacheEngineConfig.from_defaults(**(fields | changes))


class Worker:
    """A backend with LMCache's own memory under it, and what LMCache does around it."""

    def __init__(self, extra: dict[str, Any], meta: LMCacheMetadata | None = None, **changes: Any) -> None:
        self.meta = meta or metadata()
        self.config = config(extra, **changes)
        self.cpu = LocalCPUBackend(self.config, self.meta, "cpu", None)
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.backend = TurboQuantBackend(
            config=self.config, metadata=self.meta, local_cpu_backend=self.cpu, loop=self.loop, dst_device="cpu"
        )
        self.frames = self.backend.frames
        self.free = self.free_bytes()

    def free_bytes(self) -> int:
        return int(self.cpu.memory_allocator.pin_allocator.address_manager.get_free_size())

    def keys(self, count: int, first: int = 1, **fields: Any) -> list[CacheEngineKey]:
        named = {"model_name": MODEL, "world_size": 1, "worker_id": 0} | fields
        return [CacheEngineKey(chunk_hash=first + n, dtype=self.meta.kv_dtype, **named) for n in range(count)]

    def chunk(self, seed: int, tokens: int = CHUNK) -> tuple[Any, list[torch.Tensor]]:
        """A MemoryObj as LMCache's engine makes it, filled, and a copy of what it holds."""
        fmt = MemoryFormat.KV_MLA_FMT if self.meta.use_mla else MemoryFormat.KV_2LTD
        obj = self.cpu.allocate(self.meta.get_shapes(tokens), self.meta.get_dtypes(), fmt=fmt, busy_loop=False)
        assert obj is not None
        return obj, fill(obj, seed)

    def put(self, keys: list[Any], tokens: int = CHUNK, wait: bool = True) -> list[list[torch.Tensor]]:
        """Store chunks as the storage manager does: it drops its own reference right after the call."""
        made = [self.chunk(int(key.chunk_hash), tokens) for key in keys]
        self.backend.batched_submit_put_task(keys, [obj for obj, _ in made])
        for obj, _ in made:
            obj.ref_count_down()
        if wait:
            assert self.frames.drain(20.0)
        return [copy for _, copy in made]

    def get_async(self, keys: list[Any]) -> list[Any]:
        count = self.run(self.backend.batched_async_contains("id", keys, pin=True))
        return self.run(self.backend.batched_get_non_blocking("id", keys[:count])) if count else []

    def run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(30)

    def check_baseline(self) -> None:
        assert self.frames.drain(20.0)
        assert self.frames.pins.count() == 0
        assert self.free_bytes() == self.free
        assert self.cpu.memory_allocator.memcheck()

    def close(self) -> None:
        self.backend.close()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)
        self.loop.close()
        self.cpu.memory_allocator.close()


@contextmanager
def worker(extra: dict[str, Any] | None = None, **arguments: Any) -> Iterator[Worker]:
    made = Worker({"turboquant.ram_gb": 0.05} if extra is None else extra, **arguments)
    try:
        yield made
        made.check_baseline()
    finally:
        made.close()


def fill(obj: Any, seed: int) -> list[torch.Tensor]:
    copies = []
    for index, (shape, dtype) in enumerate(zip(obj.get_shapes(), obj.get_dtypes(), strict=True)):
        tensor = obj.get_tensor(index)
        data = make_tensor(tuple(shape), torch.float32, seed + index)
        if dtype.itemsize == 1:
            data = data.clamp(-200, 200).to(torch.float8_e4m3fn).view(torch.uint8).view(dtype)
        tensor.copy_(data.to(dtype) if dtype.itemsize > 1 else data)
        copies.append(tensor.clone())
    return copies


def same(obj: Any, copies: list[torch.Tensor], bound: float = 0.02) -> None:
    assert obj is not None
    for index, copy in enumerate(copies):
        assert relative_mse(obj.get_tensor(index).float(), copy.float()) < bound
    obj.ref_count_down()
