"""The real `lmcache server` with our L2 adapters over memory, disk and Redis, and what they hold after a restart."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from redis_server import RedisServer

sys.path.insert(0, str(Path(__file__).parent))
from lmcache_harness import BLOCK, CHUNK, HEAD_DIM, HEADS, LAYERS, Engine, Server, folder, model

__all__ = ["folder", "model"]

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:opentelemetry.*"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

CHUNKS = 4
TOKENS = list(range(CHUNKS * CHUNK))
BLOCKS = list(range(len(TOKENS) // BLOCK))
OTHER = [block + 64 for block in BLOCKS]
RAW = CHUNKS * LAYERS * CHUNK * HEADS * 2 * HEAD_DIM * 2
CLASSES = {"ram": "MemoryL2Adapter", "disk": "DiskL2Adapter", "redis": "RedisL2Adapter"}


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture(scope="module")
def specs(folder: Path, redis: RedisServer) -> dict[str, dict[str, Any]]:
    return {
        "ram": _spec("ram", capacity_gb=0.1),
        "disk": _spec("disk", folder=str(folder / "l2"), capacity_gb=1, fsync="data"),
        "redis": _spec("redis", url=redis.url, ttl_s=3600),
    }


@pytest.fixture(scope="module")
def wanted(folder: Path, model: str, specs: dict[str, dict[str, Any]], redis: RedisServer) -> torch.Tensor:
    """What a server with all three adapters stored; it served a hit from RAM, and has ended."""
    server = Server(folder, list(specs.values())).wait_ready()
    try:
        engine = Engine(server, model)
        values = engine.fill(BLOCKS, seed=1)
        engine.store(TOKENS, BLOCKS)
        _eventually(lambda: sum(_of(server, "stored").values()) == 3 * CHUNKS)
        _check_counters(server, folder, redis)
        _clear_l1(server)
        _check_hit(engine, values)
        assert _of(server, "hits") == {"ram": CHUNKS}
        assert not _of(server, "misses")
        engine.close()
        assert _lines(server) == [
            "ram (0.1 GiB): compressed, turboquant K4V4",
            f"disk ({folder / 'l2'}, 1 GiB): compressed, turboquant K4V4",
            _lines(server)[2],
        ]
        assert _lines(server)[2].startswith("redis (")
    finally:
        server.stop()
    assert not server.tracebacks()
    return values


def _check_counters(server: Server, folder: Path, redis: RedisServer) -> None:
    frames = _of(server, "stored_bytes")
    assert _of(server, "raw_bytes") == dict.fromkeys(CLASSES, RAW)
    assert frames == dict.fromkeys(CLASSES, frames["ram"])
    assert frames["ram"] < RAW / 3
    assert _of(server, "bytes")["ram"] == _of(server, "bytes")["disk"] == frames["ram"]
    assert redis.command("DBSIZE") == CHUNKS
    assert sum(path.stat().st_size for path in (folder / "l2").rglob("*") if path.is_file()) == frames["disk"]
    status = json.loads(server.request("/status"))
    found = [a for a in _walk(status) if isinstance(a, dict) and a.get("type") in CLASSES.values()]
    assert {a["type"]: a["tq_offload"]["tiers"][0]["stored"] for a in found} == dict.fromkeys(CLASSES.values(), CHUNKS)


def test_three_adapters_store_and_the_first_serves(wanted: torch.Tensor) -> None:
    assert wanted.shape[0] == LAYERS


def test_a_new_server_serves_what_the_old_one_stored(
    folder: Path, model: str, specs: dict[str, dict[str, Any]], wanted: torch.Tensor
) -> None:
    """Half of it from disk, and from Redis what is no more on disk."""
    frames = [path for path in sorted((folder / "l2").rglob("*")) if path.is_file() and path.stat().st_size > RAW // 32]
    assert len(frames) == CHUNKS
    for path in frames[: CHUNKS // 2]:
        path.unlink()
    server = Server(folder, [specs["disk"], specs["redis"]]).wait_ready()
    try:
        engine = Engine(server, model)
        _check_hit(engine, wanted)
        engine.close()
        assert _of(server, "hits") == {"disk": CHUNKS // 2, "redis": CHUNKS // 2}
        assert not _of(server, "stored")
        assert not _of(server, "misses")
        assert not _of(server, "lookup_failures")
    finally:
        server.stop()
    assert not server.tracebacks()


def test_what_is_not_understood_stops_the_server(folder: Path) -> None:
    server = Server(folder, [_spec("ram", capacity_gb=1, bitz=4)])
    assert server.process.wait(60) != 0
    line = "TQ-Offload: cannot start: MemoryL2Adapter: adapter_params.bitz='...' is not understood; allowed: one of"
    assert line in server.log()


def _spec(kind: str, **params: Any) -> dict[str, Any]:
    module = "tq_offload_connectors.multi_process"
    return {"type": "plugin", "module_path": module, "class_name": CLASSES[kind], "adapter_params": params}


def _check_hit(engine: Engine, wanted: torch.Tensor) -> None:
    count, found = engine.hit(TOKENS, OTHER)
    assert count == len(TOKENS)
    error = ((found.double() - wanted.double()) ** 2).sum() / (wanted.double() ** 2).sum()
    assert 0.003 < error < 0.0105, "from L1 it would be exact, from a wrong place it would be above 1"


def _of(server: Server, counter: str) -> dict[str, float]:
    """A counter of the tiers by tier, as `/metrics` serves it, reasons added up; without zeros."""
    found: dict[str, float] = {}
    for line in server.request("/metrics").splitlines():
        name, _, value = line.rpartition(" ")
        base, _, labels = name.partition("{")
        if base.removesuffix("_total") == f"tq_offload_tier_{counter}" and float(value):
            tier = labels.split('tier="')[1].split('"')[0]
            found[tier] = found.get(tier, 0) + float(value)
    return found


def _lines(server: Server) -> list[str]:
    head = "TQ-Offload: L1 CPU RAM: not compressed; L2 "
    return [line.split(head)[1].split(", means")[0] for line in server.log().splitlines() if head in line]


def _walk(value: Any) -> Iterator[Any]:
    yield value
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for child in children:
        yield from _walk(child)


def _clear_l1(server: Server) -> None:
    """Clear L1 once no store holds a lock on it."""
    _eventually(lambda: "0 locked objects and 0 staging objects remaining" in _clear_line(server))


def _clear_line(server: Server) -> str:
    server.clear_l1()
    return [line for line in server.log().splitlines() if "L1Manager: cleared" in line][-1]


def _eventually(condition: Callable[[], bool], seconds: float = 90) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.05)
