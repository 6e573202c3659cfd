"""The sections of frames in host memory from and to chunks on a GPU: only packed bytes cross the bus.

All sections of a frame are coded in one buffer on the device, laid out as the frame, and copied in one piece; the codec
writes and checks header and checksum. Give pinned host memory for copies that run at the speed of the bus. Under
TRITON_INTERPRET=1 the device is the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from tq_offload.errors import LayoutError, NonFiniteError
from tq_offload.frame import FramePlan, Section, StreamPlan
from tq_offload.kernels.base import Stream, stream_params
from tq_offload.kernels.triton.launch import decode_on_device, encode_on_device
from tq_offload.kernels.triton.sections import FIELDS, SIGNED, DeviceSections, check_device, on_device

__all__ = ["decode_sections", "device_sections", "encode_sections"]


def encode_sections(tensors: Sequence[torch.Tensor], plan: FramePlan, frame: torch.Tensor) -> None:
    """Encode contiguous tensors that fit the plan, and copy the sections of their frame to the host; waits for both.

    Args:
        tensors: One for each group, on one device.
        plan: The plan of the frame.
        frame: u8 [plan.length] in host memory; nothing is written before its first section.

    Raises:
        NonFiniteError: NaN or Inf in a coded group.
        LayoutError, BackendError: The kernels cannot run on tensors of that device.
    """
    device = _device_of(tensors)
    start = _first_section(plan)
    with on_device(device):
        packed = torch.empty(plan.length, dtype=torch.uint8, device=device)
        not_finite = torch.zeros(1, dtype=torch.int32, device=device)
        for group, opaque, tensor, streams in zip(plan.layout.groups, plan.opaque, tensors, plan.groups, strict=True):
            if opaque is not None:
                _view(packed, opaque, torch.uint8).copy_(_bytes(tensor))
                continue
            flat = _bits(tensor, group.item_size)
            for stream in streams:
                params = stream_params(stream, group.dtype, plan.spec.seed)
                encode_on_device(flat, stream.coded, params, device_sections(stream, packed), not_finite)
                for stored, live in _raw_planes(stream, flat, packed):
                    stored.copy_(live)
                    not_finite |= _any_not_finite(live, group.dtype)
        frame[start:].copy_(packed[start:], non_blocking=True)
        if not_finite.item():  # waits for all of the above
            raise NonFiniteError("NaN or Inf in the KV chunk")


def decode_sections(tensors: Sequence[torch.Tensor], plan: FramePlan, frame: torch.Tensor) -> None:
    """Copy the sections of a frame whose header is right to the device and decode them; both are queued.

    Args:
        tensors: One for each group, contiguous, on one device.
        plan: The plan of the frame.
        frame: u8 [plan.length] in host memory.

    Raises:
        LayoutError, BackendError: The kernels cannot run on tensors of that device; nothing was written.
    """
    device = _device_of(tensors)
    start = _first_section(plan)
    with on_device(device):
        packed = torch.empty(plan.length, dtype=torch.uint8, device=device)
        packed[start:].copy_(frame[start:], non_blocking=True)
        for group, opaque, tensor, streams in zip(plan.layout.groups, plan.opaque, tensors, plan.groups, strict=True):
            if opaque is not None:
                _bytes(tensor).copy_(_view(packed, opaque, torch.uint8))
                continue
            flat = _bits(tensor, group.item_size)
            for stream in streams:
                params = stream_params(stream, group.dtype, plan.spec.seed)
                decode_on_device(flat, stream.coded, params, device_sections(stream, packed))
                for stored, live in _raw_planes(stream, flat, packed):
                    live.copy_(stored)


def _device_of(tensors: Sequence[torch.Tensor]) -> torch.device:
    devices = {t.device for t in tensors}
    if len(devices) != 1 or any(not t.is_contiguous() for t in tensors):
        raise LayoutError("the tensors of a chunk must be contiguous and on one device")
    check_device(tensors[0].device)
    return tensors[0].device


def _bits(tensor: torch.Tensor, item_size: int) -> torch.Tensor:
    """1-D view of a coded group as signed integers of its items' size."""
    return tensor.detach().reshape(-1).view(SIGNED[item_size])


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """1-D view of an opaque group as bytes."""
    flat = tensor.detach().reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8, device=flat.device)


def _view(packed: torch.Tensor, section: Section, dtype: torch.dtype) -> torch.Tensor:
    return packed[section.offset : section.offset + section.nbytes].view(dtype).view(section.shape)


def _first_section(plan: FramePlan) -> int:
    """Offset of the first section: behind the preamble and the header, at a multiple of 64."""
    return -(-(32 + plan.header_length) // 64) * 64


def device_sections(plan: StreamPlan, packed: torch.Tensor) -> DeviceSections:
    """Views of a stream's sections in the bytes of a frame on a device."""

    def optional(section: Section | None, dtype: torch.dtype) -> torch.Tensor | None:
        return None if section is None else _view(packed, section, dtype)

    return DeviceSections(
        means=optional(plan.means, torch.int16),
        scales=_view(packed, plan.scales, torch.int16),
        codes=_view(packed, plan.codes, torch.uint8),
        sketch_scales=optional(plan.sketch_scales, torch.int16),
        sketch=optional(plan.sketch, torch.uint8),
        outlier_channels=optional(plan.outlier_channels, torch.int16),
        outlier_ranges=optional(plan.outlier_ranges, torch.float32),
        outlier_codes=optional(plan.outlier_codes, torch.uint8),
    )


def _raw_planes(
    plan: StreamPlan, flat: torch.Tensor, packed: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The protected planes as pairs of views: in the frame's section and in the chunk."""
    if plan.raw_section is None or not plan.raw_section.nbytes:
        return
    section, at = _view(packed, plan.raw_section, flat.dtype), 0
    for grid in plan.raw:
        yield section[at : at + grid.planes], _grid(flat, grid)
        at += grid.planes


def _grid(flat: torch.Tensor, grid: Stream) -> torch.Tensor:
    size = (grid.planes, grid.tokens, grid.vectors, grid.dim)
    return flat.as_strided(size, (grid.plane_stride, grid.token_stride, grid.vector_stride, 1), grid.offset)


def _any_not_finite(bits: torch.Tensor, dtype: str) -> torch.Tensor:
    exponent, mantissa, limit = FIELDS[dtype]
    return ((bits & ((1 << (exponent + mantissa)) - 1)) >= limit).any()
