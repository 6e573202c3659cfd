"""Deletes entries that cannot be served, so that a tier which never overwrites (fs) can store them anew."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.l2_adapters import L2AdapterInterface

from tq_offload.integrations.lmcache.metrics import METRICS
from tq_offload.integrations.lmcache.processor import short_key

__all__ = ["CORRUPT_REASONS", "Repairer", "is_gone"]

CORRUPT_REASONS = frozenset(
    {"magic", "version", "length", "header", "checksum", "content", "mismatch_key", "mismatch_model", "mismatch_shape",
     "mismatch_dtype", "mismatch_kind", "mismatch_groups"}
)  # fmt: skip


class Repairer:
    """One thread that calls `delete([key])`. No thread of LMCache ever waits for it, except decode workers, briefly.

    A store of the same key cancels a queued delete, so that it cannot take away what is just being stored.

    Args:
        delete: The tier's public `delete`, which may fail without a word.
        gone: Asks the tier whether a key is gone, for a delete that the tier did not report.
        patience: Seconds that `delete_now` waits at most.
    """

    def __init__(
        self,
        delete: Callable[[list[ObjectKey]], None],
        gone: Callable[[ObjectKey], bool],
        patience: float = 2.0,
    ) -> None:
        self._delete, self._gone, self._patience = delete, gone, patience
        self._current: ObjectKey | None = None
        self._confirmed = False
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

    def deleted(self, keys: Iterable[ObjectKey]) -> None:
        """The tier reports keys as deleted."""
        with self._wake:
            self._confirmed = self._confirmed or self._current in keys

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
                self._current, self._confirmed = key, False
            failure = self._failure(key)
            if not failure:
                METRICS.add("repairs", reason=reason)
            else:
                METRICS.add("repair_failures", reason=reason)
                METRICS.log.warning(
                    "failed repairs", f"cannot delete an entry that cannot be served, {short_key(key)}: {failure}"
                )
            done.set()

    def _failure(self, key: ObjectKey) -> str:
        """Delete the key. Returns why it is still there, or nothing."""
        try:
            self._delete([key])
            with self._wake:
                confirmed = self._confirmed
            return "" if confirmed or self._gone(key) else "the tier still has it (its own log may say why)"
        except Exception as error:  # any error of any backend
            return str(error) or type(error).__name__


def is_gone(tier: L2AdapterInterface, key: ObjectKey, patience: float = 1.0) -> bool:
    """Ask the tier by a lookup. False if it has the key or does not answer within `patience` seconds."""
    task = tier.submit_lookup_and_lock_task([key], {})
    end = time.monotonic() + patience
    while time.monotonic() < end:
        found = tier.query_lookup_and_lock_result(task)
        if found is not None:
            if found.test(0):
                tier.submit_unlock([key])
            return not found.test(0)
        time.sleep(0.005)
    return False
