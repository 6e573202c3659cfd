"""Steps of the Walsh-Hadamard transform on f32 in memory, in natural order (docs/wire-format.md, section 3).

A transform is two kinds of passes: runs of 64 elements in registers, then butterflies of whole registers at strides of
64 and more, of two, four or eight registers at a time. The size of the transform is chosen at run time.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from tq_offload.kernels.simd.config import KernelConfig
from tq_offload.kernels.simd.step import ADDRESS, step
from tq_offload.kernels.simd.vector import I64, Lanes

__all__ = [
    "RUN", "lanes_of", "radix2", "radix4", "radix8", "scaled_transform32", "scaled_transform64", "transform32",
    "transform64",
]  # fmt: skip

RUN = 64  # elements that are transformed in registers


@step(result=ADDRESS)
def lanes_of(_v: Lanes, settings: KernelConfig) -> Any:
    """Lanes of a register, a constant."""
    return I64(settings.lanes)


@step(ADDRESS)
def transform64(v: Lanes, _settings: KernelConfig, at: Any) -> None:
    """Transform of f32 [64] in place, without a norm."""
    _store(v, _transformed(v, _load(v, at, 64)), at)


@step(ADDRESS)
def transform32(v: Lanes, _settings: KernelConfig, at: Any) -> None:
    """Of f32 [32]."""
    _store(v, _transformed(v, _load(v, at, 32)), at)


@step(ADDRESS, ADDRESS)
def scaled_transform64(v: Lanes, _settings: KernelConfig, at: Any, factors: Any) -> None:
    """Transform of the products with f32 [64] at `factors`."""
    _store(v, _transformed(v, _products(v, at, factors, 64)), at)


@step(ADDRESS, ADDRESS)
def scaled_transform32(v: Lanes, _settings: KernelConfig, at: Any, factors: Any) -> None:
    """With f32 [32]."""
    _store(v, _transformed(v, _products(v, at, factors, 32)), at)


@step(ADDRESS, ADDRESS)
def radix2(v: Lanes, _settings: KernelConfig, at: Any, stride: Any) -> None:
    """Butterflies of two registers in place, `stride` bytes from one to the next."""
    _strided(v, at, stride, 2)


@step(ADDRESS, ADDRESS)
def radix4(v: Lanes, _settings: KernelConfig, at: Any, stride: Any) -> None:
    """Of four."""
    _strided(v, at, stride, 4)


@step(ADDRESS, ADDRESS)
def radix8(v: Lanes, _settings: KernelConfig, at: Any, stride: Any) -> None:
    """Of eight."""
    _strided(v, at, stride, 8)


def _strided(v: Lanes, at: Any, stride: Any, count: int) -> None:
    places = [v.b.add(at, v.b.mul(stride, ir.Constant(I64, k))) for k in range(count)]
    for place, x in zip(places, _across(v, [v.load(place, 0, v.fv) for place in places]), strict=True):
        v.store(x, place, 0)


def _load(v: Lanes, at: Any, count: int) -> list[Any]:
    return [v.load(at, 4 * first, v.fv) for first in range(0, count, v.lanes)]


def _store(v: Lanes, regs: list[Any], at: Any) -> None:
    for k, x in enumerate(regs):
        v.store(x, at, 4 * v.lanes * k)


def _products(v: Lanes, at: Any, factors: Any, count: int) -> list[Any]:
    return [v.b.fmul(a, b) for a, b in zip(_load(v, at, count), _load(v, factors, count), strict=True)]


def _transformed(v: Lanes, regs: list[Any]) -> list[Any]:
    stride = 1
    while stride < v.lanes:
        regs = [_within(v, x, stride) for x in regs]
        stride *= 2
    return _across(v, regs)


def _within(v: Lanes, x: Any, stride: int) -> Any:
    """(a[i], a[i + stride]) = (sum, difference) of lanes."""
    partner = v.shuffle(x, x, [lane ^ stride for lane in range(v.lanes)])
    return v.add_flipped(partner, x, [lane & stride != 0 for lane in range(v.lanes)])


def _across(v: Lanes, regs: list[Any]) -> list[Any]:
    """Butterflies of whole registers, a power of two of them."""
    stride = 1
    while stride < len(regs):
        for i in range(len(regs)):
            if not i & stride:
                a, b = regs[i], regs[i + stride]
                regs[i], regs[i + stride] = v.b.fadd(a, b), v.b.fsub(a, b)
        stride *= 2
    return regs
