"""5,000 puts and 5,000 gets with faults: counters add up exactly, and nothing is left behind."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lmcache")

from in_process_worker import Worker, metadata

from tq_offload.errors import StoreIOError, StoreTimeoutError
from tq_offload_connectors.byte_store import Allocate, ByteStore

ROUNDS, BATCH = 5000, 50
CHUNK = 16
MODEL = "some/model"
PUT_FAULTS = ("encode", "io", "bad frame", "timeout")  # every tenth put, in turn
GET_FAULTS = ("io", "timeout", "late", "no memory")  # every tenth get, in turn

pytestmark = [pytest.mark.integration, pytest.mark.slow]


def put_fault(n: int) -> str:
    return PUT_FAULTS[n // 10 % len(PUT_FAULTS)] if n % 10 == 9 else ""


def get_fault(n: int) -> str:
    return GET_FAULTS[n // 10 % len(GET_FAULTS)] if n % 10 == 4 else ""


class FaultyStore(ByteStore):
    """A real store that fails for the keys that the plan says; the number of a chunk is in its key."""

    def __init__(self, inner: ByteStore) -> None:
        self.inner, self.kind = inner, inner.kind

    def put(self, key: str, value: memoryview, *, owned: bool = False) -> None:
        fault = put_fault(number(key))
        if fault == "io":
            raise StoreIOError("injected")
        if fault == "timeout":
            raise StoreTimeoutError("injected")
        if fault == "bad frame":
            damaged = bytearray(value)
            damaged[len(damaged) // 2] ^= 1
            value = memoryview(damaged)
        self.inner.put(key, value, owned=owned)

    def get(self, key: str, allocate: Allocate | None = None) -> memoryview | None:
        fault = get_fault(number(key))
        if fault == "io":
            raise StoreIOError("injected")
        if fault == "timeout":
            raise StoreTimeoutError("injected")
        return self.inner.get(key, allocate)

    def contains(self, key: str) -> bool:
        return self.inner.contains(key)

    def delete(self, key: str) -> bool:
        return self.inner.delete(key)

    def keys(self) -> Any:
        return self.inner.keys()

    def usage(self) -> Any:
        return self.inner.usage()

    def clear(self) -> int:
        return self.inner.clear()

    def pin(self, key: str) -> bool:
        return self.inner.pin(key)

    def unpin(self, key: str) -> bool:
        return self.inner.unpin(key)

    def touch(self, keys: Sequence[str]) -> None:
        self.inner.touch(keys)

    def close(self) -> None:
        self.inner.close()


def number(name: str) -> int:
    return int(name.split("@")[3], 16) - 1


def resident_bytes() -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def put_all(w: Worker) -> None:
    keys = w.keys(ROUNDS)
    for start in range(0, ROUNDS, BATCH):
        batch = keys[start : start + BATCH]
        made = [w.chunk(1, CHUNK) for _ in batch]
        for n, (obj, _) in enumerate(made, start):
            if put_fault(n) == "encode":
                obj.tensor.view(-1)[0] = float("inf")
        w.backend.batched_submit_put_task(batch, [obj for obj, _ in made])
        for obj, _ in made:
            obj.ref_count_down()
        assert w.frames.drain(30.0)


def get_all(w: Worker) -> int:
    """Gets with a pin before and an unpin after, half of them by the asynchronous path. Returns chunks served."""
    served = 0
    for n, key in enumerate(w.keys(ROUNDS)):
        w.backend.contains(key, pin=True)
        fault = get_fault(n)
        held = hold_all_memory(w) if fault == "no memory" else []
        w.backend._timeout = 0.0 if fault == "late" else 30.0
        if n % 2:
            found = w.run(w.backend.batched_get_non_blocking("id", [key]))
        else:
            found = [obj for obj in w.backend.batched_get_blocking([key]) if obj is not None]
            w.backend.unpin(key)
        for obj in (*found, *held):
            obj.ref_count_down()
        served += len(found)
    return served


def hold_all_memory(w: Worker) -> list[Any]:
    held = []
    for tokens in (4096, 256, CHUNK, 1):
        while (obj := w.cpu.allocate(w.meta.get_shapes(tokens), w.meta.get_dtypes(), busy_loop=False)) is not None:
            held.append(obj)
    return held


def check_counters(w: Worker, rounds: int) -> None:
    ram, disk = (tier.counters for tier in w.frames.tiers)
    each = ROUNDS // 40 * rounds  # of each kind of fault
    for tier in (ram, disk):
        assert tier.value("puts") == ROUNDS * rounds
        assert tier.value("refused", "non_finite") == tier.value("refused") == each
        assert tier.value("failed", "io") == tier.value("failed", "timeout") == each
        assert tier.value("failed") == 2 * each
        assert tier.value("stored") == ROUNDS * rounds - 3 * each
        assert tier.value("present") == tier.value("dropped") == 0
        assert tier.value("gets") == tier.value("hits") + tier.value("misses")
        assert tier.value("misses", "io") == each
        assert tier.value("misses", "checksum") == tier.value("repairs", "checksum") == each
        assert tier.value("lookup_failures") == 0
    late = ram.value("misses", "timeout") + ram.value("hits")
    assert late + ram.value("misses", "no_memory") + 4 * each + ram.value("misses", "io") == ROUNDS * rounds


@pytest.mark.timeout(600)
def test_faults_leave_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tq_offload_connectors.in_process.objects.ALLOCATE_WAIT_S", 0.0)
    meta = metadata(kv_shape=(1, 2, CHUNK, 1, 64), chunk_size=CHUNK)
    extra = {"turboquant.ram_gb": 0.05, "turboquant.disk": str(tmp_path), "turboquant.queue_gb": 1}
    w = Worker(extra, meta=meta)
    try:
        for tier in w.frames.tiers:
            tier.store = FaultyStore(tier.store)
        baseline: tuple[int, int, int] | None = None
        for rounds in (1, 2):  # the first round warms up caches and pools
            put_all(w)
            served = get_all(w)
            w.check_baseline()
            assert 0 < served < ROUNDS
            check_counters(w, rounds)
            w.backend.clear()
            assert [tier.store.usage().nbytes for tier in w.frames.tiers] == [0, 0]
            found = (threading.active_count(), len(os.listdir("/proc/self/fd")), resident_bytes())
            if baseline is not None:
                assert found[:2] == baseline[:2]
                assert found[2] - baseline[2] < 4 << 20
            baseline = found
    finally:
        start = time.monotonic()
        w.close()
        assert time.monotonic() - start < 30
    assert not [t for t in threading.enumerate() if t.name.startswith("tq-")]
