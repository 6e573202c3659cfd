"""The one way in which kernels are compiled."""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import numba

__all__ = ["Kernel", "jit", "kernel"]

LOCK_TIMEOUT_S = 60.0  # several times what the largest kernel takes to compile

_log = logging.getLogger(__name__)


def jit(fn: Callable[..., Any], **options: Any) -> Any:
    """Compile a helper: no GIL, IEEE division, no fast-math."""
    return numba.njit(nogil=True, error_model="numpy", **options)(fn)


class Kernel:
    """An entry point. Compiled code is kept on disk where numba finds a folder that it may write.

    A cache that fails later (full disk, files that cannot be read, code of something else) is given up with a warning:
    the kernel is compiled in memory. numba keeps no checksum: bits that flip in compiled code are not noticed.
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
            with one_process(self.dispatcher, self._fn.__name__):
                return self._version(kinds)
        except Exception as error:  # pickle, numba and LLVM raise a dozen kinds for files that they cannot read
            _log.warning("numba's cache of %s is not used: %s: %s", self._fn.__name__, type(error).__name__, error)
        self.dispatcher = jit(self._fn)
        return self._version(kinds)

    def _version(self, kinds: tuple[Any, ...]) -> Callable[..., Any]:
        version: Callable[..., Any] = self.dispatcher.compile(kinds)
        if kinds not in self.dispatcher.overloads:
            raise LookupError("the file holds code for other arguments")
        return version


@contextmanager
def one_process(dispatcher: Any, name: str) -> Iterator[None]:
    """Hold the lock of a kernel's cache, where there is one: others wait, and find there what was compiled meanwhile.

    numba numbers its files without a lock. Of two processes that fill a cache at once, each may take the other's code
    for its own, and so does every later one. Nobody waits for ever: a process that has stopped must not stop others.
    """
    with ExitStack() as held:
        with suppress(OSError, TypeError):  # no folder, none that may be written, no locks there
            file = held.enter_context(open(os.path.join(dispatcher._cache.cache_path, f"{name}.lock"), "ab"))
            if _locked(file):
                held.callback(fcntl.flock, file, fcntl.LOCK_UN)  # closing is not enough: a fork may have a copy
            else:
                _log.warning("the lock of numba's cache of %s is held for more than %g s", name, LOCK_TIMEOUT_S)
        yield


def _locked(file: Any) -> bool:
    """Whether the lock could be had in time."""
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        else:
            return True


kernel = Kernel
