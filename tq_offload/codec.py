"""`TurboQuantCodec`: chunks of KV cache to frames and back. The one door to the layers below.

The tensors' device decides which kernels run: in CPU memory those of the codec's backend, on a GPU the Triton kernels.
Frames are always in host memory; only packed bytes cross the bus.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tq_offload.buffers import Array, aligned, as_bytes
from tq_offload.errors import (
    ConfigError,
    FrameMismatchError,
    LayoutError,
    TQOffloadError,
)
from tq_offload.frame import (
    UNBOUND,
    FrameHeader,
    FramePlan,
    digest,
    make_plan,
    read_header,
    write_checksum,
    write_header,
)
from tq_offload.jobs import JobPool
from tq_offload.kernels import Backend, device, get_backend, host
from tq_offload.layout import ChunkLayout, GroupLayout, dtype_name
from tq_offload.spec import MEAN_MIN_TOKENS, CodecSpec

__all__ = ["CheckedFrame", "TurboQuantCodec", "cache_key_digest", "model_fingerprint"]


MAX_THREADS = 256


def cache_key_digest(*fields: bytes | str | int) -> bytes:
    """Digest of a cache key, 16 bytes, from all of its fields in order."""
    return digest(*(f if isinstance(f, bytes) else f"{type(f).__name__}:{f}".encode() for f in fields))


def model_fingerprint(name: str) -> bytes:
    """Fingerprint of a model's name, 16 bytes."""
    return digest(b"model", name.encode())


class TurboQuantCodec:
    """Encodes chunks with one spec and decodes frames of any spec. Thread-safe; kernels release the GIL.

    Args:
        spec: How to encode. Decoding takes its settings from the frame.
        backend: Kernel backend: `auto`, `numba` or `reference`. All of them write the same bytes.
        threads: Threads that work on one chunk in CPU memory: the caller's, and more that all calls share.

    Raises:
        ConfigError, BackendError: From the choice of the backend.
    """

    def __init__(self, spec: CodecSpec | None = None, backend: str | Backend = "auto", *, threads: int = 1) -> None:
        if type(threads) is not int or not 1 <= threads <= MAX_THREADS:
            raise ConfigError("threads", threads, f"an integer from 1 to {MAX_THREADS}")
        self.spec = CodecSpec() if spec is None else spec
        self.backend: Backend = get_backend(backend) if isinstance(backend, str) else backend
        self.threads = threads
        self._jobs = JobPool(threads)

    def frame_size(self, layout: ChunkLayout) -> int:
        """Exact size in bytes of every frame of that layout."""
        return make_plan(self.spec, layout).length

    def encode(
        self, tensors: Sequence[torch.Tensor], layout: ChunkLayout, *, key: bytes = UNBOUND, model: bytes = UNBOUND
    ) -> bytearray:
        """Encode a chunk into a new buffer. See `encode_into`."""
        out = bytearray(self.frame_size(layout))
        self.encode_into(tensors, layout, out, key=key, model=model)
        return out

    def encode_into(
        self,
        tensors: Sequence[torch.Tensor],
        layout: ChunkLayout,
        out: Any,
        *,
        key: bytes = UNBOUND,
        model: bytes = UNBOUND,
    ) -> int:
        """Encode a chunk.

        Args:
            tensors: One tensor for each group of the layout, of its shape and dtype, all on one device. Contiguous ones
                are read in place.
            layout: What the tensors are.
            out: Writable buffer (or u8 tensor) of at least `frame_size(layout)` bytes; pinned memory for a GPU's speed.
            key: Digest of the cache key, 16 bytes; zeros: not bound.
            model: Fingerprint of the model, 16 bytes; zeros: not bound.

        Returns:
            Bytes written, always `frame_size(layout)`.

        Raises:
            NonFiniteError: NaN or Inf in a coded group. What `out` then holds is not a valid frame.
            LayoutError: Tensors and layout do not fit, or `out` is too short.
            BackendError: The tensors are on a device that no kernels here can work on.
        """
        plan = make_plan(self.spec, layout)
        target = as_bytes(out, writable=True)
        if len(target) < plan.length:
            raise LayoutError(f"the output has {len(target)} bytes, the frame needs {plan.length}")
        target = target[: plan.length]
        frame = target if aligned(target) else np.empty(plan.length, np.uint8)
        target[:8] = 0  # no valid frame until the header is written again below
        sources = [tensor.contiguous() for tensor in _match_tensors(tensors, layout, _misfit)]
        if _on_gpu(sources):
            device.encode_sections(sources, plan, torch.from_numpy(frame))
        else:
            host.encode_sections(sources, plan, frame, self.backend, self._jobs)
        write_header(plan, frame.data, key=_digest(key), model=_digest(model))
        write_checksum(frame.data)
        if frame is not target:
            target[:] = frame
        return plan.length

    def decode_into(
        self,
        frame: Any,
        tensors: Sequence[torch.Tensor],
        *,
        layout: ChunkLayout | None = None,
        key: bytes | None = None,
        model: bytes | None = None,
    ) -> FrameHeader:
        """Check a frame, then decode it straight into the destination.

        Args:
            frame: Exactly one frame: bytes, bytearray, memoryview, mmap, array or u8 tensor, aligned or not.
            tensors: Contiguous tensors of the shapes and dtypes that the frame holds, all on one device. Untouched on
                failure. On a GPU they are written in the order of the current stream: keep the frame until then.
            layout: If given, its shapes and dtypes must be the frame's; head_dim and spec are read from the frame.
            key: Digest that the frame must carry; None: not compared. A frame bound to no key fits only None or zeros.
            model: Likewise for the model.

        Returns:
            The header of the frame.

        Raises:
            FrameError: A subclass with a `reason`; nothing was written.
            LayoutError: The destination is not contiguous or not on one device.
            BackendError: It is on a device that no kernels here can work on.
        """
        checked = self.open(frame, layout=layout, key=key, model=model)
        checked.decode_into(tensors)
        return checked.header

    def open(
        self, frame: Any, *, layout: ChunkLayout | None = None, key: bytes | None = None, model: bytes | None = None
    ) -> CheckedFrame:
        """Check a frame now, to decode it later: for callers that allocate the destination from what it holds.

        Args and errors are those of `decode_into`.
        """
        source = as_bytes(frame, writable=False)
        header, plan = read_header(source.data)
        _match_header(header, layout, key, model)
        return CheckedFrame(header, plan, source, self)

    def decode_sections(self, plan: FramePlan, source: Array, targets: Sequence[torch.Tensor]) -> None:
        """Decode a frame whose header and checksum are right into tensors that fit it: behind `CheckedFrame`."""
        if not aligned(source):
            source = source.copy()
        host.check_content(plan, source, self.backend)
        if _on_gpu(targets):
            device.decode_sections(targets, plan, torch.from_numpy(source if source.flags.writeable else source.copy()))
            return
        host.decode_sections(targets, plan, source, self.backend, self._jobs)

    def decode(self, frame: Any, *, key: bytes | None = None, model: bytes | None = None) -> list[torch.Tensor]:
        """Decode a frame into new tensors, one for each group. See `decode_into`."""
        checked = self.open(frame, key=key, model=model)
        tensors = [torch.empty(g.shape, dtype=getattr(torch, g.dtype)) for g in checked.header.layout.groups]
        checked.decode_into(tensors)
        return tensors

    def warm_up(self, head_dim: int, dtype: str = "bfloat16") -> None:
        """Encode and decode a tiny chunk, so that no real one waits for kernels to be compiled or loaded.

        Args:
            head_dim: Elements of the vectors to come.
            dtype: torch name of their dtype.
        """
        layout = ChunkLayout((GroupLayout("kv_first", (2, 1, MEAN_MIN_TOKENS, head_dim), dtype, head_dim),))
        chunk = torch.arange(layout.nbytes // layout.groups[0].item_size, dtype=torch.float32).remainder(17)
        chunk[:head_dim] = 0  # zero vectors take another path through the kernels
        self.decode(self.encode([chunk.to(getattr(torch, dtype)).reshape(layout.groups[0].shape)], layout))

    @staticmethod
    def inspect(frame: Any) -> FrameHeader:
        """Check a frame and return its header. Raises a FrameError."""
        return read_header(as_bytes(frame, writable=False).data)[0]


@dataclass(frozen=True)
class CheckedFrame:
    """A frame whose header, checksum, key and model are right. It refers to the buffer that it was opened from."""

    header: FrameHeader
    plan: FramePlan
    source: Array
    codec: TurboQuantCodec

    def decode_into(self, tensors: Sequence[torch.Tensor]) -> None:
        """Decode into contiguous tensors of the shapes and dtypes that the frame holds. Untouched on failure.

        Raises:
            FrameError: The tensors are of another shape or dtype, or the frame holds what no encoder writes.
            LayoutError, BackendError: As `TurboQuantCodec.decode_into`.
        """
        targets = _match_tensors(tensors, self.header.layout, _mismatch)
        if any(not t.is_contiguous() for t in targets):
            raise LayoutError("the destination is not contiguous")
        self.codec.decode_sections(self.plan, self.source, targets)


def _misfit(what: str, expected: object, found: object) -> LayoutError:
    """A tensor that does not fit the layout when encoding: the caller's mistake."""
    return LayoutError(f"the tensor has {what} {found}, the layout says {expected}")


def _mismatch(what: str, in_frame: object, wanted: object) -> FrameMismatchError:
    """The same when decoding: a sound frame of something else, a miss."""
    return FrameMismatchError(what, wanted, in_frame)


def _match_tensors(
    tensors: Sequence[torch.Tensor], layout: ChunkLayout, error: Callable[[str, object, object], TQOffloadError]
) -> list[torch.Tensor]:
    if len(tensors) != len(layout.groups):
        raise error("groups", len(layout.groups), len(tensors))
    for tensor, group in zip(tensors, layout.groups, strict=True):
        if tuple(tensor.shape) != group.shape:
            raise error("shape", group.shape, tuple(tensor.shape))
        if dtype_name(tensor.dtype) != group.dtype:
            raise error("dtype", group.dtype, dtype_name(tensor.dtype))
    if len({tensor.device for tensor in tensors}) > 1:
        raise LayoutError(f"the tensors of a chunk must be on one device: {[str(t.device) for t in tensors]}")
    return list(tensors)


def _on_gpu(tensors: Sequence[torch.Tensor]) -> bool:
    return bool(tensors) and tensors[0].device.type != "cpu"


def _match_header(header: FrameHeader, layout: ChunkLayout | None, key: bytes | None, model: bytes | None) -> None:
    if model is not None and model != header.model:
        raise FrameMismatchError("model", model.hex(), header.model.hex())
    if key is not None and key != header.key:
        raise FrameMismatchError("key", key.hex(), header.key.hex())
    if layout is not None:
        for what in ("shape", "dtype"):
            wanted = [getattr(g, what) for g in layout.groups]
            found = [getattr(g, what) for g in header.layout.groups]
            if wanted != found:
                raise FrameMismatchError(what, wanted, found)


def _digest(value: bytes) -> bytes:
    if len(value) != len(UNBOUND):
        raise LayoutError(f"a digest has {len(UNBOUND)} bytes, found {len(value)}")
    return bytes(value)
