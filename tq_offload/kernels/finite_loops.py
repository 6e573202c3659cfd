"""Which bfloat16 numbers are NaN or Inf."""

from __future__ import annotations

from typing import Any

import numpy as np

from tq_offload.kernels.simd.jit import kernel
from tq_offload.kernels.simd.memory import get_i64, get_u16

__all__ = ["count_not_finite"]

EXPONENT = np.uint16(0x7F80)


@kernel
def count_not_finite(_config: Any, frame: int, places: int, count: int) -> int:
    """Numbers of which all bits of the exponent are set.

    Args:
        _config: `KernelConfig`.
        frame: Address of the frame.
        places: Address of i64 [count, 2]: offsets in the frame in bytes, and how many numbers there are.
        count: How many places.
    """
    found = 0
    for place in range(count):
        at, numbers = frame + get_i64(places, 2 * place), get_i64(places, 2 * place + 1)
        for i in range(numbers):  # without a branch: LLVM makes vector instructions of it
            found += (get_u16(at, i) & EXPONENT) == EXPONENT
    return found
