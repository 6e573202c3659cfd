"""An L2 adapter of LMCache over a FrameStore: from L1's memory into frames and back, without buffers in between."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters import L2AdapterInterface
from lmcache.v1.memory_management import MemoryObj

from tq_offload.codec import TurboQuantCodec
from tq_offload.errors import StoreError
from tq_offload.integrations.lmcache.layouts import LayoutResolver
from tq_offload.integrations.lmcache.log import logger
from tq_offload.integrations.lmcache.warm_up import warm_up
from tq_offload.layout import ChunkLayout
from tq_offload_connectors.byte_store import ByteStore
from tq_offload_connectors.frame_store import FrameKey, FrameStore, NoMemoryError
from tq_offload_connectors.multi_process.keys import frame_key, object_name
from tq_offload_connectors.multi_process.params import GIB, AdapterParams
from tq_offload_connectors.multi_process.residents import Residents, WatchedStore
from tq_offload_connectors.multi_process.tasks import Batch, Results, Sources, bitmap
from tq_offload_connectors.tier import Tier

__all__ = ["FrameL2Adapter"]

SOURCES_TIMEOUT_S = 120.0  # compiling kernels is the longest that an encoder takes


class FrameL2Adapter(L2AdapterInterface):
    """Stores the objects of LMCache as frames in one store. Never raises into LMCache's controllers.

    LMCache holds the memory of a stored object until its task is reported as completed: that is once the frame is
    written. A task fails if any of its objects was not stored; the others are stored all the same. Locks are pins of
    the store, where it has them; they expire.

    Args:
        params: Settings.
        name: Name of the tier in counters and log lines.
        store: The store; closed with the adapter.
        place: What the start-up line calls it.
        capacity: Its budget in bytes; 0: none.
        remote: See `Tier`.
        writers: Threads that write.
        l1_memory_desc: LMCache's description of its L1 memory.
    """

    tq_offload_compresses = True
    """Tells the activation by LMCACHE_SERDE to leave this adapter without a serde."""

    def __init__(
        self,
        params: AdapterParams,
        name: str,
        store: ByteStore,
        *,
        place: str,
        capacity: int = 0,
        remote: bool = False,
        writers: int = 0,
        l1_memory_desc: Any = None,
    ) -> None:
        super().__init__(max_capacity_bytes=capacity)
        settings, tier = params.settings, params.tier
        codec = TurboQuantCodec(settings.spec, backend=settings.backend, threads=settings.threads)
        self._layouts = LayoutResolver.of(settings)
        self._layouts.models_known = True
        self._ids = itertools.count()
        self._stored, self._found, self._loaded = Results[L2StoreResult](), Results[Any](), Results[Any]()
        self._residents = Residents(self._notify_keys_stored, self._notify_keys_deleted)
        self._sources = Sources()
        self._store = WatchedStore(store, self._sources.check, self._residents.remove)
        self._closed = False
        self._tier = Tier(name, self._store, remote=remote, writers=writers, queue_bytes=int(tier.write_queue_gb * GIB))
        self._frames = FrameStore(
            codec,
            [self._tier],
            workers=settings.workers,
            queue_bytes=_queue_bytes(tier.queue_gb, l1_memory_desc),
            repair=settings.repair,
        )
        self._lookups = ThreadPoolExecutor(1, thread_name_prefix=f"tq-lookup-{name}")
        self._frames.submit(partial(warm_up, codec, settings.head_dim))
        logger().info(
            "TQ-Offload: L1 CPU RAM: not compressed; L2 %s: compressed, turboquant %s", place, settings.spec.describe()
        )

    def get_store_event_fd(self) -> int:
        """File descriptor that is readable when a store has completed."""
        return self._stored.fileno()

    def get_lookup_and_lock_event_fd(self) -> int:
        """File descriptor that is readable when a lookup has completed."""
        return self._found.fileno()

    def get_load_event_fd(self) -> int:
        """File descriptor that is readable when a load has completed."""
        return self._loaded.fileno()

    # Store

    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        """Encode and store a batch; the objects may differ in shape. What finds no room in a queue fails at once."""
        batch = Batch(next(self._ids), list(keys))
        if not keys:
            self._stored.set(batch.task_id, L2StoreResult(True, 0))
        for position, (key, obj) in enumerate(zip(keys, objects, strict=True)):
            name = object_name(key)
            try:
                tensors = self._tensors(obj)
                layout = self._layouts.resolve(obj.get_shapes(), obj.get_dtypes(), key)
            except Exception as error:
                self._frames.drop(name, getattr(error, "reason", "internal"), repr(error))
                self._store_ended(batch, position, name, False, False)
            else:
                self._put(batch, position, frame_key(key), obj, tensors, layout)
        return batch.task_id

    def _put(
        self,
        batch: Batch,
        position: int,
        key: FrameKey,
        obj: MemoryObj,
        tensors: Sequence[torch.Tensor],
        layout: ChunkLayout,
    ) -> None:
        first = self._sources.add(key.name, obj)
        done = partial(self._store_ended, batch, position, key.name, first)
        self._frames.put(key, tensors, layout, release=self._sources.release, done=done)

    def _store_ended(self, batch: Batch, position: int, name: str, first: bool, stored: bool) -> None:
        if first:
            self._sources.remove(name)
        if not batch.end(position, stored, self._store.take_written(name)):
            return
        if written := [(batch.keys[i], nbytes) for i, nbytes in sorted(batch.written)]:
            self._residents.add([(object_name(key), key, nbytes) for key, nbytes in written])
            if not self._tier.remote:
                self._residents.remove_evicted(self._store)
        success = len(batch.good) == len(batch.keys)
        self._stored.set(batch.task_id, L2StoreResult(success, sum(nbytes for _, nbytes in written)))

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        """Completed stores: whether every object is in the store now, and the bytes written to it."""
        return self._stored.take_all()

    # Lookup

    def submit_lookup_and_lock_task(self, keys: list[ObjectKey], *_: Any, **__: Any) -> int:
        """Look each key up, and pin what is there; the layouts that LMCache offers are not needed."""
        task_id = next(self._ids)
        try:
            self._lookups.submit(self._lookup, task_id, list(keys))
        except RuntimeError:  # closing
            self._found.set(task_id, bitmap(len(keys), ()))
        return task_id

    def _lookup(self, task_id: int, keys: list[ObjectKey]) -> None:
        found: list[int] = []
        try:
            names = [object_name(key) for key in keys]
            there = self._store.contains_many(names)
            for name, present in zip(names, there, strict=True):
                if not present:
                    self._tier.forget(name)
                    self._residents.remove(name)
            found = [i for i, present in enumerate(there) if present]
            self._frames.pins.pin([names[i] for i in found])
        except StoreError as error:
            self._tier.counters.lost("lookup_failures", error.reason, str(error))
        except Exception:
            logger().exception("TQ-Offload: internal error in a lookup")
        self._found.set(task_id, bitmap(len(keys), found))

    def query_lookup_and_lock_result(self, task_id: int) -> Any:
        """Which keys of a lookup are there, once; None while it runs."""
        return self._found.take(task_id)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        """Undo one pin of each key."""
        names = [object_name(key) for key in keys]
        for name in names:
            self._frames.pins.unpin(name)
        self._residents.use(names)

    # Load

    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        """Read and decode a batch; each object is a hit or a miss of its own."""
        batch = Batch(next(self._ids), list(keys))
        if not keys:
            self._loaded.set(batch.task_id, bitmap(0, ()))
        for position, (key, obj) in enumerate(zip(keys, objects, strict=True)):
            try:
                future = self._frames.submit(partial(self._load, key, obj))
            except RuntimeError:  # closing
                self._load_ended(batch, position, None)
            else:
                future.add_done_callback(partial(self._load_ended, batch, position))
        return batch.task_id

    def _load(self, key: ObjectKey, obj: MemoryObj) -> bool:
        return self._frames.get(frame_key(key), lambda _: self._tensors(obj))

    def _load_ended(self, batch: Batch, position: int, future: Future[bool] | None) -> None:
        good = future is not None and not future.cancelled() and future.exception() is None and future.result()
        if not batch.end(position, good):
            return
        try:
            loaded = [batch.keys[i] for i in sorted(batch.good)]
            self._residents.use([object_name(key) for key in loaded])
            if loaded:
                self._notify_keys_accessed(loaded)
        except Exception:
            logger().exception("TQ-Offload: a listener of LMCache failed")
        self._loaded.set(batch.task_id, bitmap(len(batch.keys), batch.good))

    def query_load_result(self, task_id: int) -> Any:
        """Which keys of a load are there, decoded, once; None while it runs."""
        return self._loaded.take(task_id)

    def _tensors(self, obj: MemoryObj) -> list[torch.Tensor]:
        tensors = []
        for index in range(len(obj.get_shapes())):
            tensor = obj.get_tensor(index)
            if tensor is None:
                raise _NoHostMemoryError(f"group {index} of the object has no tensor in host memory")
            tensors.append(self._layouts.view(tensor))
        return tensors

    # Entries and the whole adapter

    def delete(self, keys: list[ObjectKey]) -> None:
        """Delete entries, locked or not: a load of a deleted one is a miss."""
        for key in keys:
            self._frames.remove(object_name(key))

    def report_status(self) -> dict[str, Any]:
        """State of the queues and the store, and all counters."""
        status = {"is_healthy": not self._closed, "type": type(self).__name__, "known_entries": len(self._residents)}
        try:
            return status | {"tq_offload": self._frames.status()}
        except StoreError as error:
            return status | {"error": str(error)}

    def close(self) -> None:
        """Write what is queued within a few seconds, drop the rest. LMCache's memory is not used after the return."""
        self._closed = True
        self._lookups.shutdown(wait=True, cancel_futures=True)
        self._frames.close()
        if not self._sources.wait(SOURCES_TIMEOUT_S):
            logger().error("TQ-Offload: L2 %s: still encoding after %d s", self._tier.name, SOURCES_TIMEOUT_S)
        for results in (self._stored, self._found, self._loaded):
            results.close()


class _NoHostMemoryError(NoMemoryError):
    reason = "no_host_memory"


def _queue_bytes(queue_gb: float | None, l1_memory_desc: Any) -> int:
    """What waits is locked in L1, and costs nothing else: a quarter of it, else 1 GiB."""
    if queue_gb is not None:
        return int(queue_gb * GIB)
    return int(getattr(l1_memory_desc, "size", 0)) // 4 or GIB
