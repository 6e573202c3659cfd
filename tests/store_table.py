"""What every `ByteStore` does: one function for each promise of the interface, called with an empty, open store.

    @pytest.mark.parametrize("check", STORE_TABLE, ids=check_name)
    def test_contract(check: Check, tmp_path: Path) -> None:
        with DiskStore(tmp_path) as store:
            check(store)

The store takes at least `TABLE_BYTES` bytes without evicting. `PINNING_TABLE` is for stores that pin and evict.
"""

from __future__ import annotations

import hashlib
import threading
from array import array
from collections.abc import Callable

import numpy as np
import pytest

from tq_offload.errors import EntryTooLargeError, StoreClosedError, StoreError, StoreIOError
from tq_offload_connectors.byte_store import MAX_KEY_BYTES, ByteStore

TABLE_BYTES = 16 << 20

AWKWARD_KEYS = (
    "a", "A", ".", "..", "/", "a/b", "../../etc/passwd", "a/../a", "//a", ".a", ".tqf-tmp-1-a", "a.tqf", "~a", "-rf *",
    "%", "%2F", "%61", "a%", "a b", " ", "\t", "a\nb", "a\r\nb", "\0", "a\0b", "é", "e\u0301", "日本語", "\U0001f600",
    "\ud800", "a" * 199, "b" * 200, "c" * 300, "/" * MAX_KEY_BYTES, "d" * MAX_KEY_BYTES,
    "é" * (MAX_KEY_BYTES // 2), "org/model@4@0@7f3a@bfloat16",
)  # fmt: skip
"""Keys that a store may mistake for a path, an option, an escape or another key."""


def pattern(size: int, seed: int = 0) -> bytes:
    """Bytes that depend on seed and position."""
    return hashlib.shake_128(str(seed).encode()).digest(size)


def sealed(size: int, seed: int) -> bytes:
    """A value of `size` + 16 bytes that `is_sealed` can tell from a mixture of two."""
    body = pattern(size, seed)
    return hashlib.blake2b(body, digest_size=16).digest() + body


def is_sealed(value: memoryview | bytes) -> bool:
    """True for what `sealed` made, whole."""
    data = bytes(value)
    return hashlib.blake2b(data[16:], digest_size=16).digest() == data[:16]


def put(store: ByteStore, key: str, value: bytes) -> None:
    """`store.put` of bytes."""
    store.put(key, memoryview(value))


def read(store: ByteStore, key: str) -> bytes | None:
    """`store.get` as bytes."""
    found = store.get(key)
    return None if found is None else bytes(found)


def absent_is_no_error(store: ByteStore) -> None:
    assert store.get("absent") is None
    assert not store.contains("absent")
    assert not store.delete("absent")
    assert not store.pin("absent")
    assert not store.unpin("absent")
    assert list(store.keys()) == []
    assert (store.usage().entries, store.usage().nbytes) == (0, 0)
    assert store.clear() == 0


def what_was_put_is_read(store: ByteStore) -> None:
    for size in (0, 1, 4095, 4096, 4097, 1 << 20):
        put(store, f"k{size}", pattern(size, size))
    for size in (0, 1, 4095, 4096, 4097, 1 << 20):
        assert read(store, f"k{size}") == pattern(size, size)
        assert store.contains(f"k{size}")
    found = store.get("k4096")
    assert found is not None
    assert (found.format, found.ndim, found.nbytes) == ("B", 1, 4096)


def any_contiguous_buffer_is_bytes(store: ByteStore) -> None:
    numbers = array("I", range(1000))
    store.put("numbers", memoryview(numbers))
    store.put("table", memoryview(bytes(range(6))).cast("B", (2, 3)))
    assert read(store, "numbers") == numbers.tobytes()
    assert read(store, "table") == bytes(range(6))
    with pytest.raises(StoreError):
        store.put("gaps", memoryview(b"abcdef")[::2])
    assert not store.contains("gaps")


def a_value_without_elements_is_empty(store: ByteStore) -> None:
    for owned, shape in enumerate([(0, 4), (4, 0), (0,), (2, 0, 3)]):
        store.put(f"k{shape}", memoryview(np.zeros(shape)), owned=bool(owned))
        assert read(store, f"k{shape}") == b""
    assert store.put_many([("many", memoryview(np.zeros((0, 4))))]) == [None]
    assert read(store, "many") == b""
    assert store.usage().nbytes == 0


def usage_counts_what_is_there(store: ByteStore) -> None:
    put(store, "a", pattern(1000))
    put(store, "b", pattern(500))
    assert store.usage().entries == 2
    assert store.usage().nbytes >= 1500
    put(store, "a", pattern(10))
    assert store.usage().entries == 2
    store.delete("b")
    assert store.usage().entries == 1


def a_second_put_replaces(store: ByteStore) -> None:
    for value in (b"first", b"the second, longer", b"3"):
        put(store, "k", value)
        assert read(store, "k") == value
    assert list(store.keys()) == ["k"]


def the_caller_may_reuse_its_buffer(store: ByteStore) -> None:
    buffer = bytearray(b"x" * 100)
    store.put("k", memoryview(buffer))
    buffer[:] = b"y" * 100
    assert read(store, "k") == b"x" * 100


def an_owned_buffer_reads_the_same(store: ByteStore) -> None:
    store.put("k", memoryview(bytearray(pattern(5000))), owned=True)
    assert read(store, "k") == pattern(5000)


def a_value_that_was_read_stays(store: ByteStore) -> None:
    put(store, "k", b"old" * 1000)
    replaced = store.get("k")
    put(store, "k", b"new" * 1000)
    deleted = store.get("k")
    store.delete("k")
    put(store, "k", b"NEW" * 1000)
    assert replaced is not None
    assert deleted is not None
    assert (bytes(replaced), bytes(deleted)) == (b"old" * 1000, b"new" * 1000)


def reads_into_a_lent_buffer(store: ByteStore) -> None:
    lent: list[memoryview] = []

    def allocate(size: int) -> memoryview:
        lent.append(memoryview(bytearray(size)))
        return lent[-1]

    for size in (0, 1, 70_001):
        put(store, "k", pattern(size, size))
        lent.clear()
        found = store.get("k", allocate)
        assert found is not None
        assert bytes(found) == pattern(size, size)
        assert [view.nbytes for view in lent] in ([], [size])
        assert all(view == found for view in lent)
    assert store.get("absent", allocate) is None


def no_memory(size: int) -> memoryview:
    """Lends nothing."""
    raise MemoryError


def too_large(size: int) -> memoryview:
    """Lends nothing."""
    raise EntryTooLargeError(f"{size} bytes")


UNFIT: tuple[tuple[Callable[[int], memoryview], type[StoreError], str], ...] = (
    (lambda size: memoryview(bytearray(size - 1)), StoreIOError, "io"),
    (lambda size: memoryview(bytearray(size + 1)), StoreIOError, "io"),
    (lambda size: memoryview(bytearray()), StoreIOError, "io"),
    (lambda size: memoryview(bytes(size)), StoreIOError, "io"),
    (lambda size: memoryview(bytearray(2 * size))[::2], StoreIOError, "io"),
    (no_memory, StoreIOError, "no_memory"),
    (too_large, EntryTooLargeError, "too_large"),
)
"""What lends a buffer that cannot take the value, and what a store that asks for one then raises."""


def a_buffer_that_cannot_take_the_value_is_an_error_of_that_read(store: ByteStore) -> None:
    """Also the next read works at once: the store itself has not failed."""
    put(store, "k", pattern(70_001))
    put(store, "other", b"v")
    for lend, wanted, reason in UNFIT:
        asked: list[int] = []

        def allocate(size: int, lend: Callable[[int], memoryview] = lend, asked: list[int] = asked) -> memoryview:
            asked.append(size)
            return lend(size)

        outcome: object = None
        try:
            outcome = store.get("k", allocate)
        except StoreError as error:
            outcome = type(error), error.reason
        assert outcome == ((wanted, reason) if asked else pattern(70_001))
        assert read(store, "other") == b"v"
        assert read(store, "k") == pattern(70_001)


def delete_removes(store: ByteStore) -> None:
    put(store, "k", b"v")
    assert store.delete("k")
    assert not store.contains("k")
    assert store.get("k") is None
    assert not store.delete("k")
    put(store, "k", b"w")
    assert read(store, "k") == b"w"


def keys_are_a_snapshot(store: ByteStore) -> None:
    for i in range(20):
        put(store, f"k{i}", b"v")
    seen, snapshot = [], store.keys()
    for key in snapshot:
        seen.append(key)
        store.delete(key)
        put(store, f"new{key}", b"v")
    assert sorted(seen) == sorted(f"k{i}" for i in range(20))


def any_text_is_a_key(store: ByteStore) -> None:
    for i, key in enumerate(AWKWARD_KEYS):
        put(store, key, pattern(50 + i, i))
    for i, key in enumerate(AWKWARD_KEYS):
        assert read(store, key) == pattern(50 + i, i), key
    assert store.usage().entries == len(AWKWARD_KEYS)
    assert sorted(store.keys()) == sorted(AWKWARD_KEYS)
    for key in AWKWARD_KEYS:
        assert store.delete(key), key
    assert list(store.keys()) == []


def bad_keys_are_refused(store: ByteStore) -> None:
    for key in ("", "k" * (MAX_KEY_BYTES + 1), "é" * (MAX_KEY_BYTES // 2 + 1)):
        for call in (
            lambda k: put(store, k, b"v"), store.get, store.contains, store.delete, store.pin, store.unpin
        ):  # fmt: skip
            with pytest.raises(StoreError):
                call(key)
    assert list(store.keys()) == []


def put_many_stores_what_it_can(store: ByteStore) -> None:
    items = [("a", memoryview(b"1")), ("", memoryview(b"2")), ("c", memoryview(b"3"))]
    errors = store.put_many(items)
    assert [type(error) for error in errors] == [type(None), StoreError, type(None)]
    assert (read(store, "a"), read(store, "c")) == (b"1", b"3")
    assert store.put_many([]) == []


def contains_prefix_stops_at_a_gap(store: ByteStore) -> None:
    for key in ("a", "b", "d"):
        put(store, key, b"v")
    assert store.contains_prefix([]) == 0
    assert store.contains_prefix(["a", "b", "c", "d"]) == 2
    assert store.contains_prefix(["c", "a"]) == 0
    assert store.contains_prefix(["d", "a", "b"]) == 3


def pins_do_not_stop_a_delete(store: ByteStore) -> None:
    put(store, "k", b"v")
    assert store.pin("k")
    put(store, "k", b"w")
    assert read(store, "k") == b"w"
    assert store.delete("k")
    assert not store.contains("k")
    assert not store.pin("k")
    assert not store.unpin("k")
    put(store, "k", b"x")
    assert store.unpin("k")
    assert store.unpin("k")


def clear_empties(store: ByteStore) -> None:
    for i in range(10):
        put(store, f"k{i}", b"v")
    assert store.clear() == 10
    assert list(store.keys()) == []
    assert (store.usage().entries, store.usage().nbytes) == (0, 0)


def closed_is_closed(store: ByteStore) -> None:
    put(store, "k", b"v")
    store.close()
    store.close()
    for call in (
        lambda: put(store, "k", b"v"), lambda: store.get("k"), lambda: store.contains("k"), lambda: store.delete("k"),
        lambda: store.pin("k"), lambda: store.unpin("k"), lambda: list(store.keys()), store.usage, store.clear,
        lambda: store.contains_prefix(["k"]),
    ):  # fmt: skip
        with pytest.raises(StoreClosedError):
            call()
    assert [type(error) for error in store.put_many([("k", memoryview(b"v"))])] == [StoreClosedError]
    assert isinstance(store.describe(), str)


def says_what_it_is(store: ByteStore) -> None:
    assert store.kind in ("memory", "disk", "redis")
    assert store.kind in store.describe()


def threads_see_whole_values(store: ByteStore) -> None:
    """Four threads put, read and delete three keys: every value that is read is one that was put, whole."""
    wrong: list[object] = []
    values = [sealed(size, size) for size in (100, 5_000, 60_000, 200_000)]

    def work(me: int) -> None:
        try:
            for i in range(60):
                key = f"k{(i * 7 + me) % 3}"
                put(store, key, values[(i + me) % len(values)])
                found = store.get(key)
                if found is not None and not is_sealed(found):
                    wrong.append(key)
                if i % 10 == me:
                    store.delete(key)
        except Exception as error:  # shown by the assertion below
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(me,)) for me in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    left = list(store.keys())
    assert all(is_sealed(read(store, key) or b"") for key in left)


def clear_keeps_what_is_pinned(store: ByteStore) -> None:
    for key in ("a", "b", "c"):
        put(store, key, b"v")
    assert store.pin("b")
    assert store.pin("b")
    assert store.clear() == 2
    assert list(store.keys()) == ["b"]
    assert store.unpin("b")
    assert store.clear() == 0
    assert store.unpin("b")
    assert store.clear() == 1


def touch_orders_entries_by_use(store: ByteStore) -> None:
    for key in ("a", "b", "c"):
        put(store, key, b"v")
    store.touch(["absent", "b", "a"])
    assert list(store.keys()) == ["c", "b", "a"]


Check = Callable[[ByteStore], None]

STORE_TABLE: tuple[Check, ...] = (
    absent_is_no_error,
    what_was_put_is_read,
    any_contiguous_buffer_is_bytes,
    a_value_without_elements_is_empty,
    usage_counts_what_is_there,
    a_second_put_replaces,
    the_caller_may_reuse_its_buffer,
    an_owned_buffer_reads_the_same,
    a_value_that_was_read_stays,
    reads_into_a_lent_buffer,
    a_buffer_that_cannot_take_the_value_is_an_error_of_that_read,
    delete_removes,
    keys_are_a_snapshot,
    any_text_is_a_key,
    bad_keys_are_refused,
    put_many_stores_what_it_can,
    contains_prefix_stops_at_a_gap,
    pins_do_not_stop_a_delete,
    clear_empties,
    closed_is_closed,
    says_what_it_is,
    threads_see_whole_values,
)
PINNING_TABLE: tuple[Check, ...] = (clear_keeps_what_is_pinned, touch_orders_entries_by_use)


def check_name(check: Check) -> str:
    """Its name, for the ids of a parametrised test."""
    return check.__name__
