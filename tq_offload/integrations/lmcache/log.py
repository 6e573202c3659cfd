"""Log lines of the integration: in LMCache's format where LMCache is, at a limited rate for what can repeat."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable

__all__ = ["RateLimitedLog", "logger"]

LOGGER_NAME = "tq_offload.lmcache"


def logger() -> logging.Logger:
    """This package's logger. With LMCache loaded it writes where and as LMCache writes."""
    log = logging.getLogger(LOGGER_NAME)
    if not log.handlers and "lmcache.logging" in sys.modules:
        sys.modules["lmcache.logging"].init_logger(LOGGER_NAME)
    return log


class RateLimitedLog:
    """At most `burst` lines per subject and `interval` seconds; the next line says how many were left out.

    Args:
        burst: Lines of one subject that are written in an interval.
        interval: Seconds.
        clock: Source of time, for tests.
    """

    def __init__(self, burst: int = 10, interval: float = 10.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._burst, self._interval, self._clock = burst, interval, clock
        self._lock = threading.Lock()
        self._state: dict[str, tuple[float, int, int]] = {}  # subject -> start of interval, lines in it, left out

    def warning(self, subject: str, message: str) -> None:
        """Write `message` unless `subject` has used up its lines."""
        now = self._clock()
        with self._lock:
            start, lines, left_out = self._state.get(subject, (now, 0, 0))
            if now - start >= self._interval:
                start, lines = now, 0
            if lines >= self._burst:
                self._state[subject] = (start, lines, left_out + 1)
                return
            self._state[subject] = (start, lines + 1, 0)
        more = f" ({left_out} more lines about '{subject}' left out)" if left_out else ""
        logger().warning("TQ-Offload: %s%s", message, more)

    def flush(self) -> None:
        """Say how many lines were left out and not yet mentioned."""
        with self._lock:
            pending = {subject: left for subject, (_, _, left) in self._state.items() if left}
            self._state.clear()
        for subject, left in pending.items():
            logger().warning("TQ-Offload: %d more lines about '%s' left out", left, subject)
