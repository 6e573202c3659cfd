"""The sections of frames from and to chunks in CPU memory: the twin of `device`.

Streams are cut into jobs for the codec's threads; the backend does the arithmetic. What a plan settles is worked out
once: between the calls into compiled code a chunk runs as little Python as possible, which threads could only run in
turn, and with the caches that the kernels leave.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache, partial

import numpy as np
import torch

from tq_offload.buffers import Array, all_finite, flat_bits, grid_view, section_view
from tq_offload.errors import FrameContentError, NonFiniteError
from tq_offload.frame import FramePlan, StreamPlan
from tq_offload.jobs import Job, JobPool
from tq_offload.kernels.base import Backend, FiniteCheck, StreamCoder, stream_params, stream_sections

__all__ = ["check_content", "decode_sections", "encode_sections"]


def encode_sections(
    tensors: Sequence[torch.Tensor], plan: FramePlan, frame: Array, backend: Backend, pool: JobPool
) -> None:
    """Encode contiguous tensors that fit the plan into the sections of their frame.

    Args:
        tensors: One for each group.
        plan: The plan of the frame.
        frame: u8 [plan.length], aligned to 4 bytes; nothing is written before its first section.
        backend: What encodes a stream.
        pool: Whose threads do it.

    Raises:
        NonFiniteError: NaN or Inf in a coded group.
    """
    jobs: list[Job] = []
    for number, (tensor, coders) in enumerate(zip(tensors, _coders(plan, backend, pool.threads), strict=True)):
        group, opaque = plan.layout.groups[number], plan.opaque[number]
        flat = flat_bits(tensor, group)
        if opaque is not None:
            section_view(frame, opaque, np.uint8)[...] = flat.view(np.uint8)
        jobs += [partial(coder.encode, flat, frame) for coder in coders]
        jobs += [partial(_encode_raw, flat, stream, group.dtype, frame) for stream in plan.groups[number] if stream.raw]
    pool.run(jobs)


def decode_sections(
    tensors: Sequence[torch.Tensor], plan: FramePlan, frame: Array, backend: Backend, pool: JobPool
) -> None:
    """Decode a frame whose header and content are right into contiguous tensors that fit it. Args as above."""
    jobs: list[Job] = []
    for number, (tensor, coders) in enumerate(zip(tensors, _coders(plan, backend, pool.threads), strict=True)):
        group, opaque = plan.layout.groups[number], plan.opaque[number]
        flat = flat_bits(tensor, group)
        if opaque is not None:
            flat.view(np.uint8)[...] = section_view(frame, opaque, np.uint8)
        jobs += [partial(coder.decode, flat, frame) for coder in coders]
        jobs += [partial(_decode_raw, flat, stream, frame) for stream in plan.groups[number] if stream.raw]
    pool.run(jobs)


def check_content(plan: FramePlan, frame: Array, backend: Backend) -> None:
    """Check what decoding relies on and every encoder writes: finite scales and means, outlier channels in order.

    Args:
        plan: The plan of the frame.
        frame: u8 [plan.length], aligned to 4 bytes.
        backend: Whatever decodes the frame.

    Raises:
        FrameContentError: It is not so.
    """
    if not _finite_check(plan, backend)(frame):
        raise FrameContentError("a scale or mean is not finite")
    for stream in (stream for group in plan.groups for stream in group):
        if stream.outliers and not stream_sections(stream, frame).outliers_fit(stream.coded.dim):
            raise FrameContentError("the outlier channels are not what an encoder writes")


@lru_cache(maxsize=256)
def _finite_check(plan: FramePlan, backend: Backend) -> FiniteCheck:
    """What checks the scales and means of a plan's frames."""
    streams = [stream for group in plan.groups for stream in group]
    sections = [s for p in streams for s in (p.means, p.scales, p.sketch_scales) if s is not None]
    places = np.array([(s.offset, s.nbytes // 2) for s in sections], np.int64).reshape(-1, 2)
    return backend.finite_check(places)


@lru_cache(maxsize=256)
def _coders(plan: FramePlan, backend: Backend, parts: int) -> list[list[StreamCoder]]:
    """For every group what codes its streams, each in up to `parts` parts."""

    def of_group(dtype: str, streams: Sequence[StreamPlan]) -> list[StreamCoder]:
        pairs = [
            (part, stream_params(stream, dtype, plan.spec.seed)) for stream in streams for part in stream.cut(parts)
        ]
        return [backend.coder(part, params) for part, params in pairs]

    return [of_group(group.dtype, plans) for group, plans in zip(plan.layout.groups, plan.groups, strict=True)]


def _encode_raw(flat: Array, plan: StreamPlan, dtype: str, frame: Array) -> None:
    """Copy the protected planes of a stream to their section."""
    for stored, live in _raw_planes(plan, flat, frame):
        if not all_finite(live, dtype):
            raise NonFiniteError("NaN or Inf in a protected layer of the KV chunk")
        stored[...] = live


def _decode_raw(flat: Array, plan: StreamPlan, frame: Array) -> None:
    """Undo `_encode_raw`."""
    for stored, live in _raw_planes(plan, flat, frame):
        live[...] = stored


def _raw_planes(plan: StreamPlan, flat: Array, frame: Array) -> Iterator[tuple[Array, Array]]:
    """The protected planes, as pairs of views: in the frame's section and in the chunk."""
    assert plan.raw_section is not None
    section, at = section_view(frame, plan.raw_section, flat.dtype), 0
    for grid in plan.raw:
        yield section[at : at + grid.planes], grid_view(flat, grid)
        at += grid.planes
