"""Which entries a lookup has pinned, in which tier and since when."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tq_offload.errors import StoreError

if TYPE_CHECKING:
    from tq_offload_connectors.tier import Tier

__all__ = ["PinLedger"]


class PinLedger:
    """Pins entries in the tier that holds them and knows where to undo it. Thread-safe.

    Args:
        tiers: Tiers that can pin. Entries that none of them has are not pinned, and need no unpin.
        timeout_s: After this time a pin is undone by the next call: its owner is gone.
        clock: Source of time, for tests.
    """

    def __init__(self, tiers: Sequence[Tier], timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._tiers, self._timeout, self._clock = list(tiers), timeout_s, clock
        self._lock = threading.Lock()
        self._pins: OrderedDict[str, list[tuple[float, Tier]]] = OrderedDict()  # by their last pin, oldest first

    def pin(self, names: Sequence[str]) -> None:
        """Pin each name in the first tier that has it."""
        now = self._clock()
        for name in names:
            for tier in self._tiers:
                if _pin(tier, name):
                    with self._lock:
                        self._pins.setdefault(name, []).append((now, tier))
                        self._pins.move_to_end(name)
                    break
        self._expire(now)

    def unpin(self, name: str) -> bool:
        """Undo one pin. Returns whether there was one."""
        with self._lock:
            found = self._pins.get(name)
            if not found:
                return False
            _, tier = found.pop(0)
            if not found:
                del self._pins[name]
        _unpin(tier, name)
        return True

    def count(self) -> int:
        """Pins that are held."""
        with self._lock:
            return sum(map(len, self._pins.values()))

    def _expire(self, now: float) -> None:
        while True:
            with self._lock:
                name = next(iter(self._pins), None)
                if name is None or self._pins[name][-1][0] + self._timeout > now:
                    return
                expired = self._pins.pop(name)
            for _, tier in expired:
                _unpin(tier, name)


def _pin(tier: Tier, name: str) -> bool:
    try:
        return tier.store.pin(name)
    except StoreError:
        return False


def _unpin(tier: Tier, name: str) -> None:
    try:
        tier.store.unpin(name)
    except StoreError:
        return
