"""`DiskStore`: one file for each value, published whole, in a folder that several processes may share."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Sequence

from tq_offload.errors import ConfigError, EntryTooLargeError, StoreClosedError, StoreFullError
from tq_offload_connectors.byte_store import Allocate, ByteStore, Usage, as_bytes, check_key
from tq_offload_connectors.disk.files import FULL, TempFile, make_folder, os_errors, read_entry, regular_size
from tq_offload_connectors.disk.index import FolderIndex
from tq_offload_connectors.disk.names import entry_key, entry_name, has_digest

__all__ = ["FSYNC", "DiskStore"]

FSYNC = ("none", "data", "full")
TOUCH_SECONDS = 60.0  # an entry's use is noted in its file at most so often


class DiskStore(ByteStore):
    """Values in files of a folder; the least recently used ones are evicted to keep the budget.

    The budget is the folder's, and counts file sizes: `du` shows more, as it rounds up to blocks, and files that are
    being written come on top. One process keeps it exactly. Several keep it by looking at the folder again every
    `resync_seconds`, so that it can be exceeded by what the others write in that time; a scan that takes long is made
    less often. Pins hold in their own process only. When an entry was last used is noted in its time of modification,
    once a minute at most, and so survives the process.

    A key over 200 bytes (percent-encoded) is noted in an attribute of its file; where the file system has none, other
    processes count and read that entry but do not list its key.

    Args:
        folder: The folder; made for its owner alone if it is not there. It may be read-only: then `problem` says so.
        capacity_bytes: Budget in bytes; None: none, but a full device still evicts.
        fsync: `none`: a crash of the machine may lose or damage what was just written; `data`: what is published is on
            the device; `full`: and stays published.
        resync_seconds: How often the folder is looked at for what others did.

    Raises:
        ConfigError: A setting that is not understood.
        StoreIOError: The folder can be neither made nor read.
    """

    kind = "disk"

    def __init__(
        self,
        folder: str | os.PathLike[str],
        capacity_bytes: int | None = None,
        fsync: str = "none",
        *,
        resync_seconds: float = 2.0,
    ) -> None:
        if capacity_bytes is not None and capacity_bytes < 1:
            raise ConfigError("capacity_bytes", capacity_bytes, "1 or more, or None")
        if fsync not in FSYNC:
            raise ConfigError("fsync", fsync, FSYNC)
        self._folder, self._capacity, self._fsync = os.path.abspath(folder), capacity_bytes, fsync
        self._index = FolderIndex(self._folder, resync_seconds)
        self._changing = threading.Lock()  # held for rename and unlink together with the index, never for data
        with os_errors(self._folder):
            if not os.path.isdir(self._folder):
                make_folder(self._folder)
            self._index.resync()

    @property
    def problem(self) -> str:
        """Why nothing can be written, or nothing."""
        allowed = os.access(self._folder, os.W_OK | os.X_OK, effective_ids=True)
        return "" if allowed else f"{self._folder} cannot be written"

    @property
    def writable(self) -> bool:
        """Whether the folder can be written, as far as its permissions tell."""
        return not self.problem

    def put(self, key: str, value: memoryview, *, owned: bool = False) -> None:
        """See `ByteStore.put`. Every failure of the system but a full device is a StoreIOError."""
        name, data = self._name(key), as_bytes(value)
        if self._capacity is not None and data.nbytes > self._capacity:
            raise EntryTooLargeError(f"{data.nbytes} bytes are more than the budget of {self._capacity}")
        with os_errors(self._folder):
            self._index.resync_if_due()
            self._make_room(name, data.nbytes)  # now, so that the device has it too
            with self._write(name, key, data) as temp:
                with self._changing:
                    self._make_room_locked(name, data.nbytes)  # again: another put may have used it
                    temp.publish()
                    self._index.note(name, data.nbytes)
                try:
                    temp.sync_folder()
                except OSError:
                    self._delete(name)
                    raise

    def get(self, key: str, allocate: Allocate | None = None) -> memoryview | None:
        """See `ByteStore.get`."""
        name = self._name(key)
        with os_errors(self._folder):
            found = read_entry(f"{self._folder}/{name}", allocate)
            if not self._index.agrees(name, None if found is None else found[0].nbytes, used=True):
                self._look_again(name)
            if found is None:
                return None
            value, used = found
            if time.time() - used > TOUCH_SECONDS:
                self._touch(name)
            return value

    def contains(self, key: str) -> bool:
        """See `ByteStore.contains`. Asks the file system."""
        name = self._name(key)
        with os_errors(self._folder):
            size = regular_size(f"{self._folder}/{name}")
            if not self._index.agrees(name, size):
                self._look_again(name)
            return size is not None

    def delete(self, key: str) -> bool:
        """See `ByteStore.delete`."""
        name = self._name(key)
        with os_errors(self._folder):
            return self._delete(name)

    def touch(self, keys: Sequence[str]) -> None:
        """See `ByteStore.touch`. Noted in this process alone; reads note it in the files."""
        self._index.touch([self._name(key) for key in keys])

    def pin(self, key: str) -> bool:
        """See `ByteStore.pin`. Other processes do not know of it."""
        return self.contains(key) and self._index.pin(entry_name(key))

    def unpin(self, key: str) -> bool:
        """See `ByteStore.unpin`."""
        self._index.unpin(self._name(key))
        return self.contains(key)

    def keys(self) -> Iterator[str]:
        """See `ByteStore.keys`. Pinned ones last."""
        self._resync_if_due()
        found = (entry_key(name, self._folder) for name in self._index.names())
        return (key for key in found if key is not None)

    def clear(self) -> int:
        """See `ByteStore.clear`."""
        self._resync_if_due()
        with os_errors(self._folder):
            return sum(self._delete(name, pinned=False) for name in self._index.names(pinned=False))

    def usage(self) -> Usage:
        """See `ByteStore.usage`. Of the folder, as of the last look at it."""
        self._resync_if_due()
        entries, nbytes, _ = self._index.totals()
        return Usage(entries, nbytes, self._capacity)

    def close(self) -> None:
        """Forget what is known of the folder; the files stay. Safe to call again."""
        self._index.close()

    def describe(self) -> str:
        """See `ByteStore.describe`."""
        budget = "no budget" if self._capacity is None else f"{self._capacity} bytes"
        return f"disk, {self._folder}, {budget}" + (", read-only" if self.problem else "")

    def _name(self, key: str) -> str:
        self._check_open()
        return entry_name(check_key(key))

    def _check_open(self) -> None:
        if self._index.closed:
            raise StoreClosedError(f"the disk store in {self._folder} is closed")

    def _resync_if_due(self) -> None:
        self._check_open()
        with os_errors(self._folder):
            self._index.resync_if_due()

    def _write(self, name: str, key: str, data: memoryview) -> TempFile:
        """The value in a temporary file. A full device evicts once."""
        path, attribute = f"{self._folder}/{name}", key if has_digest(name) else None
        try:
            return TempFile(path, data, self._fsync, attribute)
        except OSError as error:
            if error.errno not in FULL or not self._free_device(name, data.nbytes):
                raise
        return TempFile(path, data, self._fsync, attribute)

    def _make_room(self, name: str, nbytes: int) -> None:
        with self._changing:
            self._make_room_locked(name, nbytes)

    def _make_room_locked(self, name: str, nbytes: int) -> None:
        """Evict what is over the budget with an entry of that size. Called with `_changing`."""
        while self._capacity is not None:  # again, if a victim was pinned meanwhile
            victims = self._index.over(self._capacity, name, nbytes)
            if victims is None:
                pinned = self._index.totals()[2]
                raise StoreFullError(f"{self._folder}: no room for {nbytes} bytes: {pinned} bytes are pinned")
            if not victims:
                return
            for victim in victims:
                self._delete_locked(victim, pinned=False)

    def _free_device(self, name: str, nbytes: int) -> bool:
        """Evict as much as an entry of that size is short of on a full device. Returns False if there is not enough."""
        status = os.statvfs(self._folder)
        short = nbytes + status.f_frsize - status.f_bavail * status.f_frsize
        if short <= 0:  # a quota, or the number of files
            short = max(nbytes, 1)
        victims = self._index.victims(short, name)
        for victim in victims:
            self._delete(victim, pinned=False)
        return bool(victims)

    def _delete(self, name: str, *, pinned: bool = True) -> bool:
        with self._changing:
            return self._delete_locked(name, pinned=pinned)

    def _delete_locked(self, name: str, *, pinned: bool) -> bool:
        """Remove a file, if need be a pinned one. Called with `_changing`. Returns whether there was one."""
        path = f"{self._folder}/{name}"
        size = regular_size(path)
        if not self._index.forget(name, pinned=pinned) or size is None:
            return False
        try:
            os.unlink(path)
        except FileNotFoundError:
            return False
        except OSError:
            self._index.note(name, size)  # as just used, so that the next put tries another one
            raise
        return True

    def _look_again(self, name: str) -> None:
        """Take over what another process did to a file."""
        with self._changing:
            size = regular_size(f"{self._folder}/{name}")
            if size is None:
                self._index.forget(name, pinned=True)
            else:
                self._index.note(name, size)

    def _touch(self, name: str) -> None:
        """Note the use of an entry in its file, for other processes and later ones."""
        self._index.touched(name)
        with contextlib.suppress(OSError):  # another owner's file, a read-only device
            os.utime(f"{self._folder}/{name}", follow_symlinks=False)
