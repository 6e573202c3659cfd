"""Views of buffers and tensors as numpy arrays, without copies."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tq_offload.errors import LayoutError
from tq_offload.frame import Section
from tq_offload.layout import GroupLayout, Stream

__all__ = ["Array", "aligned", "all_finite", "as_bytes", "flat_bits", "grid_view", "section_view"]

Array = npt.NDArray[Any]

# Bits that are all set in NaN and Inf, by dtype. e4m3fn has no Inf, and one NaN of each sign.
_NON_FINITE = {"bfloat16": 0x7F80, "float16": 0x7C00, "float8_e4m3fn": 0x7F, "float8_e5m2": 0x7C}

_BLOCK = 1 << 16  # elements that are compared at a time

_BIT_VIEWS = {2: torch.int16, 4: torch.float32, 1: torch.uint8}


def as_bytes(buffer: Any, *, writable: bool) -> Array:
    """u8 [n] view of a buffer or u8 tensor, without a copy."""
    if isinstance(buffer, torch.Tensor):
        if buffer.dtype != torch.uint8 or not buffer.is_contiguous() or buffer.device.type != "cpu":
            raise LayoutError("a frame tensor must be contiguous uint8 in CPU memory")
        return buffer.view(-1).numpy()
    try:
        array = np.frombuffer(buffer, dtype=np.uint8)
    except (BufferError, ValueError, TypeError) as error:
        if isinstance(buffer, (bytes, bytearray, memoryview)) and memoryview(buffer).nbytes == 0:
            return np.empty(0, np.uint8)
        raise LayoutError(f"not a contiguous buffer of bytes: {error}") from error
    if writable and not array.flags.writeable:
        raise LayoutError("the output buffer is read-only")
    return array


def aligned(array: Array) -> bool:
    """True if sections, which start at multiples of 64 bytes, can be read as arrays of 2 and 4 bytes an item."""
    return bool(array.ctypes.data % 4 == 0)


def flat_bits(tensor: torch.Tensor, group: GroupLayout) -> Array:
    """1-D bits of a contiguous tensor: u16 for 2-byte elements, f32 for float32, else bytes."""
    flat = tensor.detach().reshape(-1)
    if group.kind == "opaque":
        return flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)
    array: Array = flat.view(_BIT_VIEWS[group.item_size]).numpy()
    return array.view(np.uint16) if group.item_size == 2 else array


def all_finite(bits: Array, dtype: str) -> bool:
    """True if no element is NaN or Inf.

    Args:
        bits: Elements as `flat_bits` gives them, of any shape.
        dtype: Their torch name, one of `layout.CODED_DTYPES`.
    """
    if bits.size > _BLOCK:  # in parts: what a comparison makes takes memory as well
        rows = _BLOCK * len(bits) // bits.size
        parts = [bits[at : at + rows] for at in range(0, len(bits), rows)] if rows else list(bits)
        return all(all_finite(part, dtype) for part in parts)
    if dtype == "float32":
        return bool(np.isfinite(bits).all())
    mask = bits.dtype.type(_NON_FINITE[dtype])
    return not bool(((bits & mask) == mask).any())


def section_view(frame: Array, section: Section, dtype: Any) -> Array:
    """A section of a frame as an array of its shape."""
    array: Array = frame[section.offset : section.offset + section.nbytes].view(dtype).reshape(section.shape)
    return array


def grid_view(flat: Array, grid: Stream) -> Array:
    """Strided view [P, T, J, D] of a stream."""
    item = flat.itemsize
    strides = (grid.plane_stride * item, grid.token_stride * item, grid.vector_stride * item, item)
    shape = (grid.planes, grid.tokens, grid.vectors, grid.dim)
    if 0 in shape:
        return np.empty(shape, flat.dtype)
    return np.lib.stride_tricks.as_strided(flat[grid.offset :], shape, strides)
