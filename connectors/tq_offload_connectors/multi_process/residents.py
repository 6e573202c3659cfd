"""What LMCache is to know of a store: which of its entries were really written, and which are gone."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from lmcache.v1.distributed.api import ObjectKey

from tq_offload.errors import StoreError
from tq_offload.integrations.lmcache.log import logger
from tq_offload_connectors.byte_store import Allocate, ByteStore, Usage

__all__ = ["Residents", "WatchedStore"]

_Entry = tuple[ObjectKey, int]
Tell = Callable[[list[ObjectKey], list[int]], None]

_PROBES = 4  # entries found in place in a row, from the least recently used on, that end the search for evicted ones
_ASKED = 1024  # at most in one search


class WatchedStore(ByteStore):
    """A store, and what happens in it.

    Args:
        inner: The store.
        check: Called with the name of an entry that is about to be written; raises a StoreError to forbid it.
        gone: Called with the name of an entry that was deleted, or was asked for and is not there.
    """

    def __init__(self, inner: ByteStore, check: Callable[[str], None], gone: Callable[[str], None]) -> None:
        self.kind = inner.kind
        self._inner, self._check, self._gone = inner, check, gone
        self._lock = threading.Lock()
        self._written: dict[str, int] = {}

    def take_written(self, key: str) -> int:
        """Bytes written for that key since the last call; 0: none."""
        with self._lock:
            return self._written.pop(key, 0)

    def put(self, key: str, value: memoryview, *, owned: bool = False) -> None:
        """See `ByteStore.put`."""
        self._check(key)
        self._inner.put(key, value, owned=owned)
        with self._lock:
            self._written[key] = value.nbytes

    def put_many(self, items: Sequence[tuple[str, memoryview]]) -> list[StoreError | None]:
        """See `ByteStore.put_many`."""
        errors: list[StoreError | None] = [self._forbidden(key) for key, _ in items]
        todo = [i for i, error in enumerate(errors) if error is None]
        for i, error in zip(todo, self._inner.put_many([items[i] for i in todo]), strict=True):
            errors[i] = error
            if error is None:
                with self._lock:
                    self._written[items[i][0]] = items[i][1].nbytes
        return errors

    def _forbidden(self, key: str) -> StoreError | None:
        try:
            self._check(key)
        except StoreError as error:
            return error
        return None

    def get(self, key: str, allocate: Allocate | None = None) -> memoryview | None:
        """See `ByteStore.get`."""
        data = self._inner.get(key, allocate)
        if data is None:
            self._gone(key)
        return data

    def delete(self, key: str) -> bool:
        """See `ByteStore.delete`."""
        removed = self._inner.delete(key)
        self._gone(key)
        return removed

    def contains(self, key: str) -> bool:
        """See `ByteStore.contains`."""
        return self._inner.contains(key)

    def contains_many(self, keys: Sequence[str]) -> list[bool]:
        """For each key whether it has a value; in one round trip where the store can."""
        many = getattr(self._inner, "contains_many", None)
        return list(many(keys)) if many is not None else [self._inner.contains(key) for key in keys]

    def contains_prefix(self, keys: Sequence[str]) -> int:
        """See `ByteStore.contains_prefix`."""
        return self._inner.contains_prefix(keys)

    def touch(self, keys: Sequence[str]) -> None:
        """See `ByteStore.touch`."""
        self._inner.touch(keys)

    def pin(self, key: str) -> bool:
        """See `ByteStore.pin`."""
        return self._inner.pin(key)

    def unpin(self, key: str) -> bool:
        """See `ByteStore.unpin`."""
        return self._inner.unpin(key)

    def keys(self) -> Iterator[str]:
        """See `ByteStore.keys`."""
        return self._inner.keys()

    def clear(self) -> int:
        """See `ByteStore.clear`."""
        return self._inner.clear()

    def usage(self) -> Usage:
        """See `ByteStore.usage`."""
        return self._inner.usage()

    def close(self) -> None:
        """See `ByteStore.close`."""
        self._inner.close()

    def describe(self) -> str:
        """See `ByteStore.describe`."""
        return self._inner.describe()


class Residents:
    """The entries that LMCache was told of, in their order of use, which is that of a store that evicts. Thread-safe.

    Args:
        tell_stored, tell_gone: Tell LMCache of keys and their sizes in bytes.
        limit: Entries at most; the least recently used one above it is taken for gone. For stores that do not tell
            what they dropped.
    """

    def __init__(self, tell_stored: Tell, tell_gone: Tell, limit: int = 1 << 20) -> None:
        self._tell_stored, self._tell_gone, self._limit = tell_stored, tell_gone, limit
        self._lock = threading.Lock()
        self._entries: OrderedDict[str, _Entry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, entries: Sequence[tuple[str, ObjectKey, int]]) -> None:
        """Note entries that were written, by their names, and tell LMCache."""
        gone: list[_Entry] = []
        with self._lock:
            for name, key, nbytes in entries:
                if name in self._entries:  # evicted and written again since LMCache was told
                    gone.append(self._entries.pop(name))
                self._entries[name] = key, nbytes
            while len(self._entries) > self._limit:
                gone.append(self._entries.popitem(last=False)[1])
        _tell(self._tell_gone, gone)
        _tell(self._tell_stored, [(key, nbytes) for _, key, nbytes in entries])

    def remove(self, name: str) -> None:
        """Forget an entry that is gone, and tell LMCache if it knew it."""
        with self._lock:
            entry = self._entries.pop(name, None)
        if entry is not None:
            _tell(self._tell_gone, [entry])

    def use(self, names: Sequence[str]) -> None:
        """Note entries as used."""
        with self._lock:
            for name in names:
                if name in self._entries:
                    self._entries.move_to_end(name)

    def remove_evicted(self, store: ByteStore) -> None:
        """Find what a store has evicted, asking it for the least recently used ones alone, and tell LMCache."""
        with self._lock:
            oldest = list(islice(self._entries, _ASKED))
        gone, in_place = [], 0
        for name in oldest:
            if _has(store, name):
                in_place += 1
                if in_place == _PROBES:
                    break
                continue
            with self._lock:
                entry = self._entries.pop(name, None)
            if entry is not None:
                gone.append(entry)
        _tell(self._tell_gone, gone)


def _has(store: ByteStore, name: str) -> bool:
    try:
        return store.contains(name)
    except StoreError:
        return True


def _tell(tell: Tell, entries: Sequence[_Entry]) -> None:
    if not entries:
        return
    try:
        tell([key for key, _ in entries], [nbytes for _, nbytes in entries])
    except Exception:
        logger().exception("TQ-Offload: a listener of LMCache failed")
