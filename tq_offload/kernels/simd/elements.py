"""Two registers' worth of elements of a coded dtype to f32 (even elements, odd elements) and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from tq_offload.kernels.simd.config import FORMATS, Format
from tq_offload.kernels.simd.vector import FV, I8, I16, I64, IV, LANES, Lanes

__all__ = ["load_pair", "narrow16", "rounded", "store_pair", "widen16"]

_BYTES16, _SHORTS16 = ir.VectorType(I8, 16), ir.VectorType(I16, 16)
_EVEN, _ODD = list(range(0, 16, 2)), list(range(1, 16, 2))
_INTERLEAVED = [i // 2 + (i & 1) * LANES for i in range(16)]


def load_pair(v: Lanes, fmt: Format, address: Any, first: int) -> tuple[Any, Any]:
    """Elements from `first` on of the vector at an address, exactly, as f32; NaN and Inf as something not finite."""
    if fmt.itemsize == 4:
        a, b = v.load(address, 4 * first, v.fv), v.load(address, 4 * (first + v.lanes), v.fv)
        return v.shuffle(a, b, range(0, 2 * v.lanes, 2)), v.shuffle(a, b, range(1, 2 * v.lanes, 2))
    if fmt.itemsize == 2:
        pairs = v.load(address, 2 * first, v.iv)
    else:
        pairs = v.b.bitcast(v.b.zext(v.load(address, first, _BYTES16), _SHORTS16), IV)
    if fmt.shift == 16:  # bfloat16
        return v.as_float(v.b.shl(pairs, v.i(16))), v.as_float(v.b.and_(pairs, v.i(0xFFFF0000)))
    return _widen(v, fmt, v.b.and_(pairs, v.i(0xFFFF))), _widen(v, fmt, v.b.lshr(pairs, v.i(16)))


def _widen(v: Lanes, fmt: Format, bits: Any) -> Any:
    """float16 or float8 bits in i32 lanes to f32."""
    sign_bit = 1 << (8 * fmt.itemsize - 1)
    magnitude = v.b.and_(bits, v.i(sign_bit - 1))
    value = v.as_int(v.b.fmul(v.as_float(v.b.shl(magnitude, v.i(fmt.shift))), v.f(float(fmt.rescale))))
    value = v.b.select(v.b.icmp_unsigned(">=", magnitude, v.i(fmt.limit)), v.i(0x7FC00000), value)
    sign = v.b.shl(v.b.and_(bits, v.i(sign_bit)), v.i(32 - 8 * fmt.itemsize))
    return v.as_float(v.b.or_(value, sign))


def store_pair(v: Lanes, fmt: Format, address: Any, first: int, even: Any, odd: Any) -> None:
    """Round to nearest even and store the elements from `first` on.

    float16 and float8 are clamped to their finite range. bfloat16 and float32 are not: see `narrow16`.
    """
    if fmt.itemsize == 4:
        interleaved = [i // 2 + (i & 1) * v.lanes for i in range(2 * v.lanes)]
        v.store(v.shuffle(even, odd, interleaved[: v.lanes]), address, 4 * first)
        v.store(v.shuffle(even, odd, interleaved[v.lanes :]), address, 4 * (first + v.lanes))
        return
    if fmt.shift == 16:
        low = v.b.lshr(rounded(v, v.as_int(even), 16), v.i(16))
        high = v.b.and_(rounded(v, v.as_int(odd), 16), v.i(0xFFFF0000))
    else:
        low, high = _narrow(v, fmt, even), v.b.shl(_narrow(v, fmt, odd), v.i(16))
    pairs = v.b.or_(low, high)
    if fmt.itemsize == 2:
        v.store(pairs, address, 2 * first)
    else:
        v.store(v.b.trunc(v.b.bitcast(pairs, _SHORTS16), _BYTES16), address, first)


def rounded(v: Lanes, bits: Any, shift: int) -> Any:
    """Add what makes a later shift right by `shift` round to nearest even."""
    half = 1 << (shift - 1)
    odd = v.b.icmp_unsigned("!=", v.b.and_(bits, v.i(1 << shift)), v.i(0))
    return v.b.add(bits, v.b.select(odd, v.i(half), v.i(half - 1)))


def _narrow(v: Lanes, fmt: Format, x: Any) -> Any:
    """f32 to float16 or float8 bits in i32 lanes."""
    bits = v.as_int(x)
    sign = v.b.lshr(v.b.and_(bits, v.i(0x80000000)), v.i(32 - 8 * fmt.itemsize))
    x = v.as_float(v.b.and_(bits, v.i(0x7FFFFFFF)))
    x = v.b.select(v.b.fcmp_ordered("<", x, v.f(float(fmt.top))), x, v.f(float(fmt.top)))
    scaled = v.as_int(v.b.fmul(x, v.f(float(1 / fmt.rescale))))
    normal = v.b.lshr(rounded(v, scaled, fmt.shift), v.i(fmt.shift))
    rounder = v.f(float(fmt.rounder))
    subnormal = v.b.sub(v.as_int(v.b.fadd(x, rounder)), v.as_int(rounder))
    is_small = v.b.fcmp_ordered("<", x, v.f(float(fmt.min_normal)))
    return v.b.or_(v.b.select(is_small, subnormal, normal), sign)


def _by_kind(builder: Any, kind: Any, emit: Callable[[Format], None]) -> None:
    """Emit code for every format, and a switch on its number."""
    end = builder.append_basic_block("formats.end")
    cases = [(fmt, builder.append_basic_block(f"format.{name}")) for name, fmt in FORMATS.items()]
    switch = builder.switch(kind, cases[0][1])
    for fmt, block in cases:
        if fmt.kind:
            switch.add_case(ir.Constant(I64, fmt.kind), block)
        builder.position_at_end(block)
        emit(fmt)
        builder.branch(end)
    builder.position_at_end(end)


@intrinsic
def widen16(_context: Any, _source: Any, _kind: Any, _out: Any) -> Any:
    """(source, `Format.kind`, out): sixteen elements to f32; NaN and Inf to something not finite."""

    def codegen(context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        v = Lanes(context, builder, permute=False)

        def emit(fmt: Format) -> None:
            even, odd = load_pair(v, fmt, args[0], 0)
            v.store(v.shuffle(even, odd, _INTERLEAVED[:8]), args[2], 0)
            v.store(v.shuffle(even, odd, _INTERLEAVED[8:]), args[2], 32)

        _by_kind(builder, args[1], emit)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic
def narrow16(_context: Any, _values: Any, _kind: Any, _out: Any) -> Any:
    """(values, `Format.kind`, out): sixteen f32 clamped, rounded and stored."""

    def codegen(context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        v = Lanes(context, builder, permute=False)

        def emit(fmt: Format) -> None:
            a, b = (v.clamp(v.load(args[0], at, FV), float(fmt.top)) for at in (0, 32))
            store_pair(v, fmt, args[2], 0, v.shuffle(a, b, _EVEN), v.shuffle(a, b, _ODD))

        _by_kind(builder, args[1], emit)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen
