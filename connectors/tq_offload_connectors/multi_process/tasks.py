"""Tasks of an L2 adapter: their objects, and results with the event that wakes LMCache's controllers."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.platform import create_event_notifier

try:
    from lmcache.lmcache_native import Bitmap
except ImportError:  # lmcache 0.5.3
    from lmcache.native_storage_ops import Bitmap

from tq_offload.errors import StoreError
from tq_offload.integrations.lmcache.log import logger

__all__ = ["Batch", "Results", "SourceGoneError", "Sources", "bitmap"]

Result = TypeVar("Result")


class Results(Generic[Result]):
    """Results by the ids of their tasks, each taken once, and a file descriptor that is readable when there is a new
    one. Thread-safe."""

    def __init__(self) -> None:
        self._notifier = create_event_notifier()
        self._lock = threading.Lock()
        self._results: dict[int, Result] = {}
        self._closed = False

    def fileno(self) -> int:
        """The file descriptor."""
        return int(self._notifier.fileno())

    def set(self, task_id: int, result: Result) -> None:
        """Complete a task."""
        with self._lock:
            if self._closed:
                return
            self._results[task_id] = result
            try:
                self._notifier.notify()
            except OSError as error:
                logger().warning("TQ-Offload: cannot wake LMCache: %s", error)

    def take(self, task_id: int) -> Result | None:
        """Result of a task; None while it runs."""
        with self._lock:
            return self._results.pop(task_id, None)

    def take_all(self) -> dict[int, Result]:
        """The results that nobody took."""
        with self._lock:
            found, self._results = self._results, {}
        return found

    def close(self) -> None:
        """Close the file descriptor; later results are dropped."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._notifier.close()


@dataclass(eq=False)
class Batch:
    """Objects of a task that end one by one.

    Args:
        task_id: Id of the task.
        keys: Their keys.
    """

    task_id: int
    keys: Sequence[ObjectKey]
    good: list[int] = field(default_factory=list)
    written: list[tuple[int, int]] = field(default_factory=list)  # position, bytes
    _ended: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def end(self, position: int, good: bool, written: int = 0) -> bool:
        """Note that an object ended. Returns True for the last one."""
        with self._lock:
            self._ended += 1
            if good:
                self.good.append(position)
            if written:
                self.written.append((position, written))
            return self._ended == len(self.keys)


class SourceGoneError(StoreError):
    """LMCache gave the memory of a chunk away before it was written: the frame may hold something else."""

    reason = "source_gone"


class Sources:
    """Objects whose memory is read, or was read for a frame that is not yet written. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._objects: dict[str, MemoryObj] = {}
        self._unreleased = 0

    def add(self, name: str, obj: MemoryObj) -> bool:
        """Note an object that is to be encoded. Returns False if another is on its way under that name."""
        with self._changed:
            self._unreleased += 1
            return self._objects.setdefault(name, obj) is obj

    def release(self) -> None:
        """Its memory is not read any more."""
        with self._changed:
            self._unreleased -= 1
            self._changed.notify_all()

    def remove(self, name: str) -> None:
        """Its frame is written, or will never be."""
        with self._changed:
            self._objects.pop(name, None)

    def check(self, name: str) -> None:
        """Raise SourceGoneError if the memory from which that frame was made is not the object's any more."""
        with self._changed:
            obj = self._objects.get(name)
        if obj is not None and not obj.is_valid():
            raise SourceGoneError("LMCache freed the chunk before it was written")

    def wait(self, timeout_s: float) -> bool:
        """Wait until no memory is read. Returns whether that came true in time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._unreleased, timeout_s)


def bitmap(size: int, positions: Sequence[int]) -> Any:
    """LMCache's bitmap with these positions set."""
    found = Bitmap(size)
    for position in positions:
        found.set(position)
    return found
