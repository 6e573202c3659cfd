"""Checks before kernels work on bare addresses: nothing that could leave a buffer gets past them.

Each raises a LayoutError for what its docstring says.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tq_offload.errors import LayoutError
from tq_offload.kernels.base import Array, Sections, Stream, VectorParams

__all__ = [
    "check_buffer", "check_frame", "check_outliers", "check_sections", "check_stream",
    "check_writeable", "end_of", "kind_of",
]  # fmt: skip

_ITEM_SIZES = {"bfloat16": 2, "float16": 2, "float32": 4, "float8_e4m3fn": 1, "float8_e5m2": 1}


def check_stream(flat: Array, stream: Stream, params: VectorParams, sections: Sections) -> None:
    """A stream that leaves its buffer, or sections of another shape, dtype or layout."""
    check_buffer(flat, params, end_of(stream))
    check_sections(stream, params, sections)


def end_of(stream: Stream) -> int:
    """The element after the last one of a stream, which is not empty."""
    counts = (stream.planes, stream.tokens, stream.vectors)
    strides = (stream.plane_stride, stream.token_stride, stream.vector_stride)
    if min(*counts, stream.dim, stream.offset + 1) < 1 or min(strides) < 0:
        raise LayoutError(f"{stream} leaves its buffer")
    return stream.offset + sum((n - 1) * s for n, s in zip(counts, strides, strict=True)) + stream.dim


def check_buffer(flat: Array, params: VectorParams, end: int) -> None:
    """A chunk's bits that end before the element `end`."""
    if end > flat.size:
        raise LayoutError(f"vectors up to element {end} leave their buffer of {flat.size} elements")
    if flat.ndim != 1 or not flat.flags.c_contiguous or flat.itemsize != _ITEM_SIZES.get(params.dtype):
        raise LayoutError(f"the buffer must be 1-D, contiguous and of the item size of {params.dtype}")


def kind_of(params: VectorParams) -> tuple[str, int, int, int, bool]:
    """What chunks that are decoded in one call must have in common."""
    return params.dtype, params.bits, params.seed, params.outliers, params.qjl


def check_sections(stream: Stream, params: VectorParams, sections: Sections) -> None:
    """Sections of another shape, dtype or layout than the stream's."""
    P, T, J, D = stream.planes, stream.tokens, stream.vectors, stream.dim
    wanted: list[tuple[str, Any, tuple[int, ...]]] = [
        ("scales", np.uint16, (P, T, J)),
        ("codes", np.uint8, (P, T, J, (D * params.bits + 7) // 8)),
    ]
    if params.mean:
        wanted.append(("means", np.uint16, (P, J, D)))
    if params.qjl:
        wanted += [("sketch_scales", np.uint16, (P, T, J)), ("sketch", np.uint8, (P, T, J, (D + 7) // 8))]
    if params.outliers:
        if params.outliers > D:
            raise LayoutError(f"{params.outliers} outlier channels in vectors of {D} elements")
        wanted += [
            ("outlier_channels", np.uint16, (P, J, params.outliers)),
            ("outlier_ranges", np.float32, (P, J, params.outliers, 2)),
            ("outlier_codes", np.uint8, (P, T, J, (params.outliers + 1) // 2)),
        ]
    for name, dtype, shape in wanted:
        section = getattr(sections, name)
        if section is None or section.shape != shape or section.dtype != dtype or not section.flags.c_contiguous:
            raise LayoutError(f"section {name} must be contiguous {np.dtype(dtype)} of shape {shape}")


def check_outliers(dim: int, sections: Sections) -> None:
    """Outlier channels outside the vector, out of order or with a mean: the kernels write where a frame says."""
    if not sections.outliers_fit(dim):
        raise LayoutError(f"outlier channels that do not ascend inside a vector of {dim} elements")


def check_writeable(array: Array, what: str) -> None:
    """A read-only array."""
    if not array.flags.writeable:
        raise LayoutError(f"the {what} is read-only")


def check_frame(frame: Array, end: int) -> None:
    """A frame that ends before byte `end`, or that is not u8 [n] in one piece."""
    if end > frame.size or frame.ndim != 1 or frame.dtype != np.uint8 or not frame.flags.c_contiguous:
        raise LayoutError(f"the frame must be contiguous u8 of at least {end} bytes, not {frame.dtype} {frame.shape}")
