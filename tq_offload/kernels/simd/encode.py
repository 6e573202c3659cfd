"""SIMD encoding of one vector in three passes, D a power of two from 16 to 512 (docs/wire-format.md, section 5).

The passes are apart so that each can be run over a batch of vectors: square roots and divisions between them then do
not wait for one another, and the lanes of sums are folded for all vectors at once (`batch`). "Paired" order: of every
two registers' worth first the even, then the odd elements.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from tq_offload import codebook
from tq_offload.kernels.simd.batch import LARGEST_PART, NU_PARTS, NV_PARTS, PART_BYTES, PRODUCT_PARTS
from tq_offload.kernels.simd.cells import SIGNED_BITS, cells, signed_cells
from tq_offload.kernels.simd.config import KernelConfig
from tq_offload.kernels.simd.elements import load_pair
from tq_offload.kernels.simd.tile import Tile, paired
from tq_offload.kernels.simd.vector import I8, I64, Lanes, gather, halving_tree

__all__ = [
    "TOGETHER",
    "add_one",
    "add_together",
    "pack_codes",
    "quantise",
    "quantised",
    "rotate",
    "squared_norm",
    "squared_norms",
]


def _emitter(context: Any, builder: Any, config: Any) -> tuple[Lanes, KernelConfig]:
    return Lanes(context, builder, config.config.permute, config.config.lanes), config.config


def _adder(count: int) -> Any:
    """(config, source, stride, sums): add `count` vectors, `stride` bytes apart, to f32 [D] at `sums`, paired."""

    def typing(_context: Any, config: Any, _source: Any, _stride: Any, _sums: Any) -> Any:
        def codegen(context: Any, builder: Any, _sig: Any, args: Any) -> Any:
            v, settings = _emitter(context, builder, config)
            _, source, stride, sums = args
            rows = [v.b.add(source, v.b.mul(stride, I64(row))) for row in range(count)]
            for first in range(0, settings.dim, 2 * v.lanes):
                places = [4 * (first + v.lanes * k) for k in (0, 1)]
                totals = [v.load(sums, at, v.fv) for at in places]
                for row in rows:
                    pair = load_pair(v, settings.format, row, first)
                    totals = [v.b.fadd(total, x) for total, x in zip(totals, pair, strict=True)]
                for total, at in zip(totals, places, strict=True):
                    v.store(total, sums, at)
            return context.get_dummy_value()

        return types.void(config, types.int64, types.int64, types.int64), codegen

    return intrinsic(typing)


TOGETHER = 4  # vectors that are added up in registers
add_one, add_together = _adder(1), _adder(TOGETHER)


def _squares(v: Lanes, settings: KernelConfig, source: Any, means: list[Any]) -> list[Any]:
    """Lanes of the sums of (v - mean)**2 over the even and over the odd elements, for each mean; None: of v**2."""

    def leaf(i: int) -> list[Any]:
        first = 2 * v.lanes * i
        pair, values = load_pair(v, settings.format, source, first), []
        for mean in means:
            for k, x in enumerate(pair):
                shifted = x if mean is None else v.b.fsub(x, v.load(mean, 4 * (first + v.lanes * k), v.fv))
                values.append(v.b.fmul(shifted, shifted))
        return values

    return halving_tree(leaf, v.b.fadd, settings.dim // (2 * v.lanes))


@intrinsic
def squared_norms(_context: Any, config: Any, _source: Any, _mean: Any, _parts: Any) -> Any:
    """(config, source, mean f32 [D] paired, parts of the vector): lanes of hsum(v*v) and hsum((v - mean)**2)."""

    def codegen(context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        v, settings = _emitter(context, builder, config)
        _, source, mean, parts = args
        places = [place + k * PART_BYTES for place in (NV_PARTS, NU_PARTS) for k in (0, 1)]
        for total, place in zip(_squares(v, settings, source, [None, mean]), places, strict=True):
            v.store(total, parts, place)
        return context.get_dummy_value()

    return types.void(config, types.int64, types.int64, types.int64), codegen


@intrinsic
def squared_norm(_context: Any, config: Any, _source: Any, _mean: Any, _parts: Any) -> Any:
    """(config, source, mean f32 [D] paired, one of the parts of the vector): lanes of hsum((v - mean)**2)."""

    def codegen(context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        v, settings = _emitter(context, builder, config)
        for k, total in enumerate(_squares(v, settings, args[1], [args[2]])):
            v.store(total, args[3], k * PART_BYTES)
        return context.get_dummy_value()

    return types.void(config, types.int64, types.int64, types.int64), codegen


@intrinsic
def rotate(_context: Any, config: Any, _source: Any, _mean: Any, _signs: Any, _out: Any, _parts: Any) -> Any:
    """(config, source, mean f32 [D] paired, signs u32 [D] paired, out, parts of the vector).

    y = rotation(v - mean) to f32 [D] at `out`, natural order, and lanes of max |y| to the parts. Where no mean is to be
    taken off, `mean` points to zeros.
    """

    def codegen(context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        v, settings = _emitter(context, builder, config)
        _, source, mean, signs, out, parts = args
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
                top = v.larger_magnitude(top, y)
        v.store(top, parts, LARGEST_PART)
        return context.get_dummy_value()

    i64 = types.int64
    return types.void(config, i64, i64, i64, i64, i64), codegen


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
    _context: Any, config: Any, _y: Any, _inverse: Any, _inside: Any, _base: Any, _levels: Any, _codes: Any, _parts: Any
) -> Any:
    """Codes of t = y * inverse, and the sums that the scale rules need.

    (config, y f32 [D], inverse, the tables of `cells` and the positive levels, codes, parts of the vector), all but
    `inverse` as addresses. Lanes of the sums of t*c, c*c and, unless `config.lsq`, t*t go to the parts.
    """

    def codegen(context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        v, settings = _emitter(context, builder, config)
        _, y, inverse, inside, base, levels, out_codes, parts = args
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
        for k, total in enumerate(sums):
            v.store(total, parts, PRODUCT_PARTS + k * PART_BYTES)
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
    cell = v.as_int(v.b.fadd(v.clamp(t, table.limit), v.f(table.shift)))
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
