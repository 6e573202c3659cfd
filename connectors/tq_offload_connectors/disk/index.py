"""What a process knows of a folder of entries: sizes, order of use, pins. Scans bring it in line with the folder."""

from __future__ import annotations

import threading
import time

from tq_offload_connectors.disk.files import scan
from tq_offload_connectors.lru import LruIndex

__all__ = ["FolderIndex"]

SCAN_SHARE = 0.05  # of the time may go into scans


class FolderIndex:
    """A `LruIndex` by file name. Thread-safe; its lock is never held while the system is called.

    Args:
        folder: The folder.
        resync_seconds: Time from scan to scan; more, if scans take long.
    """

    def __init__(self, folder: str, resync_seconds: float) -> None:
        self._folder, self._resync_seconds = folder, resync_seconds
        self._lock = threading.Lock()
        self._scanning = threading.Lock()
        self._lru = LruIndex()
        self._changed: set[str] | None = None  # names that this process changed since the scan that is on began
        self._touched: set[str] = set()  # names whose use this process noted since the last scan began
        self._last_scan = 0.0  # seconds since the epoch
        self._next_scan = 0.0  # monotonic
        self.closed = False

    def note(self, name: str, nbytes: int) -> None:
        """An entry is there, used just now."""
        with self._lock:
            if not self.closed:
                self._lru.set(name, nbytes)
                self._touched.add(name)
                self._mark(name)

    def forget(self, name: str, *, pinned: bool) -> bool:
        """An entry is gone, or about to go. Returns False, and does nothing, if it is pinned and must not be."""
        with self._lock:
            if not pinned and self._lru.is_pinned(name):
                return False
            self._lru.remove(name)
            self._mark(name)
            return True

    def agrees(self, name: str, nbytes: int | None, *, used: bool = False) -> bool:
        """Whether the folder was found as expected; if so, an entry that was used is the most recently used one."""
        with self._lock:
            if self._lru.size(name) != nbytes:
                return False
            if used and nbytes is not None:
                self._lru.touch(name)
            return True

    def touched(self, name: str) -> None:
        """This process noted the use of an entry in its file."""
        with self._lock:
            self._touched.add(name)

    def touch(self, names: list[str]) -> None:
        """Entries were used, in that order."""
        with self._lock:
            for name in names:
                if self._lru.size(name) is not None:
                    self._lru.touch(name)

    def pin(self, name: str) -> bool:
        """See `LruIndex.pin`."""
        with self._lock:
            return self._lru.pin(name)

    def unpin(self, name: str) -> bool:
        """See `LruIndex.unpin`."""
        with self._lock:
            return self._lru.unpin(name)

    def names(self, *, pinned: bool = True) -> list[str]:
        """Least recently used first; pinned ones last, or left out."""
        with self._lock:
            return self._lru.keys() if pinned else self._lru.free_keys()

    def totals(self) -> tuple[int, int, int]:
        """Entries, their bytes, and the bytes of pinned ones."""
        with self._lock:
            return len(self._lru), self._lru.nbytes, self._lru.pinned_nbytes

    def over(self, capacity: int, name: str, nbytes: int) -> list[str] | None:
        """What has to go if an entry gets that size: see `LruIndex.victims`. Empty: nothing."""
        with self._lock:
            short = self._lru.nbytes - (self._lru.size(name) or 0) + nbytes - capacity
            return self._lru.victims(short, spare=name)

    def victims(self, nbytes: int, name: str) -> list[str]:
        """The least recently used entries but `name` that hold `nbytes` bytes; none, if they do not hold so much."""
        with self._lock:
            return self._lru.victims(nbytes, spare=name) or []

    def close(self) -> None:
        """Forget everything."""
        with self._lock:
            self.closed = True
            self._lru = LruIndex()

    def resync_if_due(self) -> None:
        """Resync, unless that was done not long ago or another thread is at it. Raises OSError."""
        if time.monotonic() >= self._next_scan and self._scanning.acquire(blocking=False):
            try:
                self.resync()
            finally:
                self._scanning.release()

    def resync(self) -> None:
        """Scan the folder and take over what other processes did. Raises OSError."""
        start, start_epoch = time.monotonic(), time.time()
        with self._lock:
            known = set(self._lru.keys())
            self._changed, touched, self._touched = set(), self._touched, set()
        try:
            found = scan(self._folder, known)
            with self._lock:
                self._take_over(found, touched)
            self._last_scan = start_epoch
        finally:
            with self._lock:
                self._changed = None
            end = time.monotonic()
            self._next_scan = end + max(self._resync_seconds, (end - start) / SCAN_SHARE)

    def _take_over(self, found: dict[str, tuple[int, float]], touched: set[str]) -> None:
        """What this process changed during the scan, it knows better; the order of its own uses, too."""
        if self.closed:
            return
        mine = self._changed or set()
        for name in self._lru.keys():  # noqa: SIM118
            if name not in found and name not in mine:
                self._lru.remove(name)
        for name, (nbytes, used) in found.items():
            by_others = used > self._last_scan and name not in touched and name not in self._touched
            if name not in mine and (self._lru.size(name) != nbytes or by_others):
                self._lru.set(name, nbytes)

    def _mark(self, name: str) -> None:
        if self._changed is not None:
            self._changed.add(name)
