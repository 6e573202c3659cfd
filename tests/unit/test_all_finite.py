"""`all_finite` finds a NaN or Inf wherever it is, in arrays of every shape, and needs little memory for it."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from tq_offload.buffers import all_finite

SHAPES = [(), (1,), (3, 0, 5), (65_536,), (65_537,), (200_001,), (1, 1, 70_001), (3, 2, 70_001), (70_001, 3), (5, 4, 7)]
PATTERNS = {"bfloat16": (np.uint16, 0x7F80), "float16": (np.uint16, 0xFC01), "float8_e4m3fn": (np.uint8, 0x7F)}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [*PATTERNS, "float32"])
def test_one_bad_element_is_found(dtype: str, shape: tuple[int, ...]) -> None:
    if dtype == "float32":
        bits, bad = np.zeros(shape, np.float32), np.nan
    else:
        bits, bad = np.zeros(shape, PATTERNS[dtype][0]), PATTERNS[dtype][1]
    assert all_finite(bits, dtype)
    for place in {0, bits.size // 2, bits.size - 1} if bits.size else ():
        spoilt = bits.copy()
        spoilt.reshape(-1)[place] = bad
        assert not all_finite(spoilt, dtype)
        assert all_finite(bits, dtype)


def test_memory_does_not_grow_with_the_array() -> None:
    bits = np.zeros((61, 1 << 18), np.uint16)
    tracemalloc.start()
    assert all_finite(bits, "bfloat16")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20
