"""Steps on one register of a row: f32 [D] in memory in natural order, D chosen at run time.

What docs/wire-format.md, sections 3 to 6, has beside butterflies; quantisation is in `code_steps`. Steps that read
or write past the last element of a row need room there.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from tq_offload.kernels.simd.config import Format, KernelConfig
from tq_offload.kernels.simd.elements import rounded
from tq_offload.kernels.simd.step import ADDRESS, FACTOR, step
from tq_offload.kernels.simd.vector import I16, I64, Lanes

__all__ = [
    "accumulate", "clear", "finish", "finish2", "fold2", "fold4", "itemsize_of", "largest", "merge_halves",
    "multiply", "scale_top", "split", "squares", "take", "two_sums",
]  # fmt: skip


def load_elements(v: Lanes, fmt: Format, at: Any) -> Any:
    """A register of bfloat16 or float32 elements, exactly, as f32."""
    if fmt.itemsize == 4:
        return v.load(at, 0, v.fv)
    bits = v.b.zext(v.load(at, 0, ir.VectorType(I16, v.lanes)), v.iv)
    return v.as_float(v.b.shl(bits, v.i(16)))


def store_elements(v: Lanes, fmt: Format, regs: list[Any], at: Any) -> None:
    """Round one or two registers of f32 to nearest even and store them, without a clamp."""
    if fmt.itemsize == 4:
        for k, x in enumerate(regs):
            v.store(x, at, 4 * v.lanes * k)
        return
    bits = [rounded(v, v.as_int(x), 16) for x in regs]
    low = v.b.lshr(bits[0], v.i(16))
    if len(regs) == 1:
        v.store(v.b.trunc(low, ir.VectorType(I16, v.lanes)), at, 0)
        return
    pairs = v.b.bitcast(v.b.or_(low, v.b.and_(bits[1], v.i(0xFFFF0000))), ir.VectorType(I16, 2 * v.lanes))
    v.store(v.shuffle(pairs, pairs, [*range(0, 2 * v.lanes, 2), *range(1, 2 * v.lanes, 2)]), at, 0)


@step(result=ADDRESS)
def itemsize_of(_v: Lanes, settings: KernelConfig) -> Any:
    """Bytes of an element, a constant."""
    return I64(settings.format.itemsize)


@step(ADDRESS, ADDRESS)
def accumulate(v: Lanes, settings: KernelConfig, source: Any, sums: Any) -> None:
    """sums += elements at `source`."""
    v.store(v.b.fadd(v.load(sums, 0, v.fv), load_elements(v, settings.format, source)), sums, 0)


@step(ADDRESS, ADDRESS, ADDRESS, ADDRESS)
def squares(v: Lanes, settings: KernelConfig, source: Any, mean: Any, plain: Any, shifted: Any) -> None:
    """plain = x*x and shifted = (x - mean)**2 of the elements at `source`."""
    x = load_elements(v, settings.format, source)
    w = v.b.fsub(x, v.load(mean, 0, v.fv))
    v.store(v.b.fmul(x, x), plain, 0)
    v.store(v.b.fmul(w, w), shifted, 0)


@step(ADDRESS, ADDRESS, ADDRESS, ADDRESS)
def take(v: Lanes, settings: KernelConfig, source: Any, mean: Any, factors: Any, out: Any) -> None:
    """out = (x - mean) * factors of the elements at `source`."""
    w = v.b.fsub(load_elements(v, settings.format, source), v.load(mean, 0, v.fv))
    v.store(v.b.fmul(w, v.load(factors, 0, v.fv)), out, 0)


@step(ADDRESS, ADDRESS, FACTOR, ADDRESS, ADDRESS)
def finish(v: Lanes, settings: KernelConfig, y: Any, factors: Any, gain: Any, mean: Any, out: Any) -> None:
    """Elements at `out` = (y * factors) * gain + mean."""
    store_elements(v, settings.format, _decoded(v, y, factors, gain, mean, 1), out)


@step(ADDRESS, ADDRESS, FACTOR, ADDRESS, ADDRESS)
def finish2(v: Lanes, settings: KernelConfig, y: Any, factors: Any, gain: Any, mean: Any, out: Any) -> None:
    """The same of two registers' worth."""
    store_elements(v, settings.format, _decoded(v, y, factors, gain, mean, 2), out)


def _decoded(v: Lanes, y: Any, factors: Any, gain: Any, mean: Any, count: int) -> list[Any]:
    regs, gains = [], v.broadcast(gain)
    for at in range(0, 4 * v.lanes * count, 4 * v.lanes):
        x = v.b.fmul(v.b.fmul(v.load(y, at, v.fv), v.load(factors, at, v.fv)), gains)
        regs.append(v.b.fadd(x, v.load(mean, at, v.fv)))
    return regs


@step(ADDRESS, ADDRESS)
def multiply(v: Lanes, _settings: KernelConfig, at: Any, factors: Any) -> None:
    """Row *= factors."""
    v.store(v.b.fmul(v.load(at, 0, v.fv), v.load(factors, 0, v.fv)), at, 0)


@step(ADDRESS, ADDRESS, ADDRESS, ADDRESS)
def split(v: Lanes, _settings: KernelConfig, at: Any, factors: Any, even: Any, odd: Any) -> None:
    """Two registers' worth of products: the even ones to `even`, then the odd ones to `odd`."""
    first, second = (v.b.fmul(v.load(at, k, v.fv), v.load(factors, k, v.fv)) for k in (0, 4 * v.lanes))
    v.store(v.shuffle(first, second, range(0, 2 * v.lanes, 2)), even, 0)
    v.store(v.shuffle(first, second, range(1, 2 * v.lanes, 2)), odd, 0)


@step(ADDRESS, ADDRESS, ADDRESS, ADDRESS, ADDRESS)
def merge_halves(
    v: Lanes, _settings: KernelConfig, even: Any, even_factors: Any, odd: Any, odd_factors: Any, out: Any
) -> None:
    """Two registers' worth of products, by turns of a register at `even` and of one at `odd`."""
    a = v.b.fmul(v.load(even, 0, v.fv), v.load(even_factors, 0, v.fv))
    b = v.b.fmul(v.load(odd, 0, v.fv), v.load(odd_factors, 0, v.fv))
    turns = [i // 2 + (i & 1) * v.lanes for i in range(2 * v.lanes)]
    v.store(v.shuffle(a, b, turns[: v.lanes]), out, 0)
    v.store(v.shuffle(a, b, turns[v.lanes :]), out, 4 * v.lanes)


@step(ADDRESS, ADDRESS, ADDRESS)
def scale_top(v: Lanes, _settings: KernelConfig, at: Any, factors: Any, tops: Any) -> None:
    """Row *= factors; tops = the larger of itself and |row|, lane by lane."""
    y = v.b.fmul(v.load(at, 0, v.fv), v.load(factors, 0, v.fv))
    v.store(y, at, 0)
    v.store(v.larger_magnitude(v.load(tops, 0, v.fv), y), tops, 0)


@step(ADDRESS)
def clear(v: Lanes, _settings: KernelConfig, at: Any) -> None:
    """A register of zeros."""
    v.store(v.f(0.0), at, 0)


@step(ADDRESS, result=FACTOR)
def largest(v: Lanes, _settings: KernelConfig, tops: Any) -> Any:
    """The largest of 64 elements."""
    regs = [v.load(tops, 4 * i, v.fv) for i in range(0, 64, v.lanes)]
    while len(regs) > 1:
        regs = [v.maximum(a, b) for a, b in zip(regs[0::2], regs[1::2], strict=True)]
    return v.horizontal_maximum(regs[0])


@step(ADDRESS, ADDRESS)
def fold2(v: Lanes, _settings: KernelConfig, a: Any, stride: Any) -> None:
    """One step of `hsum`: the sum of two registers, `stride` bytes from one to the next, in place of the first."""
    v.store(v.b.fadd(v.load(a, 0, v.fv), v.load(v.b.add(a, stride), 0, v.fv)), a, 0)


@step(ADDRESS, ADDRESS)
def fold4(v: Lanes, _settings: KernelConfig, a: Any, stride: Any) -> None:
    """Two steps of `hsum`: four registers."""
    regs = [v.load(v.b.add(a, v.b.mul(stride, stride.type(k))), 0, v.fv) for k in range(4)]
    v.store(v.b.fadd(v.b.fadd(regs[0], regs[2]), v.b.fadd(regs[1], regs[3])), a, 0)


@step(ADDRESS, ADDRESS, ADDRESS)
def two_sums(v: Lanes, _settings: KernelConfig, a: Any, b: Any, out: Any) -> None:
    """The last steps of `hsum`, of a register at `a` and one at `b`: f32 [2] at `out`."""
    for k, total in enumerate(v.horizontal_sums(v.load(a, 0, v.fv), v.load(b, 0, v.fv))):
        v.store(total, out, 4 * k)
