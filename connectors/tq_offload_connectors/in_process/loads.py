"""One chunk that is being loaded, and who owns its memory when the load ends, fails or comes too late."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeoutError

import torch
from lmcache.v1.memory_management import MemoryObj

from tq_offload.integrations.lmcache.log import logger
from tq_offload.layout import ChunkLayout
from tq_offload_connectors.frame_store import FrameKey, FrameStore, LateError, NoMemoryError
from tq_offload_connectors.in_process.objects import ChunkObjects, Patience

__all__ = ["Load", "free_all"]


class Load:
    """Loads one chunk in a reading thread. `result` hands the chunk over; what comes after it is freed.

    Args:
        frames: Where from.
        objects: Lends memory.
        frame_key: Key in the stores.
        patience: Of the batch that the chunk belongs to.
    """

    def __init__(self, frames: FrameStore, objects: ChunkObjects, frame_key: FrameKey, patience: Patience) -> None:
        self._frames, self._objects, self._frame_key, self._patience = frames, objects, frame_key, patience
        self._lock = threading.Lock()
        self._ended = False  # nobody will ask for the chunk any more
        self._loaded: MemoryObj | None = None
        self._target: MemoryObj | None = None
        self.future: Future[None] = Future()

    def start(self) -> Load:
        """Begin. With a closed store the load ends as a miss."""
        try:
            self.future = self._frames.submit(self._run)
        except RuntimeError:
            self.future.set_result(None)
        return self

    def result(self, timeout_s: float) -> MemoryObj | None:
        """The chunk, which is the caller's from now on; None: a miss, or not there in time. To be called once."""
        try:
            self.future.exception(timeout_s)
        except (FutureTimeoutError, CancelledError):
            if self.future.cancel():
                self._frames.missed(self._frame_key.name, LateError.reason, "not even begun in time")
        with self._lock:
            self._ended = True
            loaded, self._loaded = self._loaded, None
        return loaded

    def free(self) -> None:
        """End the load without taking the chunk."""
        loaded = self.result(0.0)
        if loaded is not None:
            loaded.ref_count_down()

    def _run(self) -> None:
        served = False
        try:
            served = self._frames.get(self._frame_key, self._destination)
        except Exception as error:  # whatever it is, it must not reach LMCache
            logger().exception("TQ-Offload: internal error while loading %s", self._frame_key.name)
            self._frames.missed(self._frame_key.name, "internal", repr(error))
        finally:
            self._end(served)

    def _end(self, served: bool) -> None:
        with self._lock:
            target, self._target = self._target, None
            if served and not self._ended:
                self._loaded, target = target, None
        if target is not None:
            target.ref_count_down()

    def _destination(self, layout: ChunkLayout) -> Sequence[torch.Tensor]:
        if self._ended:
            raise LateError("nobody waits for it any more")
        if self._target is None:
            self._target = self._objects.allocate(layout, self._patience)
        if self._target is None:
            raise NoMemoryError("LMCache's CPU memory is full of chunks that are in use")
        return self._objects.targets(self._target)


def free_all(loads: Sequence[Load]) -> None:
    """Free loads, each of them whatever becomes of the others."""
    for load in loads:
        try:
            load.free()
        except Exception:
            logger().exception("TQ-Offload: cannot free a chunk that nobody wants")
