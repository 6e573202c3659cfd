"""What LMCache's connectors are shown instead of their engine: one in which a full chunk is a frame of `n` bytes.

A connector allocates what it reads, and some demand that every object have the size of a full chunk. Both come from the
metadata and the memory that it is given, so with these two views frames fit without a change to any connector: a chunk
is one group of shape [1, 1, n, 1] in uint8 with `n` tokens, so that partial chunks are cut at bytes.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from lmcache.v1.memory_management import MemoryFormat, MemoryObj

from tq_offload.frame import MAGIC
from tq_offload.integrations.lmcache.log import RateLimitedLog
from tq_offload_connectors.in_process.objects import heap_object

__all__ = ["CpuView", "MetadataView", "bytes_shape"]


def bytes_shape(nbytes: int) -> torch.Size:
    """Shape of so many bytes: four dimensions, none of them 0, as every header of LMCache can carry it."""
    return torch.Size((1, 1, nbytes, 1))


class MetadataView:
    """LMCache's metadata, but for what a chunk is.

    Args:
        metadata: The real one.
        nbytes: Size of the frame of a full chunk.
    """

    def __init__(self, metadata: Any, nbytes: int) -> None:
        self._metadata = metadata
        self.chunk_size = nbytes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._metadata, name)

    def get_shapes(self, num_tokens: int | None = None) -> list[torch.Size]:
        """One group of bytes."""
        return [bytes_shape(self.chunk_size if num_tokens is None else num_tokens)]

    def get_dtypes(self) -> list[torch.dtype]:
        """Bytes."""
        return [torch.uint8]

    def get_num_groups(self) -> int:
        """One."""
        return 1


class CpuView:
    """LMCache's CPU backend as a connector sees it: a lender of byte buffers that never waits.

    Args:
        backend: The real one; None in the scheduler, which only looks up.
        config: LMCache's configuration.
        metadata: The view of the metadata.
        cap: Most bytes that an object may have: what a damaged header says is not believed.
    """

    def __init__(self, backend: Any, config: Any, metadata: MetadataView, cap: int) -> None:
        self._backend = backend
        self.config, self.metadata = config, metadata
        self.use_pool = False
        """Set once the connector is known: lend memory of LMCache's pool, not of the heap."""
        self._cap, self._log = cap, RateLimitedLog()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def get_full_chunk_size_bytes(self) -> int:
        """Size of the frame of a full chunk."""
        return self.metadata.chunk_size

    def allocate(
        self,
        shapes: Any,
        dtypes: Any,
        fmt: MemoryFormat | None = None,
        eviction: bool = True,
        busy_loop: bool = True,
    ) -> MemoryObj | None:
        """A buffer for one object, or None. LMCache's own would wait for ever with the event loop."""
        sizes = [shapes] if isinstance(shapes, torch.Size) else [torch.Size(shape) for shape in shapes]
        kinds = [dtypes] if isinstance(dtypes, torch.dtype) else list(dtypes)
        if not self._sane(sizes, kinds):
            self._log.warning("remote object", f"an object of shapes {sizes} and dtypes {kinds} is no frame of ours")
            return None
        fmt = MemoryFormat.KV_2LTD if fmt is None else fmt
        if self.use_pool:
            obj: MemoryObj | None = self._backend.allocate(sizes, kinds, fmt, eviction=eviction, busy_loop=False)
        else:
            obj = heap_object(sizes, kinds, fmt)
        if obj is not None:  # some connectors hand it out although they could not fill it: then it must be no frame
            obj.raw_data[: len(MAGIC)] = 0
        return obj

    def batched_allocate(self, shapes: Any, dtypes: Any, batch_size: int, *args: Any, **kwargs: Any) -> Any:
        """Several of the same, or None."""
        found: list[MemoryObj] = []
        for _ in range(batch_size):
            obj = self.allocate(shapes, dtypes, *args, **kwargs)
            if obj is None:
                for other in found:
                    other.ref_count_down()
                return None
            found.append(obj)
        return found

    def _sane(self, shapes: list[torch.Size], dtypes: list[torch.dtype]) -> bool:
        if not shapes or len(shapes) != len(dtypes) or any(n <= 0 for shape in shapes for n in shape):
            return False
        nbytes = sum(math.prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True))
        return nbytes <= self._cap
