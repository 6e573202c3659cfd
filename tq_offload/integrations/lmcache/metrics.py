"""Counters of the integration, in prometheus_client's default registry, which LMCache's `/metrics` serves."""

from __future__ import annotations

import threading
from typing import Any

from tq_offload.integrations.lmcache.log import RateLimitedLog

__all__ = ["COUNTERS", "METRICS", "Metrics"]

COUNTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "stored_chunks": ("Chunks that the L2 tier has written, compressed.", ()),
    "already_stored": ("Encoded chunks that the L2 tier did not write because it had them.", ()),
    "raw_bytes": ("Uncompressed bytes of the stored chunks.", ()),
    "stored_bytes": ("Bytes of the frames of the stored chunks.", ()),
    "loaded_chunks": ("Chunks decoded into L1.", ()),
    "misses": ("Chunks that were asked for and not served.", ("reason",)),
    "refused": ("Chunks that were not encoded.", ("reason",)),
    "store_failures": ("Encoded chunks that the L2 tier did not take, and chunks without a buffer.", ("reason",)),
    "dropped_batch_mates": ("Sound chunks not stored because another of their batch was refused.", ()),
    "repairs": ("Entries that could not be served and were deleted.", ("reason",)),
    "repair_failures": ("Entries that could not be served and are still there after a delete.", ("reason",)),
    "encode_seconds": ("Time spent encoding, summed over threads.", ()),
    "decode_seconds": ("Time spent decoding, summed over threads.", ()),
}


class Metrics:
    """Counts in plain numbers at once, and in Prometheus from the first call of `expose`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[tuple[str, str], float] = {}
        self._exported: dict[str, Any] = {}
        self.log = RateLimitedLog()

    def expose(self) -> None:
        """Register the counters with prometheus_client's default registry. Safe to call again."""
        with self._lock:
            if self._exported:
                return
            from prometheus_client import Counter

            for name, (text, labels) in COUNTERS.items():
                self._exported[name] = Counter(f"tq_offload_{name}", text, labels)

    def add(self, name: str, amount: float = 1, reason: str = "") -> float:
        """Add to a counter.

        Returns:
            The counter's new value (of that reason).
        """
        labelled = bool(COUNTERS[name][1])
        with self._lock:
            value = self._values[name, reason] = self._values.get((name, reason), 0) + amount
            exported = self._exported.get(name)
        if exported is not None:
            (exported.labels(reason=reason) if labelled else exported).inc(amount)
        return value

    def value(self, name: str, reason: str | None = None) -> float:
        """Value of a counter; with labels the sum over all reasons, or that of one reason."""
        with self._lock:
            return sum(v for (n, r), v in self._values.items() if n == name and reason in (None, r))

    def miss(self, reason: str, what: str) -> None:
        """Count one chunk that was not served, and log it."""
        count = self.add("misses", reason=reason)
        self.log.warning(f"miss {reason}", f"miss, reason {reason} (number {count:.0f}): {what}")

    def refuse(self, reason: str, what: str) -> None:
        """Count one chunk that was not encoded, and log it."""
        count = self.add("refused", reason=reason)
        self.log.warning(f"refused {reason}", f"not stored, reason {reason} (number {count:.0f}): {what}")


METRICS = Metrics()
