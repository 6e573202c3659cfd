"""The disk store where things go wrong for real: full and read-only devices, EIO, kill -9, several processes."""

import contextlib
import errno
import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from store_table import pattern, put, read, sealed
from support import make_tensor

from tq_offload.codec import TurboQuantCodec, cache_key_digest
from tq_offload.errors import StoreError, StoreFullError, StoreIOError
from tq_offload.layout import ChunkLayout, GroupLayout
from tq_offload_connectors.disk import FSYNC, DiskStore
from tq_offload_connectors.disk.names import SUFFIX, TEMP_PREFIX, entry_name

pytestmark = pytest.mark.integration
TESTS = Path(__file__).parents[1]
PYTHONPATH = os.pathsep.join([str(TESTS), str(TESTS.parent), str(TESTS.parent / "connectors")])
MIB = 1 << 20
KILLS, RACES = 200, 1000


def entries(folder: Path) -> dict[str, int]:
    """Size of every file with the name of an entry; another process may remove one meanwhile."""
    found = {}
    for path in folder.glob(f"??/*{SUFFIX}"):
        with contextlib.suppress(FileNotFoundError):
            found[path.name] = path.stat().st_size
    return found


def temporary(folder: Path) -> list[Path]:
    return list(folder.glob(f"??/{TEMP_PREFIX}*"))


# A device that is full, or read-only


@pytest.fixture
def device(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 4 MiB."""
    path = tmp_path / "device"
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", path], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {mounted.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", path], check=True)


def test_a_full_device_evicts_the_least_recently_used_once(device: Path) -> None:
    store = DiskStore(device / "store")
    for i in range(3):
        put(store, f"k{i}", pattern(MIB, i))
    store.get("k0")
    put(store, "new", pattern(MIB + 500_000, 9))
    assert list(store.keys()) == ["k2", "k0", "new"]
    assert read(store, "new") == pattern(MIB + 500_000, 9)
    assert read(store, "k0") == pattern(MIB, 0)
    assert temporary(store_folder := device / "store") == []
    assert store.usage().nbytes == sum(entries(store_folder).values())


def test_a_value_that_no_eviction_can_fit_evicts_nothing(device: Path) -> None:
    store = DiskStore(device / "store")
    for i in range(3):
        put(store, f"k{i}", pattern(MIB, i))
    with pytest.raises(StoreFullError, match=os.strerror(errno.ENOSPC)):
        put(store, "new", bytes(5 * MIB))
    assert sorted(store.keys()) == ["k0", "k1", "k2"]
    for i in range(3):
        store.pin(f"k{i}")
    with pytest.raises(StoreFullError):
        put(store, "new", bytes(2 * MIB))
    assert [read(store, f"k{i}") for i in range(3)] == [pattern(MIB, i) for i in range(3)]
    assert temporary(device / "store") == []


def test_a_full_device_works_again_when_there_is_room(device: Path) -> None:
    store = DiskStore(device / "store")
    put(store, "old", pattern(1000))
    store.pin("old")
    ballast = device / "of another program"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(MIB))
    for _ in range(3):
        with pytest.raises(StoreFullError):
            put(store, "new", pattern(MIB))
        with pytest.raises(StoreFullError):
            put(store, "old", pattern(MIB))
    assert read(store, "old") == pattern(1000)
    assert temporary(device / "store") == []
    ballast.unlink()
    put(store, "new", pattern(MIB))
    assert read(store, "new") == pattern(MIB)


def test_a_read_only_folder_serves_what_is_there(device: Path) -> None:
    folder = device / "store"
    put(DiskStore(folder), "k", pattern(100_000))
    left = (folder / entry_name("k")).parent / f"{TEMP_PREFIX}1-left"
    left.write_bytes(b"orphan")
    os.utime(folder / entry_name("k"), (1, 1))
    subprocess.run(["mount", "-o", "remount,ro", device], check=True)
    store = DiskStore(folder)
    assert read(store, "k") == pattern(100_000)
    assert store.usage().nbytes == 100_000
    assert not store.writable
    assert "cannot be written" in store.problem
    assert "read-only" in store.describe()
    for call in (lambda: put(store, "k", b"v"), lambda: put(store, "new", b"v"), lambda: store.delete("k")):
        with pytest.raises(StoreIOError):
            call()
    assert read(store, "k") == pattern(100_000)
    assert store.usage().entries == 1
    with pytest.raises(StoreIOError):
        DiskStore(device / "new")
    subprocess.run(["mount", "-o", "remount,rw", device], check=True)
    assert store.writable
    put(store, "new", b"v")
    assert read(store, "new") == b"v"


def test_permissions_are_respected() -> None:
    if os.geteuid():
        pytest.skip("takes root, to become another user")
    folder = Path(tempfile.mkdtemp())  # `tmp_path` is closed to others
    folder.chmod(0o755)
    try:
        put(DiskStore(folder), "k", b"v")
        (folder / entry_name("k")).parent.chmod(0o755)
        (folder / entry_name("k")).chmod(0o644)
        os.seteuid(65534)
        try:
            store = DiskStore(folder)
            assert read(store, "k") == b"v"
            assert not store.writable
            with pytest.raises(StoreIOError, match=os.strerror(errno.EACCES)):
                put(store, "k", b"w")
        finally:
            os.seteuid(0)
        (folder / entry_name("k")).chmod(0o600)
        folder.chmod(0o711)
        os.seteuid(65534)
        try:
            with pytest.raises(StoreIOError):
                store.get("k")
            with pytest.raises(StoreIOError):
                DiskStore(folder)
        finally:
            os.seteuid(0)
    finally:
        shutil.rmtree(folder)


# A device that fails

SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* The first write of a temporary file is short; the call named by FAIL then fails, once. */
static int failed, writes;
static int ours(int fd) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    return n > 0 && (path[n] = 0, strstr(path, ".tqf-tmp-") != NULL);
}
static int fails(int fd, const char *call) {
    if (failed || strcmp(getenv("FAIL"), call) || !ours(fd)) return 0;
    errno = EIO;
    return failed = 1;
}
ssize_t write(int fd, const void *data, size_t size) {
    ssize_t (*real)(int, const void *, size_t) = dlsym(RTLD_NEXT, "write");
    if (ours(fd) && writes++ == 0) return real(fd, data, size / 2);
    return fails(fd, "write") ? -1 : real(fd, data, size);
}
int fdatasync(int fd) {
    return fails(fd, "fdatasync") ? -1 : ((int (*)(int))dlsym(RTLD_NEXT, "fdatasync"))(fd);
}
int fsync(int fd) {
    return fails(fd, "fsync") ? -1 : ((int (*)(int))dlsym(RTLD_NEXT, "fsync"))(fd);
}
"""

VICTIM = """
import sys
from store_table import pattern, put, read
from tq_offload_connectors.disk import FSYNC, DiskStore
from tq_offload.errors import StoreError
store = DiskStore(sys.argv[1], 10_000_000, sys.argv[2])
try:
    put(store, "k", pattern(300_000, 2))
    print("stored")
except StoreError as error:
    print(type(error).__name__, error)
print(read(store, "k") == pattern(200_000, 1), store.usage().nbytes)
put(store, "k", pattern(300_000, 2))
print(read(store, "k") == pattern(300_000, 2), store.usage().nbytes)
"""


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that makes calls of the system fail."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    path = tmp_path_factory.mktemp("shim")
    (path / "shim.c").write_text(SHIM)
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", path / "shim.so", path / "shim.c", "-ldl"], check=True)
    return path / "shim.so"


@pytest.mark.parametrize(("call", "fsync"), [("write", "none"), ("fdatasync", "data"), ("fsync", "full")])
def test_an_error_of_the_device_leaves_the_old_value(call: str, fsync: str, shim: Path, tmp_path: Path) -> None:
    put(DiskStore(tmp_path), "k", pattern(200_000, 1))
    env = {**os.environ, "LD_PRELOAD": str(shim), "FAIL": call, "PYTHONPATH": PYTHONPATH}
    done = subprocess.run(
        [sys.executable, "-c", VICTIM, tmp_path, fsync], env=env, capture_output=True, text=True, check=True
    )
    failure, old, new = done.stdout.splitlines()
    assert failure.startswith("StoreIOError")
    assert os.strerror(errno.EIO) in failure
    assert (old, new) == ("True 200000", "True 300000")
    assert temporary(tmp_path) == []


# Several processes, and their sudden end


class Workers:
    """Starts processes of `disk_worker.py` and reads what they print."""

    def __init__(self) -> None:
        self._zygote = subprocess.Popen(
            [sys.executable, TESTS / "integration" / "disk_worker.py"],
            env={**os.environ, "PYTHONPATH": PYTHONPATH},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self._early: list[dict[str, Any]] = []

    def line(self, key: str) -> dict[str, Any]:
        """The next line with that key; others are kept."""
        for early in self._early:
            if key in early:
                self._early.remove(early)
                return early
        assert self._zygote.stdout is not None
        for text in self._zygote.stdout:
            line: dict[str, Any] = json.loads(text)
            assert "failed" not in line, line
            if key in line:
                return line
            self._early.append(line)
        raise AssertionError("the workers are gone")

    def start(self, job: str, **arguments: Any) -> int:
        """Start a job. Returns its process id when it is ready."""
        assert self._zygote.stdin is not None
        self._zygote.stdin.write(json.dumps({"job": job, **arguments}).encode() + b"\n")
        self._zygote.stdin.flush()
        pid = int(self.line("pid")["pid"])
        self.line("ready")
        return pid

    def kill(self, pid: int) -> None:
        """kill -9; returns when it is dead."""
        handle = os.pidfd_open(pid)
        signal.pidfd_send_signal(handle, signal.SIGKILL)
        assert select.select([handle], [], [], 10)[0]
        os.close(handle)

    def alive(self, pid: int) -> bool:
        return Path(f"/proc/{pid}").exists()

    def close(self) -> None:
        os.killpg(self._zygote.pid, signal.SIGKILL)  # with all its children
        self._zygote.communicate()


@pytest.fixture
def workers() -> Iterator[Workers]:
    started = Workers()
    yield started
    started.close()


@pytest.fixture(scope="module")
def frames(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[bytes]]:
    """Two valid frames for each of twelve keys, 20 kB to 2 MB."""
    codec = TurboQuantCodec()
    found: dict[str, list[bytes]] = {}
    for i in range(12):
        shape = (2, 1 + i, 16 * (1 + i), 512)
        x = make_tensor((2, 1, shape[2], 512), seed=i).expand(shape).contiguous()
        layout = ChunkLayout((GroupLayout.infer(x.shape, x.dtype, head_dim=64),))
        key = cache_key_digest(f"frame{i}")
        found[f"frame{i}"] = [bytes(codec.encode([x * (1 + j)], layout, key=key)) for j in range(2)]
    return found


@pytest.mark.slow
def test_kill_9_leaves_whole_frames_and_no_orphans(
    workers: Workers, frames: dict[str, list[bytes]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """200 writers are killed in the middle of their work, while one that lives on must not lose a temporary file."""
    pool, folder, stop = tmp_path / "pool", tmp_path / "store", tmp_path / "stop"
    pool.mkdir()
    for key, pair in frames.items():
        for j, frame in enumerate(pair):
            (pool / f"{key}@{j}").write_bytes(frame)
    common = {"folder": str(folder), "pool": str(pool), "stop": str(stop)}
    survivor = workers.start("store_frames", seed=0, prefix="live-", fsync="none", **common)
    pick, begin = random.Random(1), time.monotonic()
    orphans = reads = wrong = 0
    for kill in range(KILLS):
        pid = workers.start("store_frames", seed=kill, prefix="", fsync=FSYNC[kill % 3], **common)
        time.sleep(pick.uniform(0.001, 0.040))
        workers.kill(pid)
        left = [path for path in temporary(folder) if f"{TEMP_PREFIX}{pid}-" in path.name]
        orphans += len(left)
        store = DiskStore(folder)
        assert [path for path in temporary(folder) if f"{TEMP_PREFIX}{survivor}-" not in path.name] == []
        for key, pair in frames.items():
            for prefix in ("", "live-"):
                found = read(store, prefix + key)
                reads += found is not None
                wrong += found is not None and found not in pair
    stop.touch()
    last = workers.line("count")
    seconds = time.monotonic() - begin
    assert last["errors"] == []
    store = DiskStore(folder)
    on_disk = entries(folder)
    assert temporary(folder) == []
    assert (store.usage().entries, store.usage().nbytes) == (len(on_disk), sum(on_disk.values()))
    codec = TurboQuantCodec()
    for key in frames:
        codec.decode(store.get(key), key=cache_key_digest(key))
    with capsys.disabled():
        sys.stdout.write(
            f"\n{KILLS} kills, {orphans} orphans, {reads} reads, {wrong} wrong, {seconds:.1f} s; "
            f"the survivor: {last['count']} puts\n"
        )
    assert wrong == 0
    assert orphans > KILLS / 10, "the kills hit no writes: the test shows nothing"


@pytest.mark.slow
def test_racing_writers_leave_one_whole_value(
    workers: Workers, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two processes put each of 1,000 keys at the same moment; they and a third one read one of the two, whole."""
    folder, turns = tmp_path / "store", tmp_path / "turns"
    turns.write_bytes(bytes(8))
    begin = time.monotonic()
    for me in range(2):
        workers.start("race", folder=str(folder), turns=str(turns), me=me, keys=RACES)
    store = DiskStore(folder)

    def verdict(i: int) -> bool | None:
        found = read(store, f"k{i}")
        return None if found is None else found in [sealed(20_000 + i % 7 * 3000, 2 * i + me) for me in range(2)]

    reads = wrong = 0
    while (turn := min(memoryview(turns.read_bytes()).cast("I"))) < RACES:
        right = verdict(max(turn - 1, 0))  # what is being put
        reads += right is not None
        wrong += right is False
    wrong += sum(workers.line("wrong")["wrong"] for _ in range(2))
    wrong += sum(verdict(i) is not True for i in range(RACES))
    assert wrong == 0
    store._index.resync()
    on_disk = entries(folder)
    assert (store.usage().entries, store.usage().nbytes) == (RACES, sum(on_disk.values()))
    assert temporary(folder) == []
    with capsys.disabled():
        seconds = time.monotonic() - begin
        sys.stdout.write(f"\n{RACES} races, {reads} reads meanwhile, {wrong} wrong, {seconds:.1f} s\n")


@pytest.mark.slow
def test_two_writers_keep_a_common_budget(workers: Workers, tmp_path: Path) -> None:
    """Each alone would fill it: together they exceed it by no more than they write between two looks at the folder."""
    budget, count = 10_000_000, 400
    pids = [workers.start("fill", folder=str(tmp_path), capacity=budget, me=me, count=count) for me in range(2)]
    peak = 0
    while any(workers.alive(pid) for pid in pids):
        peak = max(peak, sum(entries(tmp_path).values()))
    usages = [workers.line("usage")["usage"] for _ in range(2)]
    assert 2 * count * 50_000 == 4 * budget
    assert 0.8 * budget < peak < 1.5 * budget
    assert max(usages) < 1.5 * budget
    store = DiskStore(tmp_path, budget)
    put(store, "last", b"v")
    assert store.usage().nbytes == sum(entries(tmp_path).values()) <= budget


def test_files_of_other_programs_stay(tmp_path: Path) -> None:
    """Through evictions, scans and `clear`."""
    notes = [tmp_path / "notes.txt", tmp_path / "00" / "notes.txt", tmp_path / "ff" / "model.tqf", tmp_path / "0.tqf"]
    for path in notes:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(pattern(50_000))
    store = DiskStore(tmp_path, 100_000)
    assert store.usage().entries == 0
    for i in range(300):
        put(store, f"k{i}", pattern(20_000))
    assert store.usage().nbytes == 100_000
    store.clear()
    with pytest.raises(StoreError):
        put(store, "k", pattern(100_001))
    assert all(path.read_bytes() == pattern(50_000) for path in notes)
    assert DiskStore(tmp_path).usage().entries == 0
