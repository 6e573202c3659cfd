"""Counters of a tier: exact plain numbers of this object, and prometheus_client's default registry for all of them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from tq_offload.integrations.lmcache.log import RateLimitedLog

__all__ = ["COUNTERS", "GAUGES", "TierCounters"]

COUNTERS: dict[str, tuple[str, bool]] = {  # name -> text, whether it has reasons
    "puts": (
        "Chunks offered to the tier: the sum of stored, present, dropped, refused, failed and those under way.",
        False,
    ),
    "stored": ("Chunks that the tier took.", False),
    "present": ("Chunks offered that the tier has already, or that are on their way.", False),
    "dropped": ("Chunks not stored because a queue was full or the store was closing.", True),
    "refused": ("Chunks that must not be encoded.", True),
    "failed": ("Chunks that the tier did not take.", True),
    "gets": ("Chunks asked of the tier: the sum of hits and misses.", False),
    "hits": ("Chunks decoded and served.", False),
    "misses": ("Chunks asked of the tier and not served.", True),
    "repairs": ("Entries that could not be served and were deleted.", True),
    "lookup_failures": ("Lookups that the tier could not answer: taken for absent.", True),
    "promoted": ("Chunks copied into the tier after a hit in a slower one.", False),
    "raw_bytes": ("Uncompressed bytes of the stored chunks.", False),
    "stored_bytes": ("Bytes of the frames of the stored chunks.", False),
    "encode_seconds": ("Time spent encoding chunks that this tier was the first to want, summed over threads.", False),
    "decode_seconds": ("Time spent checking and decoding, summed over threads.", False),
    "write_seconds": ("Time spent handing frames to the store, summed over threads.", False),
    "read_seconds": ("Time spent reading frames from the store, summed over threads.", False),
}
GAUGES = {
    "bytes": "Bytes of the frames that the tier holds.",
    "entries": "Chunks that the tier holds.",
    "queue_bytes": "Bytes of frames that wait to be written to the tier.",
    "encode_queue_bytes": "Bytes of uncompressed chunks that wait to be encoded.",
}

_exported: dict[str, Any] = {}
_export_lock = threading.Lock()


def _collectors() -> dict[str, Any]:
    """The collectors, registered with the default registry at the first call."""
    with _export_lock:
        if not _exported:
            from prometheus_client import Counter, Gauge

            for name, (text, reasons) in COUNTERS.items():
                labels = ("tier", "reason") if reasons else ("tier",)
                _exported[name] = Counter(f"tq_offload_tier_{name}", text, labels)
            for name, text in GAUGES.items():
                _exported[name] = Gauge(f"tq_offload_tier_{name}", text, ("tier",))
        return _exported


class TierCounters:
    """What happened in one tier.

    Args:
        tier: Label of the tier: `ram`, `disk` or `redis`.
    """

    def __init__(self, tier: str) -> None:
        self.tier = tier
        self.log = RateLimitedLog()
        self._lock = threading.Lock()
        self._values: dict[tuple[str, str], float] = {}
        self._collectors = _collectors()

    def add(self, name: str, amount: float = 1, reason: str = "") -> float:
        """Add to a counter.

        Returns:
            Its new value (of that reason).
        """
        labels = {"tier": self.tier, "reason": reason} if COUNTERS[name][1] else {"tier": self.tier}
        with self._lock:
            value = self._values[name, reason] = self._values.get((name, reason), 0) + amount
        self._collectors[name].labels(**labels).inc(amount)
        return value

    def lost(self, name: str, reason: str, what: str) -> None:
        """Count one chunk that was not stored or not served (`misses`, `dropped`, `refused`, `failed`), and log it."""
        count = self.add(name, reason=reason)
        self.log.warning(
            f"{self.tier} {name} {reason}", f"{self.tier}: {name}, reason {reason} (number {count:.0f}): {what}"
        )

    def value(self, name: str, reason: str | None = None) -> float:
        """Value of a counter; with reasons the sum over all of them, or that of one."""
        with self._lock:
            return sum(v for (n, r), v in self._values.items() if n == name and reason in (None, r))

    def snapshot(self) -> dict[str, Any]:
        """All counters: numbers, and for those with reasons a number for each reason seen."""
        with self._lock:
            values = dict(self._values)
        found: dict[str, Any] = {}
        for name, (_, reasons) in COUNTERS.items():
            if reasons:
                found[name] = {reason: value for (n, reason), value in values.items() if n == name}
            else:
                found[name] = values.get((name, ""), 0)
        return found

    def gauge(self, name: str, read: Callable[[], float]) -> None:
        """Let a gauge read its value when it is scraped."""
        self._collectors[name].labels(tier=self.tier).set_function(read)

    def drop_gauges(self) -> None:
        """Set the gauges to 0: they must not keep a closed tier alive."""
        for name in GAUGES:
            self._collectors[name].labels(tier=self.tier).set_function(lambda: 0.0)
