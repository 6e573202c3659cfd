"""How chunks go to a place and come back: as they are, as LMCache's fp8, as our frames; a thread pool does each."""

from __future__ import annotations

import abc
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.codec_peers import Tensor, fp8_serde
from benchmarks.cores import pinned_pool
from benchmarks.transfer.chunks import Shape
from benchmarks.transfer.places import Place
from tq_offload.codec import TurboQuantCodec, cache_key_digest
from tq_offload.errors import StoreError
from tq_offload_connectors.byte_store import ByteStore

__all__ = ["Fp8", "Naive", "Ours", "StoreWay", "Way", "relative_error"]


class Way(abc.ABC):
    """One way of storing all chunks, and of reading them back into `targets`."""

    name: str
    workers: int
    targets: Sequence[torch.Tensor]

    @property
    def label(self) -> str:
        """Name and number of workers."""
        return f"{self.name} ×{self.workers}"

    def goes_to(self, place: Place) -> bool:
        """Whether it can be used there."""
        return True

    @abc.abstractmethod
    def put_all(self, place: Place) -> None:
        """Store all chunks; returns when all of them are there."""

    @abc.abstractmethod
    def get_all(self, place: Place) -> None:
        """Read all chunks back."""

    def close(self) -> None:  # noqa: B027
        """Release threads."""


class StoreWay(Way):
    """Chunks through a ByteStore, one task a chunk."""

    def __init__(self, shape: Shape, chunks: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], workers: int):
        self.shape, self.chunks, self.targets, self.workers = shape, chunks, targets, workers
        self._pool = pinned_pool(workers)
        self._scratch = threading.local()

    @abc.abstractmethod
    def put(self, store: ByteStore, key: str, chunk: torch.Tensor) -> None:
        """Store a chunk."""

    @abc.abstractmethod
    def get(self, store: ByteStore, key: str, target: torch.Tensor) -> None:
        """Read a chunk into `target`."""

    def goes_to(self, place: Place) -> bool:
        """A slow link is as slow for two workers."""
        return self.workers == 1 or not place.slow

    def put_all(self, place: Place) -> None:
        """See `Way`."""
        self._run(self.put, place, self.chunks)

    def get_all(self, place: Place) -> None:
        """See `Way`."""
        self._run(self.get, place, self.targets)

    def close(self) -> None:
        """See `Way`."""
        self._pool.shutdown()

    def _run(
        self, work: Callable[[ByteStore, str, torch.Tensor], None], place: Place, tensors: Sequence[torch.Tensor]
    ) -> None:
        tasks = [self._pool.submit(work, place.store, f"{self.label}@{i}", one) for i, one in enumerate(tensors)]
        for task in tasks:
            task.result()

    def lend(self, nbytes: int) -> memoryview:
        """A buffer of this thread to read into, as FrameStore lends it."""
        buffer = getattr(self._scratch, "buffer", None)
        if buffer is None or len(buffer) < nbytes:
            buffer = self._scratch.buffer = np.empty(nbytes, np.uint8).data
        return buffer[:nbytes]

    def read(self, store: ByteStore, key: str) -> memoryview:
        """The bytes under a key."""
        return _there(store.get(key, self.lend))


class Naive(StoreWay):
    """The chunk's bytes: written from the tensor, read straight into it; memory copies them."""

    name = "naive"

    def put(self, store: ByteStore, key: str, chunk: torch.Tensor) -> None:
        """See `StoreWay`."""
        store.put(key, _bytes_of(chunk))

    def get(self, store: ByteStore, key: str, target: torch.Tensor) -> None:
        """See `StoreWay`."""
        place = _bytes_of(target)
        found = np.frombuffer(_there(store.get(key, lambda nbytes: place[:nbytes])), np.uint8)
        if found.ctypes.data != target.data_ptr():
            np.copyto(np.frombuffer(place, np.uint8), found)


class Fp8(StoreWay):
    """LMCache's fp8 serde."""

    name = "LMCache fp8"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        _, self._serialize, self._deserialize = fp8_serde()

    def put(self, store: ByteStore, key: str, chunk: torch.Tensor) -> None:
        """See `StoreWay`."""
        eight_bits = np.empty(chunk.numel(), np.uint8)
        self._serialize(Tensor(chunk), Tensor(torch.from_numpy(eight_bits)))
        store.put(key, eight_bits.data, owned=True)

    def get(self, store: ByteStore, key: str, target: torch.Tensor) -> None:
        """See `StoreWay`."""
        found = np.frombuffer(self.read(store, key), np.uint8)
        self._deserialize(Tensor(torch.from_numpy(found)), Tensor(target))


class Ours(StoreWay):
    """Frames, bound to their keys and checked, in new buffers as FrameStore makes them."""

    name = "TQ-Offload"
    codec = TurboQuantCodec()

    def put(self, store: ByteStore, key: str, chunk: torch.Tensor) -> None:
        """See `StoreWay`."""
        layout = self.shape.layout
        frame = np.empty(self.codec.frame_size(layout), np.uint8)
        self.codec.encode_into([chunk], layout, frame, key=cache_key_digest(key))
        store.put(key, frame.data, owned=True)

    def get(self, store: ByteStore, key: str, target: torch.Tensor) -> None:
        """See `StoreWay`."""
        found = self.read(store, key)
        self.codec.decode_into(found, [target], layout=self.shape.layout, key=cache_key_digest(key))


def relative_error(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> float:
    """Squared error over energy of the worst chunk, in its first and its last layer."""
    pairs = [(a[:, [0, -1]].float(), b[:, [0, -1]].float()) for a, b in zip(found, wanted, strict=True)]
    return max(float((a - b).square().sum() / b.square().sum()) for a, b in pairs)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.flatten().view(torch.uint8).numpy())


def _there(value: memoryview | None) -> memoryview:
    if value is None:
        raise StoreError("what was stored is not there")
    return value
