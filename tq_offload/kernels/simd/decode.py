"""SIMD decoding of one vector, D a power of two from 16 to 512 (docs/wire-format.md, section 6, without QJL)."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from tq_offload import codebook
from tq_offload.kernels.simd.config import KernelConfig
from tq_offload.kernels.simd.elements import store_pair
from tq_offload.kernels.simd.tile import Tile, paired
from tq_offload.kernels.simd.vector import I8, Lanes, gather

__all__ = ["decode_vector", "level_of"]


@intrinsic
def decode_vector(
    _context: Any, config: Any, _codes: Any, _gain: Any, _mean: Any, _signs: Any, _levels: Any, _out: Any
) -> Any:
    """Decode one vector.

    (config, codes, gain = S/sqrt(D), mean f32 [D] paired, signs u32 [D] paired, levels f32 [2**bits], destination), all
    but the gain as addresses. "Paired": of every two
    registers' worth of elements first the even, then the odd ones. Where the mean is
    not to be added, `mean` points to -0.0, which changes nothing, not even the sign of a zero.
    """
    settings: KernelConfig = config.config

    def codegen(context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        v = Lanes(context, builder, settings.permute, settings.lanes)
        _, codes, gain, mean, signs, levels, out = args
        gains = v.broadcast(gain)
        tile = _transform(v, settings, codes, levels)
        for first in range(0, settings.dim, 2 * v.lanes):
            pair = []
            for k in (0, 1):
                x = tile.regs[tile.register_of(first + k)]
                sign = v.load(signs, 4 * (first + v.lanes * k), v.iv)
                x = v.b.fmul(x, v.as_float(v.b.xor(v.as_int(gains), sign)))
                pair.append(v.b.fadd(x, v.load(mean, 4 * (first + v.lanes * k), v.fv)))
            store_pair(v, settings.format, out, first, *pair)
        return context.get_dummy_value()

    i64 = types.int64
    return types.void(config, i64, types.float32, i64, i64, i64, i64), codegen


def _transform(v: Lanes, settings: KernelConfig, codes: Any, levels: Any) -> Tile:
    """Levels of all codes, transformed; the lanes end paired."""
    bits = settings.dim.bit_length() - 1
    if settings.dim < 64:
        high = range(v.lanes.bit_length(), bits)
        tile = Tile(v, _natural_levels(v, settings, codes, levels), paired(v.lanes), [0, *high])
        for bit in range(bits):
            tile.butterfly(bit)
        return tile
    in_lane = 3 if settings.dim >= 8 * v.lanes else 2  # a lane takes the levels of eight codes, or of four
    regs, in_block = [], in_lane + v.lanes.bit_length() - 1
    for block in range(settings.dim >> in_block):
        if in_lane == 3:
            natural = _block_levels(v, settings, codes, block, levels)
        else:
            natural = _short_block_levels(v, settings, codes, levels)
        part = Tile(v, natural, list(range(in_lane, in_block)), list(range(in_lane)))
        for bit in range(in_lane):
            part.butterfly(bit)
        for bit in range(in_lane, in_block):
            part.butterfly(bit, swap=bit - in_lane + 1)
        regs += part.regs
    tile = Tile(v, regs, part.lane_bits, [*part.reg_bits, *range(in_block, bits)])
    for bit in range(in_block, bits):
        tile.butterfly(bit)
    return tile


def _block_levels(v: Lanes, settings: KernelConfig, codes: Any, block: int, levels: Any) -> list[Any]:
    """Levels of eight codes a lane: lane = group of eight codes, register = code within the group."""
    bits, size = settings.bits, v.lanes * settings.bits
    raw = v.load(codes, size * block, ir.VectorType(I8, size))
    low, high = _words(v, raw, bits, 0), _words(v, raw, bits, max(bits - 4, 0))
    regs = []
    for code in range(8):
        word, at = (low, code * bits) if (code + 1) * bits <= 32 else (high, code * bits - 8 * max(bits - 4, 0))
        regs.append(level_of(v, bits, word, at, levels))
    return regs


def _short_block_levels(v: Lanes, settings: KernelConfig, codes: Any, levels: Any) -> list[Any]:
    """Levels of four codes a lane, of an even number of bits: lane = group of four codes, register = code within it."""
    bits = settings.bits
    words = v.load(codes, 0, ir.VectorType(ir.IntType(4 * bits), v.lanes))
    words = v.b.zext(words, v.iv) if bits < 8 else words
    return [level_of(v, bits, words, code * bits, levels) for code in range(4)]


def _words(v: Lanes, raw: Any, bits: int, start: int) -> Any:
    """Of groups of `bits` bytes: the (up to) four bytes from `start` on, one group a lane."""
    picked = [bits * lane + min(start + byte, bits - 1) for lane in range(v.lanes) for byte in range(4)]
    return v.b.bitcast(v.shuffle(raw, raw, picked), v.iv)


def level_of(v: Lanes, bits: int, word: Any, at: int, levels: Any) -> Any:
    """Levels of the codes that lie `at` bits up in each lane of `word`."""
    table = [float(x) for x in codebook.levels(bits)]
    index = v.b.lshr(word, v.i(at)) if at else word
    if bits <= 3:  # the table is repeated, so that the bits above the code do not matter
        return v.lookup8(table * (8 >> bits), index)
    if bits == 4:
        return v.lookup16(table, index)
    return gather(v, levels, v.b.and_(index, v.i((1 << bits) - 1)))


def _natural_levels(v: Lanes, settings: KernelConfig, codes: Any, levels: Any) -> list[Any]:
    """Levels of all codes of a short vector, paired: even and odd registers of every sixteen."""
    bits, regs = settings.bits, []
    size = min(bits, 4)
    for first in range(0, settings.dim, 16):
        raw = v.load(codes, first * bits // 8, ir.VectorType(I8, 2 * bits))
        for odd in (0, 1):
            starts = [min((2 * lane + odd) * bits // 8, 2 * bits - size) for lane in range(v.lanes)]
            picked = [s + min(byte, size - 1) for s in starts for byte in range(4)]
            word = v.b.bitcast(v.shuffle(raw, raw, picked), v.iv)
            shifts = [(2 * lane + odd) * bits - 8 * s for lane, s in enumerate(starts)]
            regs.append(level_of(v, bits, _shift_to(v, word, shifts, bits), 0, levels))
    return regs


def _shift_to(v: Lanes, word: Any, shifts: list[int], bits: int) -> Any:
    """Each lane shifted right by its own amount, bits above the code cleared."""
    return v.b.and_(v.b.lshr(word, v.i(shifts)), v.i((1 << bits) - 1))
