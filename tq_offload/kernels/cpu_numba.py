"""The CPU backend: numba kernels, explicit SIMD where it pays, else generic loops. The GIL is released for a stream.

numba is imported and kernels are compiled when a stream is first coded, not on import. Compiled kernels are kept on
disk (NUMBA_CACHE_DIR, else beside the sources, else the user's cache folder; in memory only if none is writable).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from tq_offload import codebook, rotation
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

__all__ = ["NumbaBackend"]

SIMD_DIMS = (16, 32, 64, 128, 256, 512)
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
            from tq_offload.kernels.simd.driver import simd_encode_stream

            config = self._config(stream.dim, params, encoding=True)
            simd_tables, _held = _simd_tables(params, config, encoding=True)
            left = np.zeros(out.scales.size, np.uint8)
            if not simd_encode_stream(
                config, grid, fmt if config.staged else None, coding, simd_tables, _address(left)
            ):
                return
            coding = coding._replace(only=_address(left))
        elif coding.means:
            loops.mean_stream(KernelConfig(), grid, fmt, coding)
        tables, _kept = _tables(params, stream.dim)
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
            from tq_offload.kernels.simd.driver import simd_decode_stream

            config = self._config(stream.dim, params, encoding=False)
            simd_tables, _held = _simd_tables(params, config, encoding=False)
            left = np.zeros(sections.scales.size, np.uint8)
            if not simd_decode_stream(config, grid, _written_as(params), coding, simd_tables, _address(left)):
                return
            coding = coding._replace(only=_address(left))
        tables, _kept = _tables(params, stream.dim)
        loops.decode_stream(KernelConfig(), grid, fmt, coding, _sketch(params, sections), tables)

    def decoder(self, dim: int, chunks: Sequence[Chunks]) -> Decoder:
        """See `Backend.decoder`: one call into compiled code for all chunks, where the SIMD kernels cover them."""
        one_by_one = decode_each(self, dim, chunks)
        if not chunks or not self._covers(dim, chunks[0].params):
            return one_by_one
        from tq_offload.kernels.simd.driver import JOB_FIELDS, Place, simd_decode_jobs

        params = chunks[0].params
        if any(_kind(part.params) != _kind(params) for part in chunks):
            raise LayoutError("chunks that are decoded together must have one dtype, number of bits, outliers and seed")
        config = self._config(dim, params, encoding=False)
        tables, held = _simd_tables(params, config, encoding=False)
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
        written_as = _written_as(params)

        def run(dst: Array, strides: Strides, _held: Any = (held, chunks)) -> None:  # what the addresses point to
            s_row, s_vector, s_token = strides
            end = max(row * s_row + vector * s_vector + token * s_token for row, vector, token in last) + dim
            _check_buffer(dst, params, end, min(strides))
            if not dst.flags.writeable:
                raise LayoutError("the destination is read-only")
            size, left = dst.itemsize, np.zeros(vectors, np.uint8)
            place = Place(_address(dst), dim, s_row * size, s_vector * size, s_token * size)
            if simd_decode_jobs(config, jobs_at, len(jobs), place, written_as, coding, tables, _address(left)):
                one_by_one(dst, strides)

        jobs_at = _address(jobs)
        return run

    def _covers(self, dim: int, params: VectorParams) -> bool:
        return self._simd and not params.qjl and dim in SIMD_DIMS and params.bits in SIMD_BITS

    def _config(self, dim: int, params: VectorParams, *, encoding: bool) -> Any:
        from tq_offload.kernels.simd.config import KernelConfig, host_lanes, least_wide_dim

        lanes = (self._lanes or host_lanes()) if dim >= least_wide_dim(params.bits, encoding=encoding) else 8
        lsq = encoding and params.rule == "lsq"
        return KernelConfig(dim, params.bits, params.dtype != "bfloat16", lsq, self._permute, lanes)


@lru_cache(maxsize=64)
def _signs(seed: int, dim: int) -> Array:
    """Signs of all stages, f32 [8, D and zeros up to a multiple of eight]."""
    table = np.zeros((2 * rotation.SKETCH_STAGE, -(-dim // 8) * 8), np.float32)
    for stage, row in enumerate(table):
        row[:dim] = rotation.signs(seed, stage, dim)
    return table


@lru_cache(maxsize=64)
def _sign_bits(seed: int, dim: int, lanes: int) -> Array:
    """Sign bits of stage 0 as u32 [D], paired (see `SimdTables`)."""
    bits = rotation.signs(seed, 0, dim).view(np.uint32) & np.uint32(0x80000000)
    return np.ascontiguousarray(bits.reshape(-1, lanes, 2).swapaxes(1, 2)).reshape(-1)


def _tables(params: VectorParams, dim: int) -> tuple[Any, list[Array]]:
    """Addresses for the generic loops, and the arrays that must be kept alive meanwhile."""
    from tq_offload.kernels.simd.cells import cells
    from tq_offload.kernels.stream_loops import Tables

    table = cells(params.bits)
    held = [_signs(params.seed, dim), codebook.levels(params.bits), table.inside, table.base]
    signs, levels, inside, base = map(_address, held)
    return Tables(signs, levels, inside, base, len(table.base), np.float32(table.density)), held


def _simd_tables(params: VectorParams, config: Any, *, encoding: bool) -> tuple[Any, list[Array]]:
    """The same for the SIMD kernels."""
    from tq_offload.kernels.simd.cells import cells
    from tq_offload.kernels.simd.driver import SimdTables

    table, levels = cells(params.bits), codebook.levels(params.bits)
    positive = levels[1 << (params.bits - 1) :]
    held = [
        _sign_bits(params.seed, config.dim, config.lanes),
        table.inside,
        table.base,
        positive if encoding else levels,
    ]
    return SimdTables(*map(_address, held)), held


def _address(array: Array | None) -> int:
    """Address of the first element; 0 for None."""
    return 0 if array is None else int(array.__array_interface__["data"][0])


def _grid(flat: Array, stream: Stream) -> Any:
    from tq_offload.kernels.grid_loops import Grid

    size = flat.itemsize
    return Grid(
        _address(flat) + stream.offset * size,
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
        _address(means),
        _address(sections.scales),
        _address(sections.codes),
        _address(only),
        np.float32(alpha),
        np.float32(beta),
        params.outliers,
        _address(sections.outlier_channels),
        _address(sections.outlier_ranges),
        _address(sections.outlier_codes),
    )


def _sketch(params: VectorParams, sections: Sections) -> Any:
    from tq_offload.kernels.stream_loops import Sketch

    return Sketch(_address(sections.sketch_scales), _address(sections.sketch)) if params.qjl else None


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


def _written_as(params: VectorParams) -> Any:
    """The format that decoded vectors are converted to apart; None: the kernel writes bfloat16 and float32 itself."""
    from tq_offload.kernels.simd.config import FORMATS

    return None if params.dtype in ("bfloat16", "float32") else FORMATS[params.dtype]


def _kind(params: VectorParams) -> tuple[str, int, int, int]:
    return params.dtype, params.bits, params.seed, params.outliers


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
