"""What the numba backend does with one stream, by address: SIMD kernels where they cover it, then the generic loops."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from tq_offload import codebook
from tq_offload.errors import LayoutError, NonFiniteError
from tq_offload.frame import StreamPlan
from tq_offload.kernels import numba_checks as checks
from tq_offload.kernels import stream_loops as loops
from tq_offload.kernels.base import Array, FiniteCheck, Sections, Stream, VectorParams, stream_sections
from tq_offload.kernels.finite_loops import count_not_finite
from tq_offload.kernels.grid_loops import RULES, Coding, Grid
from tq_offload.kernels.numba_tables import address_of_array, loop_tables
from tq_offload.kernels.outlier_loops import split_outliers
from tq_offload.kernels.simd.config import FORMATS, Format, KernelConfig
from tq_offload.kernels.simd.kernels import SimdKernels, simd_kernels

__all__ = ["PlanCoder", "StreamKernels", "coding_of", "finite_check", "grid_of", "sketch_of", "stream_kernels"]


GENERIC = KernelConfig()


@dataclass(frozen=True)
class StreamKernels:
    """What codes streams of one kind; `encoding` and `decoding` are None where no SIMD kernels cover them."""

    params: VectorParams
    encoding: SimdKernels | None
    decoding: SimdKernels | None

    @property
    def format(self) -> Format:
        """Format of the elements."""
        return FORMATS[self.params.dtype]

    def encode(self, grid: Grid, coding: Coding, sketch: loops.Sketch | None) -> None:
        """Encode a stream in which `numba_checks` found nothing wrong.

        Raises:
            NonFiniteError: NaN or Inf among its elements.
        """
        if coding.outliers and not split_outliers(GENERIC, grid, self.format, coding):
            raise NonFiniteError("NaN or Inf in the KV chunk")
        simd = self.encoding
        if simd is not None:
            left = np.zeros(grid.planes * grid.tokens * grid.vectors, np.uint8)
            if not simd.encode(simd.config, grid, simd.read_as, coding, simd.tables, address_of_array(left)):
                return
            coding = coding._replace(only=address_of_array(left))
        elif coding.means:
            loops.mean_stream(GENERIC, grid, self.format, coding)
        tables, _kept = loop_tables(self.params, grid.dim)
        if not loops.encode_stream(GENERIC, grid, self.format, coding, sketch, tables):
            raise NonFiniteError("NaN or Inf in the KV chunk")

    def decode(self, grid: Grid, coding: Coding, sketch: loops.Sketch | None) -> None:
        """Decode a stream in which `numba_checks` found nothing wrong."""
        simd = self.decoding
        if simd is not None:
            left = np.zeros(grid.planes * grid.tokens * grid.vectors, np.uint8)
            if not simd.decode(simd.config, grid, simd.written_as, coding, simd.tables, address_of_array(left)):
                return
            coding = coding._replace(only=address_of_array(left))
        tables, _kept = loop_tables(self.params, grid.dim)
        loops.decode_stream(GENERIC, grid, self.format, coding, sketch, tables)


@lru_cache(maxsize=256)
def stream_kernels(dim: int, params: VectorParams, simd: tuple[bool, int | None] | None) -> StreamKernels:
    """What codes streams of that kind.

    Args:
        dim: D.
        params: How vectors are coded.
        simd: `permute` and `lanes` of `simd_kernels`; None: generic loops alone.
    """
    if simd is None:
        return StreamKernels(params, None, None)
    encoding, decoding = (
        simd_kernels(dim, params, encoding=way, permute=simd[0], lanes=simd[1]) for way in (True, False)
    )
    return StreamKernels(params, encoding, decoding)


class PlanCoder:
    """`StreamCoder`: grid and coding of a stream with places instead of addresses, to which each call adds its own.

    Args:
        kernels: What codes the stream.
        plan: Its plan; not empty.
    """

    def __init__(self, kernels: StreamKernels, plan: StreamPlan) -> None:
        self._kernels = kernels
        self._plan = plan
        self._elements = checks.end_of(plan.coded)
        self._grid = grid_of(0, plan.coded, kernels.format.itemsize)
        sections = plan.means, plan.scales, plan.codes, plan.outlier_channels, plan.outlier_ranges, plan.outlier_codes
        self._places = [None if section is None else section.offset for section in sections]
        self._sketch = plan.sketch_scales and plan.sketch and (plan.sketch_scales.offset, plan.sketch.offset)
        self._end = max(section.offset + section.nbytes for section in plan.sections())
        self._kind = _kind_of(kernels.params)

    def encode(self, src: Array, frame: Array) -> None:
        """See `StreamCoder.encode`."""
        checks.check_writeable(frame, "frame")
        self._kernels.encode(*self._placed(src, frame))

    def decode(self, dst: Array, frame: Array) -> None:
        """See `StreamCoder.decode`."""
        checks.check_writeable(dst, "destination")
        placed = self._placed(dst, frame)
        if self._plan.outliers:
            checks.check_outliers(self._plan.coded.dim, stream_sections(self._plan, frame))
        self._kernels.decode(*placed)

    def _placed(self, chunk: Array, frame: Array) -> tuple[Grid, Coding, loops.Sketch | None]:
        checks.check_buffer(chunk, self._kernels.params, self._elements)
        checks.check_frame(frame, self._end)
        at = address_of_array(frame)
        grid = self._grid._replace(address=address_of_array(chunk) + self._grid.address)
        coding = Coding(*self._kind, *[0 if place is None else at + place for place in self._places])
        sketch = loops.Sketch(at + self._sketch[0], at + self._sketch[1]) if self._sketch else None
        return grid, coding, sketch


def grid_of(address: int, stream: Stream, size: int) -> Grid:
    """A stream over the elements of `size` bytes at an address."""
    return Grid(
        address + stream.offset * size,
        stream.planes,
        stream.tokens,
        stream.vectors,
        stream.dim,
        stream.plane_stride * size,
        stream.token_stride * size,
        stream.vector_stride * size,
    )


def coding_of(params: VectorParams, sections: Sections) -> Coding:
    """How a stream is coded, and where its sections are."""
    means = sections.means if params.mean else None
    outliers = sections.outlier_channels, sections.outlier_ranges, sections.outlier_codes
    places = map(address_of_array, (means, sections.scales, sections.codes, *outliers))
    return Coding(*_kind_of(params), *places)


def _kind_of(params: VectorParams) -> tuple[int, int, np.float32, np.float32, int]:
    """The fields of a `Coding` that are no addresses."""
    alpha, beta = codebook.RANGE_FIT[params.bits] if params.fit_range else (1.0, 0.0)
    return params.bits, RULES.index(params.rule), np.float32(alpha), np.float32(beta), params.outliers


def sketch_of(params: VectorParams, sections: Sections) -> loops.Sketch | None:
    """Where the sections of the QJL sketch are; None where it is off."""
    if not params.qjl:
        return None
    return loops.Sketch(address_of_array(sections.sketch_scales), address_of_array(sections.sketch))


def finite_check(places: Array) -> FiniteCheck:
    """See `Backend.finite_check`."""
    places = np.ascontiguousarray(places, np.int64).reshape(-1, 2)
    if (places < 0).any():
        raise LayoutError("numbers before the frame")
    end, at = int((places[:, 0] + 2 * places[:, 1]).max(initial=0)), address_of_array(places)

    def check(frame: Array, _held: Array = places) -> bool:  # what the address points to
        checks.check_frame(frame, end)
        return not count_not_finite(GENERIC, address_of_array(frame), at, len(places))

    return check
