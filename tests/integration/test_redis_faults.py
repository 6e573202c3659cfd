"""`RedisStore` when things break: calls end in time, with the right error, and work again when the fault is gone.

Values embed their key and a checksum: no fault may ever make a read return another key's value or a part of one.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
from redis_server import RedisServer, free_port

from tq_offload.errors import (
    EntryTooLargeError,
    StoreAuthError,
    StoreError,
    StoreFullError,
    StoreIOError,
    StoreTimeoutError,
    StoreUnavailableError,
)
from tq_offload_connectors import byte_store
from tq_offload_connectors.redis import RedisSettings, RedisStore
from tq_offload_connectors.redis import node as redis_node

pytestmark = pytest.mark.integration

Result = TypeVar("Result")
QUICK = {"backoff_base_s": 0.01, "backoff_cap_s": 0.05, "socket_timeout_s": 1.0}


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with RedisServer() as started:
        yield started


def connect(server: RedisServer, **options: object) -> RedisStore:
    return RedisStore(RedisSettings.from_url(server.url, **{**QUICK, **options}))


def sealed(key: str, size: int = 2_000) -> bytes:
    """A value that tells whose it is and whether it is whole."""
    body = key.encode().ljust(64, b"\0") + hashlib.shake_128(key.encode()).digest(size)
    return hashlib.blake2b(body, digest_size=16).digest() + body


def check(key: str, found: memoryview | None) -> bool:
    """Whether there is a value. Fails if it is not the one of that key."""
    if found is None:
        return False
    data = bytes(found)
    assert hashlib.blake2b(data[16:], digest_size=16).digest() == data[:16], f"a part of a value under {key}"
    owner = data[16:80].rstrip(b"\0").decode()
    assert owner == key, f"the value of {owner} under {key}"
    return True


def put(store: RedisStore, key: str, size: int = 2_000) -> None:
    store.put(key, memoryview(sealed(key, size)))


def within(seconds: float, call: Callable[[], object], error: type[StoreError]) -> StoreError:
    """The error of exactly that type that the call raises, in time."""
    start = time.monotonic()
    with pytest.raises(error) as caught:
        call()
    assert time.monotonic() - start < seconds
    assert type(caught.value) is error
    return caught.value


def at_last(call: Callable[[], Result], patience_s: float = 5.0) -> Result:
    """What the call returns when it stops raising."""
    end = time.monotonic() + patience_s
    while True:
        try:
            return call()
        except StoreError:
            if time.monotonic() > end:
                raise
            time.sleep(0.002)


def test_kill_and_restart_during_traffic(server: RedisServer) -> None:
    wrong: list[BaseException] = []
    done, failed = [0] * 4, [0] * 4
    slowest = [0.0] * 4
    stop = threading.Event()

    def work(me: int) -> None:
        count = 0
        while not stop.is_set():
            key = f"k{(count * 7 + me) % 11}"
            count += 1
            start = time.monotonic()
            try:
                if count % 2:
                    put(store, key, 100_000)
                else:
                    check(key, store.get(key))
                done[me] += 1
            except (StoreUnavailableError, StoreTimeoutError):
                failed[me] += 1
                time.sleep(0.001)
            except BaseException as error:
                wrong.append(error)
                return
            slowest[me] = max(slowest[me], time.monotonic() - start)

    with connect(server) as store:
        threads = [threading.Thread(target=work, args=(me,)) for me in range(4)]
        for thread in threads:
            thread.start()
        for _ in range(4):
            time.sleep(0.3)
            server.kill()
            time.sleep(0.1)
            server.start()
        before = list(done)
        end = time.monotonic() + 10
        while not wrong and time.monotonic() < end and any(map(int.__le__, done, before)):
            time.sleep(0.01)
        stop.set()
        for thread in threads:
            thread.join(10)
        assert wrong == []
        assert all(map(int.__gt__, done, before)), "no call works after the restart"
        assert all(failed), "the kill was not noticed"
        assert max(slowest) < 5


def test_a_dead_server_costs_microseconds(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = []
    connection = redis_node.Node._connection
    monkeypatch.setattr(
        redis_node.Node, "_connection", lambda self: attempts.append(time.monotonic()) or connection(self)
    )
    with connect(server, backoff_base_s=0.4, backoff_cap_s=0.8, retries=2) as store:
        put(store, "k")
        server.kill()
        attempts.clear()
        within(1, lambda: store.get("k"), StoreUnavailableError)
        assert len(attempts) == 3
        start = time.monotonic()
        calls = 0
        while time.monotonic() - start < 0.15:
            with pytest.raises(StoreUnavailableError, match="before it tries again"):
                store.get("k")
            calls += 1
        assert len(attempts) == 3, "it connected while it should wait"
        assert 0.15 / calls < 0.001
        assert store.put_many([("a", memoryview(b"1")), ("b", memoryview(b"2"))]).count(None) == 0
        server.start()
        put_time = time.monotonic()
        at_last(lambda: put(store, "k"))
        assert time.monotonic() - put_time < 1
        assert check("k", store.get("k"))


def test_nobody_listens() -> None:
    with RedisStore(RedisSettings.from_url(f"redis://127.0.0.1:{free_port()}", **QUICK)) as store:
        for call in (lambda: store.get("k"), lambda: put(store, "k"), lambda: list(store.keys()), store.usage):
            within(1, call, StoreUnavailableError)


def test_something_else_listens() -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as web:

        def serve() -> None:
            peer, _ = web.accept()
            with peer:
                peer.recv(1000)
                peer.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")

        web.settimeout(5)
        thread = threading.Thread(target=serve)
        thread.start()
        url = f"redis://127.0.0.1:{web.getsockname()[1]}"
        with RedisStore(RedisSettings.from_url(url, **QUICK)) as store:
            within(2, lambda: store.get("k"), StoreIOError)
        thread.join()


def test_a_paused_server(server: RedisServer) -> None:
    with connect(server, socket_timeout_s=0.2) as store:
        put(store, "k")
        server.command("CLIENT", "PAUSE", 700)
        within(0.6, lambda: store.get("k"), StoreTimeoutError)
        within(0.1, lambda: put(store, "k"), StoreUnavailableError)
        assert check("k", at_last(lambda: store.get("k")))
        put(store, "k")


@pytest.mark.parametrize("many", [False, True])
def test_a_reply_that_comes_late_is_never_another_keys(server: RedisServer, many: bool) -> None:
    keys = [f"k{i}" for i in range(6)]
    with connect(server, socket_timeout_s=0.15, backoff_base_s=0.001, backoff_cap_s=0.001) as store:
        for key in keys:
            put(store, key)
        for round_ in range(3):
            late = keys[round_]
            server.command("CLIENT", "PAUSE", 250)
            within(0.6, lambda late=late: store.get_many([late, "k5"]) if many else store.get(late), StoreTimeoutError)
            end = time.monotonic() + 0.4
            while time.monotonic() < end:  # before, while and after the late reply arrives
                for key in keys:
                    try:
                        assert check(key, store.get(key))
                    except (StoreTimeoutError, StoreUnavailableError):
                        time.sleep(0.001)
        for key in keys:
            assert check(key, at_last(lambda key=key: store.get(key)))


@pytest.mark.parametrize("own_client", [False, True])
def test_an_interrupt_between_question_and_answer(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch, own_client: bool
) -> None:
    import redis

    interrupt = [False]

    def interrupted(read: Callable[..., object]) -> Callable[..., object]:
        def wrapper(*arguments: object) -> object:
            if interrupt[0]:
                interrupt[0] = False
                raise KeyboardInterrupt
            return read(*arguments)

        return wrapper

    monkeypatch.setattr(redis_node.ReplyReader, "_receive", interrupted(redis_node.ReplyReader._receive))
    monkeypatch.setattr(redis_node, "_read", interrupted(redis_node._read))
    with redis.Redis(port=server.port) as client:
        options = RedisSettings.from_url(server.url, **QUICK)
        with RedisStore(options, client=client if own_client else None) as store:
            for key in ("a", "b", "c"):
                put(store, key)
            for _ in range(3):
                server.freeze()  # the reply is still to come when the connection is used next
                try:
                    interrupt[0] = True
                    with pytest.raises(KeyboardInterrupt):
                        store.get("a")
                    thaw = threading.Timer(0.1, server.thaw)
                    thaw.start()
                    assert check("b", store.get("b"))
                    assert check("c", store.get("c"))
                    thaw.join()
                finally:
                    server.thaw()


@pytest.mark.parametrize("receives", [0, 1, 2, 5])
def test_an_interrupt_within_a_record(server: RedisServer, monkeypatch: pytest.MonkeyPatch, receives: int) -> None:
    left = [-1]
    receive = redis_node.ReplyReader._receive

    def interrupted(self: redis_node.ReplyReader, into: memoryview) -> int:
        left[0] -= 1
        if left[0] == -1:
            raise KeyboardInterrupt
        return receive(self, into)

    monkeypatch.setattr(redis_node.ReplyReader, "_receive", interrupted)
    with connect(server, max_connections=1) as store:
        for key in ("a", "b", "c"):
            put(store, key, 9_000_000)
        for _ in range(3):
            left[0] = receives
            with pytest.raises(KeyboardInterrupt):
                store.get("a")
            for key in ("b", "a", "c"):
                assert check(key, store.get(key))


CANCELLED = """
import collections, ctypes, json, random, sys, threading, time
from test_redis_faults import at_last, check, put
from tq_offload.errors import StoreError
from tq_offload_connectors.redis import RedisSettings, RedisStore

class CancelledError(Exception):
    pass

seen, wrong, stop = collections.Counter(), [], threading.Event()
threading.excepthook = sys.unraisablehook = lambda arguments: None  # it may hit the loop and finalizers too
keys = [f"k{i}" for i in range(5)]

def work():
    while not stop.is_set():
        for key in keys:
            try:
                check(key, store.get(key))
                seen["reads"] += 1
            except CancelledError:
                seen["cancelled"] += 1
            except AssertionError as error:
                wrong.append(str(error))
            except StoreError as error:
                seen[type(error).__name__ + (" busy" if "busy" in str(error) else "")] += 1

with RedisStore(RedisSettings.from_url(sys.argv[1], backoff_base_s=0.01, backoff_cap_s=0.05)) as store:
    for key in keys:
        put(store, key, 50_000)
    thread = threading.Thread(target=work)
    start = time.monotonic()
    while time.monotonic() < start + (2 if min(seen["reads"], seen["cancelled"]) > 50 else 30):
        if not thread.is_alive():
            thread = threading.Thread(target=work)
            thread.start()
        time.sleep(random.uniform(0.0003, 0.003))
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(CancelledError))
    stop.set()
    thread.join(10)
    for key in keys:
        assert check(key, at_last(lambda: store.get(key)))
print(json.dumps([seen, wrong]))
"""


def test_exceptions_that_other_threads_raise_in_a_caller(server: RedisServer) -> None:
    """As a job's time limit does it: at any byte code, also within redis-py and within the clean-up."""
    path = [str(Path(__file__).parent), *filter(None, sys.path)]
    code = f"import sys; sys.path[:0] = {path!r}\n{CANCELLED}"
    out = subprocess.run([sys.executable, "-c", code, server.url], capture_output=True, text=True, timeout=60)
    assert out.returncode == 0, out.stderr
    seen, wrong = json.loads(out.stdout)
    assert wrong == []
    assert seen["reads"] > 50, seen
    assert seen["cancelled"] > 50, seen
    assert not any("busy" in name for name in seen), f"interrupts use up the connections: {seen}"


def test_connections_that_are_killed_are_not_noticed(server: RedisServer) -> None:
    with connect(server) as store:
        for _ in range(20):
            put(store, "k")
            server.command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            assert check("k", store.get("k"))
        wrong: list[BaseException] = []
        stop = threading.Event()

        def work(me: int) -> None:
            try:
                while not stop.is_set():
                    put(store, f"k{me}", 200_000)
                    assert check(f"k{me}", store.get(f"k{me}"))
            except BaseException as error:
                wrong.append(error)

        threads = [threading.Thread(target=work, args=(me,)) for me in range(3)]
        for thread in threads:
            thread.start()
        for _ in range(10):
            time.sleep(0.05)
            server.command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        stop.set()
        for thread in threads:
            thread.join(10)
        assert wrong == []


def test_a_wrong_password() -> None:
    with RedisServer("--requirepass", "right") as server:
        for options in ({}, {"password": "wrong"}, {"username": "nobody", "password": "right"}):
            with connect(server, backoff_base_s=5, backoff_cap_s=5, **options) as store:
                within(1, lambda store=store: store.get("k"), StoreAuthError)
                within(0.1, lambda store=store: put(store, "k"), StoreAuthError)  # waits, and says why
        with connect(server, password="right") as store:
            put(store, "k")
            assert check("k", store.get("k"))


def test_a_password_that_changes_while_running() -> None:
    with RedisServer("--requirepass", "old") as server, connect(server, password="old") as store:
        put(store, "k")
        server.command("CONFIG", "SET", "requirepass", "new", password="old")
        server.command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes", password="new")
        within(1, lambda: store.get("k"), StoreAuthError)
        server.command("CONFIG", "SET", "requirepass", "old", password="new")
        assert check("k", at_last(lambda: store.get("k")))


def test_a_server_out_of_memory() -> None:
    with (
        RedisServer("--maxmemory", "8mb", "--maxmemory-policy", "noeviction") as server,
        connect(server, backoff_base_s=5, backoff_cap_s=5) as store,
    ):
        stored = []
        for key in (f"k{i}" for i in range(30)):
            if store.put_many([(key, memoryview(sealed(key, 500_000)))]) != [None]:
                break
            stored.append(key)
        assert 0 < len(stored) < 30
        within(1, lambda: put(store, "k30", 500_000), StoreFullError)
        many = [f"m{i}" for i in range(100)]
        errors = store.put_many([(key, memoryview(sealed(key, 50_000))) for key in many])
        assert {type(error) for error in errors} - {type(None)} == {StoreFullError}
        for key, error in zip(many, errors, strict=True):
            assert check(key, store.get(key)) == (error is None)
        for key in stored:
            assert check(key, store.get(key))  # a full server is not a dead one
        for key in stored:
            assert store.delete(key)
        put(store, "k")
        assert check("k", store.get("k"))


def test_a_value_over_the_servers_limit() -> None:
    with (
        RedisServer("--proto-max-bulk-len", "1mb") as server,
        connect(server, backoff_base_s=5, backoff_cap_s=5) as store,
    ):
        put(store, "old", 1_000_000)
        for key in ("new", "old"):
            within(1, lambda key=key: put(store, key, 1_400_000), EntryTooLargeError)
        assert not store.contains("new")
        assert check("old", store.get("old"))
        errors = store.put_many(
            [(key, memoryview(sealed(key, size))) for key, size in (("a", 10), ("b", 1 << 21), ("c", 10))]
        )
        assert [type(error) for error in errors] == [type(None), EntryTooLargeError, type(None)]
        assert server.command("INFO", "stats")["total_net_input_bytes"] < 1_300_000, "it was sent all the same"


def test_a_limit_that_the_server_does_not_tell() -> None:
    """The server hangs up in the middle of the value. It is refused, and the store works on."""
    with (
        RedisServer("--proto-max-bulk-len", "1mb", "--rename-command", "CONFIG", "") as server,
        connect(server) as store,
    ):
        put(store, "old")
        with pytest.raises((EntryTooLargeError, StoreUnavailableError)):
            put(store, "new", 8_000_000)
        assert check("old", at_last(lambda: store.get("old")))
        assert not store.contains("new")


def test_a_value_over_the_servers_limit_whose_parts_are_not() -> None:
    with RedisServer("--proto-max-bulk-len", "1mb") as server, connect(server) as store:
        put(store, "k", 1_100_000)
        assert check("k", store.get("k"))


def test_a_value_that_no_buffer_is_lent_for_is_not_read(server: RedisServer) -> None:
    def allocate(nbytes: int) -> memoryview:
        if nbytes > 1 << 20:
            raise EntryTooLargeError(f"{nbytes} bytes")
        return memoryview(bytearray(nbytes))

    with connect(server, backoff_base_s=5, backoff_cap_s=5, max_connections=1) as store:
        put(store, "k")
        put(store, "large", 64 << 20)
        before = server.command("INFO", "stats")["total_net_output_bytes"]
        files = open_files()
        for _ in range(3):
            error = within(1, lambda: store.get("large", allocate), EntryTooLargeError)
            assert str(error) == f"{(64 << 20) + 80} bytes"
            assert open_files() == files - 1, "its connection is still open"
            assert check("k", store.get("k", allocate))  # at once, over another connection
        assert server.command("INFO", "stats")["total_net_output_bytes"] - before < 3 * (32 << 20), "it was sent"
        assert check("large", store.get("large"))


@pytest.mark.parametrize("own_client", [False, True])
def test_no_memory_is_no_failure_of_the_server(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch, own_client: bool
) -> None:
    import redis

    def fails(*arguments: object, **options: object) -> None:
        raise MemoryError

    options = RedisSettings.from_url(server.url, **{**QUICK, "backoff_base_s": 5, "backoff_cap_s": 5})
    with redis.Redis(port=server.port) as client, RedisStore(options, client=client if own_client else None) as store:
        put(store, "a")
        put(store, "b")
        places = [(redis_node, "pack"), (redis_node, "_read") if own_client else (redis_node.ReplyReader, "_string")]
        if not own_client:
            places.append((byte_store.np, "empty"))
        for owner, name in places:
            with monkeypatch.context() as patch:
                patch.setattr(owner, name, fails)
                error = within(1, lambda: store.get("a"), StoreIOError)
            assert error.reason == "no_memory"
            assert check("b", store.get("b"))
            assert check("a", store.get("a"))


NO_FIELD_OF_OURS: tuple[object, ...] = ("HSET", "tq:k", "a", "b")
FOREIGN: list[tuple[object, ...]] = [
    ("SET", "tq:k", "x"), ("SET", "tq:k", ""), ("SETBIT", "tq:k", 5, 1), ("RPUSH", "tq:k", "a"), ("SADD", "tq:k", "a"),
    NO_FIELD_OF_OURS, ("XADD", "tq:k", "*", "a", "b"),
]  # fmt: skip
DAMAGES: list[tuple[object, ...]] = [
    *[("HDEL", "tq:k", field) for field in ("n", "0", "1", "2", "3")],
    ("HDEL", "tq:k", "0", "1", "2", "3"), ("HDEL", "tq:k", "n", "1", "2", "3"), ("HDEL", "tq:k", "n", "0", "1", "2"),
    *[("HSET", "tq:k", field, "short") for field in ("0", "1", "2", "3")],
    *[("HSET", "tq:k", field, b"x" * 3_000_000) for field in ("n", "0", "1", "2", "3")],
    *[("HSET", "tq:k", "n", n) for n in ("", "0", "1", "-1", "299079", "299081", " 299080", "2e5", "many", "\u0662")],
    *[("HSET", "tq:k", "n", "9" * count) for count in (7, 9, 10, 12, 13, 15, 19, 20, 40, 4_299, 5_000, 100_000)],
    ("HSET", "tq:k", "n", "1000000000", "0", ""), ("HSET", "tq:k", "0", "x", "1", b"x" * 2_000_000),
    ("HSET", "tq:k", "0", b"x" * 100_000), ("HINCRBY", "tq:k", "n", -1),
]  # fmt: skip
"""Of a record of 299,080 bytes in four parts, sizes 262128, 32752, 4080 and 120."""


@pytest.mark.parametrize("own_client", [False, True])
def test_what_another_program_left_under_a_key_is_replaced_and_removed(server: RedisServer, own_client: bool) -> None:
    import redis

    lent: list[int] = []

    def allocate(nbytes: int) -> memoryview:
        lent.append(nbytes)
        return memoryview(bytearray(nbytes))

    options = RedisSettings.from_url(server.url, **QUICK)
    with redis.Redis(port=server.port) as client, RedisStore(options, client=client if own_client else None) as store:
        put(store, "other")
        put(store, "k", 299_000)
        assert b"" not in server.command("HMGET", "tq:k", "0", "1", "2", "3")
        for damage in (*FOREIGN, *DAMAGES):
            for repair in (lambda: store.delete("k"), lambda: True):
                store.delete("k")
                if damage in DAMAGES:
                    put(store, "k", 299_000)
                server.command(*damage)
                found = store.get("k", allocate)
                assert found == b"" or damage == NO_FIELD_OF_OURS, damage  # no frame, whatever a reader checks
                has_length = damage in DAMAGES and (damage[0] != "HDEL" or "n" not in damage)
                assert store.contains("k") is has_length, damage  # without, the next put is not spared
                assert check("other", store.get_many(["k", "other"])[1])
                assert store.usage().entries == 2
                assert repair()
                put(store, "k", 299_000)
                assert check("k", store.get("k"))
    assert max(lent, default=0) <= 4 * 3_000_000  # what the first part bears out, whatever the length


def test_another_part_of_the_same_length_is_left_to_the_readers_checksum(server: RedisServer) -> None:
    with connect(server) as store:
        put(store, "k", 299_000)
        server.command("HSET", "tq:k", "2", "x" * 4_080)
        found = store.get("k")
        assert found is not None
        assert len(found) == 299_080
        with pytest.raises(AssertionError, match="a part of a value"):
            check("k", found)


def test_a_field_that_is_not_ours_harms_nothing(server: RedisServer) -> None:
    with connect(server) as store:
        put(store, "k")
        server.command("HSET", "tq:k", "4", "x", "a", "b")
        assert check("k", store.get("k"))


def test_a_replica_refuses_writes_and_serves_reads(server: RedisServer) -> None:
    with connect(server) as store:
        put(store, "k")
        server.command("CONFIG", "SET", "replica-serve-stale-data", "yes")
        server.command("REPLICAOF", "127.0.0.1", free_port())
        within(1, lambda: put(store, "k"), StoreIOError)
        assert check("k", store.get("k"))
        server.command("REPLICAOF", "NO", "ONE")
        put(store, "k")


def test_more_clients_than_the_server_takes() -> None:
    with RedisServer("--maxclients", "2") as server:
        import redis

        with redis.Redis(port=server.port) as first, redis.Redis(port=server.port) as second, connect(server) as store:
            first.ping()
            second.ping()
            within(1, lambda: put(store, "k"), StoreUnavailableError)
            first.close()
            second.close()
            at_last(lambda: put(store, "k"))
            assert check("k", store.get("k"))


def test_a_server_that_loads_its_data_again() -> None:
    with (
        RedisServer("--key-load-delay", "300", "--loading-process-events-interval-bytes", "1024") as server,
        connect(server) as store,
    ):
        assert not any(store.put_many([(f"k{i}", memoryview(sealed(f"k{i}", 10))) for i in range(2_000)]))
        server.command("SAVE")
        server.kill()
        server.start(wait=False)
        seen = set()
        while True:
            try:
                assert check("k1999", store.get("k1999"))
                break
            except StoreError as error:
                seen.add((type(error), "loading" in str(error)))
                time.sleep(0.005)
        assert (StoreUnavailableError, True) in seen
        assert {kind for kind, _ in seen} == {StoreUnavailableError}


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def connections() -> int:
    from redis.connection import Connection

    gc.collect()
    return sum(issubclass(type(found), Connection) for found in gc.get_objects())  # isinstance asks deprecated objects


@pytest.mark.parametrize("fault", ["killed", "frozen", "password"])
def test_failing_calls_leave_no_connections_or_threads(server: RedisServer, fault: str) -> None:
    quick = {"connect_timeout_s": 0.005, "socket_timeout_s": 0.005, "backoff_base_s": 0.001, "backoff_cap_s": 0.001}
    with connect(server, max_connections=4, **quick) as store:
        at_last(lambda: put(store, "k"))
        before, threads, objects = open_files(), threading.active_count(), connections()
        if fault == "killed":
            server.kill()
        elif fault == "frozen":
            server.freeze()
        else:
            server.command("CONFIG", "SET", "requirepass", "x")
            server.command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes", password="x")
        attempted = 0
        for _ in range(300 if fault == "frozen" else 1_000):
            with pytest.raises(StoreError) as caught:
                store.get("k")
            attempted += "before it tries again" not in str(caught.value)
            time.sleep(0.001)
        assert attempted > 100
        assert open_files() <= before
        assert threading.active_count() == threads
        assert connections() <= objects
        if fault == "killed":
            server.start()
        elif fault == "frozen":
            server.thaw()
        else:
            server.command("CONFIG", "SET", "requirepass", "", password="x")
        at_last(lambda: put(store, "k"))
        assert check("k", at_last(lambda: store.get("k")))
        assert open_files() <= before + 1
