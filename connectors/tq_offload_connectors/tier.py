"""One tier of storage: a ByteStore, its counters and, where the store is slow, a bounded queue with its own writers."""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tq_offload.errors import EntryTooLargeError, StoreError
from tq_offload_connectors.byte_store import ByteStore
from tq_offload_connectors.counters import TierCounters

__all__ = ["Frame", "Tier"]

_KNOWN_NAMES = 65536
_KNOWN_S = 60.0  # how long a remote store is taken to have what it was given: it expires, evicts and is flushed
_BATCH_ITEMS = 16
_BATCH_BYTES = 16 << 20


@dataclass(frozen=True)
class Frame:
    """An encoded chunk on its way to a tier.

    Args:
        name: Key in the store.
        data: The frame; nobody writes to it any more.
        raw_bytes: Size of the chunk uncompressed.
        done: Called once with the tier's verdict: True if the tier has the chunk now.
    """

    name: str
    data: memoryview
    raw_bytes: int
    done: Callable[[bool], None]


class Tier:
    """Where frames go and come from. Thread-safe.

    Args:
        name: Label in counters and log lines: `ram`, `disk` or `redis`.
        store: The store; closed with the tier.
        remote: Whether asking the store costs a round trip.
        writers: Threads that write; 0: frames are written by the thread that brings them.
        queue_bytes: Bytes of frames that may wait for the writers; over it frames are dropped and counted.
    """

    def __init__(
        self, name: str, store: ByteStore, *, remote: bool = False, writers: int = 0, queue_bytes: int = 256 << 20
    ) -> None:
        self.name, self.store, self.remote = name, store, remote
        self.counters = TierCounters(name)
        self.queue_limit = queue_bytes
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._claimed: set[str] = set()
        self._known: OrderedDict[str, float] = OrderedDict()  # name -> until when; oldest first
        self._queue: deque[Frame] = deque()
        self._queued_bytes = 0
        self._writing = 0
        self._closed = False
        self._writers = [
            threading.Thread(target=self._write, name=f"tq-{name}-{n}", daemon=True) for n in range(writers)
        ]
        for thread in self._writers:
            thread.start()
        self.counters.gauge("queue_bytes", lambda: float(self._queued_bytes))
        if not remote:
            self.counters.gauge("bytes", lambda: self._usage().get("bytes", math.nan))
            self.counters.gauge("entries", lambda: self._usage().get("entries", math.nan))

    # Put

    def claim(self, name: str) -> bool:
        """Count a chunk offered, and reserve its name for the caller, who must bring a frame or give the claim up.

        Asks nothing that could take time: whether a slow store has the chunk is for `has_already` to find out.

        Returns:
            False if the tier has the chunk already or somebody else brings it: counted as present.
        """
        self.counters.add("puts")
        with self._lock:
            wanted = name not in self._claimed and self._known.get(name, 0.0) < time.monotonic()
            if wanted:
                self._claimed.add(name)
        if wanted and self.store.kind == "memory" and self._has(name):
            self._release(name)
            wanted = False
        if not wanted:
            self.counters.add("present")
        return wanted

    def has_already(self, name: str) -> bool:
        """Ask the store whether it has a claimed chunk. A remote store is asked by its writers, later."""
        return not self.remote and self._has(name)

    def end_present(self, name: str) -> None:
        """End a claim of a chunk that the store has already, counted as present."""
        self.counters.add("present")
        self._release(name)

    def give_up(self, name: str, counter: str, reason: str, what: str) -> None:
        """End a claim without a frame: count the loss as `dropped`, `refused` or `failed`."""
        self.counters.lost(counter, reason, f"{name}: {what}")
        self._release(name)

    def submit(self, frame: Frame) -> None:
        """Take a frame for a claimed name: written at once or queued, by what the tier was made for."""
        if not self._writers:
            self._store([frame])
            return
        with self._lock:
            room = self._queued_bytes + len(frame.data) <= self.queue_limit or not self._queued_bytes
            reason = "closed" if self._closed else "" if room else "write_queue_full"
            if not reason:
                self._queue.append(frame)
                self._queued_bytes += len(frame.data)
                self._changed.notify()
        if reason:
            what = f"{self._queued_bytes} bytes wait for {self.store.describe()}"
            self.give_up(frame.name, "dropped", reason, what)
            frame.done(False)

    def in_flight(self, name: str) -> bool:
        """Whether somebody brings a chunk of that name."""
        with self._lock:
            return name in self._claimed

    def _has(self, name: str) -> bool:
        try:
            return self.store.contains(name)
        except StoreError:
            return False

    def _release(self, name: str) -> None:
        with self._lock:
            self._claimed.discard(name)
            self._changed.notify_all()

    def _write(self) -> None:
        while batch := self._take():
            try:
                self._store(batch)
            finally:
                with self._lock:
                    self._writing -= 1
                    self._queued_bytes -= sum(len(frame.data) for frame in batch)
                    self._changed.notify_all()

    def _take(self) -> list[Frame]:
        """The next frames to write together; none when the tier is closed and the queue is empty."""
        with self._lock:
            while not self._queue:
                if self._closed:
                    return []
                self._changed.wait()
            share = -(-len(self._queue) // len(self._writers))
            batch, nbytes = [self._queue.popleft()], 0
            while self._queue and len(batch) < min(share, _BATCH_ITEMS) and nbytes < _BATCH_BYTES:
                nbytes += len(self._queue[0].data)
                batch.append(self._queue.popleft())
            self._writing += 1
            return batch

    def _store(self, batch: list[Frame]) -> None:
        start = time.perf_counter()
        todo = [frame for frame in batch if not (self.remote and self._has(frame.name))]
        errors: dict[str, Exception | None] = {}
        try:
            if len(todo) == 1:
                self.store.put(todo[0].name, todo[0].data, owned=True)
                errors[todo[0].name] = None
            elif todo:
                found = self.store.put_many([(frame.name, frame.data) for frame in todo])
                errors = {frame.name: error for frame, error in zip(todo, found, strict=True)}
        except Exception as error:  # a StoreError; anything else must not end the writer either
            errors = {frame.name: error for frame in todo}
        self.counters.add("write_seconds", time.perf_counter() - start)
        for frame in batch:
            self._finish(frame, frame.name in errors, errors.get(frame.name))

    def _finish(self, frame: Frame, written: bool, error: Exception | None) -> None:
        if error is not None:
            self.give_up(frame.name, "failed", getattr(error, "reason", "internal"), f"{type(error).__name__}: {error}")
        else:
            if self.remote:
                self._remember(frame.name)
            self.counters.add("stored" if written else "present")
            if written:
                self.counters.add("raw_bytes", frame.raw_bytes)
                self.counters.add("stored_bytes", len(frame.data))
            self._release(frame.name)
        frame.done(error is None)

    def _remember(self, name: str) -> None:
        with self._lock:
            self._known[name] = time.monotonic() + _KNOWN_S
            self._known.move_to_end(name)
            while len(self._known) > _KNOWN_NAMES:
                self._known.popitem(last=False)

    # Get

    def read(self, name: str, allocate: Callable[[int], memoryview], *, repair: bool = False) -> memoryview | None:
        """Read a frame, and count the time; None: a miss, counted with its reason, and never an exception.

        Args:
            name: Key in the store.
            allocate: See `ByteStore.get`.
            repair: Delete an entry that is too large to be a frame.
        """
        self.counters.add("gets")
        start = time.perf_counter()
        try:
            data = self.store.get(name, allocate)
        except EntryTooLargeError as error:  # not a frame of ours, and it would cost as much the next time
            self.missed(name, error.reason, str(error))
            if repair:
                self.repair(name, error.reason)
            return None
        except Exception as error:
            reason = "no_memory" if isinstance(error, MemoryError) else getattr(error, "reason", "internal")
            self.missed(name, reason, f"{type(error).__name__}: {error}")
            return None
        finally:
            self.counters.add("read_seconds", time.perf_counter() - start)
        if data is None:
            self.forget(name)
            self.counters.add("misses", reason="absent")
        return data

    def missed(self, name: str, reason: str, what: str) -> None:
        """Count a chunk that was read, or could not be, and is not served."""
        self.counters.lost("misses", reason, f"{name}: {what}")

    def repair(self, name: str, reason: str) -> None:
        """Delete an entry that cannot be served, so that the next put writes it anew."""
        self.forget(name)
        try:
            self.store.delete(name)
        except StoreError as error:
            self.counters.log.warning(f"{self.name} repair", f"{self.name}: cannot delete {name}: {error}")
            return
        self.counters.add("repairs", reason=reason)

    def promote(self, name: str, data: memoryview) -> None:
        """Copy a frame found in a slower tier into this one, unless it is there or on its way."""
        with self._lock:
            if name in self._claimed or self._closed:
                return
            self._claimed.add(name)
        try:
            if not self._has(name):
                self.store.put(name, data)
                self.counters.add("promoted")
        except (StoreError, MemoryError) as error:
            self.counters.log.warning(f"{self.name} promote", f"{self.name}: cannot take {name}: {error}")
        finally:
            self._release(name)

    def forget(self, name: str) -> None:
        """Do not count on the store having that name any more."""
        with self._lock:
            self._known.pop(name, None)

    # Whole tier

    def drain(self, timeout_s: float) -> bool:
        """Wait until nothing is claimed. Returns whether that came true in time."""
        with self._lock:
            return self._changed.wait_for(lambda: not self._claimed, timeout_s)

    def close(self, timeout_s: float = 5.0) -> None:
        """Write what is queued, drop and count what is left after `timeout_s`, and close the store."""
        if self._writers:
            self.drain(timeout_s)
        with self._lock:
            already, self._closed = self._closed, True
            left = list(self._queue)
            self._queue.clear()
            self._queued_bytes -= sum(len(frame.data) for frame in left)
            self._changed.notify_all()
        for frame in left:
            self.give_up(frame.name, "dropped", "closed", "the store is closing")
            frame.done(False)
        if already:
            return
        for thread in self._writers:
            thread.join(timeout_s)
        self.counters.drop_gauges()
        self.counters.log.flush()
        self.store.close()

    def status(self) -> dict[str, Any]:
        """Counters and sizes; what a remote store holds is not asked for."""
        with self._lock:
            under_way, queued = len(self._claimed), self._queued_bytes
        found: dict[str, Any] = {"tier": self.name, "store": self.store.describe(), "under_way": under_way}
        found |= {"queue_bytes": queued, "queue_limit": self.queue_limit}
        if not self.remote:
            found |= self._usage()
        return found | self.counters.snapshot()

    def _usage(self) -> dict[str, Any]:
        """What the store holds; nothing if it cannot tell."""
        try:
            usage = self.store.usage()
        except StoreError:
            return {}
        return {"entries": usage.entries, "bytes": usage.nbytes, "capacity": usage.capacity}
