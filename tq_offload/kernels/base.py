"""What a kernel backend is: two functions over one stream of vectors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tq_offload.layout import Stream

__all__ = ["Backend", "Sections", "Stream", "VectorParams"]

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


@dataclass(frozen=True)
class Sections:
    """Views into a frame, C-contiguous and aligned: P planes, T tokens, J vectors, D elements.

    means u16 [P, J, D] (bf16 bits) or None, scales u16 [P, T, J], codes u8 [P, T, J, ceil(D*bits/8)],
    sketch_scales u16 [P, T, J] and sketch u8 [P, T, J, ceil(D/8)] or None.
    """

    means: U16 | None
    scales: U16
    codes: U8
    sketch_scales: U16 | None
    sketch: U8 | None


class Backend(Protocol):
    """One implementation of the arithmetic of the wire format. All of them write the same bytes."""

    name: str

    def encode(self, src: Array, stream: Stream, params: VectorParams, out: Sections) -> None:
        """Encode a stream into `out`.

        Args:
            src: 1-D bits of all the elements of the group: u16 (bfloat16, float16), f32 or u8 (float8), read-only.

        Raises:
            NonFiniteError: NaN or Inf among the stream's elements; what `out` then holds is undefined.
        """

    def decode(self, dst: Array, stream: Stream, params: VectorParams, sections: Sections) -> None:
        """Decode a stream in place into `dst`, 1-D bits as for `encode`. Writes the stream's elements only."""
