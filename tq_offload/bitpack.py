"""b-bit codes to bytes and back, exactly b bits a code (docs/wire-format.md, section 2)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["pack", "packed_size", "unpack"]


def packed_size(count: int, bits: int) -> int:
    """Bytes that `count` codes of `bits` bits take: ceil(count * bits / 8)."""
    return (count * bits + 7) // 8


def pack(codes: npt.NDArray[np.uint8], bits: int) -> npt.NDArray[np.uint8]:
    """Pack codes along the last axis, least significant bit first.

    Args:
        codes: u8 [..., n], values below 2**bits.
        bits: 1..8.

    Returns:
        u8 [..., packed_size(n, bits)]; unused bits are zero.
    """
    planes = (codes[..., None] >> np.arange(bits, dtype=np.uint8)) & 1
    stream = planes.reshape(*codes.shape[:-1], codes.shape[-1] * bits)
    return np.packbits(stream, axis=-1, bitorder="little")


def unpack(packed: npt.NDArray[np.uint8], count: int, bits: int) -> npt.NDArray[np.uint8]:
    """Undo `pack`: u8 [..., packed_size(count, bits)] to u8 [..., count]."""
    stream = np.unpackbits(packed, axis=-1, count=count * bits, bitorder="little")
    planes = stream.reshape(*packed.shape[:-1], count, bits)
    codes: npt.NDArray[np.uint8] = (planes << np.arange(bits, dtype=np.uint8)).sum(axis=-1, dtype=np.uint8)
    return codes
