"""Steps on the scalars of a batch of vectors, one vector a lane (docs/wire-format.md, section 5).

A batch is f32 [FIELDS, BATCH] at an address: the fields below, each with a value for every vector. Lanes of vectors
that are not there hold anything. The arithmetic and its order are those of the scalar loops.

Behind it are the parts, f32 [PARTS, BATCH, ROOM]: registers of sums and maxima, one a vector, of which the lanes are
still to be folded. Folding those of all vectors at once takes a third of the instructions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from tq_offload.kernels.grid_loops import LSQ, NORM
from tq_offload.kernels.simd.elements import rounded
from tq_offload.kernels.simd.vector import I1, I16, I64, Lanes
from tq_offload.kernels.stream_loops import HIGH, LOW
from tq_offload.kernels.vector_loops import BF16_TOP

__all__ = [
    "BATCH", "BATCH_SIZE", "INVERSE", "LARGEST_PART", "NU_PARTS", "NV_PARTS", "PARTS_AT", "PART_BYTES", "PART_ROW",
    "PRODUCT_PARTS", "fit_ranges", "fold_largest", "fold_norms", "fold_products", "out_of_range", "scale_bits",
    "shortened",
]  # fmt: skip

BATCH = 16
FIELD_BYTES = 4 * BATCH
MASK = ir.IntType(BATCH)
FIELDS = 8
NV, NU, LARGEST, SIGMA, INVERSE, TC, CC, TT = range(FIELDS)  # as in the wire format; LARGEST is max |y|
PARTS, ROOM = 4, 16
PARTS_AT, PART_ROW = FIELD_BYTES * FIELDS, 4 * ROOM  # bytes: from the batch to the parts, and from vector to vector
PART_BYTES = PART_ROW * BATCH
BATCH_SIZE = FIELDS * BATCH + PARTS * BATCH * ROOM  # f32
NV_PARTS, NU_PARTS, LARGEST_PART, PRODUCT_PARTS = 0, 2 * PART_BYTES, 0, 0  # bytes from PARTS_AT on


def _lanes(context: Any, builder: Any) -> Lanes:
    return Lanes(context, builder, permute=False, lanes=BATCH)


def field(v: Lanes, batch: Any, number: int) -> Any:
    """A field of all vectors."""
    return v.load(batch, FIELD_BYTES * number, v.fv)


def _mask(v: Lanes, condition: Any) -> Any:
    """Bit i: the condition of lane i."""
    return v.b.zext(v.b.bitcast(condition, MASK), I64)


class _Parts:
    """Folds the parts of a batch and sets its fields."""

    def __init__(self, context: Any, builder: Any, config: Any, batch: Any) -> None:
        self.v = Lanes(context, builder, permute=False, lanes=config.config.lanes)
        self._batch = batch

    def total(self, place: int) -> Any:
        """Sums of the lanes, in the order of `hsum`: one vector a lane."""
        return self._fold(place, self.v.b.fadd, 0, BATCH)[0]

    def largest(self, place: int) -> Any:
        """The largest lanes."""
        return self._fold(place, self.v.maximum, 0, BATCH)[0]

    def set(self, number: int, value: Any) -> None:
        """Store a field."""
        self.v.store(value, self._batch, FIELD_BYTES * number)

    def _fold(self, place: int, join: Callable[[Any, Any], Any], first: int, count: int) -> tuple[Any, int]:
        """Vectors in one register, and how many lanes each has there. Depth first: few registers are alive."""
        v = self.v
        if count == 1:
            return v.load(self._batch, PARTS_AT + place + PART_ROW * first, v.fv), v.lanes
        a, width = self._fold(place, join, first, count // 2)
        b, _ = self._fold(place, join, first + count // 2, count // 2)
        both = range(2 * v.lanes)
        if width == 1:  # registers of eight lanes, with eight vectors each
            return v.shuffle(a, b, both), 1
        low = v.shuffle(a, b, [lane for lane in both if lane % width < width // 2])
        high = v.shuffle(a, b, [lane for lane in both if lane % width >= width // 2])
        return join(low, high), width // 2


@intrinsic
def fold_norms(_context: Any, config: Any, _batch: Any) -> Any:
    """(config, batch): NV and NU, from the sums over even and over odd elements."""

    def codegen(context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        parts = _Parts(context, builder, config, args[1])
        for number, place in ((NV, NV_PARTS), (NU, NU_PARTS)):
            parts.set(number, builder.fadd(parts.total(place), parts.total(place + PART_BYTES)))
        return context.get_dummy_value()

    return types.void(config, types.int64), codegen


@intrinsic
def fold_largest(_context: Any, config: Any, _batch: Any) -> Any:
    """(config, batch): LARGEST."""

    def codegen(context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        parts = _Parts(context, builder, config, args[1])
        parts.set(LARGEST, parts.largest(LARGEST_PART))
        return context.get_dummy_value()

    return types.void(config, types.int64), codegen


@intrinsic
def fold_products(_context: Any, config: Any, _batch: Any) -> Any:
    """(config, batch): TC, CC and, unless `config.lsq`, TT."""

    def codegen(context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        parts = _Parts(context, builder, config, args[1])
        for k, number in enumerate((TC, CC) if config.config.lsq else (TC, CC, TT)):
            parts.set(number, parts.total(PRODUCT_PARTS + PART_BYTES * k))
        return context.get_dummy_value()

    return types.void(config, types.int64), codegen


@intrinsic
def out_of_range(_context: Any, _batch: Any) -> Any:
    """(batch) -> bit for every vector of which a squared norm needs rescaling or is NaN."""

    def codegen(context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        v = _lanes(context, builder)
        inside = None
        for number in (NV, NU):
            n = field(v, args[0], number)
            both = v.b.and_(v.b.fcmp_ordered(">=", n, v.f(float(LOW))), v.b.fcmp_ordered("<=", n, v.f(float(HIGH))))
            inside = both if inside is None else v.b.and_(inside, both)
        return _mask(v, v.b.not_(inside))

    return types.int64(types.int64), codegen


@intrinsic
def shortened(_context: Any, _batch: Any) -> Any:
    """(batch) -> bit for every vector that its mean makes shorter: the flag of step 3."""

    def codegen(context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        v = _lanes(context, builder)
        return _mask(v, v.b.fcmp_ordered("<", field(v, args[0], NU), field(v, args[0], NV)))

    return types.int64(types.int64), codegen


@intrinsic
def fit_ranges(_context: Any, config: Any, _batch: Any, _alpha: Any, _beta: Any) -> Any:
    """(config, batch, alpha, beta): step 4, from NV, NU and LARGEST to SIGMA and INVERSE."""

    def codegen(context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        v = _lanes(context, builder)
        _, batch, alpha, beta = args
        nv, nu = field(v, batch, NV), field(v, batch, NU)
        n = v.b.select(v.b.fcmp_ordered("<", nu, nv), nu, nv)
        inverse = v.b.fdiv(v.f(1.0), v.square_root(n))
        stretch = v.b.fmul(v.b.fmul(field(v, batch, LARGEST), inverse), v.broadcast(beta))
        stretch = v.b.fadd(stretch, v.broadcast(alpha))
        sigma = v.b.fmul(v.square_root(v.b.fmul(n, v.f(1.0 / config.config.dim))), stretch)
        v.store(sigma, batch, FIELD_BYTES * SIGMA)
        v.store(v.b.fdiv(inverse, stretch), batch, FIELD_BYTES * INVERSE)
        return context.get_dummy_value()

    return types.void(config, types.int64, types.float32, types.float32), codegen


@intrinsic
def scale_bits(_context: Any, config: Any, _rule: Any, _batch: Any, _flags: Any, _out: Any) -> Any:
    """(config, rule, batch, flags, out): steps 6 and 7, the u16 [BATCH] of the scales section to `out`."""

    def codegen(context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        v = _lanes(context, builder)
        _, rule, batch, flags, out = args
        q = v.b.fdiv(field(v, batch, TC), field(v, batch, CC))
        if not config.config.lsq:
            tt = field(v, batch, TT)
            norm = v.square_root(v.b.fdiv(tt, field(v, batch, CC)))
            unbiased = v.b.fdiv(tt, field(v, batch, TC))
            other = v.b.select(v.b.icmp_signed("==", rule, I64(NORM)), norm, unbiased)
            q = v.b.select(v.b.icmp_signed("==", rule, I64(LSQ)), q, other)
        scale = v.b.fmul(q, field(v, batch, SIGMA))
        scale = v.as_int(v.b.select(v.b.fcmp_ordered("<", scale, v.f(float(BF16_TOP))), scale, v.f(float(BF16_TOP))))
        bits = v.b.lshr(rounded(v, scale, 16), v.i(16))
        flag = v.b.select(v.b.bitcast(v.b.trunc(flags, MASK), ir.VectorType(I1, BATCH)), v.i(0x8000), v.i(0))
        v.store(v.b.trunc(v.b.or_(bits, flag), ir.VectorType(I16, BATCH)), out, 0)
        return context.get_dummy_value()

    return types.void(config, types.int64, types.int64, types.int64, types.int64), codegen
