"""Deletes entries that cannot be served, so that a tier which never overwrites (fs) can store them anew."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable

from lmcache.v1.distributed.api import ObjectKey

from tq_offload.integrations.lmcache.log import logger
from tq_offload.integrations.lmcache.metrics import METRICS

__all__ = ["CORRUPT_REASONS", "Repairer"]

CORRUPT_REASONS = frozenset(
    {"magic", "version", "length", "header", "checksum", "content", "mismatch_key", "mismatch_model", "mismatch_shape",
     "mismatch_dtype", "mismatch_kind", "mismatch_groups"}
)  # fmt: skip


class Repairer:
    """One thread that calls `delete([key])`. No thread of LMCache ever waits for it, except decode workers, briefly.

    A store of the same key cancels a queued delete, so that it cannot take away what is just being stored.

    Args:
        delete: The tier's public `delete`.
        patience: Seconds that `delete_now` waits at most.
    """

    def __init__(self, delete: Callable[[list[ObjectKey]], None], patience: float = 2.0) -> None:
        self._delete, self._patience = delete, patience
        self._wake = threading.Condition()
        self._queue: deque[tuple[ObjectKey, str, threading.Event]] = deque()
        self._closed = False
        self._thread = threading.Thread(target=self._loop, name="tq-offload-repair", daemon=True)
        self._thread.start()

    def submit(self, key: ObjectKey, reason: str) -> threading.Event:
        """Queue a delete. The event is set when it is done or cancelled."""
        done = threading.Event()
        with self._wake:
            if self._closed:
                done.set()
            else:
                self._queue.append((key, reason, done))
                self._wake.notify()
        return done

    def delete_now(self, key: ObjectKey, reason: str) -> None:
        """Queue a delete and wait for it, at most `patience` seconds."""
        self.submit(key, reason).wait(self._patience)

    def cancel(self, keys: Iterable[ObjectKey]) -> None:
        """Drop queued deletes of these keys."""
        wanted = set(keys)
        with self._wake:
            for _, _, done in (entry for entry in self._queue if entry[0] in wanted):
                done.set()
            self._queue = deque(entry for entry in self._queue if entry[0] not in wanted)

    def close(self) -> None:
        """Drop what is queued and wait for the thread, at most `patience` seconds."""
        with self._wake:
            self._closed = True
            for _, _, done in self._queue:
                done.set()
            self._queue.clear()
            self._wake.notify()
        self._thread.join(self._patience)

    def _loop(self) -> None:
        while True:
            with self._wake:
                while not self._queue and not self._closed:
                    self._wake.wait()
                if self._closed:
                    return
                key, reason, done = self._queue.popleft()
            try:
                self._delete([key])
                METRICS.add("repairs", reason=reason)
            except Exception as error:  # any error of any backend
                logger().warning("TQ-Offload: cannot delete an entry that cannot be served: %s", error)
            finally:
                done.set()
