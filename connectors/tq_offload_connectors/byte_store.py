"""`ByteStore`: bytes under keys. The one interface of the memory, disk and Redis stores."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np

from tq_offload.errors import StoreError, StoreIOError

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["MAX_KEY_BYTES", "Allocate", "ByteStore", "Usage", "as_bytes", "check_key", "lend", "no_memory"]

MAX_KEY_BYTES = 1024
"""Longest key in bytes of UTF-8."""

Allocate = Callable[[int], memoryview]
"""Lends a writable buffer of exactly that many bytes; its next call may take the buffer back."""


@dataclass(frozen=True)
class Usage:
    """What a store holds.

    Args:
        entries: Number of entries.
        nbytes: Bytes of their values as stored.
        capacity: Budget in bytes; None: no budget of its own.
    """

    entries: int
    nbytes: int
    capacity: int | None


class ByteStore(abc.ABC):
    """Bytes under keys. Every method is thread-safe and may block; callers run them on worker threads.

    Keys are non-empty text of at most `MAX_KEY_BYTES` bytes. A value is published as a whole or not at all: `get` never
    returns part of one. Methods raise a `StoreError` and
    nothing else; an absent entry is no error.
    """

    kind: str
    """Name of the kind of store: `memory`, `disk` or `redis`."""

    @abc.abstractmethod
    def put(self, key: str, value: memoryview, *, owned: bool = False) -> None:
        """Store a value; one that is there is replaced.

        Args:
            key: Key.
            value: Contiguous bytes.
            owned: The caller gives the buffer away and will not touch it again; a store in memory keeps it uncopied.

        Raises:
            StoreFullError, EntryTooLargeError: No room now; no room ever.
            StoreError: Another subclass: the store failed. After a StoreTimeoutError or StoreUnavailableError the value
                may be there all the same, or still arrive.
        """

    @abc.abstractmethod
    def get(self, key: str, allocate: Allocate | None = None) -> memoryview | None:
        """Read a value, and count it as used.

        Args:
            key: Key.
            allocate: Where a store that has to read into a buffer gets it; None: a new one.

        Returns:
            The bytes, to be read only; None if there are none. They stay as they are, also when the entry is replaced
            or evicted, until `allocate` takes its buffer back.
        """

    @abc.abstractmethod
    def contains(self, key: str) -> bool:
        """True if the key has a value."""

    @abc.abstractmethod
    def delete(self, key: str) -> bool:
        """Remove a value, pinned or not. Returns whether there was one."""

    @abc.abstractmethod
    def keys(self) -> Iterator[str]:
        """The keys, least recently used first where the store knows; a snapshot."""

    @abc.abstractmethod
    def usage(self) -> Usage:
        """What the store holds."""

    @abc.abstractmethod
    def close(self) -> None:
        """Release threads, connections and memory; values that outlive the process stay. Safe to call again."""

    def put_many(self, items: Sequence[tuple[str, memoryview]]) -> list[StoreError | None]:
        """Store several values; for each the error that kept it from being stored, or None."""
        return [self._put_one(key, value) for key, value in items]

    def _put_one(self, key: str, value: memoryview) -> StoreError | None:
        try:
            self.put(key, value)
        except StoreError as error:
            return error
        return None

    def contains_many(self, keys: Sequence[str]) -> list[bool]:
        """Which of the keys have a value."""
        return [self.contains(key) for key in keys]

    def contains_prefix(self, keys: Sequence[str]) -> int:
        """How many of the keys, from the first on without a gap, have a value."""
        for count, key in enumerate(keys):
            if not self.contains(key):
                return count
        return len(keys)

    def touch(self, keys: Sequence[str]) -> None:  # noqa: B027
        """Count entries as used, in that order, where the store evicts by use. What it does not have is passed over."""

    def pin(self, key: str) -> bool:
        """Keep an entry from being evicted until `unpin` was called as often.

        Pins belong to the key: they outlive a delete and a new put, and every pin that returned True needs its unpin.

        Returns:
            Whether the entry is there. A store that cannot pin says so by `contains` alone.
        """
        return self.contains(key)

    def unpin(self, key: str) -> bool:
        """Undo one `pin`. Returns whether the entry is there."""
        return self.contains(key)

    def clear(self) -> int:
        """Remove every entry, in a store that can pin those that are not pinned. Returns how many."""
        return sum(self.delete(key) for key in self.keys())

    def describe(self) -> str:
        """Where it stores, for a log line; without passwords."""
        return self.kind

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def check_key(key: str) -> str:
    """The key itself.

    Raises:
        StoreError: Empty, or longer than `MAX_KEY_BYTES`.
    """
    if not 0 < len(key.encode("utf-8", "surrogatepass")) <= MAX_KEY_BYTES:
        raise StoreError(f"a key has 1 to {MAX_KEY_BYTES} bytes, found {len(key)} characters")
    return key


def as_bytes(value: memoryview) -> memoryview:
    """The same memory as a flat view of bytes, read-only.

    Raises:
        StoreError: Not contiguous.
    """
    if not value.c_contiguous:
        raise StoreError("a value is contiguous bytes")
    return (value.cast("B") if value.nbytes else memoryview(b"")).toreadonly()  # a zero in a shape cannot be cast


def lend(allocate: Allocate | None, nbytes: int) -> memoryview:
    """A flat writable buffer of that many bytes, to read a value into: of `allocate`, or a new one.

    Raises:
        StoreIOError: There is no memory (reason `no_memory`), or what was lent cannot take the value.
        StoreError: `allocate` refuses.
    """
    try:
        lent = allocate(nbytes) if allocate else np.empty(nbytes, np.uint8).data
    except MemoryError as error:
        raise no_memory(f"for a value of {nbytes} bytes") from error
    if lent.nbytes != nbytes:
        raise StoreIOError(f"asked for a buffer of {nbytes} bytes, was lent one of {lent.nbytes}")
    if not nbytes:
        return memoryview(bytearray())
    if lent.readonly or not lent.c_contiguous:
        raise StoreIOError("the buffer that was lent is read-only or not contiguous")
    return lent.cast("B")


def no_memory(what: str) -> StoreIOError:
    """The error of a read for which this process has no memory."""
    error = StoreIOError(f"no memory {what}")
    error.reason = "no_memory"
    return error
