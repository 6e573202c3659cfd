"""LMCache's own remote connectors (fs, lm, S3, Mooncake, plugins, ...) compressed, in in-process mode.

LMCache calls a serde on the engine's thread, and for asynchronous loads not at all. So the connector is wrapped:
`install` replaces `CreateConnector` and `CreateSerde` in LMCache's remote backend. Chunks are encoded in threads before
they reach the connector, and decoded in threads after it. No class of LMCache is changed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from typing import Any

from lmcache.utils import CacheEngineKey
from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.storage_backend.connector.instrumented_connector import InstrumentedRemoteConnector

from tq_offload_connectors.frame_store import FrameStore
from tq_offload_connectors.in_process.objects import ChunkObjects
from tq_offload_connectors.remote.loads import PrefixLoader, release
from tq_offload_connectors.remote.setup import install
from tq_offload_connectors.remote.store import ConnectorStore, RemoteName, is_frame, mapped, payload

__all__ = ["CompressedConnector", "install"]

CLOSE_TIMEOUT_S = 5.0


class CompressedConnector(InstrumentedRemoteConnector):
    """A connector of LMCache whose chunks are compressed. Failures are misses or chunks not stored; none is raised.

    Of a chunk to store one reference is taken over; it is given back as soon as the chunk is encoded.

    Args:
        timed: The connector with LMCache's instruments around it, so that they count the bytes that really move.
        frames: Encodes and decodes; its only tier is `store`. Closed with the connector.
        store: The connector as a store.
        objects: Reads and lends chunks.
        loader: Loads chunks.
        model_name: LMCache's name of the model.
    """

    def __init__(
        self,
        timed: InstrumentedRemoteConnector,
        frames: FrameStore,
        store: ConnectorStore,
        objects: ChunkObjects,
        loader: PrefixLoader,
        model_name: str,
    ) -> None:
        super().__init__(timed.getWrappedConnector())
        self.frames, self.tier = frames, frames.tiers[0]
        self._timed, self._store, self._objects = timed, store, objects
        self._loader, self._model = loader, model_name

    # Store

    def put(self, key: CacheEngineKey, memory_obj: MemoryObj) -> Coroutine[Any, Any, None]:
        """Queue a chunk now, on the caller's thread; what is returned ends when the chunk is stored or lost."""
        if key.model_name != self._model:
            return self._put_probe(key, memory_obj)
        return _ended([self._offer(key, memory_obj)])

    def batched_put(self, keys: list[CacheEngineKey], memory_objs: list[MemoryObj]) -> Coroutine[Any, Any, None]:
        """Queue chunks, each as by `put`."""
        return _ended([self._offer(key, obj) for key, obj in zip(keys, memory_objs, strict=True)])

    def _offer(self, key: CacheEngineKey, obj: MemoryObj) -> Future[bool]:
        done: Future[bool] = Future()
        frame_key = RemoteName.of(key)
        try:
            layout, tensors = self._objects.source(obj, key)
        except Exception as error:
            self.frames.drop(frame_key.name, "layout", repr(error))
            obj.ref_count_down()
            done.set_result(False)
            return done
        self.frames.put(frame_key, tensors, layout, release=obj.ref_count_down, done=done.set_result)
        return done

    async def _put_probe(self, key: CacheEngineKey, obj: MemoryObj) -> None:
        """Bytes of LMCache's health check, whose key names no model of ours: it compares them, so they go unchanged."""
        try:
            await self._timed.put(key, self._store.object(memoryview(obj.byte_array).cast("B")))
        finally:
            obj.ref_count_down()

    # Load

    async def get(self, key: CacheEngineKey) -> MemoryObj | None:
        """A chunk, or None."""
        return (await self.batched_get([key]))[0]

    def support_batched_get(self) -> bool:
        """Always, whatever the connector below does."""
        return True

    async def batched_get(self, keys: list[CacheEngineKey]) -> list[MemoryObj | None]:
        """The chunks up to the first that cannot be served, and None from there on: what follows is of no use."""
        if keys and keys[0].model_name != self._model:
            return await self._get_probes(keys)
        found: list[MemoryObj | None] = [*await self._loader.load(keys)]
        return found + [None] * (len(keys) - len(found))

    def support_batched_get_non_blocking(self) -> bool:
        """Always, whatever the connector below does."""
        return True

    async def batched_get_non_blocking(self, lookup_id: str, keys: list[CacheEngineKey]) -> list[MemoryObj]:
        """The chunks up to the first that cannot be served."""
        return await self._loader.load(keys)

    async def _get_probes(self, keys: Sequence[CacheEngineKey]) -> list[MemoryObj | None]:
        found: list[MemoryObj | None] = []
        for fetched in await self._loader.fetch(keys):
            usable = isinstance(fetched, MemoryObj) and not is_frame(payload(fetched))
            if not usable:
                release(fetched)
            found.append(fetched if usable else None)
        return found

    # Lookup: what is absent must be stored when it comes again

    async def exists(self, key: CacheEngineKey) -> bool:
        """Whether the connector has the key."""
        try:
            return self._seen(key, await self._timed.exists(key))
        except Exception as error:
            return bool(self._unanswered(error))

    def exists_sync(self, key: CacheEngineKey) -> bool:
        """Whether the connector has the key."""
        try:
            return self._seen(key, self._timed.exists_sync(key))
        except Exception as error:
            return bool(self._unanswered(error))

    def batched_contains(self, keys: list[CacheEngineKey]) -> int:
        """How many of the keys, from the first on, the connector has."""
        try:
            return self._seen_prefix(keys, self._timed.batched_contains(keys))
        except Exception as error:
            return self._unanswered(error)

    async def batched_async_contains(self, lookup_id: str, keys: list[CacheEngineKey], pin: bool = False) -> int:
        """How many of the keys, from the first on, the connector has."""
        try:
            return self._seen_prefix(keys, await self._timed.batched_async_contains(lookup_id, keys, pin))
        except Exception as error:
            return self._unanswered(error)

    def remove_sync(self, key: CacheEngineKey) -> bool:
        """Delete a chunk, where the connector can."""
        self.tier.forget(key.to_string())
        return bool(self._timed.remove_sync(key))

    def _unanswered(self, error: Exception) -> int:
        self.tier.counters.lost("lookup_failures", mapped(error).reason, str(error))
        return 0

    def _seen(self, key: CacheEngineKey, there: Any) -> bool:
        if not there:
            self.tier.forget(key.to_string())
        return bool(there)

    def _seen_prefix(self, keys: Sequence[CacheEngineKey], count: int) -> int:
        for key in keys[count:]:
            self.tier.forget(key.to_string())
        return count

    # The whole connector

    async def close(self) -> None:
        """Store what is queued, within a few seconds, and close the connector."""
        await asyncio.to_thread(self.frames.close, CLOSE_TIMEOUT_S)
        self._loader.cancel()
        await _close(self._connector)

    def status(self) -> dict[str, Any]:
        """Queue and counters."""
        return self.frames.status()

    def __repr__(self) -> str:
        return f"CompressedConnector({self._connector})"


def _ended(futures: list[Future[bool]]) -> Coroutine[Any, Any, None]:
    async def wait() -> None:
        for future in futures:
            await asyncio.shield(asyncio.wrap_future(future))

    return wait()


async def _close(raw: Any) -> None:
    """Close a connector of LMCache. Some (Redis, S3, ...) wait in `close` for the end of jobs on the loop that `close`
    itself holds up, for ever; so their jobs are ended before, and then there is nothing to wait for."""

    async def ended(wait: bool = True) -> None: ...

    jobs = getattr(raw, "pq_executor", None)
    if jobs is not None:
        with contextlib.suppress(Exception):
            await asyncio.wait_for(jobs.shutdown_async(wait=True), CLOSE_TIMEOUT_S)
        jobs.shutdown = ended
    with contextlib.suppress(Exception):
        await asyncio.wait_for(raw.close(), CLOSE_TIMEOUT_S)
