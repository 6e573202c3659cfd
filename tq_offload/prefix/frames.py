"""K or V of a layer to frames and back: codes, scales and means are copied, nothing is quantised anew.

A packed run of P chunks of c tokens is a group `latent` of shape (P, c, B*H*D): its planes are the chunks, its vectors
the rows and heads. Exact tokens are a group `opaque` of shape (B, H, n, D). A stream of `latent` counts as K, so in
the frames of V the fields of the spec for K hold what was chosen for V (`frame_spec`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from tq_offload.buffers import Array, all_finite, flat_bits, section_view
from tq_offload.codec import CheckedFrame
from tq_offload.errors import CacheTypeError, FrameContentError
from tq_offload.frame import Section, make_plan, write_checksum, write_header
from tq_offload.kv_cache.packed import PackedTokens, vector_params
from tq_offload.layout import CODED_DTYPES, ChunkLayout, GroupLayout, dtype_name
from tq_offload.spec import CodecSpec

__all__ = [
    "MAX_GROUPS", "Piece", "Shape", "frame_spec", "read_bytes", "read_piece", "shape_of", "write_bytes", "write_frame",
]  # fmt: skip

MAX_GROUPS = 256  # of a frame; more go into further frames

Piece = PackedTokens | torch.Tensor
"""Packed tokens, or exact ones [B, H, n, D]."""

# Sections of a stream, their item type, and where in them the batch is. In `PackedTokens` it comes first.
_SECTIONS: tuple[tuple[str, Any, int], ...] = (
    ("codes", np.uint8, 2), ("scales", np.int16, 2), ("means", np.int16, 1), ("sketch_scales", np.int16, 2),
    ("sketch", np.uint8, 2), ("outlier_channels", np.int16, 1), ("outlier_ranges", np.float32, 1),
    ("outlier_codes", np.uint8, 2),
)  # fmt: skip
_BF16 = ("scales", "means", "sketch_scales")
_EXACT_DTYPES = (*CODED_DTYPES, "float64")


@dataclass(frozen=True)
class Shape:
    """What the pieces of one side of a layer have in common."""

    rows: int
    heads: int
    dim: int
    dtype: str

    @property
    def elements(self) -> int:
        """Of a token."""
        return self.rows * self.heads * self.dim


def frame_spec(spec: CodecSpec, side: str) -> CodecSpec:
    """The spec that the frames of one side carry: what was chosen for that side is in the fields for K."""
    spec = replace(spec, protect_first=0, protect_last=0)
    return (
        spec
        if side == "K"
        else replace(spec, key_bits=spec.value_bits, key_rule=spec.value_rule, qjl=False, key_outliers=0)
    )


def shape_of(piece: Piece) -> Shape:
    """B, H, D and dtype of a piece."""
    if isinstance(piece, PackedTokens):
        rows, _, _, heads = piece.scales.shape
        return Shape(rows, heads, piece.dim, piece.params.dtype)
    rows, heads, _, dim = piece.shape
    return Shape(rows, heads, dim, dtype_name(piece.dtype))


def write_frame(pieces: Sequence[Piece], spec: CodecSpec, *, key: bytes, model: bytes) -> Array:
    """A frame with a group for every piece.

    Args:
        pieces: At most `MAX_GROUPS`.
        spec: Of `frame_spec`.
        key: Digest of the entry.
        model: Fingerprint of the model.

    Raises:
        CacheTypeError: Tokens packed with another spec, or exact ones of a dtype that is not stored.
        LayoutError: More than a frame can hold.
    """
    plan = make_plan(spec, ChunkLayout(tuple(_group(piece, spec) for piece in pieces)))
    frame = np.empty(plan.length, np.uint8)
    for piece, group, streams, section in zip(pieces, plan.layout.groups, plan.groups, plan.opaque, strict=True):
        if isinstance(piece, PackedTokens):
            for _, part, view in _sections(piece, streams[0], frame):
                view[...] = part
        elif section is not None:
            section_view(frame, section, np.uint8)[...] = flat_bits(piece.detach().cpu().contiguous(), group)
    write_header(plan, frame.data, key=key, model=model)
    write_checksum(frame.data)
    return frame


def write_bytes(data: bytes, *, key: bytes, model: bytes) -> Array:
    """A frame of one group that holds bytes."""
    plan = make_plan(CodecSpec(), ChunkLayout((GroupLayout("opaque", (len(data),), "uint8"),)))
    frame, section = np.empty(plan.length, np.uint8), plan.opaque[0]
    assert section is not None
    section_view(frame, section, np.uint8)[...] = np.frombuffer(data, np.uint8)
    write_header(plan, frame.data, key=key, model=model)
    write_checksum(frame.data)
    return frame


def read_bytes(frame: CheckedFrame) -> bytes:
    """The bytes of `write_bytes`.

    Raises:
        FrameContentError: It is another frame.
    """
    groups = frame.plan.layout.groups
    if len(groups) != 1 or groups[0].dtype != "uint8" or (section := frame.plan.opaque[0]) is None:
        raise FrameContentError("a frame of one group of bytes was expected")
    return section_view(frame.source, section, np.uint8).tobytes()


def _group(piece: Piece, spec: CodecSpec) -> GroupLayout:
    shape = shape_of(piece)
    if not isinstance(piece, PackedTokens):
        if shape.dtype not in _EXACT_DTYPES:
            raise CacheTypeError(f"K and V of {shape.dtype} cannot be stored: load the model in bfloat16 or float16")
        return GroupLayout("opaque", tuple(piece.shape), shape.dtype)
    _, chunks, tokens, _ = piece.scales.shape
    if piece.params != vector_params(spec, "K", getattr(torch, shape.dtype), tokens, shape.dim):
        raise CacheTypeError("a layer holds tokens that were packed with other settings than it has now")
    return GroupLayout("latent", (chunks, tokens, shape.rows * shape.heads * shape.dim), shape.dtype, shape.dim)


def _sections(piece: PackedTokens, stream: Any, frame: Array) -> list[tuple[str, Array, Array]]:
    """Names and arrays of packed tokens beside their sections in the frame, as views of one shape."""
    found = []
    for name, kind, batch in _SECTIONS:
        part, section = getattr(piece, name), getattr(stream, name)
        if part is not None:
            moved = np.moveaxis(part.numpy(), 0, batch)
            found.append((name, moved, section_view(frame, section, kind).reshape(moved.shape)))
    return found


def read_piece(frame: CheckedFrame, index: int, rows: int, length: int) -> Piece:
    """One group of a frame, in memory of its own.

    Args:
        frame: A checked frame whose spec is one of `frame_spec`.
        index: Number of the group.
        rows: B.
        length: Tokens in use.

    Raises:
        FrameContentError: The group is not what `write_frame` makes of that many rows and tokens.
    """
    plan = frame.plan
    group, section = plan.layout.groups[index], plan.opaque[index]
    if section is not None:
        return _read_exact(group, section, frame.source, rows, length)
    if group.kind != "latent" or len(group.shape) != 3:
        raise FrameContentError(f"a group {group.kind} of shape {group.shape} in a frame of a prefix")
    (chunks, tokens, channels), dim = group.shape, group.head_dim
    heads, odd = divmod(channels // dim, rows)
    if odd or not heads or not (chunks - 1) * tokens < length <= chunks * tokens:
        raise FrameContentError(f"{rows} rows of {length} tokens in a group of shape {group.shape}")
    params = vector_params(plan.spec, "K", getattr(torch, group.dtype), tokens, dim)
    piece = PackedTokens.empty(params, rows, chunks, tokens, heads, dim)
    for name, part, view in _sections(piece, plan.groups[index][0], frame.source):
        if name in _BF16 and not all_finite(view.view(np.uint16), "bfloat16"):
            raise FrameContentError("a scale or mean is not finite")
        part[...] = view
    if not all(piece.sections(row).outliers_fit(dim) for row in range(rows)):
        raise FrameContentError("the outlier channels are not what an encoder writes")
    return replace(piece, length=length)


def _read_exact(group: GroupLayout, section: Section, source: Array, rows: int, length: int) -> torch.Tensor:
    fits = len(group.shape) == 4 and group.shape[0] == rows and group.shape[2] == length and 0 not in group.shape
    if not fits or group.dtype not in _EXACT_DTYPES:
        raise FrameContentError(f"{rows} rows of {length} tokens in a group of {group.dtype}, shape {group.shape}")
    tensor = torch.empty(group.shape, dtype=getattr(torch, group.dtype))
    flat_bits(tensor, group)[...] = section_view(source, section, np.uint8)
    return tensor
