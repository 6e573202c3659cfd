"""The sections of frames from and to chunks in CPU memory: the twin of `device`.

Streams are cut into jobs for the codec's threads; the backend does the arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from tq_offload.buffers import Array, all_finite, flat_bits, grid_view, section_view
from tq_offload.errors import NonFiniteError
from tq_offload.frame import FramePlan, Section, StreamPlan
from tq_offload.jobs import Job, JobPool
from tq_offload.kernels.base import Backend, Sections, Stream, split_planes, stream_params

__all__ = ["decode_sections", "encode_sections", "stream_sections"]


def encode_sections(
    tensors: Sequence[torch.Tensor], plan: FramePlan, frame: Array, backend: Backend, pool: JobPool
) -> None:
    """Encode contiguous tensors that fit the plan into the sections of their frame.

    Args:
        tensors: One for each group.
        plan: The plan of the frame.
        frame: u8 [plan.length]; nothing is written before its first section.
        backend: What encodes a stream.
        pool: Whose threads do it.

    Raises:
        NonFiniteError: NaN or Inf in a coded group.
    """
    jobs: list[Job] = []
    for group, opaque, tensor, streams in zip(plan.layout.groups, plan.opaque, tensors, plan.groups, strict=True):
        flat = flat_bits(tensor, group)
        if opaque is not None:
            section_view(frame, opaque, np.uint8)[...] = flat.view(np.uint8)
        for stream in streams:
            jobs += _coding_jobs(backend.encode, flat, stream, group.dtype, plan, frame, pool)
            jobs.append(partial(_encode_raw, flat, stream, group.dtype, frame))
    pool.run(jobs)


def decode_sections(
    tensors: Sequence[torch.Tensor], plan: FramePlan, frame: Array, backend: Backend, pool: JobPool
) -> None:
    """Decode a frame whose header and content are right into contiguous tensors that fit it. Args as above."""
    jobs: list[Job] = []
    for group, opaque, tensor, streams in zip(plan.layout.groups, plan.opaque, tensors, plan.groups, strict=True):
        flat = flat_bits(tensor, group)
        if opaque is not None:
            flat.view(np.uint8)[...] = section_view(frame, opaque, np.uint8)
        for stream in streams:
            jobs += _coding_jobs(backend.decode, flat, stream, group.dtype, plan, frame, pool)
            jobs.append(partial(_decode_raw, flat, stream, frame))
    pool.run(jobs)


def stream_sections(plan: StreamPlan, frame: Array) -> Sections:
    """Views of a stream's sections in a frame."""

    def view(section: Section | None, dtype: Any) -> Any:
        return None if section is None else section_view(frame, section, dtype)

    return Sections(
        means=view(plan.means, np.uint16),
        scales=view(plan.scales, np.uint16),
        codes=view(plan.codes, np.uint8),
        sketch_scales=view(plan.sketch_scales, np.uint16),
        sketch=view(plan.sketch, np.uint8),
        outlier_channels=view(plan.outlier_channels, np.uint16),
        outlier_ranges=view(plan.outlier_ranges, np.float32),
        outlier_codes=view(plan.outlier_codes, np.uint8),
    )


def _coding_jobs(
    code: Callable[..., None],
    flat: Array,
    stream: StreamPlan,
    dtype: str,
    plan: FramePlan,
    frame: Array,
    pool: JobPool,
) -> list[Job]:
    if not stream.coded.planes:
        return []
    params = stream_params(stream, dtype, plan.spec.seed)
    parts = split_planes(stream.coded, stream_sections(stream, frame), pool.threads)
    return [partial(code, flat, part, params, sections) for part, sections in parts]


def _encode_raw(flat: Array, plan: StreamPlan, dtype: str, frame: Array) -> None:
    """Copy the protected planes of a stream to their section."""
    if plan.raw_section is not None:
        for stored, live in _raw_planes(plan.raw, section_view(frame, plan.raw_section, flat.dtype), flat):
            if not all_finite(live, dtype):
                raise NonFiniteError("NaN or Inf in a protected layer of the KV chunk")
            stored[...] = live


def _decode_raw(flat: Array, plan: StreamPlan, frame: Array) -> None:
    """Undo `_encode_raw`."""
    if plan.raw_section is not None:
        for stored, live in _raw_planes(plan.raw, section_view(frame, plan.raw_section, flat.dtype), flat):
            live[...] = stored


def _raw_planes(grids: Sequence[Stream], raw: Array, flat: Array) -> Iterator[tuple[Array, Array]]:
    """The protected planes, as pairs of views: in the frame's section and in the chunk."""
    at = 0
    for grid in grids:
        yield raw[at : at + grid.planes], grid_view(flat, grid)
        at += grid.planes
