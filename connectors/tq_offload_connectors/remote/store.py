"""One of LMCache's remote connectors as a ByteStore: writes go through its event loop, reads were fetched before."""

from __future__ import annotations

import asyncio
import struct
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

from lmcache.utils import CacheEngineKey
from lmcache.v1.memory_management import MemoryFormat, MemoryObj

from tq_offload.codec import cache_key_digest, model_fingerprint
from tq_offload.errors import (
    EntryTooLargeError,
    StoreClosedError,
    StoreError,
    StoreFullError,
    StoreIOError,
    StoreTimeoutError,
    StoreUnavailableError,
)
from tq_offload.frame import MAGIC
from tq_offload_connectors.byte_store import Allocate, ByteStore, Usage
from tq_offload_connectors.frame_store import FrameKey
from tq_offload_connectors.remote.table import Handling
from tq_offload_connectors.remote.view import CpuView

__all__ = ["ConnectorStore", "Fetched", "RemoteName", "is_frame", "mapped", "payload"]

POLL_S = 0.2
_LENGTH = struct.Struct("<Q")
_LENGTH_AT = 16  # of the frame's preamble

Fetched = Any
"""What a connector gave for a key: a MemoryObj that is ours, the exception that kept it, or None."""


class RemoteName(str):
    """Name of a chunk in counters and log lines, with LMCache's key, and what was fetched for it."""

    __slots__ = ("fetched", "key")

    key: CacheEngineKey
    fetched: Fetched

    @classmethod
    def of(cls, key: CacheEngineKey, fetched: Fetched = None) -> FrameKey:
        """The codec's key of a chunk, under such a name."""
        text = str(key.to_string())
        name = cls(text)
        name.key, name.fetched = key, fetched
        return FrameKey(name, cache_key_digest(text), model_fingerprint(key.model_name))


class ConnectorStore(ByteStore):
    """Frames in a remote connector.

    Args:
        timed: The connector with LMCache's instruments around it; it takes a reference of what it is given to store.
        raw: The connector itself.
        loop: Event loop that it runs on.
        cpu: Lends the buffers.
        handling: How the connector wants its objects.
        place: Where it stores, without passwords.
    """

    kind = "remote"

    def __init__(self, timed: Any, raw: Any, loop: Any, cpu: CpuView, handling: Handling, place: str) -> None:
        self._timed, self._raw, self._loop, self._cpu = timed, raw, loop, cpu
        self._handling, self._place = handling, place
        self._closing = threading.Event()

    def put(self, key: str, value: memoryview, *, owned: bool = False) -> None:
        """Store a frame. See `put_many`."""
        error = self.put_many([(key, value)])[0]
        if error is not None:
            raise error

    def put_many(self, items: Sequence[tuple[str, memoryview]]) -> list[StoreError | None]:
        """Store frames at once, and wait for all of them for as long as the connector needs."""
        results: list[StoreError | None] = [None] * len(items)
        pairs: dict[int, tuple[CacheEngineKey, MemoryObj]] = {}
        for index, (name, value) in enumerate(items):
            try:
                pairs[index] = (_key_of(name), self.object(value))
            except StoreError as error:
                results[index] = error
        for index, failure in zip(pairs, self._send(list(pairs.values())), strict=True):
            results[index] = None if failure is None else mapped(failure)
        return results

    def object(self, value: memoryview) -> MemoryObj:
        """A MemoryObj with those bytes, padded where the connector wants objects of one size.

        Raises:
            EntryTooLargeError, StoreFullError: The bytes do not fit such an object; LMCache's pool is full.
        """
        full = self._cpu.metadata.chunk_size
        nbytes = full if self._handling.length == "fixed" else len(value)
        if len(value) > nbytes:
            raise EntryTooLargeError(f"a frame of {len(value)} bytes; the connector takes {full}")
        obj = self._cpu.allocate(self._cpu.metadata.get_shapes(nbytes), self._cpu.metadata.get_dtypes(), _FORMAT)
        if obj is None:
            raise StoreFullError("LMCache's CPU memory, which this connector needs, has no room for a frame")
        target = memoryview(obj.byte_array).cast("B")
        target[: len(value)] = value
        target[len(value) :] = bytes(nbytes - len(value))
        return obj

    def _send(self, pairs: list[tuple[CacheEngineKey, MemoryObj]]) -> list[BaseException | None]:
        if not pairs:
            return []
        work = self._put_all(pairs)
        try:
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:  # the loop is closed
            work.close()
            for _, obj in pairs:
                obj.ref_count_down()
            return [StoreClosedError("LMCache's event loop is closed")] * len(pairs)
        while True:
            try:
                results: list[BaseException | None] = future.result(POLL_S)
                return results
            except FutureTimeoutError:
                if self._closing.is_set():
                    if not self._loop.is_running():  # nor will it ever begin
                        work.close()
                    return [StoreClosedError("closed while the connector was storing")] * len(pairs)

    async def _put_all(self, pairs: list[tuple[CacheEngineKey, MemoryObj]]) -> list[BaseException | None]:
        puts = (self._timed.put(key, obj) for key, obj in pairs)
        results: list[BaseException | None] = await asyncio.gather(*puts, return_exceptions=True)
        return results

    def get(self, key: str, allocate: Allocate | None = None) -> memoryview | None:
        """The bytes that were fetched for the key, or the error."""
        fetched = key.fetched if isinstance(key, RemoteName) else None
        if isinstance(fetched, BaseException):
            raise mapped(fetched)
        return None if fetched is None else payload(fetched)

    def contains(self, key: str) -> bool:
        """Not asked: a chunk that LMCache wants stored is stored, as its connectors do."""
        return False

    def delete(self, key: str) -> bool:
        """Delete an object, where the connector can."""
        try:
            return bool(self._raw.remove_sync(_key_of(key)))
        except NotImplementedError:
            raise StoreError(f"{type(self._raw).__name__} cannot delete; the next store writes it anew") from None
        except Exception as error:
            raise mapped(error) from error

    def keys(self) -> Iterator[str]:
        """Not known."""
        return iter(())

    def usage(self) -> Usage:
        """Not known."""
        return Usage(0, 0, None)

    def describe(self) -> str:
        """Where the connector stores."""
        return self._place

    def close(self) -> None:
        """Wait for no put any more. The connector is closed by its own `close`."""
        self._closing.set()


_FORMAT = MemoryFormat.KV_2LTD  # every connector's header has a number for it; the binary ones break shapes


def _key_of(name: str) -> CacheEngineKey:
    if not isinstance(name, RemoteName):
        raise StoreError(f"{name} has no key of LMCache")
    return name.key


def payload(obj: MemoryObj) -> memoryview:
    """The bytes of an object, without what a connector padded the frame with."""
    data = memoryview(obj.byte_array).cast("B")
    if not is_frame(data) or len(data) < _LENGTH_AT + _LENGTH.size:
        return data
    return data[: _LENGTH.unpack_from(data, _LENGTH_AT)[0]]


def is_frame(data: memoryview) -> bool:
    """Whether bytes begin as a frame does."""
    return bytes(data[: len(MAGIC)]) == MAGIC


def mapped(error: BaseException) -> StoreError:
    """A connector's error as one of ours. Their clients have trees of their own, so the name has to do."""
    if isinstance(error, StoreError):
        return error
    name, text = type(error).__name__, f"{type(error).__name__}: {error}"
    if isinstance(error, TimeoutError) or "Timeout" in name:
        return StoreTimeoutError(text)
    if isinstance(error, (ConnectionError, asyncio.CancelledError)) or "Connection" in name:
        return StoreUnavailableError(text)
    return StoreFullError(text) if isinstance(error, MemoryError) else StoreIOError(text)
