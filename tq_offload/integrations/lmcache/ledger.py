"""What the tier itself says it stored and deleted: the counters of stores, and whether a repair worked."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.internal_api import L2AdapterListener, L2StoreResult

from tq_offload.integrations.lmcache.metrics import METRICS
from tq_offload.integrations.lmcache.processor import Outcome

__all__ = ["StoreLedger", "StoreTask"]


@dataclass(eq=False)
class StoreTask:
    """A store under way: frames that the tier has not reported yet, and the bytes that it has."""

    pending: dict[ObjectKey, Outcome]
    reported_bytes: int = 0


class StoreLedger(L2AdapterListener):
    """Counts what the inner adapter reports as stored, key by key.

    Adapters report before or shortly after they complete a task, from threads of their own. What is not reported when
    the task completes is counted by the bytes that the result says were written: a report that comes later, or never,
    changes nothing.

    Args:
        deleted: Told which keys the adapter has deleted.
    """

    def __init__(self, deleted: Callable[[list[ObjectKey]], None] | None = None) -> None:
        self._deleted = deleted
        self._lock = threading.Lock()
        self._open: list[StoreTask] = []

    def begin(self, outcomes: dict[ObjectKey, Outcome]) -> StoreTask:
        """A store of these frames is about to be submitted."""
        task = StoreTask(outcomes)
        with self._lock:
            self._open.append(task)
        return task

    def abandon(self, task: StoreTask) -> None:
        """The store was not submitted, or its end will not be seen."""
        with self._lock:
            if task in self._open:
                self._open.remove(task)

    def settle(self, task: StoreTask, result: L2StoreResult) -> None:
        """The store is complete: count what was not reported."""
        self.abandon(task)
        left = int(result.bytes_transferred()) - task.reported_bytes
        for outcome in task.pending.values():
            if 0 < outcome.frame_bytes <= left:
                left -= outcome.frame_bytes
                _count(outcome, outcome.frame_bytes)
            elif result.is_successful():
                METRICS.add("already_stored")
            else:
                METRICS.add("store_failures", reason="tier")

    def on_l2_keys_stored(self, keys: list[ObjectKey], sizes: list[int]) -> None:
        """Called by the adapter; a size of 0 says that the key was there."""
        for key, size in zip(keys, sizes, strict=False):
            with self._lock:
                task = next((task for task in self._open if key in task.pending), None)
                if task is None:
                    continue
                outcome = task.pending.pop(key)
                task.reported_bytes += size
            _count(outcome, size)

    def on_l2_keys_accessed(self, keys: list[ObjectKey]) -> None:
        """Called by the adapter; nothing to do."""

    def on_l2_keys_deleted(self, keys: list[ObjectKey]) -> None:
        """Called by the adapter."""
        if self._deleted is not None:
            self._deleted(keys)


def _count(outcome: Outcome, size: int) -> None:
    if size <= 0:
        METRICS.add("already_stored")
        return
    METRICS.add("stored_chunks")
    METRICS.add("raw_bytes", outcome.raw_bytes)
    METRICS.add("stored_bytes", size)
