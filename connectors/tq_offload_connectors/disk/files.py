"""Files of the disk store: how one is published as a whole, read as a whole, found, and cleaned up after."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Collection, Iterator
from types import TracebackType

from tq_offload.errors import EntryTooLargeError, StoreFullError, StoreIOError
from tq_offload_connectors.byte_store import Allocate, lend, no_memory
from tq_offload_connectors.disk.names import KEY_ATTRIBUTE, SUFFIX, TEMP_PREFIX, is_entry

__all__ = ["FULL", "TempFile", "make_folder", "os_errors", "read_entry", "regular_size", "scan"]

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Error numbers of a device or quota that is full."""

NOT_AN_ENTRY = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO})  # none, a symlink, a socket
READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC  # O_NONBLOCK: a FIFO must not block
SHARDS = frozenset(f"{i:02x}" for i in range(256))
MAX_ATTEMPTS = 100


@contextlib.contextmanager
def os_errors(folder: str) -> Iterator[None]:
    """The one boundary between errors of the system and those of stores.

    Raises:
        StoreFullError: For ENOSPC and EDQUOT.
        EntryTooLargeError: For EFBIG.
        StoreIOError: For every other OSError, and for MemoryError (reason `no_memory`).
    """
    try:
        yield
    except OSError as error:
        text = f"{folder}: {error.strerror or error}"
        if error.errno in FULL:
            raise StoreFullError(text) from error
        if error.errno == errno.EFBIG:
            raise EntryTooLargeError(text) from error
        raise StoreIOError(text) from error
    except MemoryError as error:
        raise no_memory(f"for what is asked of {folder}") from error


def make_folder(path: str) -> None:
    """Create a folder for its owner alone, and the folders above it, unless it is there."""
    os.makedirs(path, 0o700, exist_ok=True)


def regular_size(path: str) -> int | None:
    """Size in bytes of a regular file; None if there is none or something else."""
    try:
        status = os.lstat(path)
    except OSError as error:
        if error.errno in NOT_AN_ENTRY:
            return None
        raise
    return status.st_size if stat.S_ISREG(status.st_mode) else None


class TempFile:
    """A value on its way into the folder, in a file beside its place that is removed unless it is published.

    While it is written it is locked (flock), so that `scan` can tell an orphan from one that is in use: a lock ends
    with its process, whatever its id, container or host. Where locks are not supported orphans stay.

    Args:
        path: The place.
        data: Flat bytes.
        fsync: `none`; `data`: the data is on the device before it is published; `full`: the folder's entry, too.
        attribute: The key, to be noted where attributes are supported; None: the name tells it.
    """

    def __init__(self, path: str, data: memoryview, fsync: str, attribute: str | None = None) -> None:
        self._path, self._fsync = path, fsync
        self._fd, self._temp = _create_locked(os.path.dirname(path))
        try:
            done = 0
            while done < data.nbytes:
                done += os.write(self._fd, data[done:])
            if attribute is not None:
                with contextlib.suppress(OSError):
                    os.setxattr(self._fd, KEY_ATTRIBUTE, attribute.encode("utf-8", "surrogatepass"))
            if fsync == "data":
                os.fdatasync(self._fd)
            elif fsync == "full":
                os.fsync(self._fd)
            os.close(os.dup(self._fd))  # network file systems report failed writes at close; this keeps the lock
        except BaseException:
            self.__exit__(None, None, None)
            raise

    def publish(self) -> None:
        """Move it into its place, atomically."""
        os.replace(self._temp, self._path)
        self._temp = ""

    def sync_folder(self) -> None:
        """With `full`: wait until the entry of the folder is on the device, and that of the subfolder."""
        if self._fsync == "full":
            folder = os.path.dirname(self._path)
            for path in (folder, os.path.dirname(folder)):
                fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                try:
                    os.fsync(fd)
                finally:
                    os.close(fd)

    def __enter__(self) -> TempFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        if self._temp:
            with contextlib.suppress(OSError):
                os.unlink(self._temp)
        with contextlib.suppress(OSError):
            os.close(self._fd)


def _create_locked(folder: str) -> tuple[int, str]:
    """A new locked file. Between `open` and `flock` a scan may take it for an orphan; then there is another attempt."""
    for _ in range(MAX_ATTEMPTS):
        path = f"{folder}/{TEMP_PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            fd = os.open(path, flags, 0o600)
        except FileNotFoundError:
            make_folder(os.path.dirname(folder))
            make_folder(folder)
            continue
        try:
            if _lock(fd) is not False and os.fstat(fd).st_nlink:
                return fd, path
        except BaseException:
            os.close(fd)
            os.unlink(path)
            raise
        os.close(fd)
    raise OSError(errno.EAGAIN, "temporary files vanish as soon as they are made")


def _lock(fd: int) -> bool | None:
    """Whether the lock was got; None: this file system has no locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def read_entry(path: str, allocate: Allocate | None) -> tuple[memoryview, float] | None:
    """Read a whole file.

    Args:
        path: Its path.
        allocate: Lends the buffer; None: a new one.

    Returns:
        Its bytes, read-only, and its time of modification in seconds since the epoch; None if there is no regular file.

    Raises:
        OSError: Of the system.
        StoreIOError: It was cut off while it was read.
        StoreError: There is no buffer for it; see `lend`. Nothing was read.
    """
    try:
        fd = os.open(path, READ)
    except OSError as error:
        if error.errno in NOT_AN_ENTRY:
            return None
        raise
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            return None
        buffer = lend(allocate, status.st_size)
        _read_into(fd, buffer, path)
        return buffer.toreadonly(), status.st_mtime
    finally:
        os.close(fd)


def _read_into(fd: int, buffer: memoryview, path: str) -> None:
    done = 0
    while done < buffer.nbytes:
        count = os.preadv(fd, [buffer[done:]], done)
        if not count:
            raise StoreIOError(f"{path}: ends after {done} bytes, had {buffer.nbytes}")
        done += count


def scan(folder: str, known: Collection[str] = ()) -> dict[str, tuple[int, float]]:
    """Size in bytes and time of last use of all entries, under their names, in the order of that time.

    Removes orphaned temporary files. What cannot be read, and what no store wrote, is left out.

    Args:
        folder: The folder.
        known: Names that need not be checked.

    Raises:
        OSError: The folder itself cannot be listed.
    """
    found: list[tuple[float, str, int]] = []
    for shard in sorted(SHARDS & {entry.name for entry in _entries(folder)}):
        with contextlib.suppress(OSError):
            for entry in _entries(f"{folder}/{shard}"):
                if entry.name.startswith(TEMP_PREFIX):
                    _remove_orphan(entry.path)
                elif entry.name.endswith(SUFFIX):
                    name = f"{shard}/{entry.name}"
                    with contextlib.suppress(OSError):
                        status = entry.stat(follow_symlinks=False)
                        if stat.S_ISREG(status.st_mode) and (name in known or is_entry(name)):
                            found.append((status.st_mtime, name, status.st_size))
    return {name: (size, used) for used, name, size in sorted(found)}


def _entries(path: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as listing:
            return list(listing)
    except FileNotFoundError:
        return []


def _remove_orphan(path: str) -> None:
    with contextlib.suppress(OSError):
        fd = os.open(path, READ & ~os.O_RDONLY | os.O_RDWR)  # some network file systems lock only what can be written
        try:
            if stat.S_ISREG(os.fstat(fd).st_mode) and _lock(fd):
                os.unlink(path)
        finally:
            os.close(fd)
