"""LMCache's Redis, RESP and lm connectors against real servers, with chunks compressed."""

from __future__ import annotations

import asyncio
import importlib.util
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lmcache", reason="these tests need the extra [lmcache]")

from redis_server import RedisServer, free_port
from remote_engine import CHUNK, FOUR_BIT, errors, groups_manager, make_metadata, open_engine, wait_for

__all__ = ["open_engine"]

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:opentelemetry.*"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

WAYS = ("single", "batched", "async")
BIG = {"kv_shape": (2, 2, 256, 2, 128), "chunk_size": 256}
MLA = {"use_mla": True, "kv_shape": (3, 1, CHUNK, 1, 576)}


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture(scope="module")
def lm_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """LMCache's own server."""
    port = free_port()
    log = (tmp_path_factory.mktemp("lm") / "server.log").open("wb")
    process = subprocess.Popen(
        [sys.executable, "-m", "lmcache.v1.server", "127.0.0.1", str(port)], stdout=log, stderr=log
    )

    def listens() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    wait_for(listens, 60)
    yield port
    process.kill()
    process.wait()
    log.close()


@pytest.fixture(params=["redis", "resp", "lm"])
def url(request: pytest.FixtureRequest) -> str:
    if request.param == "lm":
        return f"lm://127.0.0.1:{request.getfixturevalue('lm_port')}"
    if request.param == "resp" and importlib.util.find_spec("lmcache.lmcache_redis") is None:
        pytest.skip("this LMCache is built without its native Redis client")
    server = request.getfixturevalue("redis")
    server.command("FLUSHALL")
    return _url(request.param, server)


def _url(scheme: str, server: RedisServer) -> str:
    return f"{scheme}://{server.url.split('://')[1].split('/')[0]}"


def unique(first: int = 0) -> int:
    """A first key that no other test has: LMCache's server keeps what it was given."""
    return time.monotonic_ns() + first


@pytest.mark.parametrize("way", WAYS)
def test_chunks_come_back(open_engine: Any, url: str, way: str) -> None:
    engine = open_engine(url)
    keys = engine.keys(3, first=unique())
    wanted = engine.put(keys)
    found = errors(engine.get(keys, way), wanted)
    assert all(0.003 < error < FOUR_BIT for error in found)
    assert (engine.count("stored"), engine.count("hits")) == (3, 3)
    partial = engine.keys(1, first=unique())
    wanted = engine.put(partial, tokens=17)
    assert max(errors(engine.get(partial, way), wanted)) < 0.02
    assert engine.balanced()


def test_latents_and_hybrid_groups(open_engine: Any, url: str) -> None:
    for meta, extra in (
        (make_metadata(**MLA), None),
        (
            make_metadata(
                kv_layer_groups_manager=groups_manager((2, 2, 128, torch.bfloat16), (1, 3, 576, torch.float16))
            ),
            {"turboquant.head_dim": 64},
        ),
    ):
        engine = open_engine(url, meta, active=True, extra_config=extra)
        keys = engine.keys(2, first=unique())
        wanted = engine.put(keys)
        for way in WAYS:
            assert max(errors(engine.get(keys, way), wanted)) < FOUR_BIT
        assert engine.balanced()


@pytest.mark.parametrize("way", ["batched", "async"])
def test_a_missing_chunk_ends_the_prefix(open_engine: Any, url: str, way: str) -> None:
    """LMCache's own Redis connector would hand the chunk after the gap to the tokens before it."""
    engine = open_engine(url)
    keys = engine.keys(4, first=unique())
    wanted = engine.put([keys[0], keys[1], keys[3]])
    if way == "batched":
        found = engine.get(keys, way)
        assert found[2:] == [None, None]
    else:
        found = engine.run(engine.backend.batched_get_non_blocking("lookup", keys))
        assert len(found) == 2
    assert max(errors(found[:2], wanted[:2])) < FOUR_BIT
    assert engine.balanced()


def test_redis_holds_much_less(open_engine: Any, redis: RedisServer) -> None:
    redis.command("FLUSHALL")
    used = {}
    for serde in ("naive", "turboquant"):
        engine = open_engine(_url("redis", redis), make_metadata(**BIG), chunk_size=256, remote_serde=serde)
        key = engine.keys(1)[0]
        obj, _ = engine.chunk(1, tokens=256)
        engine.backend.submit_put_task(key, obj).result(20)
        obj.ref_count_down()
        used[serde] = int(redis.command("MEMORY", "USAGE", key.to_string() + "kv_bytes"))
    assert used["naive"] / used["turboquant"] > 3.7


def test_damage_in_redis_is_a_miss_and_the_next_store_heals_it(open_engine: Any, redis: RedisServer) -> None:
    redis.command("FLUSHALL")
    engine = open_engine(_url("redis", redis))
    keys = engine.keys(2)
    wanted = engine.put(keys)
    redis.command("SETRANGE", keys[0].to_string() + "kv_bytes", 5000, "damage")
    assert engine.get(keys) == [None, None]
    assert engine.count("misses", "checksum") == 1
    engine.put(keys[:1])
    assert max(errors(engine.get(keys), wanted)) < FOUR_BIT
    assert engine.balanced()


def test_resp_does_not_serve_what_it_could_not_read(open_engine: Any, redis: RedisServer) -> None:
    """LMCache's own RESP connector hands out the unfilled buffer when a value has another length."""
    redis.command("FLUSHALL")
    engine = open_engine(_url("resp", redis))
    keys = engine.keys(2)
    engine.put(keys)
    redis.command("SET", keys[0].to_string(), "short")
    assert engine.get(keys) == [None, None]
    # The other value is out of step, too, where it is read over the same connection.
    assert engine.count("misses", "magic") in (1, 2)
    redis.command("DEL", keys[0].to_string())
    start = time.monotonic()
    assert engine.get(keys) == [None, None]
    assert time.monotonic() - start < 5, "a get of an absent key never ends, so it must not be sent"
    assert engine.balanced()


def test_a_redis_that_dies_and_comes_back(open_engine: Any) -> None:
    with RedisServer() as server:
        engine = open_engine(_url("redis", server))
        keys = engine.keys(2)
        engine.put(keys)
        server.kill()
        assert engine.get(keys) == [None, None]
        assert not engine.backend.contains(keys[0])
        assert engine.run(engine.backend.batched_async_contains("lookup", keys, False)) == 0
        engine.put(engine.keys(2, first=9))
        assert engine.count("failed", "unavailable") == 2
        assert engine.count("lookup_failures", "unavailable") == 2
        server.start()
        assert engine.run(engine.backend.batched_async_contains("lookup", keys, False)) == 0
        wanted = engine.put(keys)
        assert max(errors(engine.get(keys), wanted)) < FOUR_BIT
        assert engine.balanced()


def test_close_ends(open_engine: Any, redis: RedisServer) -> None:
    """LMCache's own Redis connector waits in `close` for the loop that it runs on."""
    engine = open_engine(_url("redis", redis))
    engine.put(engine.keys(1))
    start = time.monotonic()
    engine.backend.close()
    assert time.monotonic() - start < 10


def test_a_soak_of_puts_gets_and_cancels_leaks_nothing(open_engine: Any, tmp_path: Path) -> None:
    engine = open_engine(f"fs://host:0{tmp_path / 'fs'}")
    batched_get, returned = engine.backend.connection.batched_get, []

    async def watched(keys: list[Any]) -> list[Any]:
        found: list[Any] = await batched_get(keys)
        returned.append(len(found))
        return found

    engine.backend.connection.batched_get = watched
    for n in range(20):
        keys = engine.keys(4, first=1 + 4 * n)
        engine.put(keys)
        for obj in engine.get(keys, WAYS[n % 3]):
            obj.ref_count_down()
        engine.config.blocking_timeout_secs = 0.001
        returned.clear()
        found = engine.get(keys, "batched")
        engine.config.blocking_timeout_secs = 10
        for obj in found:
            if obj is not None:
                obj.ref_count_down()
        engine.run(asyncio.sleep(0.01))
        if returned and found == [None] * 4:
            # Ended between LMCache's timeout and its cancelling: it drops the objects, whose destructors free them.
            engine.lost.messages[:] = [one for one in engine.lost.messages if "garbage collected" not in one]
    wait_for(engine.balanced)
    assert engine.count("stored") == 80
