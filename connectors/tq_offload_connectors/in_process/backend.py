"""LMCache's in-process mode: one storage plugin that keeps compressed CPU RAM, disk and Redis tiers.

The official way, `storage_plugins`, names this module and `TurboQuantBackend`; `LMCACHE_SERDE=turboquant` fills it in.
One backend for all tiers, so that a chunk is encoded once, and a hit in a slow tier brings its frame into the fast one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from lmcache.utils import CacheEngineKey
from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.storage_backend.abstract_backend import StoragePluginInterface

from tq_offload.codec import TurboQuantCodec
from tq_offload.errors import BackendError, ConfigError, StoreError
from tq_offload.integrations.lmcache.log import logger
from tq_offload.integrations.lmcache.warm_up import warm_up
from tq_offload_connectors.frame_store import FrameKey, FrameStore, Put
from tq_offload_connectors.in_process.loads import Load, free_all
from tq_offload_connectors.in_process.objects import ChunkObjects, Patience
from tq_offload_connectors.in_process.plan import TierPlan, make_tiers, plan_from_config

__all__ = ["TurboQuantBackend"]

CLOSE_TIMEOUT_S = 10.0


class TurboQuantBackend(StoragePluginInterface):
    """Compressed tiers of one worker. A failure is a miss or a chunk not stored; both are counted, neither is raised.

    Args:
        dst_device: Ignored: chunks are decoded into LMCache's CPU memory.
        config: LMCache's configuration; `extra_config` may hold `turboquant.*` settings.
        metadata: LMCache's metadata of this worker.
        local_cpu_backend: Lends the memory of loaded chunks; None in the scheduler, which only looks up.
        loop: LMCache's event loop.

    Raises:
        SystemExit: A setting that is not understood; LMCache would swallow every Exception and go on without the tiers.
    """

    def __init__(
        self,
        config: Any = None,
        metadata: Any = None,
        local_cpu_backend: Any = None,
        loop: Any = None,
        dst_device: str = "cpu",
    ) -> None:
        super().__init__(
            dst_device="cpu", config=config, metadata=metadata, local_cpu_backend=local_cpu_backend, loop=loop
        )
        try:
            self.plan: TierPlan = plan_from_config(config, metadata, dst_device)
            serde = self.plan.serde
            codec = TurboQuantCodec(serde.spec, backend=serde.backend, threads=serde.threads)
            self.frames = FrameStore(
                codec,
                make_tiers(self.plan),
                workers=self.plan.serde.workers,
                queue_bytes=self.plan.queue_bytes,
                repair=self.plan.serde.repair,
                pin_timeout_s=float(getattr(config, "pin_timeout_sec", 300)),
                max_frame_bytes=4 * _chunk_bytes(metadata) + (64 << 20),  # groups of layers may be added later
            )
        except (ConfigError, BackendError, StoreError) as error:
            raise SystemExit(f"TQ-Offload: cannot start: {error}") from error
        self.objects = ChunkObjects(config, metadata, local_cpu_backend, self.plan.serde)
        self._timeout = float(getattr(config, "blocking_timeout_secs", 10))
        self._layerwise = bool(config.use_layerwise)
        self._reads_as_first_rank = self.plan.reads_as_first_rank
        if local_cpu_backend is not None:
            self.frames.submit(partial(warm_up, codec, self.objects.head_dim))
        for line in self.plan.lines():
            logger().info("TQ-Offload: %s", line)

    def __str__(self) -> str:
        return type(self).__name__

    # Lookup

    def contains(self, key: CacheEngineKey, pin: bool = False) -> bool:
        """Whether some tier has the chunk."""
        return self.batched_contains([key], pin) == 1

    def batched_contains(self, keys: list[CacheEngineKey], pin: bool = False) -> int:
        """How many chunks, from the first on without a gap, some tier has."""
        return self.frames.contains_prefix([self._name(key) for key in keys], pin)

    async def batched_async_contains(self, lookup_id: str, keys: list[CacheEngineKey], pin: bool = False) -> int:
        """The same, off the event loop: a remote tier takes a round trip. Cancelled, it leaves no pins."""
        try:
            future = self.frames.submit(partial(self.batched_contains, keys, pin))
        except RuntimeError:  # closed
            return 0
        asked = asyncio.wrap_future(future)
        try:
            await asyncio.wait([asked])
        except BaseException:
            if not future.cancel() and pin:
                future.add_done_callback(partial(self._undo_pins, keys))
            raise
        return 0 if asked.cancelled() else asked.result()

    def _undo_pins(self, keys: Sequence[CacheEngineKey], found: Future[int]) -> None:
        if not found.cancelled() and found.exception() is None:
            for key in keys[: found.result()]:
                self.unpin(key)

    def exists_in_put_tasks(self, key: CacheEngineKey) -> bool:
        """Whether the chunk is on its way into some tier."""
        return self.frames.in_flight(self._name(key))

    def pin(self, key: CacheEngineKey) -> bool:
        """Keep a chunk from being evicted."""
        return self.batched_contains([key], pin=True) == 1

    def unpin(self, key: CacheEngineKey) -> bool:
        """Undo a pin."""
        return self.frames.pins.unpin(self._name(key))

    # Put

    def batched_submit_put_task(
        self,
        keys: Sequence[CacheEngineKey],
        objs: list[MemoryObj],
        transfer_spec: Any = None,
        on_complete_callback: Callable[[CacheEngineKey], None] | None = None,
    ) -> None:
        """Offer chunks to the tiers. Takes a reference to each object until it is encoded; never waits."""
        if self._reads_as_first_rank:
            return
        puts = []
        for key, obj in zip(keys, objs, strict=False):
            name = key.to_string()
            try:
                layout, tensors = self.objects.source(obj, key)
            except Exception as error:  # an object without host memory, or of a form that LMCache did not have before
                self.frames.drop(name, "object", repr(error))
                continue
            obj.ref_count_up()
            done = None if on_complete_callback is None else partial(_complete, on_complete_callback, key)
            puts.append(Put(FrameKey.of(name, key.model_name), tensors, layout, obj.ref_count_down, done))
        self.frames.put_many(puts)

    async def async_batched_submit_put_task(
        self,
        keys: Sequence[CacheEngineKey],
        objs: list[MemoryObj],
        transfer_spec: Any = None,
        on_complete_callback: Callable[[CacheEngineKey], None] | None = None,
    ) -> None:
        """The same."""
        self.batched_submit_put_task(keys, objs, transfer_spec, on_complete_callback)

    # Get

    def get_blocking(self, key: CacheEngineKey) -> MemoryObj | None:
        """Load one chunk; None: a miss."""
        return self.batched_get_blocking([key])[0]

    def batched_get_blocking(self, keys: list[CacheEngineKey]) -> list[MemoryObj | None]:
        """Load chunks in parallel, each decoded straight into memory of LMCache. What is late is a miss."""
        loads = self._start(keys)
        deadline = time.monotonic() + self._timeout
        found = [load.result(max(0.0, deadline - time.monotonic())) for load in loads]
        self._touch(keys)
        return found

    def get_non_blocking(self, key: CacheEngineKey, location: str | None = None) -> Future[MemoryObj | None] | None:
        """A future of `get_blocking`."""
        (load,) = self._start([key])
        try:
            return self.frames.submit(partial(load.result, self._timeout))
        except RuntimeError:  # closed
            free_all([load])
            missed: Future[MemoryObj | None] = Future()
            missed.set_result(None)
            return missed

    async def batched_get_non_blocking(
        self, lookup_id: str, keys: list[CacheEngineKey], transfer_spec: Any = None
    ) -> list[MemoryObj]:
        """Load chunks for asynchronous loading: those before the first miss. Undoes the pins of the lookup.

        Raises:
            RuntimeError: In layerwise mode, for a chunk that is not there: LMCache could not tell it from a hit.
        """
        if not keys:
            return []
        loads = self._start(keys)
        try:
            await asyncio.wait([asyncio.wrap_future(load.future) for load in loads], timeout=self._timeout)
            found = [load.result(0.0) for load in loads]
        except BaseException:  # cancelled: nobody will take the chunks
            free_all(loads)
            raise
        finally:
            if not self._layerwise:  # there LMCache unpins by itself
                for key in keys:
                    self.unpin(key)
        self._touch(keys)
        hits = next((n for n, obj in enumerate(found) if obj is None), len(found))
        for obj in found[hits:]:
            if obj is not None:
                obj.ref_count_down()
        if self._layerwise and hits < len(keys):
            for obj in found[:hits]:
                obj.ref_count_down()  # type: ignore[union-attr]
            raise RuntimeError(f"TQ-Offload: {keys[hits].to_string()} is gone while its layers are loaded")
        return [obj for obj in found[:hits] if obj is not None]

    def _start(self, keys: Sequence[CacheEngineKey]) -> list[Load]:
        patience = Patience()
        return [Load(self.frames, self.objects, self._key(key), patience).start() for key in keys]

    def _touch(self, keys: Sequence[CacheEngineKey]) -> None:
        """The first chunk of a prefix is to be evicted last."""
        self.frames.touch([self._name(key) for key in reversed(keys)])

    # Whole backend

    def remove(self, key: CacheEngineKey, force: bool = True) -> bool:
        """Delete a chunk in every tier."""
        return self.frames.remove(self._name(key))

    def clear(self) -> int:
        """Delete what is not pinned. Returns tokens, as LMCache counts them: full chunks."""
        return self.frames.clear() * int(self.metadata.chunk_size)

    def touch_cache(self) -> None:
        """Nothing: reads and pins count as uses already."""

    def get_allocator_backend(self) -> Any:
        """The backend whose memory the chunks to be stored are in."""
        return self.local_cpu_backend

    def status(self) -> dict[str, Any]:
        """Queue, pins and every tier."""
        return self.frames.status()

    def close(self) -> None:
        """Write what is under way within some seconds, drop and count the rest."""
        self.frames.close(CLOSE_TIMEOUT_S)

    def _name(self, key: CacheEngineKey) -> str:
        return str((key.with_new_worker_id(0) if self._reads_as_first_rank else key).to_string())

    def _key(self, key: CacheEngineKey) -> FrameKey:
        return FrameKey.of(self._name(key), key.model_name)


def _chunk_bytes(metadata: Any) -> int:
    """Bytes of a full chunk, uncompressed."""
    shapes = zip(metadata.get_shapes(), metadata.get_dtypes(), strict=True)
    return sum(shape.numel() * dtype.itemsize for shape, dtype in shapes)


def _complete(callback: Callable[[CacheEngineKey], None], key: CacheEngineKey, stored: bool) -> None:
    """LMCache's callback means that the chunk is persisted."""
    if not stored:
        return
    try:
        callback(key)
    except Exception as error:
        logger().warning("TQ-Offload: on_complete_callback failed for %s: %s", key.to_string(), error)
