"""Jobs of one call, done by the caller's thread and by a few others that all calls share."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait

__all__ = ["Job", "JobPool"]

Job = Callable[[], None]


class JobPool:
    """Does the jobs of a call on up to `threads` threads. Thread-safe.

    The caller's thread starts at once and never waits for a thread that is still to start: what takes milliseconds
    would lose a tenth to waking others up.

    Args:
        threads: The caller's and `threads - 1` more, which are started when first needed and which all calls share.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._others = ThreadPoolExecutor(threads - 1, thread_name_prefix="tq-codec") if threads > 1 else None

    def run(self, jobs: Sequence[Job]) -> None:
        """Do all of them; after the first error no more is begun, and it is raised. None still runs on return."""
        todo = deque(jobs)
        others = []
        if self._others is not None:
            others = [self._others.submit(_drain, todo) for _ in range(min(self.threads, len(jobs)) - 1)]
        try:
            _drain(todo)
        finally:
            begun = [other for other in others if not other.cancel()]
            wait(begun)
        for other in begun:
            other.result()


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
