"""Tables that the compiled CPU kernels are given by address: signs of the rotation, levels, cells of the quantiser.

Every function returns the addresses and the arrays behind them, which must be kept alive meanwhile.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np

from tq_offload import codebook, rotation
from tq_offload.kernels.base import Array, VectorParams

__all__ = ["address_of_array", "loop_tables", "register_tables", "row_tables"]


def address_of_array(array: Array | None) -> int:
    """Address of the first element; 0 for None."""
    return 0 if array is None else int(array.__array_interface__["data"][0])


def loop_tables(params: VectorParams, dim: int) -> tuple[Any, list[Array]]:
    """`Tables` for the generic loops."""
    from tq_offload.kernels.simd.cells import cells
    from tq_offload.kernels.stream_loops import Tables

    table = cells(params.bits)
    held = [_signs(params.seed, dim), codebook.levels(params.bits), table.inside, table.base]
    signs, levels, inside, base = map(address_of_array, held)
    return Tables(signs, levels, inside, base, len(table.base), np.float32(table.density)), held


def register_tables(params: VectorParams, config: Any, *, encoding: bool) -> tuple[Any, list[Array]]:
    """`SimdTables` for the SIMD kernels of D a power of two."""
    from tq_offload.kernels.simd.register_decode import SimdTables

    held = [_sign_bits(params.seed, config.dim, config.lanes), *_code_tables(params.bits, encoding)]
    return SimdTables(*map(address_of_array, held)), held


def row_tables(params: VectorParams, dim: int, *, encoding: bool) -> tuple[Any, list[Array]]:
    """`RowTables` for the SIMD kernels of other D."""
    from tq_offload.kernels.simd.row_decode import RowTables

    held = [_factors(params.seed, dim, encoding), *_code_tables(params.bits, encoding)]
    return RowTables(*map(address_of_array, held)), held


def _code_tables(bits: int, encoding: bool) -> list[Array]:
    from tq_offload.kernels.simd.cells import cells

    levels = codebook.levels(bits)
    return [cells(bits).inside, cells(bits).base, levels[1 << (bits - 1) :] if encoding else levels]


@lru_cache(maxsize=64)
def _signs(seed: int, dim: int) -> Array:
    """Signs of all stages, f32 [8, D and zeros up to a multiple of eight]."""
    table = np.zeros((2 * rotation.SKETCH_STAGE, -(-dim // 8) * 8), np.float32)
    for stage, row in enumerate(table):
        row[:dim] = rotation.signs(seed, stage, dim)
    return table


@lru_cache(maxsize=64)
def _sign_bits(seed: int, dim: int, lanes: int) -> Array:
    """Sign bits of stage 0 as u32 [D], paired (see `SimdTables`), aligned to cache lines."""
    bits = rotation.signs(seed, 0, dim).view(np.uint32) & np.uint32(0x80000000)
    paired = np.ascontiguousarray(bits.reshape(-1, lanes, 2).swapaxes(1, 2)).reshape(-1)
    return _cache_lines([paired.view(np.float32)], dim).view(np.uint32)


@lru_cache(maxsize=64)
def _factors(seed: int, dim: int, encoding: bool) -> Array:
    """f32 [5 or 4, row_room(D)], aligned to cache lines: see `RowTables`.

    Signs s of the stages, and the norms of the low and of the high block, 1 outside of them, in the order of their use.
    """
    block = rotation.block_size(dim)
    low, high = (np.ones(dim, np.float32) for _ in range(2))
    low[:block] = high[dim - block :] = np.float32(1.0 / math.sqrt(block))
    s = [rotation.signs(seed, stage, dim) for stage in range(4)]
    if encoding:
        unshuffled = np.empty_like(s[2])  # these are taken before the shuffle of the elements
        unshuffled[0::2], unshuffled[1::2] = np.split(s[2], [(dim + 1) // 2])
        rows = [s[0], low * s[1], high * unshuffled, low * s[3], high]
    else:
        rows = [high * s[3], low * s[2], high * s[1], low * s[0]]
    return _cache_lines(rows, (dim + 31) // 16 * 16)


def _cache_lines(rows: list[Array], length: int) -> Array:
    """f32 [rows, length] from the start of a cache line on, zeros after the elements; length a multiple of 16."""
    space = np.zeros(len(rows) * length + 16, np.float32)
    start = -address_of_array(space) // space.itemsize % 16
    table = space[start : start + len(rows) * length].reshape(len(rows), length)
    for place, row in zip(table, rows, strict=True):
        place[: len(row)] = row
    return table
