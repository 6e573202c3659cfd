"""`FrameStore`: chunks in, frames out to every tier, and back. Puts never block; what could not be kept is counted."""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, TypeVar
from weakref import WeakSet

import numpy as np
import torch

from tq_offload.codec import TurboQuantCodec, cache_key_digest, model_fingerprint
from tq_offload.errors import EntryTooLargeError, FrameError, LayoutError, TQOffloadError
from tq_offload.integrations.lmcache.log import logger
from tq_offload.layout import ChunkLayout
from tq_offload_connectors.pins import PinLedger
from tq_offload_connectors.tier import Frame, Tier

Result = TypeVar("Result")

__all__ = ["Destination", "FrameKey", "FrameStore", "LateError", "NoMemoryError", "Put", "open_stores"]

EXIT_TIMEOUT_S = 1.0

Destination = Callable[[ChunkLayout], Sequence[torch.Tensor]]
"""From what a sound frame holds to where it is to be decoded.

It raises a FrameError for a layout that was not asked for, NoMemoryError where there is no room, LateError where nobody
waits any more.
"""


class NoMemoryError(TQOffloadError):
    """No memory for the chunk that was to be loaded."""

    reason = "no_memory"


class LateError(TQOffloadError):
    """Nobody waits for the chunk any more."""

    reason = "timeout"


@dataclass(frozen=True)
class FrameKey:
    """Key of a chunk.

    Args:
        name: Key in the stores; different for different chunks.
        digest: 16 bytes that a frame carries to prove that it belongs to the key.
        model: Fingerprint of the model, 16 bytes.
    """

    name: str
    digest: bytes
    model: bytes

    @classmethod
    def of(cls, name: str, model_name: str) -> FrameKey:
        """The key of that name."""
        return cls(name, cache_key_digest(name), model_fingerprint(model_name))


@dataclass(eq=False)
class Put:
    """A chunk to be stored.

    Args:
        key: Key.
        tensors: One CPU tensor for each group; they must stay as they are until `release`.
        layout: What they are.
        release: Called exactly once, as soon as the tensors are not needed any more; maybe before the put returns.
        done: Called exactly once when every tier is done, with whether all of them have the chunk now.
    """

    key: FrameKey
    tensors: Sequence[torch.Tensor]
    layout: ChunkLayout
    release: Callable[[], None]
    done: Callable[[bool], None] | None = None
    tiers: list[Tier] = field(default_factory=list, init=False)
    _pending: int = field(default=0, init=False)
    _stored: bool = field(default=True, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def claim(self, tiers: Sequence[Tier]) -> None:
        """Reserve the chunk in the tiers that want it. With none of them the put is done."""
        self.tiers = [tier for tier in tiers if tier.claim(self.key.name)]
        self._pending = len(self.tiers)
        if not self.tiers:
            self._report()

    def finish(self, stored: bool) -> None:
        """A tier is done; the last one reports."""
        with self._lock:
            self._stored = self._stored and stored
            self._pending -= 1
            last = self._pending == 0
        if last:
            self._report()

    def lose(self, counter: str, reason: str, what: str) -> None:
        """Give the chunk up in every tier that was to have it, counted there."""
        for tier in self.tiers:
            tier.give_up(self.key.name, counter, reason, what)
            self.finish(False)

    def _report(self) -> None:
        if self.done is not None:
            self.done(self._stored)


open_stores: WeakSet[FrameStore] = WeakSet()
"""Those of this process that are not closed."""


@cache
def _close_at_exit(pid: int) -> None:
    """Close what is open at the end of this process: a thread that the interpreter ends inside torch aborts it."""

    def close() -> None:
        if os.getpid() == pid:  # a forked process has none of the threads
            for store in list(open_stores):
                store.close(EXIT_TIMEOUT_S)

    atexit.register(close)


class FrameStore:
    """Encodes chunks once and keeps the frames in tiers, fastest first. Thread-safe.

    Args:
        codec: Codec.
        tiers: The tiers, in the order in which they are asked. Closed with the store.
        workers: Threads that encode, and as many that read and decode.
        queue_bytes: Uncompressed bytes that may wait for the encoders; they stay pinned until they are encoded.
        repair: Delete entries that cannot be served.
        max_frame_bytes: Larger entries are not read: they are no frames.
        pin_timeout_s: After this time a pin no longer keeps an entry from being evicted.
    """

    def __init__(
        self,
        codec: TurboQuantCodec,
        tiers: Sequence[Tier],
        *,
        workers: int = 2,
        queue_bytes: int = 256 << 20,
        repair: bool = True,
        pin_timeout_s: float = 300.0,
        max_frame_bytes: int = 1 << 30,
    ) -> None:
        self.codec, self.tiers = codec, list(tiers)
        self.queue_limit, self.max_frame_bytes, self._repair = queue_bytes, max_frame_bytes, repair
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._queue: deque[Put] = deque()
        self._queued_bytes = 0  # waiting or being encoded
        self._closed = False
        self._scratch = threading.local()
        self.pins = PinLedger([tier for tier in self.tiers if not tier.remote], pin_timeout_s)
        self._readers = ThreadPoolExecutor(workers, thread_name_prefix="tq-read")
        self._encoders = [
            threading.Thread(target=self._encode_loop, name=f"tq-encode-{n}", daemon=True) for n in range(workers)
        ]
        for thread in self._encoders:
            thread.start()
        open_stores.add(self)
        _close_at_exit(os.getpid())
        for tier in self.tiers:
            tier.counters.gauge("encode_queue_bytes", lambda: float(self._queued_bytes))

    # Put

    def put(
        self,
        key: FrameKey,
        tensors: Sequence[torch.Tensor],
        layout: ChunkLayout,
        *,
        release: Callable[[], None],
        done: Callable[[bool], None] | None = None,
    ) -> bool:
        """Offer one chunk; see `Put` and `put_many`."""
        return self.put_many([Put(key, tensors, layout, release, done)]) == 1

    def put_many(self, puts: Sequence[Put]) -> int:
        """Offer chunks to every tier that does not have them. Never waits, and never raises for a chunk that is lost.

        Args:
            puts: The chunks of a prefix in order: once one finds no room the rest is dropped too, since without it
                they could not be hit.

        Returns:
            How many were not dropped.
        """
        for put in puts:
            put.claim(self.tiers)
        present = [put for put in puts if not put.tiers]
        wanted = [put for put in puts if put.tiers]  # once queued a put is its encoder's
        with self._lock:
            reason, taken = self._room_for(wanted)
            self._queue.extend(wanted[:taken])
            self._queued_bytes += sum(put.layout.nbytes for put in wanted[:taken])
            self._changed.notify_all()
        for put in (*present, *wanted[taken:]):
            self._release(put)
        for put in wanted[taken:]:
            put.lose("dropped", reason, f"{self._queued_bytes} uncompressed bytes wait to be encoded")
        return len(present) + taken

    def _room_for(self, puts: Sequence[Put]) -> tuple[str, int]:
        """How many puts, from the first on, find room in the queue, and why the next one does not."""
        if self._closed:
            return "closed", 0
        nbytes = self._queued_bytes
        for count, put in enumerate(puts):
            if nbytes and nbytes + put.layout.nbytes > self.queue_limit:
                return "queue_full", count
            nbytes += put.layout.nbytes
        return "", len(puts)

    def drop(self, name: str, reason: str, what: str) -> None:
        """Count a chunk that the caller did not even offer, for every tier."""
        for tier in self.tiers:
            tier.counters.add("puts")
            tier.counters.lost("dropped", reason, f"{name}: {what}")

    def in_flight(self, name: str) -> bool:
        """Whether a put of that name is under way in any tier."""
        return any(tier.in_flight(name) for tier in self.tiers)

    def _encode_loop(self) -> None:
        while (put := self._next_put()) is not None:
            present = [tier for tier in put.tiers if tier.has_already(put.key.name)]
            put.tiers = [tier for tier in put.tiers if tier not in present]
            frame, reason, what = self._encode(put) if put.tiers else (None, "", "")
            self._release(put)
            with self._lock:
                self._queued_bytes -= put.layout.nbytes
                self._changed.notify_all()
            for tier in present:
                tier.end_present(put.key.name)
                put.finish(True)
            if reason:
                put.lose("refused", reason, what)
            elif frame is not None:
                for tier in put.tiers:
                    tier.submit(Frame(put.key.name, frame, put.layout.nbytes, put.finish))
            del put, frame

    def _release(self, put: Put) -> None:
        """Let go of the memory, before any tier reports: who waits for the end of a put finds it free."""
        try:
            put.release()
        except Exception:
            logger().exception("TQ-Offload: cannot release the memory of %s", put.key.name)

    def _next_put(self) -> Put | None:
        with self._lock:
            while not self._queue:
                if self._closed:
                    return None
                self._changed.wait()
            return self._queue.popleft()

    def _encode(self, put: Put) -> tuple[memoryview | None, str, str]:
        """The frame; or None, and why the chunk must not be stored, in a word and in full."""
        start = time.perf_counter()
        try:
            out = np.empty(self.codec.frame_size(put.layout), np.uint8)
            self.codec.encode_into(put.tensors, put.layout, out, key=put.key.digest, model=put.key.model)
            return out.data.toreadonly(), "", ""
        except (TQOffloadError, MemoryError) as error:
            reason = "layout" if isinstance(error, LayoutError) else str(getattr(error, "reason", "no_memory"))
            return None, reason, str(error)
        except Exception as error:
            logger().exception("TQ-Offload: internal error while encoding %s", put.key.name)
            return None, "internal", repr(error)
        finally:
            put.tiers[0].counters.add("encode_seconds", time.perf_counter() - start)

    # Get

    def get(self, key: FrameKey, destination: Destination) -> bool:
        """Read a chunk from the first tier that has it whole, straight into its destination.

        Args:
            key: Key.
            destination: See `Destination`; called at most once for each tier, after the frame was checked.

        Returns:
            Whether the chunk was decoded. If not, every tier has counted why.
        """
        for position, tier in enumerate(self.tiers):
            data = tier.read(key.name, self._allocate, repair=self._repair)
            if data is None:
                continue
            start = time.perf_counter()
            try:
                checked = self.codec.open(data, key=key.digest, model=key.model)
                checked.decode_into(destination(checked.header.layout))
            except (NoMemoryError, LateError) as error:
                tier.missed(key.name, error.reason, str(error))
                return False
            except (FrameError, LayoutError) as error:
                reason = str(getattr(error, "reason", "layout"))
                tier.missed(key.name, reason, str(error))
                if self._repair:
                    tier.repair(key.name, reason)
                continue
            except Exception as error:
                logger().exception("TQ-Offload: internal error while decoding %s", key.name)
                tier.missed(key.name, "internal", repr(error))
                return False
            finally:
                tier.counters.add("decode_seconds", time.perf_counter() - start)
            tier.counters.add("hits")
            self._promote(key.name, data, position)
            return True
        return False

    def missed(self, name: str, reason: str, what: str) -> None:
        """Count a chunk that was asked for and not even looked for."""
        self.tiers[0].counters.add("gets")
        self.tiers[0].missed(name, reason, what)

    def touch(self, names: Sequence[str]) -> None:
        """Count entries as used, in that order."""
        for tier in self.tiers:
            self._asked(tier, partial(tier.store.touch, names))

    def submit(self, load: Callable[[], Result]) -> Future[Result]:
        """Run a function that calls `get` in a reading thread."""
        return self._readers.submit(load)

    def _promote(self, name: str, data: memoryview, position: int) -> None:
        if position and self.tiers[0].store.kind == "memory":
            self.tiers[0].promote(name, data)

    def _allocate(self, nbytes: int) -> memoryview:
        """A buffer of the calling thread, used again for its next read. Refuses what is too large to be a frame."""
        if nbytes > self.max_frame_bytes:
            raise EntryTooLargeError(f"{nbytes} bytes, and no frame has more than {self.max_frame_bytes}")
        buffer = getattr(self._scratch, "buffer", None)
        if buffer is None or len(buffer) < nbytes:
            buffer = self._scratch.buffer = np.empty(nbytes, np.uint8).data
        return buffer[:nbytes]

    def contains_prefix(self, names: Sequence[str], pin: bool = False) -> int:
        """How many of the names, from the first on without a gap, some tier has.

        Args:
            names: Keys in the stores.
            pin: Also pin those; `pins.unpin` undoes it.
        """
        missing: Sequence[int] = range(len(names))
        for tier in self.tiers:
            if tier.remote:  # one round trip; asked last: the first that it does not have ends the prefix
                count = self._asked(tier, partial(tier.store.contains_prefix, [names[i] for i in missing]))
                missing = missing[count:]
                for position in missing:  # expired or flushed: the next put is to bring them again
                    tier.forget(names[position])
            else:
                missing = [i for i in missing if not self._asked(tier, partial(tier.store.contains, names[i]))]
            if not missing:
                break
        found = missing[0] if missing else len(names)
        if pin:
            self.pins.pin(names[:found])
        return found

    def _asked(self, tier: Tier, ask: Callable[[], int | None]) -> int:
        try:
            return ask() or 0
        except TQOffloadError as error:
            tier.counters.lost("lookup_failures", str(getattr(error, "reason", "store")), str(error))
            return 0

    # Entries and the whole store

    def remove(self, name: str) -> bool:
        """Delete an entry in every tier. Returns whether any had it."""
        removed = False
        for tier in self.tiers:
            tier.forget(name)
            removed = bool(self._asked(tier, partial(tier.store.delete, name))) or removed
        return removed

    def clear(self) -> int:
        """Delete what is not pinned in the tiers. Returns how many entries of the fullest tier."""
        return max((self._asked(tier, tier.store.clear) for tier in self.tiers), default=0)

    def drain(self, timeout_s: float = 10.0) -> bool:
        """Wait for the puts under way. Returns whether they ended in time."""
        deadline = time.monotonic() + timeout_s
        return all(tier.drain(max(0.0, deadline - time.monotonic())) for tier in self.tiers)

    def close(self, timeout_s: float = 5.0) -> None:
        """End what is under way within about `timeout_s`, drop and count the rest, and close the tiers."""
        self.drain(timeout_s)
        with self._lock:
            already, self._closed = self._closed, True
            left = list(self._queue)
            self._queue.clear()
            self._queued_bytes -= sum(put.layout.nbytes for put in left)
            self._changed.notify_all()
        for put in left:
            self._release(put)
            put.lose("dropped", "closed", "the store is closing")
        if already:
            return
        open_stores.discard(self)
        for thread in self._encoders:
            thread.join(timeout_s)
        self._readers.shutdown(wait=True, cancel_futures=True)
        for tier in self.tiers:
            tier.close(timeout_s)

    def status(self) -> dict[str, Any]:
        """Queue, pins and every tier."""
        with self._lock:
            queued, waiting = self._queued_bytes, len(self._queue)
        return {
            "spec": self.codec.spec.describe(),
            "encode_queue_bytes": queued,
            "encode_queue_limit": self.queue_limit,
            "encode_queue_chunks": waiting,
            "pins": self.pins.count(),
            "tiers": [tier.status() for tier in self.tiers],
        }
