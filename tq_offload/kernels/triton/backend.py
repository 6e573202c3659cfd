"""`TritonBackend`: the Triton kernels behind the `Backend` of the host's arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import torch

from tq_offload.errors import LayoutError, NonFiniteError
from tq_offload.frame import StreamPlan
from tq_offload.kernels.base import (
    Array,
    Chunks,
    Decoder,
    FiniteCheck,
    Sections,
    SectionsCoder,
    Stream,
    StreamCoder,
    VectorParams,
    check_finite,
    decode_each,
)
from tq_offload.kernels.triton.launch import decode_on_device, encode_on_device
from tq_offload.kernels.triton.sections import DeviceSections, default_device, on_device

__all__ = ["TritonBackend"]

_NAMES = tuple(f.name for f in fields(DeviceSections))
_SECTION_TYPES = {"uint8": torch.uint8, "uint16": torch.int16, "float32": torch.float32}
_SIGNED = {1: np.int8, 2: np.int16, 4: np.int32}


class TritonBackend:
    """`Backend` on a GPU, or under TRITON_INTERPRET=1 on the CPU; copies the group's bits there and back.

    For data that is on the GPU anyway use `tq_offload.kernels.device`, which copies packed bytes only.

    Args:
        device: Where to run; None: the current CUDA device.

    Raises:
        BackendError: triton is not installed, or there is no CUDA device.
    """

    name = "triton"

    def __init__(self, device: torch.device | None = None) -> None:
        found = default_device()
        self._device = found if device is None else device

    def encode(self, src: Array, stream: Stream, params: VectorParams, out: Sections) -> None:
        """See `Backend.encode`."""
        if not stream.planes * stream.tokens * stream.vectors:
            return
        with on_device(self._device):
            sections = _map(out, lambda a: torch.empty(a.shape, dtype=_dtype(a), device=self._device))
            flag = torch.zeros(1, dtype=torch.int32, device=self._device)
            encode_on_device(self._copy(src), stream, params, sections, flag)
            if flag.item():
                raise NonFiniteError("NaN or Inf in the KV chunk")
            for name in _NAMES:
                array, section = getattr(out, name), getattr(sections, name)
                if array is not None:
                    array[...] = section.cpu().numpy().view(array.dtype)

    def decode(self, dst: Array, stream: Stream, params: VectorParams, sections: Sections) -> None:
        """See `Backend.decode`."""
        if not stream.planes * stream.tokens * stream.vectors:
            return
        if not dst.flags.writeable:
            raise LayoutError("the destination is read-only")
        if not sections.outliers_fit(stream.dim):
            raise LayoutError("outlier channels must ascend inside a vector, with finite ranges")
        with on_device(self._device):
            flat = self._copy(dst)  # what lies between the vectors stays as it is
            decode_on_device(flat, stream, params, _map(sections, self._shaped))
            dst.view(_SIGNED[dst.itemsize])[...] = flat.cpu().numpy()

    def coder(self, plan: StreamPlan, params: VectorParams) -> StreamCoder:
        """See `Backend.coder`."""
        return SectionsCoder(self, plan, params)

    def finite_check(self, places: Array) -> FiniteCheck:
        """See `Backend.finite_check`."""
        return check_finite(places)

    def decoder(self, dim: int, chunks: Sequence[Chunks]) -> Decoder:
        """See `Backend.decoder`."""
        return decode_each(self, dim, chunks)

    def _copy(self, array: Array) -> torch.Tensor:
        """1-D bits as signed integers on the device; never the array's own memory."""
        return torch.from_numpy(np.array(array).view(_SIGNED[array.itemsize])).to(self._device)

    def _shaped(self, array: Array) -> torch.Tensor:
        dtype = _dtype(array)
        signed = np.int16 if dtype is torch.int16 else array.dtype
        return torch.from_numpy(np.array(array).view(signed)).to(self._device)


def _map(sections: Sections, function: Callable[[Array], torch.Tensor]) -> DeviceSections:
    """The function of every section that is there."""
    arrays = {name: getattr(sections, name) for name in _NAMES}
    found: dict[str, Any] = {name: None if a is None else function(a) for name, a in arrays.items()}
    return DeviceSections(**found)


def _dtype(array: Array) -> torch.dtype:
    if array.dtype.name not in _SECTION_TYPES:
        raise LayoutError(f"a section is of {', '.join(_SECTION_TYPES)}, not {array.dtype}")
    return _SECTION_TYPES[array.dtype.name]
