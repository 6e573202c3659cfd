"""LMCache's SerdeProcessor over a thread pool that works on the objects of one task in parallel."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.serde import SerdeProcessor
from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.platform import create_event_notifier

from tq_offload.codec import TurboQuantCodec
from tq_offload.errors import BackendError, ConfigError, LayoutError, TQOffloadError
from tq_offload.integrations.lmcache.layouts import LayoutResolver
from tq_offload.integrations.lmcache.log import logger
from tq_offload.integrations.lmcache.metrics import METRICS
from tq_offload.integrations.lmcache.serde import TurboQuantDeserializer, TurboQuantSerializer
from tq_offload.integrations.lmcache.settings import SerdeSettings, settings_from_serde
from tq_offload.integrations.lmcache.warm_up import warm_up

__all__ = ["DecodeListener", "Outcome", "TurboQuantProcessor", "create_processor", "short_key"]


class DecodeListener(Protocol):
    """The adapter, as the processor sees it."""

    def decode_failed(self, key: ObjectKey, reason: str) -> None:
        """Called in a worker thread before the task completes."""


@dataclass(frozen=True)
class Outcome:
    """What became of one object. `reason` is empty for success."""

    reason: str = ""
    raw_bytes: int = 0
    frame_bytes: int = 0


@dataclass
class _Task:
    task_id: int
    remaining: int
    work: Callable[[MemoryObj, MemoryObj, ObjectKey], Outcome]
    completed: dict[int, bool]
    notifier: Any
    encode: bool
    failed: list[MemoryObj] = field(default_factory=list)
    done: list[MemoryObj] = field(default_factory=list)


class TurboQuantProcessor(SerdeProcessor):
    """Encodes and decodes batches. Never raises into LMCache's controllers: a failure is counted, logged and reported.

    Alone, a batch fails as a whole when one object does, as LMCache's interface has it. With a listener attached (our
    adapter) a batch succeeds for the objects that did, and `take_outcome` says which did not.

    Args:
        settings: Codec, threads and so on.
        layouts: Chooses layouts; None: by `settings` and the model's config.
    """

    def __init__(self, settings: SerdeSettings, layouts: LayoutResolver | None = None) -> None:
        self.settings = settings
        self.layouts = layouts or LayoutResolver.of(settings)
        codec = TurboQuantCodec(settings.spec, backend=settings.backend, threads=settings.threads)
        self._serializer = TurboQuantSerializer(codec, self.layouts)
        self._deserializer = TurboQuantDeserializer(codec, self.layouts)
        self._serialize_done, self._deserialize_done = create_event_notifier(), create_event_notifier()
        self._lock = threading.Lock()
        self._next_id = 0
        self._serialized: dict[int, bool] = {}
        self._deserialized: dict[int, bool] = {}
        self._outcomes: dict[int, tuple[MemoryObj, Outcome]] = {}
        self._listener: DecodeListener | None = None
        self._pool = ThreadPoolExecutor(settings.workers, thread_name_prefix="tq-offload")
        METRICS.expose()
        self._pool.submit(warm_up, codec, self.settings.head_dim)

    def attach(self, listener: DecodeListener) -> None:
        """Let an adapter that handles single failures take over; call it before the first task."""
        self._listener = listener
        self.layouts.models_known = True

    def take_outcome(self, obj: MemoryObj) -> Outcome | None:
        """What became of a destination object, once. None: nothing recorded."""
        with self._lock:
            entry = self._outcomes.pop(id(obj), None)
        return entry[1] if entry is not None and entry[0] is obj else None

    def get_serialize_event_fd(self) -> int:
        """File descriptor that is readable when a serialize task has completed."""
        return int(self._serialize_done.fileno())

    def get_deserialize_event_fd(self) -> int:
        """File descriptor that is readable when a deserialize task has completed."""
        return int(self._deserialize_done.fileno())

    def submit_serialize(self, src_objs: list[MemoryObj], dst_objs: list[MemoryObj], keys: list[ObjectKey]) -> int:
        """Encode a batch. Returns the id of the task."""
        return self._submit(self._encode, self._serialized, self._serialize_done, src_objs, dst_objs, keys)

    def submit_deserialize(self, src_objs: list[MemoryObj], dst_objs: list[MemoryObj], keys: list[ObjectKey]) -> int:
        """Decode a batch. Returns the id of the task."""
        return self._submit(self._decode, self._deserialized, self._deserialize_done, src_objs, dst_objs, keys)

    def query_serialize_result(self, task_id: int) -> bool | None:
        """Result of a serialize task, once; None while it runs."""
        with self._lock:
            return self._serialized.pop(task_id, None)

    def query_deserialize_result(self, task_id: int) -> bool | None:
        """Result of a deserialize task, once; None while it runs."""
        with self._lock:
            return self._deserialized.pop(task_id, None)

    def estimate_serialized_size(self, layout_desc: MemoryLayoutDesc) -> int:
        """Exact size of the frame of an object of that layout."""
        return self._serializer.estimate_serialized_size(layout_desc)

    def close(self) -> None:
        """Wait for running tasks, then release threads and file descriptors."""
        self._pool.shutdown(wait=True)
        self._serialize_done.close()
        self._deserialize_done.close()
        METRICS.log.flush()

    def _submit(
        self,
        work: Callable[[MemoryObj, MemoryObj, ObjectKey], Outcome],
        completed: dict[int, bool],
        notifier: Any,
        src_objs: list[MemoryObj],
        dst_objs: list[MemoryObj],
        keys: list[ObjectKey],
    ) -> int:
        with self._lock:
            task_id = self._next_id
            self._next_id += 1
        task = _Task(task_id, len(keys), work, completed, notifier, work == self._encode)
        if not keys:
            self._complete(task)
        for src, dst, key in zip(src_objs, dst_objs, keys, strict=True):
            try:
                self._pool.submit(self._run, task, src, dst, key)
            except RuntimeError:  # the pool is shut down: LMCache is closing
                self._finish(task, dst, Outcome("closed"))
        return task_id

    def _run(self, task: _Task, src: MemoryObj, dst: MemoryObj, key: ObjectKey) -> None:
        outcome = Outcome("internal")
        try:
            outcome = task.work(src, dst, key)
        except Exception:
            logger().exception("TQ-Offload: internal error with %s", short_key(key))
        finally:
            self._finish(task, dst, outcome)

    def _finish(self, task: _Task, dst: MemoryObj, outcome: Outcome) -> None:
        with self._lock:
            (task.failed if outcome.reason else task.done).append(dst)
            if self._listener is not None and (task.encode or outcome.reason):
                self._outcomes[id(dst)] = (dst, outcome)
            task.remaining -= 1
            last = task.remaining == 0
        if last:
            self._complete(task)

    def _complete(self, task: _Task) -> None:
        success = not task.failed
        if self._listener is not None:  # fails only when nothing was encoded: there is nothing to hand on
            success = success or bool(task.done) or not task.encode
        if task.encode and not success:
            METRICS.add("dropped_batch_mates", len(task.done))
            for obj in (*task.failed, *task.done):
                self.take_outcome(obj)
        with self._lock:
            task.completed[task.task_id] = success
        try:
            task.notifier.notify()
        except OSError as error:
            logger().warning("TQ-Offload: cannot wake LMCache: %s", error)

    def _encode(self, src: MemoryObj, dst: MemoryObj, key: ObjectKey) -> Outcome:
        start = time.perf_counter()
        try:
            size = self._serializer.serialize(src, dst, key)
            dst.set_used_size(size)
        except (TQOffloadError, ValueError) as error:
            reason = _reason(error)
            METRICS.refuse(reason, f"{short_key(key)}: {error}")
            return Outcome(reason)
        finally:
            METRICS.add("encode_seconds", time.perf_counter() - start)
        return Outcome("", src.get_size(), size)

    def _decode(self, src: MemoryObj, dst: MemoryObj, key: ObjectKey) -> Outcome:
        start = time.perf_counter()
        try:
            self._deserializer.deserialize(src, dst, key)
        except (TQOffloadError, ValueError) as error:
            reason = _reason(error)
            METRICS.miss(reason, f"{short_key(key)}: {error}")
            if self._listener is not None:
                self._listener.decode_failed(key, reason)
            return Outcome(reason)
        finally:
            METRICS.add("decode_seconds", time.perf_counter() - start)
        METRICS.add("loaded_chunks")
        return Outcome()


def short_key(key: ObjectKey) -> str:
    """A key for a log line."""
    return f"{key.model_name} chunk {key.chunk_hash.hex()[:16]} rank {key.kv_rank:#x} group {key.object_group_id}"


def _reason(error: Exception) -> str:
    return str(getattr(error, "reason", "layout" if isinstance(error, LayoutError) else "internal"))


def create_processor(kwargs: dict[str, object]) -> TurboQuantProcessor:
    """Factory of the serde type `tq_offload`; see `settings.SERDE_SETTINGS` for the keys.

    Raises:
        ConfigError: An unknown key or a value that is not allowed.
        BackendError: The backend that was asked for cannot run here.
    """
    try:
        return TurboQuantProcessor(settings_from_serde(kwargs))
    except (ConfigError, BackendError) as error:
        logger().error("TQ-Offload: cannot start: %s", error)  # LMCache wraps it in a long traceback
        raise
