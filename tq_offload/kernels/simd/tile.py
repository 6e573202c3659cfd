"""The fast Walsh-Hadamard transform on registers, whatever bits of the element index the lanes hold.

The format fixes which operations make an element, not where it sits meanwhile. A `Tile` tracks which bit of the
element index each lane bit and each register bit stands for. A butterfly across registers is free of shuffles; one
across lanes swaps its bit with a register bit whose butterfly is done, for one shuffle and one add a register.
"""

from __future__ import annotations

from typing import Any

from tq_offload.kernels.simd.vector import Lanes

__all__ = ["Tile", "paired"]

# For every lane bit: the lanes with the bit clear and those with it set, of two registers, as one x86 shuffle each;
# then the new order of the lane bits, -1 standing for the register bit that was swapped in. By number of lanes.
_SPLITS = {
    8: (
        ([0, 2, 8, 10, 4, 6, 12, 14], [1, 3, 9, 11, 5, 7, 13, 15], (1, -1, 2)),
        ([0, 8, 1, 9, 4, 12, 5, 13], [2, 10, 3, 11, 6, 14, 7, 15], (-1, 0, 2)),
        ([0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15], (0, 1, -1)),
    ),
    16: (
        *(
            ([g + i for g in range(0, 16, 4) for i in clear], [g + i for g in range(0, 16, 4) for i in is_set], order)
            for clear, is_set, order in (
                ((0, 2, 16, 18), (1, 3, 17, 19), (1, -1, 2, 3)),
                ((0, 16, 1, 17), (2, 18, 3, 19), (-1, 0, 2, 3)),
            )
        ),
        *(
            ([4 * g + i for g in clear for i in range(4)], [4 * g + i for g in is_set for i in range(4)], order)
            for clear, is_set, order in (
                ((0, 2, 4, 6), (1, 3, 5, 7), (0, 1, 3, -1)),
                ((0, 1, 4, 5), (2, 3, 6, 7), (0, 1, 2, -1)),
            )
        ),
    ),
}


def paired(lanes: int) -> list[int]:
    """Lane bits of elements that were loaded as one register of even and one of odd ones."""
    return list(range(1, lanes.bit_length()))


class Tile:
    """Registers that hold the elements of a vector, or of a block of it.

    Args:
        v: The emitter.
        regs: Registers; bit k of a register's number is bit `reg_bits[k]` of the element index.
        lane_bits: Bits of the element index that the bits of the lane number stand for.
        reg_bits: See `regs`.
    """

    def __init__(self, v: Lanes, regs: list[Any], lane_bits: list[int], reg_bits: list[int]) -> None:
        self.v, self.regs, self.lane_bits, self.reg_bits = v, regs, list(lane_bits), list(reg_bits)

    def butterfly(self, bit: int, swap: int | None = None) -> None:
        """(a[i], a[i + 2**bit]) = (sum, difference).

        Args:
            bit: The bit of the element index.
            swap: If the bit is in the lanes: the register bit (of the element index) that takes its place there; None
                to leave it in place.
        """
        if bit in self.reg_bits:
            self._across_registers(self.reg_bits.index(bit))
        elif swap is None:
            self._across_lanes(self.lane_bits.index(bit))
        else:
            self._swapping(self.lane_bits.index(bit), self.reg_bits.index(swap))

    def _pairs(self, k: int) -> list[tuple[int, int]]:
        return [(i, i | 1 << k) for i in range(len(self.regs)) if not i >> k & 1]

    def _across_registers(self, k: int) -> None:
        for i, j in self._pairs(k):
            a, b = self.regs[i], self.regs[j]
            self.regs[i], self.regs[j] = self.v.b.fadd(a, b), self.v.b.fsub(a, b)

    def _across_lanes(self, k: int) -> None:
        v = self.v
        flip = v.i([0x80000000 if lane >> k & 1 else 0 for lane in range(v.lanes)])
        for i, x in enumerate(self.regs):
            partner = v.shuffle(x, x, [lane ^ 1 << k for lane in range(v.lanes)])
            self.regs[i] = v.b.fadd(partner, v.as_float(v.b.xor(v.as_int(x), flip)))

    def _swapping(self, lane: int, k: int) -> None:
        clear, is_set, order = _SPLITS[self.v.lanes][lane]
        bit, swapped = self.lane_bits[lane], self.reg_bits[k]
        for i, j in self._pairs(k):
            low = self.v.fence(self.v.shuffle(self.regs[i], self.regs[j], clear))
            high = self.v.fence(self.v.shuffle(self.regs[i], self.regs[j], is_set))
            self.regs[i], self.regs[j] = self.v.b.fadd(low, high), self.v.b.fsub(low, high)
        self.lane_bits = [swapped if o < 0 else self.lane_bits[o] for o in order]
        self.reg_bits[k] = bit

    def register_of(self, element: int) -> int:
        """Number of the register that holds the element."""
        return sum((element >> bit & 1) << k for k, bit in enumerate(self.reg_bits))
