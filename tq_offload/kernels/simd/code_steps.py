"""Steps between codes and a row, f32 [D] in memory in natural order, D a multiple of the lanes chosen at run time."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from tq_offload.kernels.simd.config import KernelConfig
from tq_offload.kernels.simd.decode import level_of
from tq_offload.kernels.simd.encode import pack_codes, quantised
from tq_offload.kernels.simd.step import ADDRESS, FACTOR, step
from tq_offload.kernels.simd.vector import I8, Lanes

__all__ = ["expand", "expand_last", "quantise", "quantise32"]


@step(ADDRESS, ADDRESS, ADDRESS)
def expand(v: Lanes, settings: KernelConfig, codes: Any, levels: Any, out: Any) -> None:
    """Levels of a register's worth of codes; reads a power of two bytes, some of them of the next register's codes."""
    size = v.lanes * settings.bits // 8
    _expand(v, settings, v.load(codes, 0, ir.VectorType(I8, 1 << (size - 1).bit_length())), levels, out)


@step(ADDRESS, ADDRESS, ADDRESS)
def expand_last(v: Lanes, settings: KernelConfig, codes: Any, levels: Any, out: Any) -> None:
    """The same without reading more."""
    _expand(v, settings, v.load(codes, 0, ir.VectorType(I8, v.lanes * settings.bits // 8)), levels, out)


def _expand(v: Lanes, settings: KernelConfig, raw: Any, levels: Any, out: Any) -> None:
    bits, last = settings.bits, v.lanes * settings.bits // 8 - 1
    starts = [lane * bits // 8 for lane in range(v.lanes)]
    picked = [min(start + byte, last) for start in starts for byte in range(4)]
    word = v.b.bitcast(v.shuffle(raw, raw, picked), v.iv)
    word = v.b.lshr(word, v.i([lane * bits - 8 * start for lane, start in enumerate(starts)]))
    v.store(level_of(v, bits, word, 0, levels), out, 0)


@step(ADDRESS, FACTOR, ADDRESS, ADDRESS, ADDRESS, ADDRESS, ADDRESS, ADDRESS)
def quantise(
    v: Lanes, settings: KernelConfig, y: Any, inverse: Any, inside: Any, base: Any, levels: Any, codes: Any, tc: Any,
    cc: Any,
) -> None:  # fmt: skip
    """Codes of a register of t = y * inverse, packed to `codes`; t*c and c*c to rows, and t*t in place of y
    unless `config.lsq`. The tables are those of `SimdTables`.
    """
    _quantise(v, settings, 1, y, inverse, (inside, base, levels), codes, (tc, cc))


@step(ADDRESS, FACTOR, ADDRESS, ADDRESS, ADDRESS, ADDRESS, ADDRESS, ADDRESS)
def quantise32(
    v: Lanes, settings: KernelConfig, y: Any, inverse: Any, inside: Any, base: Any, levels: Any, codes: Any, tc: Any,
    cc: Any,
) -> None:  # fmt: skip
    """The same of 32 coordinates."""
    _quantise(v, settings, 32 // v.lanes, y, inverse, (inside, base, levels), codes, (tc, cc))


def _quantise(
    v: Lanes, settings: KernelConfig, count: int, y: Any, inverse: Any, tables: Any, out: Any, products: Any
) -> None:
    codes, inverses = [], v.broadcast(inverse)
    for at in range(0, 4 * v.lanes * count, 4 * v.lanes):
        t = v.b.fmul(v.load(y, at, v.fv), inverses)
        code, t, c = quantised(v, settings.bits, t, *tables)
        codes.append(code)
        v.store(v.b.fmul(t, c), products[0], at)
        v.store(v.b.fmul(c, c), products[1], at)
        if not settings.lsq:
            v.store(v.b.fmul(t, t), y, at)
    pack_codes(v, settings.bits, codes, out, 0)
