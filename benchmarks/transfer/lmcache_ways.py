"""LMCache's own way, uncompressed: its Redis and file system connectors over its own memory, all at once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.transfer.chunks import Shape
from benchmarks.transfer.places import Place
from benchmarks.transfer.ways import Way

__all__ = ["LMCacheWay"]

_CONNECTORS = {"redis, loopback": "RedisConnector", "disk, page cache": "FSConnector"}


class LMCacheWay(Way):
    """All chunks at once, as LMCache's remote backend asks its connector for them; objects of LMCache's memory."""

    name, workers = "LMCache naive", 1

    def __init__(self, shape: Shape, chunks: Sequence[torch.Tensor]) -> None:
        from lmcache.utils import CacheEngineKey
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.metadata import LMCacheMetadata
        from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

        kv_shape = (shape.layers, 2, shape.tokens, shape.heads, shape.head_dim)
        metadata = LMCacheMetadata(
            model_name="bench", world_size=1, local_world_size=1, worker_id=0, local_worker_id=0,
            kv_dtype=torch.bfloat16, kv_shape=kv_shape, chunk_size=shape.tokens, role="worker",
        )  # fmt: skip
        self.config = LMCacheEngineConfig.from_defaults(
            chunk_size=shape.tokens, local_cpu=False,
            max_local_cpu_size=((2 * len(chunks) + 1) * shape.nbytes + (64 << 20)) / (1 << 30),
        )  # fmt: skip
        self.cpu = LocalCPUBackend(self.config, metadata, "cpu", None)
        self.keys = [CacheEngineKey("bench", 1, 0, i + 1, torch.bfloat16) for i in range(len(chunks))]
        self.targets, self.objects = [], []
        for chunk in chunks:
            one = self.cpu.allocate(metadata.get_shapes(shape.tokens), metadata.get_dtypes(), busy_loop=False)
            one.tensor.copy_(chunk)
            self.objects.append(one)
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self._connectors: dict[str, Any] = {}

    @property
    def label(self) -> str:
        """See `Way`."""
        return self.name

    def goes_to(self, place: Place) -> bool:
        """See `Way`."""
        return place.name in _CONNECTORS

    def put_all(self, place: Place) -> None:
        """See `Way`."""
        connector = self._connector(place)
        self._wait(*(connector.put(key, one) for key, one in zip(self.keys, self.objects, strict=True)))

    def get_all(self, place: Place) -> None:
        """See `Way`; `targets` are LMCache's objects."""
        connector = self._connector(place)
        found = self._wait(*(connector.get(key) for key in self.keys))
        self.targets = [one.tensor for one in found]
        for one in found:
            one.ref_count_down()

    def close(self) -> None:
        """See `Way`."""
        self._wait(self._end())
        for one in self.objects:
            one.ref_count_down()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    def _connector(self, place: Place) -> Any:
        if place.name not in self._connectors:
            self._connectors[place.name] = self._wait(self._make(place))[0]
        return self._connectors[place.name]

    async def _make(self, place: Place) -> Any:
        from lmcache.v1.storage_backend.connector.fs_connector import FSConnector
        from lmcache.v1.storage_backend.connector.redis_connector import RedisConnector

        if _CONNECTORS[place.name] == "RedisConnector":
            return RedisConnector(place.address, self.loop, self.cpu)
        return FSConnector(self.loop, self.cpu, self.config, base_paths_str=f"{place.address}/lmcache")

    async def _end(self) -> None:
        """Close connections. RedisConnector.close() waits for ever for its idle workers: they are cancelled instead."""
        for connector in self._connectors.values():
            if hasattr(connector, "connection"):
                await connector.connection.aclose()
                await connector.pool.aclose()
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        mine = [task for task in rest if "_worker" in str(task.get_coro())]
        for task in mine:
            task.cancel()
        await asyncio.gather(*mine, return_exceptions=True)

    def _wait(self, *work: Any) -> list[Any]:
        async def together() -> list[Any]:
            return await asyncio.gather(*work)

        return asyncio.run_coroutine_threadsafe(together(), self.loop).result(60)
