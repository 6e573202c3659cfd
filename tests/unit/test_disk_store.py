"""The disk store: the contract of every store, and what only it promises."""

import contextlib
import errno
import os
import socket
import stat
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from store_table import AWKWARD_KEYS, PINNING_TABLE, STORE_TABLE, TABLE_BYTES, Check, check_name, pattern, put, read

from tq_offload.errors import (
    ConfigError,
    EntryTooLargeError,
    StoreClosedError,
    StoreError,
    StoreFullError,
    StoreIOError,
)
from tq_offload_connectors.disk import FSYNC, DiskStore
from tq_offload_connectors.disk import files as disk_files
from tq_offload_connectors.disk.files import TempFile, os_errors
from tq_offload_connectors.disk.names import KEY_ATTRIBUTE, TEMP_PREFIX, entry_key, entry_name, is_entry

NEVER = 1e9


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("check", [*STORE_TABLE, *PINNING_TABLE], ids=check_name)
@pytest.mark.parametrize("capacity", [None, TABLE_BYTES], ids=["no-budget", "budget"])
def test_contract(check: Check, capacity: int | None, tmp_path: Path) -> None:
    with DiskStore(tmp_path / "store", capacity) as store:
        check(store)
    assert not [path for path in files(tmp_path) if path.name.startswith(TEMP_PREFIX)]


@pytest.mark.parametrize("fsync", FSYNC)
def test_a_file_is_exactly_its_value(fsync: str, tmp_path: Path) -> None:
    store = DiskStore(tmp_path / "new" / "store", fsync=fsync)
    put(store, "org/model@0@7f", pattern(10_000))
    (file,) = files(tmp_path)
    assert file.read_bytes() == pattern(10_000)
    assert file.name == "org%2Fmodel@0@7f.tqf"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "new" / "store").stat().st_mode) == 0o700


@pytest.mark.parametrize("key", AWKWARD_KEYS)
def test_names_can_be_read_back(key: str, tmp_path: Path) -> None:
    name = entry_name(key)
    shard, base = name.split("/")
    assert len(base.encode()) <= 210
    assert not base.startswith(".")
    assert is_entry(name)
    assert not is_entry(f"{(int(shard, 16) + 1) % 256:02x}/{base}")
    put(DiskStore(tmp_path), key, b"v")
    assert entry_key(name, str(tmp_path)) == key
    assert list(DiskStore(tmp_path).keys()) == [key]


def test_names_differ() -> None:
    assert len({entry_name(key) for key in AWKWARD_KEYS}) == len(AWKWARD_KEYS)


def test_a_long_key_without_attribute_is_counted_but_not_listed(tmp_path: Path) -> None:
    put(DiskStore(tmp_path), "k" * 300, b"value")
    os.removexattr(files(tmp_path)[0], KEY_ATTRIBUTE)
    store = DiskStore(tmp_path)
    assert (store.usage().entries, list(store.keys()), read(store, "k" * 300)) == (1, [], b"value")
    assert store.clear() == 1


def test_what_was_stored_outlives_the_store_in_the_order_of_use(tmp_path: Path) -> None:
    with DiskStore(tmp_path) as store:
        for i, key in enumerate(("a", "b", "c")):
            put(store, key, pattern(100, i))
            os.utime(tmp_path / entry_name(key), (1000 + i, 1000 + i))
        store.get("a")  # long not used: noted in the file
    store = DiskStore(tmp_path, 300)
    assert list(store.keys()) == ["b", "c", "a"]
    assert store.usage().nbytes == 300
    put(store, "d", pattern(100, 4))
    assert list(store.keys()) == ["c", "a", "d"]


def test_a_use_is_noted_once_a_minute_at_most(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    put(store, "a", b"v")
    now = time.time()
    for age, noted in ((30, False), (90, True)):
        os.utime(tmp_path / entry_name("a"), (now - age, now - age))
        store.get("a")
        assert (os.stat(tmp_path / entry_name("a")).st_mtime > now - 1) == noted


def test_the_budget_is_kept_exactly(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, 1000, resync_seconds=NEVER)
    for i in range(60):
        put(store, f"k{i * 7 % 25}", pattern(1 + i * 37 % 300))
        on_disk = sum(path.stat().st_size for path in files(tmp_path))
        assert store.usage().nbytes == on_disk <= 1000
    with pytest.raises(EntryTooLargeError):
        put(store, "k", pattern(1001))


def test_pinned_entries_stay_and_nothing_is_evicted_in_vain(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, 30)
    for key in ("a", "b", "c"):
        put(store, key, b"x" * 10)
    store.pin("a")
    store.pin("a")
    with pytest.raises(StoreFullError, match="10 bytes are pinned"):
        put(store, "d", b"x" * 21)
    assert sorted(store.keys()) == ["a", "b", "c"]
    put(store, "d", b"x" * 20)
    assert sorted(store.keys()) == ["a", "d"]
    put(store, "a", b"y" * 10)
    store.unpin("a")
    with pytest.raises(StoreFullError):
        put(store, "e", b"x" * 30)
    store.unpin("a")
    put(store, "e", b"x" * 30)
    assert list(store.keys()) == ["e"]


def test_what_is_pinned_while_it_is_about_to_be_evicted_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = DiskStore(tmp_path, 30, resync_seconds=NEVER)
    for key in ("a", "b", "c"):
        put(store, key, b"x" * 10)
    over = store._index.over

    def pin_late(*arguments: Any) -> list[str] | None:
        victims = over(*arguments)
        monkeypatch.setattr(store._index, "over", over)
        assert victims == [entry_name("a")]
        assert store.pin("a")
        return victims

    monkeypatch.setattr(store._index, "over", pin_late)
    put(store, "d", b"x" * 10)
    assert sorted(store.keys()) == ["a", "c", "d"]


@pytest.mark.parametrize(
    ("fsync", "calls"),
    [
        ("none", ["replace"]),
        ("data", ["fdatasync file", "replace"]),
        ("full", ["fsync file", "replace", "fsync folder", "fsync folder"]),
    ],
)
def test_what_reaches_the_device_and_when(
    fsync: str, calls: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def spy(name: str) -> None:
        real = getattr(os, name)

        def call(*arguments: Any) -> None:
            if isinstance(arguments[0], int):
                seen.append(f"{name} {'folder' if stat.S_ISDIR(os.fstat(arguments[0]).st_mode) else 'file'}")
            else:
                seen.append(name)
            real(*arguments)

        monkeypatch.setattr(os, name, call)

    store = DiskStore(tmp_path, fsync=fsync)
    for name in ("fsync", "fdatasync", "replace"):
        spy(name)
    put(store, "k", b"v")
    assert seen == calls


def test_a_full_folder_shrinks_at_the_next_put(tmp_path: Path) -> None:
    big = DiskStore(tmp_path)
    for i in range(10):
        put(big, f"k{i}", pattern(100))
    store = DiskStore(tmp_path, 450)
    assert store.usage().nbytes == 1000
    put(store, "new", pattern(100))
    assert store.usage().nbytes == sum(path.stat().st_size for path in files(tmp_path)) == 400


def test_what_another_process_does_is_seen(tmp_path: Path) -> None:
    """Two stores on one folder do not know of each other, as two processes do not."""
    one, two = DiskStore(tmp_path, resync_seconds=NEVER), DiskStore(tmp_path, resync_seconds=NEVER)
    put(one, "a", b"first")
    assert two.contains("a")
    assert two.pin("a")
    assert read(two, "a") == b"first"
    assert two.usage().nbytes == 5
    put(one, "a", b"longer than before")
    assert read(two, "a") == b"longer than before"
    assert two.usage().nbytes == 18
    one.delete("a")
    assert read(two, "a") is None
    assert (two.usage().entries, two.usage().nbytes) == (0, 0)
    put(one, "b", b"x")
    assert not two.contains("a")
    assert list(two.keys()) == []  # not looked at yet
    two._index.resync()
    assert list(two.keys()) == ["b"]


def test_a_scan_takes_over_what_others_used(tmp_path: Path) -> None:
    one = DiskStore(tmp_path, resync_seconds=NEVER)
    for key in ("a", "b", "c"):
        put(one, key, b"v")
    one._index.resync()
    one.get("a")
    assert list(one.keys()) == ["b", "c", "a"]
    one._index.resync()
    assert list(one.keys()) == ["b", "c", "a"], "the scan changed the order of this process's own uses"
    later = time.time() + 5
    os.utime(tmp_path / entry_name("b"), (later, later))
    one._index.resync()
    assert list(one.keys()) == ["c", "a", "b"]


def test_a_scan_keeps_the_order_of_own_uses(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, resync_seconds=NEVER)
    for i, key in enumerate(("a", "b", "c")):
        put(store, key, b"v")
        os.utime(tmp_path / entry_name(key), (1000 + i, 1000 + i))
    store._index.resync()
    for key in ("a", "b", "a"):  # noted in the files: a, then b
        time.sleep(0.02)  # the clock of files is coarse
        store.get(key)
    for _ in range(2):
        store._index.resync()
        assert list(store.keys()) == ["c", "b", "a"]


def test_a_change_during_a_scan_is_not_undone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tq_offload_connectors.disk import index as disk_index

    store = DiskStore(tmp_path, resync_seconds=NEVER)
    put(store, "gone", b"1")
    put(store, "grows", b"1")
    put(store, "stays", b"1")

    def scan_with_changes(folder: str, known: set[str]) -> dict[str, tuple[int, float]]:
        found = disk_files.scan(folder, known)
        store.delete("gone")
        put(store, "grows", b"22")
        put(store, "new", b"333")
        return found

    monkeypatch.setattr(disk_index, "scan", scan_with_changes)
    store._index.resync()
    assert sorted(store.keys()) == ["grows", "new", "stays"]
    assert store.usage().nbytes == 6


def test_a_folder_that_is_removed_is_made_again(tmp_path: Path) -> None:
    import shutil

    store = DiskStore(tmp_path / "store", 1000, resync_seconds=0)
    put(store, "a", b"v")
    shutil.rmtree(tmp_path / "store")
    assert store.get("a") is None
    assert store.usage().nbytes == 0
    put(store, "a", b"w")
    assert read(store, "a") == b"w"


def test_files_of_others_are_left_alone_and_never_block(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, 1000)
    for key in ("fifo", "socket", "link", "folder", "file"):
        put(store, key, b"v")
    shard = {key: tmp_path / entry_name(key) for key in ("fifo", "socket", "link", "folder", "file")}
    for key in ("fifo", "socket", "link", "folder"):
        shard[key].unlink()
    os.mkfifo(shard["fifo"])
    here = os.getcwd()
    os.chdir(shard["socket"].parent)  # names of sockets are short
    try:
        server = socket.socket(socket.AF_UNIX)
        server.bind(shard["socket"].name)
        server.close()
    finally:
        os.chdir(here)
    shard["link"].symlink_to(shard["file"])
    shard["folder"].mkdir()
    mine = shard["file"].parent
    others = [mine / "notes.txt", mine / "%zz.tqf", mine / "wrong-place.tqf", tmp_path / "index.db", mine / "%haa.tqf"]
    for path in others:
        path.write_bytes(b"not ours")
    os.mkfifo(mine / f"{TEMP_PREFIX}1-fifo")
    (tmp_path / "zz").mkdir()
    (tmp_path / "sub" / "00").mkdir(parents=True)
    for again in (store, DiskStore(tmp_path, 1000)):
        again._index.resync()
        assert list(again.keys()) == ["file"]
        assert again.usage().nbytes == 1
        for key in ("fifo", "socket", "link", "folder"):
            assert again.get(key) is None
            assert not again.contains(key)
            assert not again.delete(key)
        again.clear()
        put(again, "file", b"v")
    put(store, "fifo", b"w")  # takes the place of what is no entry
    assert read(store, "fifo") == b"w"
    with pytest.raises(StoreIOError):
        put(store, "folder", b"w")
    assert all(path.read_bytes() == b"not ours" for path in others)


def test_orphans_go_and_files_being_written_stay(tmp_path: Path) -> None:
    place = tmp_path / entry_name("k")
    temp = TempFile(str(place), memoryview(b"half"), "none")
    orphan = place.parent / f"{TEMP_PREFIX}{os.getpid()}-aa"
    orphan.write_bytes(b"left")
    store = DiskStore(tmp_path)
    assert not orphan.exists()
    assert len(files(tmp_path)) == 1
    assert store.usage().entries == 0
    temp.publish()
    temp.__exit__(None, None, None)
    assert read(store, "k") == b"half"


def test_a_scan_between_open_and_lock_costs_an_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock, scans = disk_files._lock, []

    def late_lock(fd: int) -> bool | None:
        if len(scans) < 3:
            scans.append(1)
            monkeypatch.setattr(disk_files, "_lock", lock)
            disk_files.scan(str(tmp_path))
            monkeypatch.setattr(disk_files, "_lock", late_lock)
        return lock(fd)

    store = DiskStore(tmp_path)
    monkeypatch.setattr(disk_files, "_lock", late_lock)
    put(store, "k", b"v")
    assert (len(scans), read(store, "k")) == (3, b"v")


def test_a_lent_buffer_of_another_size_is_refused(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    put(store, "k", b"value")
    for size in (4, 6):
        with pytest.raises(StoreIOError, match="lent"):
            store.get("k", lambda _, size=size: memoryview(bytearray(size)))
    with pytest.raises(StoreIOError, match="read-only"):
        store.get("k", lambda size: memoryview(bytes(size)))
    assert len(os.listdir("/proc/self/fd")) < 200


def test_a_file_that_no_buffer_is_lent_for_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = DiskStore(tmp_path)
    put(store, "k", b"value")
    os.truncate(tmp_path / entry_name("k"), 3 << 30)
    before = len(os.listdir("/proc/self/fd"))

    def allocate(size: int) -> memoryview:
        if size > 1 << 20:
            raise EntryTooLargeError(f"{size} bytes")
        return memoryview(bytearray(size))

    monkeypatch.setattr(os, "preadv", lambda *arguments: pytest.fail("it is read"))
    start = time.monotonic()
    with pytest.raises(EntryTooLargeError, match=f"^{3 << 30} bytes$"):
        store.get("k", allocate)
    assert time.monotonic() - start < 0.5
    assert len(os.listdir("/proc/self/fd")) == before


def test_no_memory_for_a_read_is_not_a_full_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = DiskStore(tmp_path)
    put(store, "k", b"value")

    def fails(*arguments: object) -> None:
        raise MemoryError

    for patched in ("tq_offload_connectors.byte_store.np.empty", "os.preadv"):
        with monkeypatch.context() as patch:
            patch.setattr(patched, fails)
            with pytest.raises(StoreIOError, match="no memory") as caught:
                store.get("k")
        assert caught.value.reason == "no_memory"
        assert read(store, "k") == b"value"


def test_a_file_that_is_cut_off_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    put(store, "k", pattern(10_000))

    def allocate(size: int) -> memoryview:
        os.truncate(tmp_path / entry_name("k"), 5000)
        return memoryview(bytearray(size))

    with pytest.raises(StoreIOError, match="ends after 5000"):
        store.get("k", allocate)


def test_the_value_is_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, value, seen = DiskStore(tmp_path), bytearray(pattern(1000)), []
    write = os.write

    def spy(fd: int, data: memoryview) -> int:
        seen.append(data.obj)
        return write(fd, data[:300])  # a short write

    monkeypatch.setattr(os, "write", spy)
    store.put("k", memoryview(value))
    assert read(store, "k") == value
    assert len(seen) == 4
    assert all(kept is value for kept in seen)


@pytest.mark.parametrize("number", sorted(errno.errorcode), ids=lambda number: errno.errorcode[number])
def test_every_error_number_is_mapped(number: int) -> None:
    expected = {errno.ENOSPC: StoreFullError, errno.EDQUOT: StoreFullError, errno.EFBIG: EntryTooLargeError}
    with pytest.raises(StoreError) as caught, os_errors("folder"):
        raise OSError(number, os.strerror(number))
    assert type(caught.value) is expected.get(number, StoreIOError)
    assert os.strerror(number) in str(caught.value)


CALLS = (
    "open", "close", "dup", "write", "fsync", "fdatasync", "replace", "unlink", "lstat", "fstat", "statvfs", "scandir",
    "makedirs", "preadv", "utime", "setxattr", "getxattr",
)  # fmt: skip


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EACCES, errno.ENOENT, errno.EROFS])
def test_whatever_call_fails_only_store_errors_come_out(
    call: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call of the system fails in turn, once for every method; what comes out, and what is left, is in order."""
    real = getattr(os, call)
    long = "k" * 300
    store = DiskStore(tmp_path / "s", 1000, "full", resync_seconds=0)
    methods: list[Any] = [
        lambda: put(store, "new", pattern(400)), lambda: put(store, "k", pattern(700)), lambda: put(store, long, b"v"),
        lambda: store.get("k"), lambda: store.contains("k"), lambda: store.delete("k"), lambda: list(store.keys()),
        lambda: store.pin("k"), lambda: store.unpin("k"), lambda: store.clear(), lambda: store.usage(),
        lambda: DiskStore(tmp_path / "s"), lambda: DiskStore(tmp_path / "other"), lambda: store.describe(),
    ]  # fmt: skip
    for method in methods:
        for key in ("k", "old"):
            put(store, key, pattern(300, 1))
        os.utime(store._folder + "/" + entry_name("k"), (1, 1))

        def failing(*args: Any, **kwargs: Any) -> Any:
            if call == "close":
                real(*args, **kwargs)
            raise OSError(number, os.strerror(number))

        with monkeypatch.context() as patch:
            patch.setattr(os, call, failing)
            with contextlib.suppress(StoreError):
                method()
        store._index.resync()
        assert read(store, "k") in (None, pattern(300, 1), pattern(700))
        on_disk = files(tmp_path / "s")
        assert store.usage().nbytes == sum(path.stat().st_size for path in on_disk if path.suffix == ".tqf")
        assert not [path for path in on_disk if path.suffix != ".tqf"]


def test_nothing_else_of_the_system_is_called() -> None:
    """The table of calls above is complete."""
    import ast

    quiet = {"path", "PathLike", "getpid", "access", "DirEntry"}
    used = set()
    for file in Path(disk_files.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
                used.add(node.attr)
    assert {name for name in used if not name.isupper()} - quiet == set(CALLS)


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, 1000)
    before = len(os.listdir("/proc/self/fd"))
    for i in range(50):
        put(store, f"k{i}", pattern(100))
        store.get(f"k{i}")
        store.get("absent")
        with pytest.raises(StoreError):
            store.get(f"k{i}", lambda size: memoryview(b""))
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_folder_that_is_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for folder in (tmp_path / "file", tmp_path / "file" / "store"):
        with pytest.raises(StoreIOError):
            DiskStore(folder)


def test_closed_stores_keep_their_files(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    put(store, "a", b"v")
    store.close()
    with pytest.raises(StoreClosedError):
        store.usage()
    assert read(DiskStore(tmp_path), "a") == b"v"


def test_the_budget_holds_with_many_threads(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, 100_000, resync_seconds=0.01)
    wrong: list[object] = []

    def work(me: int) -> None:
        try:
            for i in range(100):
                put(store, f"k{(i * 13 + me) % 40}", pattern(1 + (i * 997 + me) % 30_000))
                if store.usage().nbytes > 100_000:
                    wrong.append(store.usage())
        except StoreError as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(me,)) for me in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert store.usage().nbytes == sum(path.stat().st_size for path in files(tmp_path)) <= 100_000


@pytest.mark.parametrize("wrong", [{"capacity_bytes": 0}, {"fsync": "always"}])
def test_bad_settings_are_refused(wrong: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        DiskStore(tmp_path, **wrong)
