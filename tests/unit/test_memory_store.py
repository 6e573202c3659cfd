"""The memory store: the contract of every store, and what only it promises."""

import threading
import time

import pytest
from store_table import PINNING_TABLE, STORE_TABLE, TABLE_BYTES, Check, check_name, pattern, put, read

from tq_offload.errors import ConfigError, EntryTooLargeError, StoreClosedError, StoreFullError
from tq_offload_connectors.lru import LruIndex
from tq_offload_connectors.memory import MemoryStore


@pytest.mark.parametrize("check", [*STORE_TABLE, *PINNING_TABLE], ids=check_name)
def test_contract(check: Check) -> None:
    with MemoryStore(TABLE_BYTES) as store:
        check(store)


def test_usage_is_the_sum_of_the_lengths() -> None:
    store = MemoryStore(100)
    put(store, "a", b"x" * 40)
    put(store, "b", b"x" * 60)
    assert store.usage().nbytes == 100
    put(store, "a", b"x" * 10)
    assert (store.usage().entries, store.usage().nbytes, store.usage().capacity) == (2, 70, 100)
    store.delete("b")
    assert (store.usage().entries, store.usage().nbytes) == (1, 10)


def test_the_least_recently_used_goes_first() -> None:
    store = MemoryStore(30)
    for key in ("a", "b", "c"):
        put(store, key, b"x" * 10)
    store.get("a")
    assert list(store.keys()) == ["b", "c", "a"]
    store.contains("b")  # no use
    put(store, "d", b"x" * 11)
    assert list(store.keys()) == ["a", "d"]


def test_a_replacement_evicts_only_what_it_needs() -> None:
    store = MemoryStore(30)
    for key in ("a", "b", "c"):
        put(store, key, b"x" * 10)
    put(store, "a", b"y" * 10)
    assert list(store.keys()) == ["b", "c", "a"]
    put(store, "b", b"z" * 30)
    assert list(store.keys()) == ["b"]


def test_pinned_entries_stay_and_nothing_is_evicted_in_vain() -> None:
    store = MemoryStore(30)
    for key in ("a", "b", "c"):
        put(store, key, b"x" * 10)
    for _ in range(2):
        assert store.pin("a")
    with pytest.raises(StoreFullError, match="10 bytes are pinned"):
        put(store, "d", b"x" * 21)
    assert sorted(store.keys()) == ["a", "b", "c"]
    put(store, "d", b"x" * 20)
    assert sorted(store.keys()) == ["a", "d"]
    store.unpin("a")
    with pytest.raises(StoreFullError):
        put(store, "e", b"x" * 30)
    store.unpin("a")
    put(store, "e", b"x" * 30)
    assert list(store.keys()) == ["e"]


def test_a_replacement_keeps_the_pins_and_has_the_room_of_the_old_value() -> None:
    store = MemoryStore(10)
    put(store, "a", b"x" * 10)
    store.pin("a")
    put(store, "a", b"y" * 10)
    assert read(store, "a") == b"y" * 10
    with pytest.raises(StoreFullError):
        put(store, "b", b"x")
    store.unpin("a")
    put(store, "b", b"x")
    assert list(store.keys()) == ["b"]


def test_pins_outlive_a_delete_so_that_another_reader_keeps_its_own() -> None:
    store = MemoryStore(10)
    put(store, "a", b"x" * 10)
    store.pin("a")
    store.delete("a")
    put(store, "a", b"y" * 10)
    store.pin("a")
    store.unpin("a")  # the first reader is done
    with pytest.raises(StoreFullError):
        put(store, "b", b"x")


def test_a_value_over_the_budget_changes_nothing() -> None:
    store = MemoryStore(10)
    put(store, "a", b"x" * 10)
    with pytest.raises(EntryTooLargeError):
        put(store, "b", b"x" * 11)
    with pytest.raises(EntryTooLargeError):
        put(store, "a", b"x" * 11)
    assert read(store, "a") == b"x" * 10


def test_get_gives_the_kept_buffer_read_only() -> None:
    store = MemoryStore(1000)
    buffer = bytearray(b"x" * 100)
    store.put("owned", memoryview(buffer), owned=True)
    found = store.get("owned", lambda size: pytest.fail("asked for a buffer"))
    assert found is not None
    assert found.readonly
    assert found.obj is buffer
    put(store, "copied", b"y" * 100)
    assert store.get("copied") is store.get("copied")


def test_what_cannot_be_stored_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    import tq_offload_connectors.memory as module

    monkeypatch.setattr(module, "_copy", lambda data: pytest.fail("copied"))
    store = MemoryStore(10)
    store.put("a", memoryview(b"x" * 10), owned=True)
    store.pin("a")
    with pytest.raises(StoreFullError):
        put(store, "b", b"x")
    with pytest.raises(EntryTooLargeError):
        put(store, "b", b"x" * 11)
    store.close()
    with pytest.raises(StoreClosedError):
        put(store, "a", b"x")


def test_close_drops_everything() -> None:
    store = MemoryStore(1000)
    buffer = bytearray(100)
    store.put("a", memoryview(buffer), owned=True)
    store.close()
    buffer.clear()  # raises BufferError while a view of it is held


def test_eviction_does_not_walk_over_the_pinned() -> None:
    index = LruIndex()
    for i in range(100_000):
        index.set(f"k{i}", 1)
        index.pin(f"k{i}")
    index.set("free", 1)
    start = time.perf_counter()
    for _ in range(1000):
        assert index.victims(1, spare="") == ["free"]
    assert time.perf_counter() - start < 0.5  # 1000 walks take over a second


def test_the_budget_holds_at_every_moment_with_many_threads() -> None:
    store = MemoryStore(100_000)
    stop, seen = threading.Event(), []

    def watch() -> None:
        while not stop.is_set():
            seen.append(sum(len(value) for value in list(store._values.values())))
            time.sleep(0.0002)

    def work(me: int) -> None:
        for i in range(400):
            try:
                put(store, f"k{(i * 13 + me) % 40}", pattern(1 + (i * 997 + me) % 30_000))
            except StoreFullError:
                pytest.fail("full with nothing pinned")

    watcher = threading.Thread(target=watch)
    watcher.start()
    threads = [threading.Thread(target=work, args=(me,)) for me in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stop.set()
    watcher.join()
    assert max(seen) <= 100_000
    assert store.usage().nbytes == sum(len(read(store, key) or b"") for key in list(store.keys()))


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ConfigError):
        MemoryStore(0)
