"""Jobs of one call, done by the caller's thread and by a few others that all calls share."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

__all__ = ["Job", "JobPool"]

Job = Callable[[], None]


class JobPool:
    """Does the jobs of a call on up to `threads` threads. Thread-safe.

    The caller's thread starts at once and never waits for a thread that is still to start: what takes milliseconds
    would lose a tenth to waking others up. Where no other thread can be had (a limit, the end of the interpreter), it
    does all of them. A forked process starts threads of its own.

    Args:
        threads: The caller's and `threads - 1` more, which are started when first needed and which all calls share.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._others: tuple[int, ThreadPoolExecutor] | None = None

    def __reduce__(self) -> tuple[type[JobPool], tuple[int]]:
        return JobPool, (self.threads,)

    def run(self, jobs: Sequence[Job]) -> None:
        """Do all of them; after the first error no more is begun, and it is raised. None still runs on return."""
        todo = deque(jobs)
        others: list[Future[None]] = []
        try:
            self._ask_others(todo, min(self.threads, len(jobs)) - 1, others)
            _drain(todo)
        finally:
            todo.clear()
            _wait([other for other in others if not other.cancel()])
        for other in others:
            if not other.cancelled():
                other.result()

    def _ask_others(self, todo: deque[Job], count: int, asked: list[Future[None]]) -> None:
        try:
            for _ in range(count):
                asked.append(self._executor().submit(_drain, todo))
        except RuntimeError:  # no more threads can be started
            return

    def _executor(self) -> ThreadPoolExecutor:
        """That of this process: after a fork the other one has no threads, and its locks may be held for ever."""
        if self._others is None or self._others[0] != os.getpid():
            self._others = os.getpid(), ThreadPoolExecutor(self.threads - 1, thread_name_prefix="tq-codec")
        return self._others[1]


def _drain(todo: deque[Job]) -> None:
    while True:
        try:
            job = todo.popleft()
        except IndexError:
            return
        try:
            job()
        except BaseException:
            todo.clear()
            raise


def _wait(begun: Sequence[Future[None]]) -> None:
    """Return when all have ended, whatever interrupts that: they write to the caller's memory."""
    interrupted: BaseException | None = None
    while not all(other.done() for other in begun):
        try:
            wait(begun)
        except BaseException as error:
            interrupted = error
    if interrupted is not None:
        raise interrupted
