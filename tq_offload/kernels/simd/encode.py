"""SIMD encoding of one vector in three passes, D a power of two from 16 to 512 (docs/wire-format.md, section 5).

The passes are apart so that the driver can run each over a batch of vectors: square roots and divisions between them
then do not wait for one another. "Paired" order: of every two registers' worth first the even, then the odd elements.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from tq_offload import codebook
from tq_offload.kernels.simd.batch import FIELD_BYTES, NU, NV, TC
from tq_offload.kernels.simd.cells import SIGNED_BITS, cells, signed_cells
from tq_offload.kernels.simd.config import KernelConfig
from tq_offload.kernels.simd.elements import load_pair
from tq_offload.kernels.simd.tile import Tile, paired
from tq_offload.kernels.simd.vector import I8, I64, Lanes, gather, halving_tree

__all__ = ["add_elements", "pack_codes", "quantise", "quantised", "rotate", "squared_norms"]


def _emitter(context: Any, builder: Any, config: Any) -> tuple[Lanes, KernelConfig]:
    return Lanes(context, builder, config.config.permute, config.config.lanes), config.config


@intrinsic
def add_elements(_context: Any, config: Any, _source: Any, _sums: Any) -> Any:
    """(config, source, sums): add the elements of a vector to f32 [D] at `sums`, paired."""

    def codegen(context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        v, settings = _emitter(context, builder, config)
        for first in range(0, settings.dim, 2 * v.lanes):
            for k, x in enumerate(load_pair(v, settings.format, args[1], first)):
                at = 4 * (first + v.lanes * k)
                v.store(v.b.fadd(v.load(args[2], at, v.fv), x), args[2], at)
        return context.get_dummy_value()

    return types.void(config, types.int64, types.int64), codegen


@intrinsic
def squared_norms(_context: Any, config: Any, _source: Any, _mean: Any, _out: Any) -> Any:
    """(config, source, mean f32 [D] paired, out): hsum(v*v) and hsum((v - mean)**2) to NV and NU of the vector."""

    def codegen(context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        v, settings = _emitter(context, builder, config)
        _, source, mean, out = args

        def squares(i: int) -> list[Any]:
            first = 2 * v.lanes * i
            pair = load_pair(v, settings.format, source, first)
            values = [v.b.fmul(x, x) for x in pair]
            shifted = [v.b.fsub(x, v.load(mean, 4 * (first + v.lanes * k), v.fv)) for k, x in enumerate(pair)]
            return values + [v.b.fmul(x, x) for x in shifted]

        sums = halving_tree(squares, v.b.fadd, settings.dim // (2 * v.lanes))
        for k in range(0, len(sums), 2):
            even, odd = v.horizontal_sums(sums[k], sums[k + 1])
            v.store(v.b.fadd(even, odd), out, FIELD_BYTES * (NU if k else NV))
        return context.get_dummy_value()

    return types.void(config, types.int64, types.int64, types.int64), codegen


@intrinsic
def rotate(_context: Any, config: Any, _source: Any, _mean: Any, _signs: Any, _out: Any) -> Any:
    """(config, source, mean f32 [D] paired, signs u32 [D] paired, out) -> max |y|.

    y = rotation(v - mean) to f32 [D] at `out`, natural order. Where no mean is to be taken off, `mean` points to zeros.
    """

    def codegen(context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        v, settings = _emitter(context, builder, config)
        _, source, mean, signs, out = args
        regs = []
        for first in range(0, settings.dim, 2 * v.lanes):
            for k, x in enumerate(load_pair(v, settings.format, source, first)):
                at = 4 * (first + v.lanes * k)
                w = v.b.fsub(x, v.load(mean, at, v.fv))
                regs.append(v.as_float(v.b.xor(v.as_int(w), v.load(signs, at, v.iv))))
        regs = _transform(v, regs)
        top = v.absolute(regs[0])
        for k, y in enumerate(regs):
            v.store(y, out, 4 * v.lanes * k)
            if k:
                top = v.maximum(top, v.absolute(y))
        return v.horizontal_maximum(top)

    i64 = types.int64
    return types.float32(config, i64, i64, i64, i64), codegen


def _transform(v: Lanes, regs: list[Any]) -> list[Any]:
    """Transform of paired registers, into natural order; depth first, to keep few registers alive."""
    if len(regs) > 2:
        half = len(regs) // 2
        low, high = _transform(v, regs[:half]), _transform(v, regs[half:])
        sums = [v.b.fadd(a, b) for a, b in zip(low, high, strict=True)]
        return sums + [v.b.fsub(a, b) for a, b in zip(low, high, strict=True)]
    tile = Tile(v, regs, paired(v.lanes), [0])
    tile.butterfly(0)
    for bit in paired(v.lanes):
        tile.butterfly(bit, swap=bit - 1)
    return tile.regs


@intrinsic
def quantise(
    _context: Any, config: Any, _y: Any, _inverse: Any, _inside: Any, _base: Any, _levels: Any, _codes: Any, _out: Any
) -> Any:
    """Codes of t = y * inverse, and the sums that the scale rules need.

    (config, y f32 [D], inverse, the tables of `cells` and the positive levels, codes, out), all but `inverse` as
    addresses. The sums of t*c, c*c and, unless `config.lsq`, t*t go to TC, CC and TT of the vector at `out`.
    """

    def codegen(context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        v, settings = _emitter(context, builder, config)
        _, y, inverse, inside, base, levels, out_codes, out = args
        inverses = v.broadcast(inverse)
        codes: list[Any] = [None] * (settings.dim // v.lanes)

        def products(i: int) -> list[Any]:
            t = v.b.fmul(v.load(y, 4 * v.lanes * i, v.fv), inverses)
            codes[i], t, c = quantised(v, settings.bits, t, inside, base, levels)
            return [v.b.fmul(t, c), v.b.fmul(c, c)] + ([] if settings.lsq else [v.b.fmul(t, t)])

        sums = halving_tree(products, v.b.fadd, len(codes))
        many = 4 if settings.bits == 4 else 32 // v.lanes
        for first in range(0, len(codes), many):
            pack_codes(v, settings.bits, codes[first : first + many], out_codes, first * v.lanes * settings.bits // 8)
        for k, total in enumerate([*v.horizontal_sums(*sums[:2]), *v.horizontal_sums(sums[-1], sums[-1])][: len(sums)]):
            v.store(total, out, FIELD_BYTES * (TC + k))
        return context.get_dummy_value()

    i64 = types.int64
    return types.void(config, i64, types.float32, i64, i64, i64, i64, i64), codegen


def quantised(v: Lanes, bits: int, t: Any, inside: Any, base: Any, levels: Any) -> tuple[Any, Any, Any]:
    """(codes as i32, t, c) of a register of coordinates; t and c both as they are, or both as magnitudes.

    Ties, and both zeros, go to the lower code.
    """
    if v.has_lookup32 and bits in SIGNED_BITS:
        return _by_signed_cells(v, bits, t)
    return _by_cells(v, bits, t, inside, base, levels)


def _by_signed_cells(v: Lanes, bits: int, t: Any) -> tuple[Any, Any, Any]:
    table = signed_cells(bits)
    near = v.b.select(v.b.fcmp_ordered("<", t, v.f(table.limit)), t, v.f(table.limit))
    near = v.b.select(v.b.fcmp_ordered(">", near, v.f(-table.limit)), near, v.f(-table.limit))
    cell = v.as_int(v.b.fadd(near, v.f(table.shift)))
    above = v.b.fcmp_ordered(">", t, v.lookup32(table.inside, cell))
    code = v.b.sub(v.lookup32(table.base, cell), v.lane_mask(above))
    return code, t, v.lookup16(codebook.levels(bits).tolist() * (16 >> bits), code)


def _by_cells(v: Lanes, bits: int, t: Any, inside: Any, base: Any, levels: Any) -> tuple[Any, Any, Any]:
    half = 1 << (bits - 1)
    table = cells(bits)
    small = len(table.base) == 8
    negative = v.lane_mask(v.b.fcmp_ordered("<=", t, v.f(0.0)))
    t = v.absolute(t)
    if bits == 1:
        k = v.i(0)
    else:
        cell = v.b.fptosi(v.b.fmul(t, v.f(table.density)), v.iv)
        cell = v.minimum_int(cell, len(table.base) - 1)
        threshold = v.lookup8_int(table.inside.tolist(), cell) if small else v.as_int(gather(v, inside, cell))
        below = v.lookup8_int(table.base.tolist(), cell) if small else v.as_int(gather(v, base, cell))
        # On the negative side a tie counts as above: one more unit in the last place, as integers.
        above = v.b.icmp_signed(">", v.b.sub(v.as_int(t), negative), threshold)
        k = v.b.sub(below, v.lane_mask(above))
    positive = [float(x) for x in codebook.levels(bits)[half:]]
    c = v.lookup8(positive * (8 // half), k) if half <= 8 else gather(v, levels, k)
    # The code is half + k, or half - 1 - k on the negative side.
    flip = v.b.xor(v.b.and_(negative, v.i(2 * half - 1)), v.i(half))
    return v.b.xor(k, flip), t, c


def pack_codes(v: Lanes, bits: int, codes: list[Any], address: Any, offset: int) -> None:
    """Pack the codes of one, two or four registers, 32 codes at most but for four bits."""
    (_pack_nibbles if bits == 4 else _pack_any)(v, bits, codes, address, offset)


def _pack_nibbles(v: Lanes, _bits: int, codes: list[Any], address: Any, offset: int) -> None:
    """Codes of four bits: byte k of a lane is the code of register k; then every two lanes become one."""
    word = codes[0]
    for k, code in enumerate(codes[1:], 1):
        word = v.b.or_(word, v.b.shl(code, v.i(8 * k)))
    lanes, count = v.lanes // 2, len(codes)
    two = v.b.bitcast(word, ir.VectorType(I64, lanes))
    two = v.b.or_(two, v.b.lshr(two, _splat64(two.type, 28)))
    raw = v.b.bitcast(v.b.trunc(two, ir.VectorType(ir.IntType(8 * count), lanes)), ir.VectorType(I8, count * lanes))
    v.store(v.shuffle(raw, raw, [count * lane + k for k in range(count) for lane in range(lanes)]), address, offset)


def _pack_any(v: Lanes, bits: int, codes: list[Any], address: Any, offset: int) -> None:
    """A 64-bit lane for every eight codes, squeezed in three steps."""
    while len(codes) > 1:
        codes = [v.shuffle(a, b, list(range(2 * a.type.count))) for a, b in zip(codes[0::2], codes[1::2], strict=True)]
    count = codes[0].type.count
    packed = v.b.bitcast(v.b.trunc(codes[0], ir.VectorType(I8, count)), ir.VectorType(I64, count // 8))
    for width in (8, 16, 32) if bits < 8 else ():
        used = bits * width // 8  # bits in use in a field of `width` bits
        low = _splat64(packed.type, sum(((1 << used) - 1) << at for at in range(0, 64, 2 * width)))
        high = _splat64(packed.type, sum(((1 << used) - 1) << at + used for at in range(0, 64, 2 * width)))
        shifted = v.b.lshr(packed, _splat64(packed.type, width - used))
        packed = v.b.or_(v.b.and_(packed, low), v.b.and_(shifted, high))
    raw = v.b.bitcast(packed, ir.VectorType(I8, count))
    picked = [8 * group + byte for group in range(count // 8) for byte in range(bits)]
    v.store(v.shuffle(raw, raw, picked), address, offset)


def _splat64(typ: Any, value: int) -> Any:
    return ir.Constant(typ, [ir.Constant(I64, value)] * typ.count)
