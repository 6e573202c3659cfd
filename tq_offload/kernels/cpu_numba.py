"""The CPU backend: numba kernels, explicit SIMD for the dims and bits below, else generic loops; without the GIL.

numba is imported and kernels are compiled when a stream is first coded, not on import. Compiled kernels are kept on
disk (NUMBA_CACHE_DIR, else beside the sources, else the user's cache folder; in memory only if none is writable).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import numpy as np

from tq_offload import codebook
from tq_offload.errors import LayoutError, NonFiniteError
from tq_offload.kernels.base import (
    Array,
    Chunks,
    Decoder,
    Sections,
    Stream,
    Strides,
    VectorParams,
    decode_each,
)
from tq_offload.kernels.numba_tables import address_of_array, loop_tables
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
        if not stream.planes * stream.tokens * stream.vectors:
            return
        from tq_offload.kernels import stream_loops as loops
        from tq_offload.kernels.outlier_loops import split_outliers
        from tq_offload.kernels.simd.config import FORMATS, KernelConfig

        _check(src, stream, params, out)
        grid, coding, fmt = _grid(src, stream), _coding(params, out), FORMATS[params.dtype]
        if params.outliers and not split_outliers(KernelConfig(), grid, fmt, coding):
            raise NonFiniteError("NaN or Inf in the KV chunk")
        if self._covers(stream.dim, params):
            simd = self._kernels(stream.dim, params, encoding=True)
            left = np.zeros(out.scales.size, np.uint8)
            if not simd.encode(simd.config, grid, simd.read_as, coding, simd.tables, address_of_array(left)):
                return
            coding = coding._replace(only=address_of_array(left))
        elif coding.means:
            loops.mean_stream(KernelConfig(), grid, fmt, coding)
        tables, _kept = loop_tables(params, stream.dim)
        if not loops.encode_stream(KernelConfig(), grid, fmt, coding, _sketch(params, out), tables):
            raise NonFiniteError("NaN or Inf in the KV chunk")

    def decode(self, dst: Array, stream: Stream, params: VectorParams, sections: Sections) -> None:
        """See `Backend.decode`."""
        if not stream.planes * stream.tokens * stream.vectors:
            return
        from tq_offload.kernels import stream_loops as loops
        from tq_offload.kernels.simd.config import FORMATS, KernelConfig

        _check(dst, stream, params, sections)
        _check_outliers(stream.dim, sections)
        if not dst.flags.writeable:
            raise LayoutError("the destination is read-only")
        grid, coding, fmt = _grid(dst, stream), _coding(params, sections), FORMATS[params.dtype]
        if self._covers(stream.dim, params):
            simd = self._kernels(stream.dim, params, encoding=False)
            left = np.zeros(sections.scales.size, np.uint8)
            if not simd.decode(simd.config, grid, simd.written_as, coding, simd.tables, address_of_array(left)):
                return
            coding = coding._replace(only=address_of_array(left))
        tables, _kept = loop_tables(params, stream.dim)
        loops.decode_stream(KernelConfig(), grid, fmt, coding, _sketch(params, sections), tables)

    def decoder(self, dim: int, chunks: Sequence[Chunks]) -> Decoder:
        """See `Backend.decoder`: one call into compiled code for all chunks, where the SIMD kernels cover them."""
        one_by_one = decode_each(self, dim, chunks)
        if not chunks or not self._covers(dim, chunks[0].params):
            return one_by_one
        from tq_offload.kernels.simd.register_decode import JOB_FIELDS, Place

        params = chunks[0].params
        if any(_kind(part.params) != _kind(params) for part in chunks):
            raise LayoutError("chunks that are decoded together must have one dtype, number of bits, outliers and seed")
        simd = self._kernels(dim, params, encoding=False)
        jobs = np.zeros((len(chunks), JOB_FIELDS), np.int64)
        vectors = 0
        for job, part in zip(jobs, chunks, strict=True):
            if min(part.row, part.start) < 0:
                raise LayoutError(f"chunks from row {part.row}, token {part.start} on leave their buffer")
            _check_sections(part.stream(dim, (0, 0, 0)), part.params, part.sections)
            _check_outliers(dim, part.sections)
            coding = _coding(part.params, part.sections)
            job[:5] = part.row, part.start, part.planes, part.tokens, part.vectors
            job[5:8] = coding.means, coding.scales, coding.codes
            job[8:] = coding.outlier_channels, coding.outlier_ranges, coding.outlier_codes, vectors
            vectors += part.sections.scales.size
        last = {(part.row, part.vectors - 1, part.start + part.planes * part.tokens - 1) for part in chunks}

        def run(dst: Array, strides: Strides, _held: Any = chunks) -> None:  # what the addresses point to
            s_row, s_vector, s_token = strides
            end = max(row * s_row + vector * s_vector + token * s_token for row, vector, token in last) + dim
            _check_buffer(dst, params, end, min(strides))
            if not dst.flags.writeable:
                raise LayoutError("the destination is read-only")
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

    def _kernels(self, dim: int, params: VectorParams, *, encoding: bool) -> Any:
        from tq_offload.kernels.simd.kernels import simd_kernels

        return simd_kernels(dim, params, encoding=encoding, permute=self._permute, lanes=self._lanes)


def _grid(flat: Array, stream: Stream) -> Any:
    from tq_offload.kernels.grid_loops import Grid

    size = flat.itemsize
    return Grid(
        address_of_array(flat) + stream.offset * size,
        stream.planes,
        stream.tokens,
        stream.vectors,
        stream.dim,
        stream.plane_stride * size,
        stream.token_stride * size,
        stream.vector_stride * size,
    )


def _coding(params: VectorParams, sections: Sections, only: Array | None = None) -> Any:
    from tq_offload.kernels.grid_loops import RULES, Coding

    alpha, beta = codebook.RANGE_FIT[params.bits] if params.fit_range else (1.0, 0.0)
    means = sections.means if params.mean else None
    return Coding(
        params.bits,
        RULES.index(params.rule),
        address_of_array(means),
        address_of_array(sections.scales),
        address_of_array(sections.codes),
        address_of_array(only),
        np.float32(alpha),
        np.float32(beta),
        params.outliers,
        address_of_array(sections.outlier_channels),
        address_of_array(sections.outlier_ranges),
        address_of_array(sections.outlier_codes),
    )


def _sketch(params: VectorParams, sections: Sections) -> Any:
    from tq_offload.kernels.stream_loops import Sketch

    return Sketch(address_of_array(sections.sketch_scales), address_of_array(sections.sketch)) if params.qjl else None


_ITEM_SIZES = {"bfloat16": 2, "float16": 2, "float32": 4, "float8_e4m3fn": 1, "float8_e5m2": 1}


def _check(flat: Array, stream: Stream, params: VectorParams, sections: Sections) -> None:
    """Kernels work on bare addresses: nothing that could leave a buffer gets past here.

    Raises:
        LayoutError: A stream that leaves its buffer, or sections of another shape, dtype or layout.
    """
    P, T, J, D = stream.planes, stream.tokens, stream.vectors, stream.dim
    strides = (stream.plane_stride, stream.token_stride, stream.vector_stride)
    last = stream.offset + sum((n - 1) * s for n, s in zip((P, T, J), strides, strict=True)) + D
    if min(P, T, J, D, stream.offset + 1) < 1:
        raise LayoutError(f"{stream} leaves its buffer of {flat.size} elements")
    _check_buffer(flat, params, last, min(strides))
    _check_sections(stream, params, sections)


def _check_buffer(flat: Array, params: VectorParams, end: int, least_stride: int) -> None:
    if least_stride < 0 or end > flat.size:
        raise LayoutError(f"vectors up to element {end} leave their buffer of {flat.size} elements")
    if flat.ndim != 1 or not flat.flags.c_contiguous or flat.itemsize != _ITEM_SIZES.get(params.dtype):
        raise LayoutError(f"the buffer must be 1-D, contiguous and of the item size of {params.dtype}")


def _kind(params: VectorParams) -> tuple[str, int, int, int, bool]:
    return params.dtype, params.bits, params.seed, params.outliers, params.qjl


def _check_sections(stream: Stream, params: VectorParams, sections: Sections) -> None:
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


def _check_outliers(dim: int, sections: Sections) -> None:
    """The kernels write where the channels of a frame say."""
    if not sections.outliers_fit(dim):
        raise LayoutError(f"outlier channels that do not ascend inside a vector of {dim} elements")
