"""Which SIMD kernels a stream takes, and what they are given.

D a power of two: a vector in registers, compiled for every D (`register_encode`, `register_decode`). Other multiples of
eight: a vector as a row in memory, compiled once (`row_encode`, `row_decode`). A kernel of one kind is called as one of
the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tq_offload.kernels.base import Array, VectorParams
from tq_offload.kernels.numba_tables import register_tables, row_tables
from tq_offload.kernels.simd.config import FORMATS, KernelConfig, host_lanes, least_wide_dim
from tq_offload.kernels.simd.jit import Kernel
from tq_offload.kernels.simd.register_decode import simd_decode_jobs, simd_decode_stream
from tq_offload.kernels.simd.register_encode import simd_encode_stream
from tq_offload.kernels.simd.row_decode import row_decode_jobs, row_decode_stream
from tq_offload.kernels.simd.row_encode import row_encode_stream
from tq_offload.rotation import is_power_of_two

__all__ = ["SimdKernels", "simd_kernels"]


@dataclass(frozen=True)
class SimdKernels:
    """Kernels and their first and last arguments.

    `read_as` and `written_as`: the format that elements are converted from or to apart; None: the kernel reads, or
    writes, them itself. `held`: what the addresses in the tables point to.
    """

    encode: Kernel
    decode: Kernel
    decode_jobs: Kernel
    config: KernelConfig
    tables: Any
    held: list[Array]
    read_as: Any
    written_as: Any


def simd_kernels(dim: int, params: VectorParams, *, encoding: bool, permute: bool, lanes: int | None) -> SimdKernels:
    """The kernels for vectors of D elements.

    Args:
        dim: D, one of `cpu_numba.SIMD_DIMS` or `cpu_numba.ROW_DIMS`.
        params: How they are coded.
        encoding: Whether the tables are those of an encoder.
        permute: See `KernelConfig`.
        lanes: 8 or 16; None: as the CPU has them. Dims that 16 do not suit get 8.
    """
    fmt = FORMATS[params.dtype]
    staged, lsq = params.dtype != "bfloat16", encoding and params.rule == "lsq"
    wide = lanes or host_lanes()
    read_as, written_as = fmt if staged else None, None if params.dtype in ("bfloat16", "float32") else fmt
    if is_power_of_two(dim):
        lanes = wide if dim >= least_wide_dim(params.bits, encoding=encoding) else 8
        config = KernelConfig(dim, params.bits, staged, lsq, permute, lanes)
        tables, held = register_tables(params, config, encoding=encoding)
        entries = simd_encode_stream, simd_decode_stream, simd_decode_jobs
    else:
        config = KernelConfig(0, params.bits, staged, lsq, permute, wide if dim % 16 == 0 else 8)
        tables, held = row_tables(params, dim, encoding=encoding)
        entries = row_encode_stream, row_decode_stream, row_decode_jobs
    return SimdKernels(*entries, config, tables, held, read_as, written_as)
