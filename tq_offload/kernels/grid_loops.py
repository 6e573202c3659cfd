"""What the loops over a stream are given: where its vectors are and how they are coded."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from tq_offload.kernels.simd.jit import jit
from tq_offload.kernels.simd.memory import CACHE_LINE

__all__ = [
    "LSQ", "NORM", "RULES", "TO_A_LINE", "UNBIASED", "Coding", "Grid", "address", "address_of", "aligned", "keep",
]  # fmt: skip

TO_A_LINE = CACHE_LINE // 4  # f32 that work space has more than is used of it from `aligned` on
RULES = ("lsq", "norm", "unbiased")
LSQ, NORM, UNBIASED = 0, 1, 2


class Grid(NamedTuple):
    """A stream in bytes: address of its first vector, counts, D, and strides in bytes."""

    address: int
    planes: int
    tokens: int
    vectors: int
    dim: int
    plane_stride: int
    token_stride: int
    vector_stride: int


class Coding(NamedTuple):
    """How a stream is coded, and the addresses of its sections (0: absent).

    `rule` is an index of `RULES`. `alpha` and `beta` are those of the range fit; 1 and 0 turn it off, exactly.
    `outliers` is the number of channels of a vector that are coded apart. `only` is a u8 [P, T, J] mask of the vectors
    to do, or 0 for all of them.
    """

    bits: int
    rule: int
    alpha: np.float32
    beta: np.float32
    outliers: int
    means: int = 0
    scales: int = 0
    codes: int = 0
    outlier_channels: int = 0
    outlier_ranges: int = 0
    outlier_codes: int = 0
    only: int = 0


@jit
def address(space: Any) -> Any:
    """Address of an array, as a signed integer: a mix of the two would compile every helper twice."""
    return np.int64(space.ctypes.data)


@jit
def aligned(space: Any) -> Any:
    """Address of the first cache line in work space: registers that lie across two lines are read and written twice."""
    return (address(space) + CACHE_LINE - 1) // CACHE_LINE * CACHE_LINE


@jit
def keep(space: Any) -> Any:
    """To be called after the last use of an array's address: numba frees an array after the last use of its name."""
    return space.size


@jit
def address_of(grid: Any, p: Any, i: Any) -> Any:
    """Address of vector i of plane p, counted over tokens and vectors."""
    t = i // grid.vectors
    return grid.address + p * grid.plane_stride + t * grid.token_stride + (i - t * grid.vectors) * grid.vector_stride
