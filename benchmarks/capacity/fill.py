"""A budget filled with chunks of its own each, until the store evicts the first one."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from benchmarks.transfer.chunks import Shape, make_chunk
from tq_offload.codec import TurboQuantCodec, cache_key_digest
from tq_offload_connectors.byte_store import ByteStore
from tq_offload_connectors.disk import DiskStore
from tq_offload_connectors.memory import MemoryStore

__all__ = ["FORMATS", "Filled", "Values", "fill"]

FORMATS = ("naive", "TQ-Offload")


@dataclass(frozen=True)
class Filled:
    """What a budget holds.

    Args:
        tier, way: Which.
        budget: Bytes.
        chunks, tokens: Held when the first one was evicted.
        nbytes: Bytes of their values, as the store counts them.
        outside: Growth of this process's memory, or blocks of the files, in bytes.
        readable: How many of a sample of the held chunks came back right.
    """

    tier: str
    way: str
    budget: int
    chunks: int
    tokens: int
    nbytes: int
    outside: int
    readable: int


class Values:
    """Values to store under a key, and whether what comes back is right; a few source chunks in turn."""

    def __init__(self, shape: Shape, way: str, sources: int = 3) -> None:
        self.shape, self.way = shape, way
        self.codec = TurboQuantCodec()
        self.sources = [make_chunk(shape, seed) for seed in range(sources)]
        self.target = torch.zeros_like(self.sources[0])
        if way != "naive":
            self.right(0, "warm-up", self.make(0, "warm-up"))  # kernels take memory of their own

    @property
    def nbytes(self) -> int:
        """Bytes of a value."""
        return self.shape.nbytes if self.way == "naive" else self.codec.frame_size(self.shape.layout)

    def make(self, number: int, key: str) -> memoryview:
        """The chunk as it is (a view), or a new frame bound to the key."""
        chunk = self.sources[number % len(self.sources)]
        if self.way == "naive":
            return memoryview(chunk.flatten().view(torch.uint8).numpy())
        return memoryview(self.codec.encode([chunk], self.shape.layout, key=cache_key_digest(key)))

    def right(self, number: int, key: str, value: memoryview | None) -> bool:
        """Whether the value is that of the key."""
        if value is None:
            return False
        wanted = self.sources[number % len(self.sources)]
        if self.way == "naive":
            return value == memoryview(wanted.flatten().view(torch.uint8).numpy())
        self.codec.decode_into(value, [self.target], layout=self.shape.layout, key=cache_key_digest(key))
        error = (self.target[:, 0].float() - wanted[:, 0].float()).square().sum() / wanted[:, 0].float().square().sum()
        return float(error) < 0.01


def fill(tier: str, values: Values, budget: int, folder: Path) -> Filled:
    """Fill a new store of that tier (`memory`, `disk`) until a put evicts its first chunk."""
    place = folder / f"{tier}-{values.way}"
    before = _resident()
    store: ByteStore = MemoryStore(budget) if tier == "memory" else DiskStore(place, budget)
    with store:
        count = _until_eviction(store, values)
        usage = store.usage()
        outside = _resident() - before if tier == "memory" else _blocks(place.rglob("*"))
        sample = range(1, 1 + count, max(1, count // 4))  # 0 is the evicted one
        readable = sum(values.right(i, f"chunk {i}", store.get(f"chunk {i}")) for i in sample)
        if readable != len(sample):
            raise SystemExit(f"{tier}, {values.way}: {readable} of {len(sample)} chunks came back right")
        store.clear()
    tokens = usage.entries * values.shape.tokens
    return Filled(tier, values.way, budget, usage.entries, tokens, usage.nbytes, outside, readable)


def _until_eviction(store: ByteStore, values: Values) -> int:
    """Puts until the first chunk is gone; returns how many chunks are there."""
    number = 0
    while number == 0 or store.contains("chunk 0"):
        key = f"chunk {number}"
        store.put(key, values.make(number, key), owned=values.way != "naive")
        number += 1
    return number - 1


def _resident() -> int:
    return int(psutil.Process(os.getpid()).memory_info().rss)


def _blocks(paths: Iterable[Path]) -> int:
    return sum(path.stat().st_blocks * 512 for path in paths if path.is_file())
