"""What LMCache's engine does around a remote backend in in-process mode, with its real classes and memory."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")

import pytest
import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1 import memory_management
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend import remote_backend
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

from tq_offload_connectors.remote.connector import CompressedConnector, _close, install

MODEL = "some/model"
CHUNK, LAYERS, HEADS, DIM = 64, 2, 2, 64
FOUR_BIT = 0.0105  # relative MSE of 4-bit codes is 0.0095


def make_metadata(**fields: Any) -> Any:
    values: dict[str, Any] = {
        "model_name": MODEL, "world_size": 1, "local_world_size": 1, "worker_id": 0, "local_worker_id": 0,
        "kv_dtype": torch.bfloat16, "kv_shape": (LAYERS, 2, CHUNK, HEADS, DIM), "chunk_size": CHUNK, "role": "worker",
    }  # fmt: skip
    return LMCacheMetadata(**(values | fields))


def groups_manager(*groups: tuple[int, int, int, torch.dtype]) -> Any:
    """A KVLayerGroupsManager as metadata reads it: (kv_size, layers, width, dtype) of each group."""
    made = [
        SimpleNamespace(shape_desc=SimpleNamespace(kv_size=kv), num_layers=layers, hidden_dim_size=width, dtype=dtype)
        for kv, layers, width, dtype in groups
    ]
    return SimpleNamespace(kernel_groups=made, num_kernel_groups=len(made))


class Lost(logging.Handler):
    """LMCache's complaints about objects that Python had to free, or that were given back twice."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if "garbage collected" in message or "is negative" in message:
            self.messages.append(message)


class RemoteEngine:
    """A remote backend of LMCache with everything below it.

    Args:
        url: Where to.
        meta: Metadata.
        active: As with LMCACHE_SERDE=turboquant, and the serde `naive`.
        pool_gb: Size of LMCache's CPU memory.
        plugin: Name of a remote storage plugin, instead of the URL.
        config: Further settings of LMCache.
    """

    def __init__(
        self,
        url: str | None,
        meta: Any = None,
        *,
        active: bool = False,
        pool_gb: float = 0.01,
        plugin: str | None = None,
        **config: Any,
    ) -> None:
        install(remote_backend, active=active)
        remote_backend.CreateConnector.tq_offload_active = active
        self.meta = meta or make_metadata()
        fields: dict[str, Any] = {
            "chunk_size": CHUNK, "local_cpu": False, "max_local_cpu_size": pool_gb, "remote_url": url,
            "remote_serde": "naive" if active else "turboquant", "blocking_timeout_secs": 10,
            "lmcache_instance_id": "test",
        }  # fmt: skip
        self.config = LMCacheEngineConfig.from_defaults(**(fields | config))
        self.cpu = LocalCPUBackend(self.config, self.meta, "cpu")
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        try:
            self.backend = remote_backend.RemoteBackend(
                self.config, self.meta, self.loop, self.cpu, "cpu", plugin_name=plugin
            )
        except BaseException:
            self._end_loop()
            raise
        self.connector = self.backend.connection
        self.plain = not isinstance(self.connector, CompressedConnector)
        self.free = self.free_bytes()
        self.lost = Lost()
        logging.getLogger(memory_management.__name__).addHandler(self.lost)

    # Chunks

    def free_bytes(self) -> int:
        return int(self.cpu.memory_allocator.pin_allocator.address_manager.get_free_size())

    def keys(self, count: int, first: int = 1, **fields: Any) -> list[CacheEngineKey]:
        named = {"model_name": MODEL, "world_size": self.meta.world_size, "worker_id": 0} | fields
        return [CacheEngineKey(chunk_hash=first + n, dtype=self.meta.kv_dtype, **named) for n in range(count)]

    def chunk(self, seed: int, tokens: int = CHUNK) -> tuple[Any, list[torch.Tensor]]:
        """A chunk as the engine makes it, and a copy of what it holds."""
        fmt = MemoryFormat.KV_MLA_FMT if self.meta.use_mla else MemoryFormat.KV_2LTD
        obj = self.cpu.allocate(self.meta.get_shapes(tokens), self.meta.get_dtypes(), fmt=fmt, busy_loop=False)
        assert obj is not None
        generator = torch.Generator().manual_seed(seed)
        copies = []
        for index in range(len(obj.get_shapes())):
            tensor = obj.get_tensor(index)
            if tensor.dtype == torch.uint8:
                tensor.copy_(torch.randint(0, 120, tensor.shape, generator=generator, dtype=torch.uint8))
            else:
                tensor.copy_(torch.randn(tensor.shape, generator=generator).to(tensor.dtype))
            copies.append(tensor.clone())
        return obj, copies

    def offer(self, keys: Sequence[Any], tokens: int = CHUNK) -> list[list[torch.Tensor]]:
        """Store as the storage manager does: it drops its own reference right after the call."""
        made = [self.chunk(int(key.chunk_hash), tokens) for key in keys]
        self.backend.batched_submit_put_task(list(keys), [obj for obj, _ in made])
        for obj, _ in made:
            obj.ref_count_down()
        return [copies for _, copies in made]

    def put(self, keys: Sequence[Any], tokens: int = CHUNK) -> list[list[torch.Tensor]]:
        copies = self.offer(keys, tokens)
        assert self.connector.frames.drain(30.0)
        wait_for(lambda: self.balanced() and not self.backend.put_tasks)
        return copies

    def get(self, keys: Sequence[Any], way: str = "batched") -> list[Any]:
        if way == "single":
            return [self.backend.get_blocking(key) for key in keys]
        if way == "batched":
            return list(self.backend.batched_get_blocking(list(keys)))
        count = self.run(self.backend.batched_async_contains("lookup", list(keys), False))
        return list(self.run(self.backend.batched_get_non_blocking("lookup", list(keys[:count]))))

    def run(self, coroutine: Any, timeout: float = 30.0) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout)

    def count(self, name: str, reason: str | None = None) -> float:
        return float(self.connector.tier.counters.value(name, reason))

    def balanced(self) -> bool:
        """No chunk of LMCache's memory is in use, each was given back exactly once, and the counters add up."""
        offered = sum(map(self.count, ("stored", "present", "dropped", "refused", "failed")))
        asked = self.count("hits") + self.count("misses")
        if self.free_bytes() != self.free or (self.count("puts"), self.count("gets")) != (offered, asked):
            return False
        assert self.lost.messages == []
        return True

    # End

    def close(self) -> None:
        with contextlib.suppress(Exception):
            if self.loop.is_running():
                self.run(_close(self.connector.getWrappedConnector()) if self.plain else self.connector.close())
        self._end_loop()
        if not self.plain:
            self.connector.frames.close(1.0)  # where the connector's own close could not run: the loop was gone
        gc.collect()
        logging.getLogger(memory_management.__name__).removeHandler(self.lost)
        self.cpu.memory_allocator.close()
        assert self.lost.messages == []

    def _end_loop(self) -> None:
        if self.loop.is_running():
            with contextlib.suppress(Exception):
                self.run(_cancel_others())
            self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(5)
        if not self.loop.is_running() and not self.loop.is_closed():
            self.loop.run_until_complete(_cancel_others())
            self.loop.close()


async def _cancel_others() -> None:
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.fixture
def open_engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes RemoteEngines without what an earlier test installed, and closes them. For the module that imports it."""
    for name in ("CreateConnector", "CreateSerde"):
        original = getattr(remote_backend, name)
        monkeypatch.setattr(remote_backend, name, getattr(original, "tq_offload_original", original))
    engines: list[RemoteEngine] = []

    def make(*args: Any, **kwargs: Any) -> RemoteEngine:
        engines.append(RemoteEngine(*args, **kwargs))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def errors(objects: Sequence[Any], wanted: Sequence[Sequence[torch.Tensor]]) -> list[float]:
    """Relative MSE of chunks; checks their shapes and frees them."""
    found = []
    for obj, copies in zip(objects, wanted, strict=True):
        assert obj is not None
        assert obj.get_ref_count() == 1
        for index, copy in enumerate(copies):
            tensor = obj.get_tensor(index)
            assert (tensor.shape, tensor.dtype) == (copy.shape, copy.dtype)
            a, b = tensor.double(), copy.double()
            found.append(float(((a - b) ** 2).sum() / (b**2).sum()))
        obj.ref_count_down()
    return found


def wait_for(condition: Callable[[], object], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.002)
