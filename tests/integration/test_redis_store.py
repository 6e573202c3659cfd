"""`RedisStore` on real servers: the table of every store, and what is Redis's own."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis_server import Certificates, RedisServer, free_port, make_certificates, redis_cluster
from store_table import STORE_TABLE, Check, check_name, pattern, put, read

from tq_offload.errors import (
    ConfigError,
    StoreAuthError,
    StoreClosedError,
    StoreError,
    StoreTimeoutError,
    StoreUnavailableError,
)
from tq_offload_connectors.redis import RedisSettings, RedisStore
from tq_offload_connectors.redis.node import Node

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer() as started:
        yield started


@pytest.fixture(autouse=True)
def _empty(request: pytest.FixtureRequest) -> None:
    for name in ("server", "cluster"):
        if name in request.fixturenames:
            found = request.getfixturevalue(name)
            for each in found if isinstance(found, list) else [found]:
                each.command("FLUSHALL")


def connect(server: RedisServer, **options: object) -> RedisStore:
    return RedisStore(RedisSettings.from_url(server.url, **options))


@pytest.fixture
def store(server: RedisServer) -> Iterator[RedisStore]:
    with connect(server) as opened:
        yield opened


@pytest.mark.parametrize("check", STORE_TABLE, ids=check_name)
def test_contract(check: Check, server: RedisServer) -> None:
    with connect(server) as store:
        check(store)


@pytest.mark.parametrize("check", STORE_TABLE, ids=check_name)
def test_contract_of_a_callers_client(check: Check, server: RedisServer) -> None:
    import redis

    with redis.Redis(port=server.port, protocol=3) as client, RedisStore(RedisSettings(), client=client) as store:
        check(store)


def record_exchanges(monkeypatch: pytest.MonkeyPatch) -> list[list[bytes]]:
    """The names of the commands of every exchange from now on."""
    exchanges: list[list[bytes]] = []
    exchange = Node._exchange

    def recording(self, commands, allocate):  # type: ignore[no-untyped-def]
        exchanges.append([bytes(command[0]) for command in commands])
        return exchange(self, commands, allocate)

    monkeypatch.setattr(Node, "_exchange", recording)
    return exchanges


def test_a_prefix_is_a_wall(server: RedisServer) -> None:
    prefixes = ("a*:", "ab:", "a[b]:", "a\\*:", "é?:", "tq:")
    stores = [connect(server, key_prefix=prefix) for prefix in prefixes]
    server.command("SET", "foreign", "x")
    for store in stores:
        for i in range(3):
            put(store, f"k{i}", b"v" * 10)
    for store in stores:
        assert sorted(store.keys()) == ["k0", "k1", "k2"]
        assert (store.usage().entries, store.usage().nbytes, store.usage().capacity) == (3, 30, None)
    for i, store in enumerate(stores):
        assert store.clear() == 3
        assert list(store.keys()) == []
        assert server.command("DBSIZE") == 1 + 3 * (len(stores) - i - 1)
        store.close()


def value_at(server: RedisServer, key: str) -> bytes:
    """The value at a full key, read without the store."""
    length, *parts = server.command("HMGET", key, "n", "0", "1", "2", "3")
    value = b"".join(parts)
    assert int(length) == len(value)
    return value


def test_keys_are_prefix_and_key(store: RedisStore, server: RedisServer) -> None:
    put(store, "some/key", b"v")
    assert server.command("KEYS", "*") == [b"tq:some/key"]
    assert value_at(server, "tq:some/key") == b"v"


def test_a_value_is_one_hash_of_its_length_and_four_parts(store: RedisStore, server: RedisServer) -> None:
    value = pattern(3_000_000)
    put(store, "k", value)
    found = server.command("HGETALL", "tq:k")
    assert sorted(found) == [b"0", b"1", b"2", b"3", b"n"]
    assert found[b"n"] == b"3000000"
    assert len(found[b"0"]) == (5 << 19) - 16
    assert found[b"0"] + found[b"1"] + found[b"2"] + found[b"3"] == value


def test_nothing_stays_of_the_value_before(store: RedisStore, server: RedisServer) -> None:
    put(store, "fresh", pattern(10))
    fresh = server.command("HGETALL", "tq:fresh")
    for size in (3_000_000, 0, 150_000, 10):
        put(store, "k", pattern(size))
        assert value_at(server, "tq:k") == pattern(size)
        assert read(store, "k") == pattern(size)
    assert server.command("HGETALL", "tq:k") == fresh
    assert store.memory_usage(["k"])[0] < 1_000


def test_the_server_takes_no_more_memory_than_the_values_have(store: RedisStore) -> None:
    """As strings the same values take 10 % more than they have, and up to 25 %."""
    rng = random.Random(0)
    sizes = [int(100_000 * 80 ** rng.random()) for _ in range(30)]
    for i, size in enumerate(sizes):
        put(store, f"k{i}", bytes(size))
    for used, size in zip(store.memory_usage([f"k{i}" for i in range(30)]), sizes, strict=True):
        assert used is not None
        assert size < used < 1.012 * size


def test_foreign_keys_under_the_prefix(store: RedisStore, server: RedisServer) -> None:
    put(store, "k", b"v")
    server.command("SET", b"tq:\xff\xfe", "not UTF-8")
    server.command("RPUSH", "tq:list", "not a string")
    assert sorted(store.keys()) == ["k", "list"]
    assert (store.usage().entries, store.usage().nbytes) == (3, 1)  # of the others, no length is known
    assert store.clear() == 3
    assert server.command("DBSIZE") == 0


def test_thousands_of_keys(store: RedisStore) -> None:
    count = 5_000
    assert not any(store.put_many([(f"k{i}", memoryview(b"%d" % i)) for i in range(count)]))
    assert sorted(store.keys()) == sorted(f"k{i}" for i in range(count))
    assert store.usage().entries == count
    assert store.contains_prefix([f"k{i}" for i in range(count)] + ["absent"]) == count
    assert store.clear() == count


def test_entries_expire(server: RedisServer) -> None:
    with connect(server, ttl_s=100) as store:
        put(store, "k", b"v")
        assert not any(store.put_many([("m", memoryview(b"v"))]))
        for key in ("tq:k", "tq:m"):
            assert 99_000 < server.command("PTTL", key) <= 100_000
    with connect(server, ttl_s=0.05) as store:
        put(store, "k", b"v")
        time.sleep(0.1)
        assert read(store, "k") is None
    with connect(server, ttl_s=100) as store, connect(server, ttl_s=50) as shorter:
        put(store, "k", b"v")
        put(shorter, "k", b"w")
        assert 49_000 < server.command("PTTL", "tq:k") <= 50_000
        put(store, "k", b"v")
        assert 99_000 < server.command("PTTL", "tq:k") <= 100_000


def test_a_put_without_a_time_ends_the_one_that_the_key_had(server: RedisServer) -> None:
    with connect(server, ttl_s=0.2) as expiring, connect(server) as store:
        for key in ("a", "b", "c", "string"):
            put(expiring, key, b"v")
        server.command("SET", "tq:string", "x", "PX", 200)
        put(store, "a", b"w")
        assert not any(store.put_many([("b", memoryview(b"w")), ("string", memoryview(b"w"))]))
        assert [server.command("PTTL", f"tq:{key}") for key in ("a", "b", "string")] == [-1] * 3
        assert 0 < server.command("PTTL", "tq:c") <= 200
        time.sleep(0.25)
        assert [read(store, key) for key in ("a", "b", "c", "string")] == [b"w", b"w", None, b"w"]


def test_a_value_in_place_of_another_type_expires(server: RedisServer) -> None:
    with connect(server, ttl_s=100) as store:
        server.command("SET", "tq:k", "x")
        put(store, "k", b"v")
        assert read(store, "k") == b"v"
        assert 99_000 < server.command("PTTL", "tq:k") <= 100_000


def test_pipelines_are_split_by_bytes(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with connect(server, pipeline_bytes=10_000) as store:
        exchanges = record_exchanges(monkeypatch)
        sizes = [4_000, 4_000, 4_000, 25_000, 1, 9_999, 1]
        errors = store.put_many([(f"k{i}", memoryview(pattern(size, i))) for i, size in enumerate(sizes)])
        assert errors == [None] * len(sizes)
        assert exchanges == [[b"HSET", b"PERSIST"] * count for count in (2, 1, 1, 2, 1)]
        for i, size in enumerate(sizes):
            assert read(store, f"k{i}") == pattern(size, i)


def test_lookups_and_reads_of_many_keys_are_one_round_trip(store: RedisStore, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in (0, 1, 3):
        put(store, f"k{i}", pattern(100, i))
    exchanges = record_exchanges(monkeypatch)
    assert store.contains_prefix([f"k{i}" for i in range(5)]) == 2
    found = store.get_many([f"k{i}" for i in range(5)])
    assert [None if value is None else bytes(value) for value in found] == [
        pattern(100, 0), pattern(100, 1), None, pattern(100, 3), None
    ]  # fmt: skip
    assert exchanges == [[b"HEXISTS"] * 5, [b"HMGET"] * 5]
    assert store.get_many([]) == []


def test_memory_usage_is_what_the_server_says(store: RedisStore, server: RedisServer) -> None:
    put(store, "k", pattern(50_000))
    found = store.memory_usage(["k", "absent"])
    assert found == [server.command("MEMORY", "USAGE", "tq:k"), None]
    assert found[0] is not None
    assert found[0] > 50_000


def test_reads_straight_into_a_lent_buffer(store: RedisStore) -> None:
    value = pattern(3_000_000)
    put(store, "k", value)
    lent = bytearray(len(value))
    found = store.get("k", lambda nbytes: memoryview(lent)[:nbytes])
    assert found == value
    assert lent == value
    assert found is not None
    assert found.readonly


def test_an_error_of_the_callers_allocate_reaches_it_and_harms_nobody(store: RedisStore) -> None:
    put(store, "a", pattern(300_000, 1))
    put(store, "b", pattern(300_000, 2))

    class CancelledError(Exception):
        pass

    def allocate(nbytes: int) -> memoryview:
        raise CancelledError(nbytes)

    for _ in range(3):
        with pytest.raises(CancelledError):
            store.get("a", allocate)
        assert read(store, "b") == pattern(300_000, 2)


def test_databases_and_the_unix_socket(server: RedisServer) -> None:
    with (
        connect(server, db=3) as third,
        RedisStore(RedisSettings.from_url(f"unix://{server.socket_path}?db=3")) as local,
        connect(server) as zeroth,
    ):
        put(third, "k", pattern(100_000))
        assert read(local, "k") == pattern(100_000)
        assert not zeroth.contains("k")


def test_commands_that_a_server_does_not_have() -> None:
    with (
        RedisServer("--rename-command", "UNLINK", "", "--rename-command", "CONFIG", "") as server,
        connect(server) as store,
    ):
        put(store, "k", pattern(2_000_000))
        put(store, "m", b"v")
        assert store.delete("k")
        assert not store.delete("k")
        assert store.clear() == 1


def test_the_value_limit_is_asked_for_once_and_for_large_values_only(
    store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchanges = record_exchanges(monkeypatch)
    large = (5 << 18) - 16  # the first with a part of more than a MiB
    put(store, "k", pattern(large - 1))
    assert exchanges == [[b"HSET", b"PERSIST"]]
    for _ in range(3):
        put(store, "k", pattern(large))
    assert exchanges[1:] == [[b"CONFIG"], *[[b"HSET", b"PERSIST"]] * 3]


def test_user_and_password_of_an_acl(server: RedisServer) -> None:
    secret = "p:w/@% é"
    server.command(
        "ACL", "SETUSER", "ap:p", "reset", "on", f">{secret}", "~mine:*", "+@read", "+@write", "+@connection", "+ping"
    )
    url = server.url.replace("redis://", "redis://ap%3Ap:p%3Aw%2F%40%25%20%C3%A9@")
    with (
        RedisStore(RedisSettings.from_url(url, key_prefix="mine:")) as by_url,
        connect(server, username="ap:p", password=secret, key_prefix="mine:") as by_option,
        connect(server, username="ap:p", password=secret, key_prefix="theirs:") as elsewhere,
    ):
        put(by_url, "k", pattern(2_000_000))  # CONFIG is denied
        assert read(by_option, "k") == pattern(2_000_000)
        assert by_option.clear() == 1
        for _ in range(3):
            with pytest.raises(StoreAuthError, match="permission"):
                put(elsewhere, "k", b"v")
        assert secret not in f"{by_url.describe()}{by_option.describe()}{by_option._settings}"


def test_what_is_not_permitted_does_not_stop_what_is(server: RedisServer) -> None:
    with connect(server) as writer:
        put(writer, "k", b"v")
    server.command("ACL", "SETUSER", "reader", "reset", "on", ">pw", "~*", "+@read", "+@connection")
    with connect(server, username="reader", password="pw") as store:
        for _ in range(3):
            with pytest.raises(StoreAuthError):
                put(store, "k", b"w")
            assert read(store, "k") == b"v"
        errors = store.put_many([("k", memoryview(b"w")), ("l", memoryview(b"w"))])
        assert [type(error) for error in errors] == [StoreAuthError] * 2


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("tls"))


# redis-py 5.0 leaves a socket whose handshake failed to the garbage collector.
@pytest.mark.filterwarnings("ignore:Exception ignored in. <socket:pytest.PytestUnraisableExceptionWarning")
def test_tls(certificates: Certificates, tmp_path: Path) -> None:
    other = make_certificates(tmp_path)
    with RedisServer(tls=certificates) as server:
        for url, options in (
            (server.tls_url, {"tls_ca_certs": str(certificates.ca)}),
            (server.tls_url.replace("127.0.0.1", "localhost"), {"tls_ca_certs": str(certificates.ca)}),
            (server.tls_url, {"tls_verify": False}),
        ):
            with RedisStore(RedisSettings.from_url(url, **options)) as store:
                put(store, "k", pattern(3_000_000))
                assert read(store, "k") == pattern(3_000_000)
        for url, options in (
            (server.tls_url, {}),
            (server.tls_url, {"tls_ca_certs": str(other.ca)}),
            (server.tls_url.replace("127.0.0.1", "127.1"), {"tls_ca_certs": str(certificates.ca)}),  # not its name
        ):
            with RedisStore(RedisSettings.from_url(url, **options)) as store, pytest.raises(StoreUnavailableError):
                store.contains("k")


def test_clients_that_cannot_carry_bytes_are_refused(server: RedisServer) -> None:
    import redis
    import redis.asyncio

    for client in (
        redis.Redis(port=server.port, decode_responses=True),
        redis.Redis.from_url(f"{server.url}?decode_responses=True"),
    ):
        with pytest.raises(ConfigError, match=r"decode_responses.*create the client without it"):
            RedisStore(RedisSettings(), client=client)
    for foreign in (redis.asyncio.Redis(port=server.port), object()):
        with pytest.raises(ConfigError, match=r"redis\.Redis"):
            RedisStore(RedisSettings(), client=foreign)


def test_a_callers_client_stays_open(server: RedisServer) -> None:
    import redis

    with redis.Redis(port=server.port, protocol=2) as client:
        store = RedisStore(RedisSettings(), client=client)
        put(store, "k", b"v")
        connection = client.client_id()
        store.close()
        with pytest.raises(StoreClosedError):
            store.get("k")
        assert value_at(server, "tq:k") == b"v"
        assert client.client_id() == connection


def test_close_ends_a_call_that_waits(server: RedisServer) -> None:
    store = connect(server, socket_timeout_s=30)
    put(store, "k", b"v")
    found: list[BaseException] = []

    def wait() -> None:
        try:
            store.get("k")
        except StoreError as error:
            found.append(error)

    server.freeze()
    try:
        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(0.2)
        store.close()
        thread.join(5)
        assert not thread.is_alive()
    finally:
        server.thaw()
    assert [type(error) for error in found] == [StoreClosedError]


def test_a_call_waits_for_a_free_connection_and_not_for_ever(server: RedisServer) -> None:
    with connect(server, max_connections=1, socket_timeout_s=0.3, backoff_cap_s=0.1) as store:
        put(store, "k", b"v")
        lent = threading.Event()

        def slowly(nbytes: int) -> memoryview:
            lent.wait(5)
            return memoryview(bytearray(nbytes))

        thread = threading.Thread(target=store.get, args=("k", slowly))
        thread.start()
        time.sleep(0.05)
        start = time.monotonic()
        with pytest.raises(StoreTimeoutError, match="busy"):
            store.get("k")
        assert 0.2 < time.monotonic() - start < 2
        lent.set()
        thread.join()
        assert read(store, "k") == b"v"  # congestion of our own does not put the store down
        assert server.command("INFO", "clients")["connected_clients"] <= 2


def test_a_forked_child_has_connections_of_its_own(store: RedisStore) -> None:
    put(store, "k", pattern(500_000))
    children = []
    for i in range(3):
        child = os.fork()
        if child == 0:
            try:
                for _ in range(20):
                    put(store, f"c{i}", pattern(1_000, i))
                    if read(store, "k") != pattern(500_000) or read(store, f"c{i}") != pattern(1_000, i):
                        os._exit(1)
                store.close()
                os._exit(0)
            finally:
                os._exit(2)
        children.append(child)
    for _ in range(20):
        assert read(store, "k") == pattern(500_000)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
    assert read(store, "k") == pattern(500_000)
    assert [read(store, f"c{i}") for i in range(3)] == [pattern(1_000, i) for i in range(3)]


def test_a_sentinel_names_the_master(server: RedisServer, tmp_path: Path) -> None:
    config = tmp_path / "sentinel.conf"
    config.write_text(f"sentinel monitor main 127.0.0.1 {server.port} 1\n")
    dead = free_port()
    with RedisServer() as second, RedisServer(config=config) as sentinel:
        url = f"redis-sentinel://127.0.0.1:{dead},127.0.0.1:{sentinel.port}/main"
        with RedisStore(RedisSettings.from_url(url, backoff_base_s=0.01, backoff_cap_s=0.02)) as store:
            put(store, "k", b"v")
            assert value_at(server, "tq:k") == b"v"
            sentinel.command("SENTINEL", "REMOVE", "main")
            sentinel.command("SENTINEL", "MONITOR", "main", "127.0.0.1", second.port, 1)
            assert read(store, "k") == b"v"  # no reason to ask again
            server.kill()
            try:
                put_at_last(store, "k", b"w")
                assert value_at(second, "tq:k") == b"w"
            finally:
                server.start()
        with (
            RedisStore(RedisSettings.from_url(url.replace("/main", "/other"))) as store,
            pytest.raises(StoreUnavailableError, match="other"),
        ):
            store.get("k")


def put_at_last(store: RedisStore, key: str, value: bytes, patience_s: float = 5.0) -> None:
    end = time.monotonic() + patience_s
    while True:
        try:
            put(store, key, value)
            return
        except (StoreUnavailableError, StoreTimeoutError):
            assert time.monotonic() < end
            time.sleep(0.01)


@pytest.fixture(scope="module")
def cluster() -> Iterator[list[RedisServer]]:
    with redis_cluster(3, "--cluster-require-full-coverage", "no") as started:
        yield started


def connect_cluster(cluster: list[RedisServer], **options: object) -> RedisStore:
    options = {"backoff_base_s": 0.01, "backoff_cap_s": 0.02, **options}
    return RedisStore(RedisSettings.from_url(cluster[0].url, cluster=True, **options))


@pytest.mark.parametrize("check", STORE_TABLE, ids=check_name)
def test_contract_on_a_cluster(check: Check, cluster: list[RedisServer]) -> None:
    with connect_cluster(cluster) as store:
        check(store)


def test_a_cluster_is_used_as_a_whole(cluster: list[RedisServer], monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [f"k{i}" for i in range(60)]
    with connect_cluster(cluster) as store:
        store.contains("k0")
        exchanges = record_exchanges(monkeypatch)
        assert not any(store.put_many([(key, memoryview(key.encode())) for key in keys]))
        assert store.contains_prefix([*keys, "absent"]) == 60
        assert [bytes(value or b"") for value in store.get_many(keys)] == [key.encode() for key in keys]
        assert len(exchanges) == 9  # three calls, a pipeline for each of three primaries
        assert all(server.command("DBSIZE") > 5 for server in cluster)
        assert sorted(store.keys()) == sorted(keys)
        assert None not in store.memory_usage(keys)
        put(store, "large", pattern(3_000_000))
        assert read(store, "large") == pattern(3_000_000)


def slot_and_owner(cluster: list[RedisServer], key: str) -> tuple[int, RedisServer]:
    slot = cluster[0].command("CLUSTER", "KEYSLOT", f"tq:{key}")
    return slot, cluster[[slot <= 5460, slot <= 10921, True].index(True)]


def test_a_cluster_that_moves_a_slot(cluster: list[RedisServer]) -> None:
    key = "moving"
    slot, source = slot_and_owner(cluster, key)
    target = next(server for server in cluster if server is not source)
    source_id, target_id = (str(s.command("CLUSTER", "MYID"), "ascii") for s in (source, target))
    with connect_cluster(cluster) as store:
        put(store, key, b"v")
        target.command("CLUSTER", "SETSLOT", slot, "IMPORTING", source_id)
        source.command("CLUSTER", "SETSLOT", slot, "MIGRATING", target_id)
        assert read(store, key) == b"v"
        source.command("MIGRATE", "127.0.0.1", target.port, f"tq:{key}", 0, 5000)
        assert read(store, key) == b"v"  # ASK
        assert store.get_many([key, key, "other"])[:2] == [b"v", b"v"]
        try:
            for server in (target, source, *cluster):
                server.command("CLUSTER", "SETSLOT", slot, "NODE", target_id)
            assert read(store, key) == b"v"  # MOVED
            put(store, key, b"w")
            assert value_at(target, f"tq:{key}") == b"w"
        finally:
            store.delete(key)
            for server in (source, target, *cluster):
                server.command("CLUSTER", "SETSLOT", slot, "NODE", source_id)


def test_a_dead_node_of_a_cluster_costs_only_its_keys(cluster: list[RedisServer]) -> None:
    keys = [f"k{i}" for i in range(30)]
    victim = cluster[1]
    lost = {key for key in keys if slot_and_owner(cluster, key)[1] is victim}
    assert 0 < len(lost) < 30
    with connect_cluster(cluster, socket_timeout_s=0.5) as store:
        assert not any(store.put_many([(key, memoryview(b"v")) for key in keys]))
        victim.freeze()
        try:
            errors = store.put_many([(key, memoryview(b"w")) for key in keys])
            failed = {key for key, error in zip(keys, errors, strict=True) if error is not None}
            assert failed == lost
            for key in set(keys) - lost:
                assert read(store, key) == b"w"
            with pytest.raises((StoreUnavailableError, StoreTimeoutError)):
                store.get(min(lost))
        finally:
            victim.thaw()
        put_at_last(store, min(lost), b"x", 10)
        assert read(store, min(lost)) == b"x"
