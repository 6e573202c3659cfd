"""The pause after a failure, so that a dead server costs its callers microseconds."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

from tq_offload.errors import StoreAuthError, StoreError, StoreUnavailableError

__all__ = ["Breaker"]


class Breaker:
    """Lets calls through until one fails; then none for a while, then one at a time as a probe.

    The pause doubles with each failure in a row and is cut by a random part of up to a half. What fails at the same
    time counts once. A probe that never reports back is given up after `lease_s`.

    Args:
        base_s, cap_s: First and longest pause.
        lease_s: Time that a probe has before another may start.
        clock: Source of time, for tests.
    """

    def __init__(
        self, base_s: float, cap_s: float, lease_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._base_s, self._cap_s, self._lease_s, self._clock = base_s, cap_s, lease_s, clock
        self._lock = threading.Lock()
        self._epoch = self._failures = 0
        self._until = 0.0
        self._cause: tuple[type[StoreError], str] | None = None

    @property
    def epoch(self) -> int:
        """Number of failures so far; what was learned in an earlier epoch may be outdated."""
        return self._epoch

    def check(self) -> None:
        """Raise as `enter` does, without becoming the probe."""
        cause, left = self._cause, self._until - self._clock()
        if cause is not None and left > 0:
            raise cause[0](f"waits {left:.2f} s before it tries again, after: {cause[1]}")

    def enter(self) -> int:
        """Begin a call. Returns the epoch, to be handed to `fail` or `succeed`.

        Raises:
            StoreUnavailableError: The pause is not over, or another call probes. StoreAuthError after one of that kind.
        """
        if self._cause is None:
            return self._epoch
        with self._lock:
            self.check()
            if self._cause is not None:
                self._until = self._clock() + self._lease_s
            return self._epoch

    def fail(self, epoch: int, error: StoreError) -> None:
        """The call failed because of the connection."""
        with self._lock:
            if epoch != self._epoch:
                return
            pause = min(self._cap_s, self._base_s * 2.0 ** min(self._failures, 60))
            self._epoch, self._failures = self._epoch + 1, self._failures + 1
            self._until = self._clock() + pause * random.uniform(0.5, 1.0)
            kind = StoreAuthError if isinstance(error, StoreAuthError) else StoreUnavailableError
            self._cause = (kind, str(error))

    def succeed(self, epoch: int) -> None:
        """The server answered the call."""
        if self._cause is None:
            return
        with self._lock:
            if epoch == self._epoch:
                self._failures, self._cause = 0, None
