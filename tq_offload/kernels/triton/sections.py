"""Where Triton kernels run, and what they work on: bits of elements and sections, as tensors on that device."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from dataclasses import dataclass
from typing import Any

import torch

from tq_offload.errors import BackendError, LayoutError
from tq_offload.kernels.base import Stream, VectorParams

__all__ = [
    "FIELDS", "SIGNED", "DeviceSections", "check_device", "check_stream", "default_device", "interpreted", "on_device",
]  # fmt: skip

# Of an element type: widths of exponent and mantissa, and the least magnitude bits that are NaN or Inf.
FIELDS = {
    "bfloat16": (8, 7, 0x7F80),
    "float16": (5, 10, 0x7C00),
    "float32": (8, 23, 0x7F800000),
    "float8_e4m3fn": (4, 3, 0x7F),
    "float8_e5m2": (5, 2, 0x7C),
}

# The integers that hold the bits of an item, by its size in bytes.
SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class DeviceSections:
    """Contiguous sections of a stream on a device, shaped as `Sections`; i16 for its u16."""

    means: torch.Tensor | None
    scales: torch.Tensor
    codes: torch.Tensor
    sketch_scales: torch.Tensor | None
    sketch: torch.Tensor | None
    outlier_channels: torch.Tensor | None = None
    outlier_ranges: torch.Tensor | None = None
    outlier_codes: torch.Tensor | None = None


def interpreted() -> bool:
    """True if triton runs kernels on the CPU, in Python."""
    return os.environ.get("TRITON_INTERPRET", "0") in ("1", "true", "on", "yes", "y")


def default_device() -> torch.device:
    """Where kernels run: the current CUDA device, or the CPU under TRITON_INTERPRET=1.

    Raises:
        BackendError: Neither is there, or triton is not installed.
    """
    if importlib.util.find_spec("triton") is None:
        raise BackendError("triton is not installed")
    if interpreted():
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise BackendError("no CUDA device for triton (TRITON_INTERPRET=1 runs its kernels on the CPU, slowly)")
    return torch.device("cuda", torch.cuda.current_device())


def check_device(device: torch.device) -> None:
    """Raise a BackendError if kernels cannot run on tensors of that device."""
    if device.type != default_device().type:
        raise BackendError(f"triton kernels cannot run on tensors on {device}")


def on_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Make a CUDA device the current one; nothing for the CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def check_stream(flat: torch.Tensor, stream: Stream, params: VectorParams, sections: DeviceSections) -> None:
    """Kernels work on bare pointers: nothing that could leave a buffer gets past here.

    Raises:
        LayoutError: A stream that leaves its buffer, or sections of another shape, dtype, layout or device.
    """
    P, T, J, D = stream.planes, stream.tokens, stream.vectors, stream.dim
    strides = (stream.plane_stride, stream.token_stride, stream.vector_stride)
    last = stream.offset + sum((n - 1) * s for n, s in zip((P, T, J), strides, strict=True)) + D
    if min(*strides, stream.offset) < 0 or last > flat.numel():
        raise LayoutError(f"{stream} leaves its buffer of {flat.numel()} elements")
    if P * T * J >= 2**31 or J * D >= 2**31:
        raise LayoutError(f"{stream} has more vectors than a kernel can count")
    exponent, mantissa, _ = FIELDS[params.dtype]
    if flat.ndim != 1 or not flat.is_contiguous() or flat.dtype != SIGNED[(1 + exponent + mantissa) // 8]:
        raise LayoutError(f"the buffer must be 1-D, contiguous and signed integers of the size of {params.dtype}")
    wanted: list[tuple[str, torch.dtype, tuple[int, ...]]] = [
        ("scales", torch.int16, (P, T, J)),
        ("codes", torch.uint8, (P, T, J, (D * params.bits + 7) // 8)),
    ]
    if params.mean:
        wanted.append(("means", torch.int16, (P, J, D)))
    if params.qjl:
        wanted += [("sketch_scales", torch.int16, (P, T, J)), ("sketch", torch.uint8, (P, T, J, (D + 7) // 8))]
    if (k := params.outliers) > 0:
        wanted += [("outlier_channels", torch.int16, (P, J, k)), ("outlier_ranges", torch.float32, (P, J, k, 2))]
        wanted.append(("outlier_codes", torch.uint8, (P, T, J, (k + 1) // 2)))
    for name, dtype, shape in wanted:
        section = getattr(sections, name)
        fits = section is not None and section.shape == shape and section.dtype == dtype
        if not fits or not section.is_contiguous() or section.device != flat.device:
            raise LayoutError(f"section {name} must be contiguous {dtype} of shape {shape} on {flat.device}")
