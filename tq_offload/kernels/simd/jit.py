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
        self._versions: dict[tuple[Any, ...], Callable[..., Any]] = {}
        try:
            self.dispatcher = jit(fn, cache=True)
        except RuntimeError:  # "cannot cache function: no locator available"
            self.dispatcher = jit(fn)

    def __call__(self, config: Any, *args: Any) -> Any:
        """Run what was compiled for that `KernelConfig` and these types; the fields of tuples always have the same.

        numba's own search for it would take ten times as long as its call: it falls back to Python for the config.
        """
        kind = (config, *map(type, args))
        version = self._versions.get(kind)
        if version is None:
            version = self._versions[kind] = self._compiled(config, *args)
        return version(config, *args)

    def _compiled(self, *args: Any) -> Callable[..., Any]:
        """From memory, from disk or compiled now."""
        kinds = tuple(numba.typeof(arg) for arg in args)
        try:
            version: Callable[..., Any] = self.dispatcher.compile(kinds)
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            _log.warning("numba's cache of %s is not used: %s", self._fn.__name__, error)
            self.dispatcher = jit(self._fn)
            version = self.dispatcher.compile(kinds)
        return version


kernel = Kernel
