"""A thin builder of LLVM IR on registers of eight or sixteen 32-bit lanes.

Eight lanes are one AVX2 register, sixteen one of AVX-512; LLVM splits what a CPU has not. No fast-math flags are ever
set, so the order of operations written here is the order in which they are done, whatever the number of lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

__all__ = ["F32", "FV", "I1", "I8", "I16", "I32", "I64", "IV", "LANES", "Lanes", "gather", "halving_tree"]

LANES = 8
F32, I1, I8, I16, I32, I64 = (
    ir.FloatType(),
    ir.IntType(1),
    ir.IntType(8),
    ir.IntType(16),
    ir.IntType(32),
    ir.IntType(64),
)
_SMALLER_MAGNITUDE, _LARGER_MAGNITUDE = 0b0010, 0b1011  # of VRANGEPS: with the sign of a, and without one
FV, IV = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES)


def halving_tree(leaf: Callable[[int], list[Any]], add: Callable[[Any, Any], Any], n: int) -> list[Any]:
    """Sum of leaf(0..n-1) in the order of `hsum` (docs/wire-format.md, section 4), n a power of two.

    `leaf` returns several values that are summed apart. Depth first, so that only log2(n) partial sums are alive.
    """

    def total(i: int, step: int) -> list[Any]:
        if step == n:
            return leaf(i)
        return [add(a, b) for a, b in zip(total(i, 2 * step), total(i + step, 2 * step), strict=True)]

    return total(0, 1)


class Lanes:
    """Emits operations on eight lanes through an `ir.IRBuilder`.

    Args:
        context: numba's target context.
        builder: The builder; `self.b` for everything that needs no help.
        permute: Use the CPU's table permute where it has one.
        lanes: 8 or 16. `self.fv` and `self.iv` are the types of a register.
    """

    def __init__(self, context: Any, builder: Any, permute: bool, lanes: int = LANES) -> None:
        self.b, self.lanes = builder, lanes
        self.fv, self.iv = ir.VectorType(F32, lanes), ir.VectorType(I32, lanes)
        features = context.codegen().magic_tuple()[2].split(",")
        self._permute = permute and ("+avx2" if lanes == LANES else "+avx512f") in features
        self._fused = "+fma" in features
        self._has_range = lanes == 16 and "+avx512dq" in features

    def f(self, value: float | Sequence[float]) -> Any:
        """f32 constant in all lanes, or one constant for each lane."""
        values = [float(value)] * self.lanes if isinstance(value, (int, float)) else [float(v) for v in value]
        return ir.Constant(self.fv, [ir.Constant(F32, v) for v in values])

    def i(self, value: int | Sequence[int]) -> Any:
        """i32 constant in all lanes, or one constant for each lane."""
        values = [value] * self.lanes if isinstance(value, int) else list(value)
        return ir.Constant(self.iv, [ir.Constant(I32, v & 0xFFFFFFFF) for v in values])

    def as_int(self, x: Any) -> Any:
        """Bits of f32 lanes."""
        return self.b.bitcast(x, self.iv)

    def as_float(self, x: Any) -> Any:
        """f32 lanes of bits."""
        return self.b.bitcast(x, self.fv)

    def broadcast(self, scalar: Any) -> Any:
        """A scalar in all lanes."""
        vector = ir.VectorType(scalar.type, self.lanes)
        one = self.b.insert_element(ir.Constant(vector, ir.Undefined), scalar, ir.Constant(I32, 0))
        return self.shuffle(one, one, [0] * self.lanes)

    def pointer(self, address: Any, offset: int, typ: Any) -> Any:
        """Pointer to `typ` at `address + offset` bytes."""
        if not isinstance(address.type, ir.IntType):
            raise TypeError("addresses are integers")
        return self.b.inttoptr(self.b.add(address, ir.Constant(I64, offset)), typ.as_pointer())

    def load(self, address: Any, offset: int, typ: Any) -> Any:
        """Load from any alignment."""
        value = self.b.load(self.pointer(address, offset, typ))
        value.align = 1
        return value

    def store(self, value: Any, address: Any, offset: int) -> None:
        """Store to any alignment."""
        self.b.store(value, self.pointer(address, offset, value.type)).align = 1

    def prefetch(self, address: Any, offset: int) -> None:
        """Ask for a cache line to be in the second-level cache; the address may lie outside every buffer."""
        typ = I8.as_pointer()
        function = self._intrinsic("llvm.prefetch.p0", ir.VoidType(), [typ, I32, I32, I32])
        read, second_level, data = I32(0), I32(2), I32(1)
        self.b.call(function, [self.pointer(address, offset, I8), read, second_level, data])

    def shuffle(self, a: Any, b: Any, mask: Sequence[int]) -> Any:
        """`shufflevector`: lanes of a, then of b."""
        typ = ir.VectorType(I32, len(mask))
        return self.b.shuffle_vector(a, b, ir.Constant(typ, [ir.Constant(I32, i) for i in mask]))

    def fence(self, x: Any) -> Any:
        """x; keeps LLVM from making x86's slow horizontal adds of a shuffle and an addition."""
        return self.b.call(self._intrinsic(f"llvm.arithmetic.fence.v{self.lanes}f32", self.fv, [self.fv]), [x])

    def add_flipped(self, x: Any, y: Any, flips: Sequence[bool]) -> Any:
        """x + y, with the sign of y flipped in some lanes. A fused product by 1 or -1 rounds as the sum alone does."""
        if self._fused:
            fma = self._intrinsic(f"llvm.fma.v{self.lanes}f32", self.fv, [self.fv] * 3)
            return self.b.call(fma, [y, self.f([-1.0 if flip else 1.0 for flip in flips]), x])
        flipped = self.b.xor(self.as_int(y), self.i([0x80000000 if flip else 0 for flip in flips]))
        return self.b.fadd(x, self.as_float(flipped))

    def lane_mask(self, condition: Any) -> Any:
        """All bits set in the lanes where the condition holds."""
        return self.b.sext(condition, self.iv)

    def lookup8(self, table: Sequence[float], index: Any) -> Any:
        """table[index & 7] in every lane, f32; the table has eight entries."""
        if self._permute:
            return self._permuted(self.f(list(table) * (self.lanes // 8)), index)
        return self._select_tree([self.f(v) for v in table], index)

    def lookup16(self, table: Sequence[float], index: Any) -> Any:
        """table[index & 15] in every lane, f32; the table has sixteen entries."""
        if self._permute and self.lanes == 16:
            return self._permuted(self.f(table), index)
        upper = self.b.icmp_signed("<", self.b.shl(index, self.i(28)), self.i(0))
        return self.b.select(upper, self.lookup8(table[8:], index), self.lookup8(table[:8], index))

    def lookup8_int(self, table: Sequence[int], index: Any) -> Any:
        """table[index & 7] in every lane, i32."""
        if self._permute:
            floats = self.b.bitcast(self.i(list(table) * (self.lanes // 8)), self.fv)
            return self.as_int(self._permuted(floats, index))
        return self._select_tree([self.i(v) for v in table], index)

    @property
    def has_lookup32(self) -> bool:
        """Whether there is a permute of two registers, for `lookup32`."""
        return self._permute and self.lanes == 16

    def lookup32(self, table: Any, index: Any) -> Any:
        """table[index & 31] in every lane; the table is f32 or i32 [32]. Needs `has_lookup32`."""
        kind, make, typ = ("d", self.i, self.iv) if table.dtype.kind == "i" else ("ps", self.f, self.fv)
        low, high = make(table[:16].tolist()), make(table[16:].tolist())
        name = f"llvm.x86.avx512.vpermi2var.{kind}.512"
        return self.b.call(self._intrinsic(name, typ, [typ, self.iv, typ]), [low, index, high])

    def _permuted(self, table: Any, index: Any) -> Any:
        """Lane `index` of a register, modulo the number of lanes."""
        name = "llvm.x86.avx2.permps" if self.lanes == LANES else "llvm.x86.avx512.permvar.sf.512"
        return self.b.call(self._intrinsic(name, self.fv, [self.fv, self.iv]), [table, index])

    def _select_tree(self, entries: list[Any], index: Any) -> Any:
        for bit in range(3):
            chosen = self.b.icmp_unsigned("!=", self.b.and_(index, self.i(1 << bit)), self.i(0))
            entries = [
                low if low == high else self.b.select(chosen, high, low)
                for low, high in zip(entries[0::2], entries[1::2], strict=True)
            ]
        return entries[0]

    def _intrinsic(self, name: str, result: Any, args: list[Any]) -> Any:
        module = self.b.module
        return module.globals.get(name) or ir.Function(module, ir.FunctionType(result, args), name)

    def absolute(self, x: Any) -> Any:
        """|x|."""
        return self.as_float(self.b.and_(self.as_int(x), self.i(0x7FFFFFFF)))

    def square_root(self, x: Any) -> Any:
        """Correctly rounded square roots."""
        return self.b.call(self._intrinsic(f"llvm.sqrt.v{self.lanes}f32", self.fv, [self.fv]), [x])

    def maximum(self, a: Any, b: Any) -> Any:
        """The larger of two f32 in every lane."""
        return self.b.select(self.b.fcmp_ordered(">", a, b), a, b)

    def clamp(self, x: Any, limit: float) -> Any:
        """x between -limit and limit; of NaN anything."""
        if self._has_range:
            return self._range(x, self.f(limit), _SMALLER_MAGNITUDE)
        x = self.b.select(self.b.fcmp_ordered("<", x, self.f(limit)), x, self.f(limit))
        return self.b.select(self.b.fcmp_ordered(">", x, self.f(-limit)), x, self.f(-limit))

    def larger_magnitude(self, top: Any, x: Any) -> Any:
        """The larger of `top`, which is not negative, and |x| in every lane."""
        if self._has_range:
            return self._range(top, x, _LARGER_MAGNITUDE)
        return self.maximum(top, self.absolute(x))

    def _range(self, a: Any, b: Any, choice: int) -> Any:
        """The CPU's choice by magnitude, as one instruction."""
        every = ir.IntType(16)
        args = [self.fv, self.fv, I32, self.fv, every, I32]
        function = self._intrinsic("llvm.x86.avx512.mask.range.ps.512", self.fv, args)
        return self.b.call(function, [a, b, I32(choice), a, every(-1), I32(4)])

    def minimum_int(self, a: Any, limit: int) -> Any:
        """min(a, limit) of i32 lanes, unsigned."""
        return self.b.select(self.b.icmp_unsigned("<", a, self.i(limit)), a, self.i(limit))

    def horizontal_sums(self, a: Any, b: Any) -> tuple[Any, Any]:
        """Sums of the lanes of a and of b by halving, as scalars."""
        if self.lanes == 16:
            a, b = (self.b.fadd(self.shuffle(x, x, range(8)), self.shuffle(x, x, range(8, 16))) for x in (a, b))
        x = self.b.fadd(
            self.shuffle(a, b, [0, 1, 2, 3, 8, 9, 10, 11]), self.shuffle(a, b, [4, 5, 6, 7, 12, 13, 14, 15])
        )
        for step in (2, 1):
            x = self.b.fadd(x, self.shuffle(x, x, [(i + step) & 3 | i & 4 for i in range(8)]))
        return self.lane(x, 0), self.lane(x, 4)

    def horizontal_maximum(self, x: Any) -> Any:
        """The largest lane, as a scalar."""
        for step in (8, 4, 2, 1)[self.lanes == LANES :]:
            x = self.maximum(x, self.shuffle(x, x, [i ^ step for i in range(self.lanes)]))
        return self.lane(x, 0)

    def lane(self, x: Any, i: int) -> Any:
        """One lane as a scalar."""
        return self.b.extract_element(x, ir.Constant(I32, i))


def gather(v: Lanes, table: Any, index: Any) -> Any:
    """f32 table[index] in every lane, from memory."""
    pointers, mask = ir.VectorType(F32.as_pointer(), v.lanes), ir.VectorType(ir.IntType(1), v.lanes)
    at = v.b.gep(v.b.inttoptr(table, F32.as_pointer()), [index], source_etype=F32)
    at.type = pointers  # llvmlite does not know that an address and a vector of indices make a vector of addresses
    every = ir.Constant(mask, [ir.Constant(ir.IntType(1), 1)] * v.lanes)
    loads = v._intrinsic(f"llvm.masked.gather.v{v.lanes}f32.v{v.lanes}p0", v.fv, [pointers, I32, mask, v.fv])
    return v.b.call(loads, [at, ir.Constant(I32, 4), every, ir.Constant(v.fv, ir.Undefined)])
