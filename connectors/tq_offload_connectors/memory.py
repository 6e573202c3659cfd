"""`MemoryStore`: values in this process's memory, within a budget; and the memory that other stores read into."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

from tq_offload.errors import ConfigError, EntryTooLargeError, StoreClosedError, StoreFullError
from tq_offload_connectors.byte_store import Allocate, ByteStore, Usage, as_bytes, check_key
from tq_offload_connectors.lru import LruIndex

__all__ = ["MemoryStore"]


class MemoryStore(ByteStore):
    """Values in memory; the least recently used ones are evicted to keep the budget.

    The values held never exceed the budget, also not for a moment. Outside it are copies that are being made by `put`
    and evicted values that a reader still holds. An owned buffer is kept whole: if it is a part of a larger one, the
    larger one stays in memory. `keys` lists the pinned entries last.

    Args:
        capacity_bytes: Budget in bytes.

    Raises:
        ConfigError: A budget below 1.
    """

    kind = "memory"

    def __init__(self, capacity_bytes: int) -> None:
        if capacity_bytes < 1:
            raise ConfigError("capacity_bytes", capacity_bytes, "1 or more")
        self._capacity = capacity_bytes
        self._lock = threading.Lock()
        self._index = LruIndex()
        self._values: dict[str, memoryview] = {}
        self._closed = False

    def put(self, key: str, value: memoryview, *, owned: bool = False) -> None:
        """See `ByteStore.put`. Nothing is copied, and nothing evicted, for a value that cannot be stored."""
        check_key(key)
        data = as_bytes(value)
        if data.nbytes > self._capacity:
            self._check_open()
            raise EntryTooLargeError(f"{data.nbytes} bytes are more than the budget of {self._capacity}")
        with self._lock:
            self._victims(key, data.nbytes)
        kept = data if owned else _copy(data)
        with self._lock:
            evicted = [self._remove(victim) for victim in self._victims(key, kept.nbytes)]
            evicted.append(self._values.get(key))
            self._index.set(key, kept.nbytes)
            self._values[key] = kept
        evicted.clear()  # large buffers are freed here, outside the lock

    def get(self, key: str, allocate: Allocate | None = None) -> memoryview | None:
        """See `ByteStore.get`. The kept buffer itself; `allocate` is not called."""
        check_key(key)
        with self._lock:
            self._check_open()
            value = self._values.get(key)
            if value is not None:
                self._index.touch(key)
            return value

    def contains(self, key: str) -> bool:
        """See `ByteStore.contains`."""
        check_key(key)
        with self._lock:
            self._check_open()
            return key in self._values

    def delete(self, key: str) -> bool:
        """See `ByteStore.delete`."""
        check_key(key)
        with self._lock:
            self._check_open()
            removed = self._remove(key)
        return removed is not None

    def touch(self, keys: Sequence[str]) -> None:
        """See `ByteStore.touch`."""
        with self._lock:
            self._check_open()
            for key in keys:
                if key in self._values:
                    self._index.touch(key)

    def pin(self, key: str) -> bool:
        """See `ByteStore.pin`."""
        check_key(key)
        with self._lock:
            self._check_open()
            return self._index.pin(key)

    def unpin(self, key: str) -> bool:
        """See `ByteStore.unpin`."""
        check_key(key)
        with self._lock:
            self._check_open()
            return self._index.unpin(key)

    def keys(self) -> Iterator[str]:
        """See `ByteStore.keys`."""
        with self._lock:
            self._check_open()
            return iter(self._index.keys())

    def clear(self) -> int:
        """See `ByteStore.clear`."""
        with self._lock:
            self._check_open()
            removed = [self._remove(key) for key in self._index.free_keys()]
        return len(removed)

    def usage(self) -> Usage:
        """See `ByteStore.usage`. The sum of the lengths of the values held."""
        with self._lock:
            self._check_open()
            return Usage(len(self._index), self._index.nbytes, self._capacity)

    def close(self) -> None:
        """Drop everything. Safe to call again."""
        with self._lock:
            self._closed = True
            self._index = LruIndex()
            dropped, self._values = self._values, {}
        dropped.clear()

    def describe(self) -> str:
        """See `ByteStore.describe`."""
        return f"memory, {self._capacity} bytes"

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosedError("the memory store is closed")

    def _victims(self, key: str, nbytes: int) -> list[str]:
        """What has to go to store `nbytes` bytes under a key. Called with the lock."""
        self._check_open()
        short = self._index.nbytes - (self._index.size(key) or 0) + nbytes - self._capacity
        victims = self._index.victims(short, spare=key)
        if victims is None:
            raise StoreFullError(f"no room for {nbytes} bytes: {self._index.pinned_nbytes} bytes are pinned")
        return victims

    def _remove(self, key: str) -> memoryview | None:
        self._index.remove(key)
        return self._values.pop(key, None)


def _copy(data: memoryview) -> memoryview:
    try:
        return memoryview(bytes(data))
    except MemoryError:
        raise StoreFullError(f"no memory for a copy of {data.nbytes} bytes") from None
