"""The one way in which kernels are compiled."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable
from typing import Any

import numba

__all__ = ["Kernel", "jit", "kernel"]

_log = logging.getLogger(__name__)


def jit(fn: Callable[..., Any], **options: Any) -> Any:
    """Compile a helper: no GIL, IEEE division, no fast-math."""
    return numba.njit(nogil=True, error_model="numpy", **options)(fn)


class Kernel:
    """An entry point. Compiled code is kept on disk where numba finds a folder that it may write.

    A cache that fails later (full disk, damaged files) is given up with a warning; the kernel is compiled in memory.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        self._fn = fn
        try:
            self.dispatcher = jit(fn, cache=True)
        except RuntimeError:  # "cannot cache function: no locator available"
            self.dispatcher = jit(fn)

    def __call__(self, *args: Any) -> Any:
        """Run; numba looks into the cache and compiles before anything is executed."""
        try:
            return self.dispatcher(*args)
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            _log.warning("numba's cache of %s is not used: %s", self._fn.__name__, error)
            self.dispatcher = jit(self._fn)
            return self.dispatcher(*args)


kernel = Kernel
