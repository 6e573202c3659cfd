"""The one way in which kernels are compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba

__all__ = ["jit", "kernel"]


def jit(fn: Callable[..., Any]) -> Any:
    """Compile a helper: no GIL, IEEE division, no fast-math."""
    return numba.njit(nogil=True, error_model="numpy")(fn)


def kernel(fn: Callable[..., Any]) -> Any:
    """Compile an entry point, kept on disk where numba finds a folder that it may write."""
    try:
        return numba.njit(nogil=True, error_model="numpy", cache=True)(fn)
    except RuntimeError:  # "cannot cache function: no locator available"
        return jit(fn)
