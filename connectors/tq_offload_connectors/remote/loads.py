"""Loads of chunks through one of LMCache's connectors: fetched in waves on its event loop, decoded in threads."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from lmcache.utils import CacheEngineKey
from lmcache.v1.memory_management import MemoryObj

from tq_offload_connectors.frame_store import FrameStore
from tq_offload_connectors.in_process.loads import Load, free_all
from tq_offload_connectors.in_process.objects import ChunkObjects, Patience
from tq_offload_connectors.remote.store import Fetched, RemoteName

__all__ = ["PrefixLoader", "release"]

WAVE_CHUNKS = 32
WAVE_BYTES = 128 << 20


class PrefixLoader:
    """Loads chunks up to the first that cannot be served. Its methods run on the connector's event loop.

    A fetch is never cancelled: LMCache's connectors lose workers and buffers by that. What comes too late is freed.

    Args:
        timed: The connector.
        frames: Decodes, counts, repairs.
        objects: Lends memory.
        frame_bytes: Size of the frame of a full chunk.
        asks_first: Ask the connector which keys it has before they are fetched.
    """

    def __init__(
        self, timed: Any, frames: FrameStore, objects: ChunkObjects, frame_bytes: int, asks_first: bool = False
    ) -> None:
        self._timed, self._frames, self._objects = timed, frames, objects
        self._wave = max(1, min(WAVE_CHUNKS, WAVE_BYTES // frame_bytes))
        self._asks_first = asks_first
        self._tasks: set[asyncio.Task[list[Fetched]]] = set()

    async def load(self, keys: Sequence[CacheEngineKey]) -> list[MemoryObj]:
        """The chunks, up to the first failure; they are the caller's."""
        found: list[MemoryObj] = []
        loads: list[Load] = []  # of the last two waves
        patience = Patience()
        try:
            for wave in self._waves(keys):
                fetched = await self.fetch(wave)
                before, begun = loads, self._begin(wave, fetched, patience)
                loads = before + begun
                served = await _collect(before, found)
                loads = begun if served else _freed(begun)
                if not served or len(begun) < len(wave):
                    break
            await _collect(loads, found)
        except BaseException:
            _freed(loads)
            for obj in found:
                obj.ref_count_down()
            raise
        return found

    def _waves(self, keys: Sequence[CacheEngineKey]) -> Iterator[Sequence[CacheEngineKey]]:
        for start in range(0, len(keys), self._wave):
            yield keys[start : start + self._wave]

    def _begin(self, keys: Sequence[CacheEngineKey], fetched: Sequence[Fetched], patience: Patience) -> list[Load]:
        """Start decoding up to the first that was not fetched, which ends as a miss; free the rest."""
        loads: list[Load] = []
        for index, (key, item) in enumerate(zip(keys, fetched, strict=True)):
            load = Load(self._frames, self._objects, RemoteName.of(key, item), patience).start()
            loads.append(load)
            if not isinstance(item, MemoryObj):
                for other in fetched[index + 1 :]:
                    release(other)
                break
            load.future.add_done_callback(partial(_after, item))
        return loads

    async def fetch(self, keys: Sequence[CacheEngineKey]) -> list[Fetched]:
        """What the connector has for the keys, one for each; the objects are the caller's."""
        task = asyncio.ensure_future(self._ask(list(keys)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(_release_result)
            raise

    async def _ask(self, keys: list[CacheEngineKey]) -> list[Fetched]:
        start = time.perf_counter()
        there = keys
        try:
            if self._asks_first:
                there = keys[: await self._timed.batched_async_contains("", keys)]
            if not there:
                found: list[Fetched] = []
            elif self._timed.support_batched_get():
                found = list(await self._timed.batched_get(there))[: len(there)]
            else:
                found = list(await asyncio.gather(*(self._timed.get(key) for key in there), return_exceptions=True))
        except Exception as error:
            return [error] * len(keys)
        finally:
            self._frames.tiers[0].counters.add("read_seconds", time.perf_counter() - start)
        return found + [None] * (len(keys) - len(found))

    def cancel(self) -> None:
        """End the fetches that are still under way; only for the end of everything."""
        for task in list(self._tasks):
            task.cancel()


async def _collect(loads: list[Load], found: list[MemoryObj]) -> bool:
    """Take the chunks of loads in order. At the first failure free the rest."""
    for index, load in enumerate(loads):
        await asyncio.shield(asyncio.wrap_future(load.future))
        obj = load.result(0.0)
        if obj is None:
            _freed(loads[index + 1 :])
            return False
        found.append(obj)
    return True


def _freed(loads: list[Load]) -> list[Load]:
    """Free loads; those that have not begun are not counted, since nobody asked in the end. Returns none."""
    free_all([load for load in loads if not load.future.cancel()])
    return []


def release(fetched: Fetched) -> None:
    """Give an object back that nobody wants."""
    if isinstance(fetched, MemoryObj):
        fetched.ref_count_down()


def _after(item: MemoryObj, _: object) -> None:
    item.ref_count_down()


def _release_result(task: asyncio.Task[list[Fetched]]) -> None:
    if not task.cancelled() and task.exception() is None:
        for item in task.result():
            release(item)
