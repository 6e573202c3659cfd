"""The CPU backend: numba kernels, explicit SIMD for the dims and bits below, else generic loops; without the GIL.

numba is imported and kernels are compiled when a stream is first coded, not on import. Compiled kernels are kept on
disk (NUMBA_CACHE_DIR, else beside the sources, else the user's cache folder; in memory only if none is writable).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import numpy as np

from tq_offload.errors import LayoutError
from tq_offload.frame import StreamPlan
from tq_offload.kernels import numba_checks as checks
from tq_offload.kernels.base import (
    Array,
    Chunks,
    Decoder,
    FiniteCheck,
    Sections,
    SectionsCoder,
    Stream,
    StreamCoder,
    Strides,
    VectorParams,
    decode_each,
)
from tq_offload.kernels.numba_tables import address_of_array
from tq_offload.rotation import is_power_of_two

__all__ = ["NumbaBackend"]

SIMD_DIMS = (16, 32, 64, 128, 256, 512)  # a vector is held in registers
ROW_DIMS = tuple(dim for dim in range(40, 1024, 8) if not is_power_of_two(dim))  # it is a row in memory
_COVERED = frozenset((*SIMD_DIMS, *ROW_DIMS))
SIMD_BITS = (1, 2, 3, 4, 8)  # the kernels do 5 to 7 as well; rarely used, they are not worth the compile time


class NumbaBackend:
    """`Backend` on the CPU, one thread a call; thread-safe.

    Args:
        simd: Use the explicit SIMD kernels for the dims and bits that they cover.
        permute: Let these use the CPU's table permute; False: the portable select tree. Same bytes either way.
        lanes: Lanes of their registers, 8 or 16; None: as the CPU has them. Same bytes either way.

    Raises:
        ImportError: numba is not installed.
    """

    name = "numba"

    def __init__(self, *, simd: bool = True, permute: bool = True, lanes: int | None = None) -> None:
        if importlib.util.find_spec("numba") is None:
            raise ImportError("numba is not installed")
        self._simd = simd
        self._permute = permute
        self._lanes = lanes

    def encode(self, src: Array, stream: Stream, params: VectorParams, out: Sections) -> None:
        """See `Backend.encode`."""
        if stream.planes * stream.tokens * stream.vectors:
            checks.check_stream(src, stream, params, out)
            self._kernels(stream.dim, params).encode(*_addresses(src, stream, params, out))

    def decode(self, dst: Array, stream: Stream, params: VectorParams, sections: Sections) -> None:
        """See `Backend.decode`."""
        if stream.planes * stream.tokens * stream.vectors:
            checks.check_stream(dst, stream, params, sections)
            checks.check_outliers(stream.dim, sections)
            checks.check_writeable(dst, "destination")
            self._kernels(stream.dim, params).decode(*_addresses(dst, stream, params, sections))

    def coder(self, plan: StreamPlan, params: VectorParams) -> StreamCoder:
        """See `Backend.coder`."""
        from tq_offload.kernels.numba_stream import PlanCoder

        if not plan.coded.planes * plan.coded.tokens * plan.coded.vectors:
            return SectionsCoder(self, plan, params)
        return PlanCoder(self._kernels(plan.coded.dim, params), plan)

    def finite_check(self, places: Array) -> FiniteCheck:
        """See `Backend.finite_check`."""
        from tq_offload.kernels.numba_stream import finite_check

        return finite_check(places)

    def decoder(self, dim: int, chunks: Sequence[Chunks]) -> Decoder:
        """See `Backend.decoder`: one call into compiled code for all chunks, where the SIMD kernels cover them."""
        one_by_one = decode_each(self, dim, chunks)
        if not chunks or not self._covers(dim, chunks[0].params):
            return one_by_one
        from tq_offload.kernels.numba_stream import coding_of
        from tq_offload.kernels.simd.register_decode import JOB_FIELDS, Place

        params = chunks[0].params
        if any(checks.kind_of(part.params) != checks.kind_of(params) for part in chunks):
            raise LayoutError("chunks that are decoded together must have one dtype, number of bits, outliers and seed")
        simd = self._kernels(dim, params).decoding
        jobs = np.zeros((len(chunks), JOB_FIELDS), np.int64)
        vectors = 0
        for job, part in zip(jobs, chunks, strict=True):
            if min(part.row, part.start) < 0:
                raise LayoutError(f"chunks from row {part.row}, token {part.start} on leave their buffer")
            checks.check_sections(part.stream(dim, (0, 0, 0)), part.params, part.sections)
            checks.check_outliers(dim, part.sections)
            coding = coding_of(part.params, part.sections)
            job[:5] = part.row, part.start, part.planes, part.tokens, part.vectors
            job[5:8] = coding.means, coding.scales, coding.codes
            job[8:] = coding.outlier_channels, coding.outlier_ranges, coding.outlier_codes, vectors
            vectors += part.sections.scales.size
        last = {(part.row, part.vectors - 1, part.start + part.planes * part.tokens - 1) for part in chunks}

        def run(dst: Array, strides: Strides, _held: Any = chunks) -> None:  # what the addresses point to
            s_row, s_vector, s_token = strides
            end = max(row * s_row + vector * s_vector + token * s_token for row, vector, token in last) + dim
            if min(strides) < 0:
                raise LayoutError(f"strides of {strides} elements")
            checks.check_buffer(dst, params, end)
            checks.check_writeable(dst, "destination")
            size, left = dst.itemsize, np.zeros(vectors, np.uint8)
            place = Place(address_of_array(dst), dim, s_row * size, s_vector * size, s_token * size)
            if simd.decode_jobs(
                simd.config, jobs_at, len(jobs), place, simd.written_as, coding, simd.tables, address_of_array(left)
            ):
                one_by_one(dst, strides)

        jobs_at = address_of_array(jobs)
        return run

    def _covers(self, dim: int, params: VectorParams) -> bool:
        """Whether SIMD kernels do most of the vectors; the generic loops do the rest, and what is not covered."""
        return self._simd and not params.qjl and dim in _COVERED and params.bits in SIMD_BITS

    def _kernels(self, dim: int, params: VectorParams) -> Any:
        """`StreamKernels` of that kind."""
        from tq_offload.kernels.numba_stream import stream_kernels

        simd = (self._permute, self._lanes) if self._covers(dim, params) else None
        return stream_kernels(dim, params, simd)


def _addresses(flat: Array, stream: Stream, params: VectorParams, sections: Sections) -> tuple[Any, Any, Any]:
    """`Grid`, `Coding` and `Sketch`."""
    from tq_offload.kernels.numba_stream import coding_of, grid_of, sketch_of

    grid = grid_of(address_of_array(flat), stream, flat.itemsize)
    return grid, coding_of(params, sections), sketch_of(params, sections)
