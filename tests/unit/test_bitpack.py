import numpy as np
import pytest

from tq_offload.bitpack import pack, packed_size, unpack


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("count", [0, 1, 7, 8, 63, 64, 127, 128])
def test_round_trip_and_exact_size(bits: int, count: int) -> None:
    codes = (np.arange(3 * count, dtype=np.uint64) * 2654435761 >> 7).reshape(3, count) % (1 << bits)
    codes = codes.astype(np.uint8)
    packed = pack(codes, bits)
    assert packed.shape == (3, packed_size(count, bits)) == (3, -(-count * bits // 8))
    np.testing.assert_array_equal(unpack(packed, count, bits), codes)


def test_order_is_least_significant_bit_first() -> None:
    assert pack(np.array([0b101, 0b011, 0b110], np.uint8), 3).tolist() == [0b10011101, 0b1]
    assert pack(np.array([0x3, 0xA], np.uint8), 4).tolist() == [0xA3]


def test_three_bits_take_three_bits() -> None:
    assert packed_size(128, 3) == 48
