"""Intrinsics of the loops: memory by address at any alignment, bit casts, and steps of sums and of the transform.

Addresses instead of arrays: alignment and read-only flags then make no further compiled versions, and numba has far
less to compile. `cpu_numba` checks the sizes of all buffers before it hands out an address.
"""

from __future__ import annotations

from typing import Any

from numba.core import types
from numba.extending import intrinsic

from tq_offload.kernels.simd.vector import F32, FV, I8, I16, I32, I64, Lanes

__all__ = [
    "CACHE_LINE", "add8", "bits_of", "butterfly8", "butterfly_lanes", "f32_of", "get", "get_i32", "get_i64", "get_u8",
    "get_u16", "get_u32", "mul8", "paired_index", "prefetch", "put", "put_i64", "put_u8", "put_u16", "put_u32",
    "scale8", "sub8", "top8",
]  # fmt: skip


CACHE_LINE = 64


def _element(builder: Any, address: Any, index: Any, size: int) -> Any:
    return builder.add(address, builder.mul(index, I64(size)))


def _getter(llvm_type: Any, numba_type: Any, size: int) -> Any:
    """(address, i) -> item i of an array at the address."""

    def typing(_context: Any, _address: Any, _index: Any) -> Any:
        def codegen(context: Any, builder: Any, _sig: Any, args: Any) -> Any:
            return Lanes(context, builder, permute=False).load(_element(builder, args[0], args[1], size), 0, llvm_type)

        return numba_type(types.int64, types.int64), codegen

    return intrinsic(typing)


def _putter(numba_type: Any, size: int) -> Any:
    """(address, i, value): set item i of an array at the address."""

    def typing(_context: Any, _address: Any, _index: Any, _value: Any) -> Any:
        def codegen(context: Any, builder: Any, _sig: Any, args: Any) -> Any:
            at = _element(builder, args[0], args[1], size)
            Lanes(context, builder, permute=False).store(args[2], at, 0)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, numba_type), codegen

    return intrinsic(typing)


get, put = _getter(F32, types.float32, 4), _putter(types.float32, 4)
get_u8, put_u8 = _getter(I8, types.uint8, 1), _putter(types.uint8, 1)
get_u16, put_u16 = _getter(I16, types.uint16, 2), _putter(types.uint16, 2)
get_i32 = _getter(I32, types.int32, 4)
get_i64, put_i64 = _getter(I64, types.int64, 8), _putter(types.int64, 8)
get_u32, put_u32 = _getter(I32, types.uint32, 4), _putter(types.uint32, 4)


@intrinsic
def paired_index(_context: Any, config: Any, _index: Any) -> Any:
    """(config, i): where element i sits when of every two registers' worth the even ones come first."""
    lanes = config.config.lanes

    def codegen(_context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        block = builder.and_(args[1], I64(-2 * lanes))
        odd = builder.mul(builder.and_(args[1], I64(1)), I64(lanes))
        within = builder.lshr(builder.and_(args[1], I64(2 * lanes - 1)), I64(1))
        return builder.or_(block, builder.or_(odd, within))

    return types.int64(config, types.int64), codegen


@intrinsic
def prefetch(_context: Any, config: Any, _address: Any) -> Any:
    """(config, address): ask for the bfloat16 vector there; the address may lie outside every buffer.

    The CPU itself stops looking ahead at the end of a page, and a token's vectors of one side may fill half a page.
    """

    def codegen(context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        v = Lanes(context, builder, permute=False)
        for at in range(0, 0 if config.config.staged else 2 * config.config.dim, CACHE_LINE):
            v.prefetch(args[1], at)
        return context.get_dummy_value()

    return types.void(config, types.int64), codegen


@intrinsic
def f32_of(_context: Any, _bits: Any) -> Any:
    """F32 of its bits, u32."""

    def codegen(_context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        return builder.bitcast(args[0], F32)

    return types.float32(types.uint32), codegen


@intrinsic
def bits_of(_context: Any, _value: Any) -> Any:
    """Bits of an f32, as u32."""

    def codegen(_context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        return builder.bitcast(args[0], I32)

    return types.uint32(types.float32), codegen


@intrinsic
def butterfly_lanes(_context: Any, _address: Any) -> Any:
    """Strides 1, 2 and 4 of the transform on eight f32 at an address, in place."""

    def codegen(context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        v = Lanes(context, builder, permute=False)
        x = v.load(args[0], 0, FV)
        for h in (1, 2, 4):
            partner = v.shuffle(x, x, [i ^ h for i in range(8)])
            negated = v.as_float(builder.xor(v.as_int(x), v.i([-(2**31) if i & h else 0 for i in range(8)])))
            x = builder.fadd(partner, negated)
        v.store(x, args[0], 0)
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def butterfly8(_context: Any, _first: Any, _second: Any) -> Any:
    """(a, b) = (a + b, a - b) on eight f32 at each of two addresses, in place."""

    def codegen(context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        v = Lanes(context, builder, permute=False)
        a, b = v.load(args[0], 0, FV), v.load(args[1], 0, FV)
        v.store(builder.fadd(a, b), args[0], 0)
        v.store(builder.fsub(a, b), args[1], 0)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


def _combine(operation: str) -> Any:
    """(out, a, b): out = a <operation> b on eight f32 at each of three addresses."""

    def typing(_context: Any, _out: Any, _a: Any, _b: Any) -> Any:
        def codegen(context: Any, builder: Any, _sig: Any, args: Any) -> Any:
            v = Lanes(context, builder, permute=False)
            v.store(getattr(builder, operation)(v.load(args[1], 0, FV), v.load(args[2], 0, FV)), args[0], 0)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.int64), codegen

    return intrinsic(typing)


add8, sub8, mul8 = _combine("fadd"), _combine("fsub"), _combine("fmul")


@intrinsic
def scale8(_context: Any, _out: Any, _a: Any, _factor: Any) -> Any:
    """(out, a, factor): out = a * factor on eight f32."""

    def codegen(context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        v = Lanes(context, builder, permute=False)
        v.store(builder.fmul(v.load(args[1], 0, FV), v.broadcast(args[2])), args[0], 0)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32), codegen


@intrinsic
def top8(_context: Any, _a: Any) -> Any:
    """Largest magnitude of eight f32 at an address."""

    def codegen(context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        v = Lanes(context, builder, permute=False)
        return v.horizontal_maximum(v.absolute(v.load(args[0], 0, FV)))

    return types.float32(types.int64), codegen
