"""What a kernel backend is: two functions over one stream of vectors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tq_offload.buffers import all_finite, section_view
from tq_offload.frame import Section, StreamPlan
from tq_offload.layout import Stream

__all__ = [
    "Backend",
    "Chunks",
    "Decoder",
    "FiniteCheck",
    "Sections",
    "SectionsCoder",
    "Stream",
    "StreamCoder",
    "VectorParams",
    "check_finite",
    "decode_each",
    "stream_params",
    "stream_sections",
]

Array = npt.NDArray[Any]
U8 = npt.NDArray[np.uint8]
U16 = npt.NDArray[np.uint16]


@dataclass(frozen=True)
class VectorParams:
    """How the vectors of a stream are coded (docs/wire-format.md, sections 3 to 6).

    `dtype` is the torch name of the elements: bfloat16, float16, float32, float8_e4m3fn, float8_e5m2.
    """

    dtype: str
    bits: int
    seed: int
    rule: str
    mean: bool
    fit_range: bool
    qjl: bool
    outliers: int = 0


def stream_params(plan: StreamPlan, dtype: str, seed: int) -> VectorParams:
    """How the vectors of a stream of a frame are coded."""
    return VectorParams(dtype, plan.bits, seed, plan.rule, plan.mean, plan.fit_range, plan.qjl, plan.outliers)


@dataclass(frozen=True)
class Sections:
    """Views into a frame, C-contiguous and aligned: P planes, T tokens, J vectors, D elements.

    means u16 [P, J, D] (bf16 bits) or None, scales u16 [P, T, J], codes u8 [P, T, J, ceil(D*bits/8)],
    sketch_scales u16 [P, T, J] and sketch u8 [P, T, J, ceil(D/8)] or None. With k outlier channels: outlier_channels
    u16 [P, J, k], ascending, outlier_ranges f32 [P, J, k, 2] and outlier_codes u8 [P, T, J, ceil(k/2)]; else None.
    """

    means: U16 | None
    scales: U16
    codes: U8
    sketch_scales: U16 | None
    sketch: U8 | None
    outlier_channels: U16 | None = None
    outlier_ranges: npt.NDArray[np.float32] | None = None
    outlier_codes: U8 | None = None

    def outliers_fit(self, dim: int) -> bool:
        """True if the channels ascend inside a vector of `dim` elements and have no mean, and the ranges are finite."""
        if self.outlier_channels is None or self.outlier_ranges is None:
            return True
        channels = self.outlier_channels.astype(np.int32)
        ascending = bool((np.diff(channels, axis=-1) > 0).all())
        if not (ascending and (channels < dim).all() and np.isfinite(self.outlier_ranges).all()):
            return False
        return self.means is None or not np.take_along_axis(self.means, channels, axis=-1).any()


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


class StreamCoder(Protocol):
    """Codes one stream of all the frames of a plan: what the plan settles is worked out once."""

    def encode(self, src: Array, frame: Array) -> None:
        """As `Backend.encode`, into the stream's sections in the frame, u8 [length], aligned to 4 bytes."""

    def decode(self, dst: Array, frame: Array) -> None:
        """As `Backend.decode`."""


@dataclass(frozen=True)
class SectionsCoder:
    """The `StreamCoder` of a backend that has nothing to work out."""

    backend: Backend
    plan: StreamPlan
    params: VectorParams

    def encode(self, src: Array, frame: Array) -> None:
        """See `StreamCoder.encode`."""
        self.backend.encode(src, self.plan.coded, self.params, stream_sections(self.plan, frame))

    def decode(self, dst: Array, frame: Array) -> None:
        """See `StreamCoder.decode`."""
        self.backend.decode(dst, self.plan.coded, self.params, stream_sections(self.plan, frame))


def check_finite(places: Array) -> FiniteCheck:
    """The `Backend.finite_check` of a backend that has no faster one."""

    def check(frame: Array) -> bool:
        return all(all_finite(frame[at : at + 2 * count].view(np.uint16), "bfloat16") for at, count in places.tolist())

    return check


@dataclass(frozen=True)
class Chunks:
    """P chunks of T tokens, one after the other from token `start` of row `row`, with J vectors a token."""

    row: int
    start: int
    planes: int
    tokens: int
    vectors: int
    params: VectorParams
    sections: Sections

    def stream(self, dim: int, strides: Strides) -> Stream:
        """Where they are in a tensor of these strides."""
        s_row, s_vector, s_token = strides
        offset = self.row * s_row + self.start * s_token
        return Stream(self.planes, self.tokens, self.vectors, dim, offset, self.tokens * s_token, s_token, s_vector)


Strides = tuple[int, int, int]
"""Elements from a row, a vector and a token to the next."""

FiniteCheck = Callable[[Array], bool]
"""Whether numbers in a frame, u8 [length] and aligned to 4 bytes, are finite."""

Decoder = Callable[[Array, Strides], None]
"""Decodes chunks into a tensor [rows, J, tokens, D]: its 1-D bits from its first element on, and its strides."""


class Backend(Protocol):
    """One implementation of the arithmetic of the wire format. All of them write the same bytes."""

    name: str

    def __hash__(self) -> int:
        """By identity: coders are remembered for a backend."""

    def encode(self, src: Array, stream: Stream, params: VectorParams, out: Sections) -> None:
        """Encode a stream into `out`.

        Args:
            src: 1-D bits of all the elements of the group: u16 (bfloat16, float16), f32 or u8 (float8), read-only.

        Raises:
            NonFiniteError: NaN or Inf among the stream's elements; what `out` then holds is undefined.
        """

    def decode(self, dst: Array, stream: Stream, params: VectorParams, sections: Sections) -> None:
        """Decode a stream in place into `dst`, 1-D bits as for `encode`. Writes the stream's elements only."""

    def coder(self, plan: StreamPlan, params: VectorParams) -> StreamCoder:
        """What codes the coded planes of a stream of frames; its chunk has the dtype of `params`."""

    def finite_check(self, places: Array) -> FiniteCheck:
        """What tells whether the bfloat16 numbers in these places of a frame are finite.

        Args:
            places: i64 [n, 2]: offsets in bytes, which are even, and counts.
        """

    def decoder(self, dim: int, chunks: Sequence[Chunks]) -> Decoder:
        """A function that decodes all of these chunks, for data that is decoded again and again.

        Args:
            dim: D.
            chunks: Of one dtype and number of bits. The function refers to their sections.
        """


def decode_each(backend: Backend, dim: int, chunks: Sequence[Chunks]) -> Decoder:
    """A `Backend.decoder` that decodes one stream after the other."""

    def run(dst: Array, strides: Strides) -> None:
        for part in chunks:
            backend.decode(dst, part.stream(dim, strides), part.params, part.sections)

    return run
