"""The real `lmcache server` with the real fs adapter, through LMCache's own client classes, with the one setting."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from lmcache_harness import BLOCK, CHUNK, HEAD_DIM, HEADS, LAYERS, Engine, Server, folder, model

__all__ = ["folder", "model"]

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:opentelemetry.*"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

CHUNKS = 4
TOKENS = CHUNKS * CHUNK
BLOCKS = TOKENS // BLOCK
FOUR_BIT = 0.0105  # relative MSE of 4-bit codes is 0.0095


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    server = Server(folder, [{"type": "fs", "base_path": str(folder / "l2")}], {"LMCACHE_SERDE": "turboquant"})
    yield server.wait_ready()
    server.stop()


@pytest.fixture(scope="module")
def engine(server: Server, model: str) -> Iterator[Engine]:
    engine = Engine(server, model)
    yield engine
    engine.close()


def test_a_chunk_goes_to_disk_and_comes_back(server: Server, engine: Engine, folder: Path, model: str) -> None:
    tokens, blocks = _request(0)
    wanted = engine.fill(blocks, seed=1)
    engine.store(tokens, blocks)
    files = _wait_files(folder, CHUNKS)
    assert {f.stat().st_size for f in files} == {_frame_size()}
    _eventually(lambda: server.metrics()["stored_chunks"] == CHUNKS)
    before = server.metrics()
    raw = CHUNKS * LAYERS * CHUNK * HEADS * 2 * HEAD_DIM * 2
    assert before["raw_bytes"] == raw
    assert before["stored_bytes"] == CHUNKS * _frame_size() < raw / 3

    _clear_l1(server)
    count, found = engine.hit(tokens, _other(blocks))
    assert count == TOKENS
    error = ((found.double() - wanted.double()) ** 2).sum() / (wanted.double() ** 2).sum()
    assert 0.003 < error < FOUR_BIT, "from L1 it would be exact, from a wrong place it would be above 1"
    assert server.metrics()["loaded_chunks"] - before["loaded_chunks"] == CHUNKS
    assert not [name for name in server.metrics() if name.startswith("misses")]


def test_the_start_says_what_each_tier_is(server: Server, folder: Path) -> None:
    line = next(line for line in server.log().splitlines() if "L2 #0" in line)
    assert f"TQ-Offload: L1 CPU RAM: not compressed; L2 #0 fs ({folder / 'l2'}): compressed, turboquant K4V4" in line
    assert "serde tq_offload" in line


def test_bad_entries_are_misses_the_server_lives_and_the_next_store_repairs(
    server: Server, engine: Engine, folder: Path
) -> None:
    before = server.metrics()
    damaged = [("checksum", _flip), ("not_loaded", _truncate), ("magic", _foreign)]
    for number, (reason, damage) in enumerate(damaged, start=1):
        tokens, blocks = _request(number)
        engine.fill(blocks, seed=10 + number)
        known = set(_files(folder))
        engine.store(tokens, blocks)
        _eventually(lambda known=known: len(set(_files(folder)) - known) == CHUNKS)
        path = _file_of_chunk(engine, folder, known, tokens, 2)
        damage(path)
        _clear_l1(server)
        count, _ = engine.hit(tokens, _other(blocks))
        assert count == 2 * CHUNK, f"{reason}: the prefix before the bad chunk, and no more"
        assert server.metrics()[f"misses{{{reason}}}"] == 1
        assert f"miss, reason {reason} (number 1)" in server.log()
        _eventually(lambda path=path: not path.exists())

        values = engine.fill(blocks, seed=10 + number)
        engine.store(tokens, blocks)
        _eventually(lambda path=path: path.exists() and path.stat().st_size == _frame_size())
        _clear_l1(server)
        count, found = engine.hit(tokens, _other(blocks))
        assert count == TOKENS, f"{reason}: the store must have repaired the entry"
        assert ((found.double() - values.double()) ** 2).sum() / (values.double() ** 2).sum() < FOUR_BIT
    after = server.metrics()
    assert sum(v for k, v in after.items() if k.startswith("misses")) == 3
    assert sum(v for k, v in after.items() if k.startswith("repairs")) == 3
    assert after["stored_chunks"] >= before["stored_chunks"] + 3 * (CHUNKS + 1)
    assert server.process.poll() is None
    assert not server.tracebacks()


def test_a_chunk_with_nan_is_refused_and_its_neighbours_are_stored(
    server: Server, engine: Engine, folder: Path
) -> None:
    tokens, blocks = _request(4)
    engine.fill(blocks, seed=20)
    next(iter(engine.caches.values()))[blocks[CHUNK // BLOCK], 0, 0, 0] = float("nan")  # in chunk 1
    known = set(_files(folder))
    engine.store(tokens, blocks)
    _eventually(lambda: len(set(_files(folder)) - known) == CHUNKS - 1)
    _eventually(lambda: server.metrics().get("refused{non_finite}") == 1)
    _clear_l1(server)
    count, _ = engine.hit(tokens, _other(blocks))
    assert count == CHUNK


def test_a_new_server_serves_what_the_old_one_stored(folder: Path, engine: Engine, model: str) -> None:
    """The explicit way, without LMCACHE_SERDE, on the folder that the first server filled."""
    spec = {
        "type": "plugin",
        "module_path": "tq_offload.integrations.lmcache.plugin",
        "class_name": "InnerAdapter",
        "adapter_params": {"type": "fs", "base_path": str(folder / "l2")},
        "serde": {"type": "tq_offload", "bits": 4},
    }
    server = Server(folder, [spec]).wait_ready()
    try:
        other = Engine(server, model)
        tokens, blocks = _request(0)
        count, found = other.hit(tokens, blocks)
        wanted = other.fill(blocks, seed=1)
        other.close()
        assert count == TOKENS
        assert ((found.double() - wanted.double()) ** 2).sum() / (wanted.double() ** 2).sum() < FOUR_BIT
        assert server.metrics()["loaded_chunks"] == CHUNKS
        assert f"L2 FSL2Adapter ({folder / 'l2'}): compressed, turboquant K4V4" in server.log()
    finally:
        server.stop()


def test_the_module_starts_the_server_without_any_setting(folder: Path, engine: Engine, model: str) -> None:
    server = Server(
        folder, [{"type": "fs", "base_path": str(folder / "l2")}], module="tq_offload.integrations.lmcache"
    ).wait_ready()
    try:
        other = Engine(server, model)
        count, _ = other.hit(*_request(0))
        other.close()
        assert count == TOKENS
        assert server.metrics()["loaded_chunks"] == CHUNKS
    finally:
        server.stop()


@pytest.mark.parametrize(
    ("env", "serde", "text"),
    [
        ({"LMCACHE_SERDE": "turbo"}, {}, "LMCACHE_SERDE='turbo' is not understood; allowed: turboquant"),
        ({"LMCACHE_SERDE": "turboquant", "TQ_OFFLOAD_BITS": "9"}, {}, "TQ_OFFLOAD_BITS"),
        ({"LMCACHE_SERDE": "turboquant", "TQ_OFFLOAD_BIT": "4"}, {}, "TQ_OFFLOAD_BIT='4' is not understood"),
        (
            {"LMCACHE_SERDE": "turboquant"},
            {"serde": {"type": "tq_offload", "bits": 9}},
            "TQ-Offload: cannot start: serde.bits=9 is not understood; allowed: an integer from 1 to 8",
        ),
    ],
)
def test_what_is_not_understood_stops_the_server(
    folder: Path, env: dict[str, str], serde: dict[str, Any], text: str
) -> None:
    server = Server(folder, [{"type": "fs", "base_path": str(folder / "never"), **serde}], env)
    assert server.process.wait(60) == 1
    assert text in server.log()
    assert not server.tracebacks()


def _request(number: int) -> tuple[list[int], list[int]]:
    """Tokens of a request of their own, and the blocks where its KV cache lies."""
    return [1000 * number + i for i in range(TOKENS)], list(range(BLOCKS))


def _other(blocks: list[int]) -> list[int]:
    return [block + 64 for block in blocks]


def _frame_size() -> int:
    from tq_offload.codec import TurboQuantCodec
    from tq_offload.layout import ChunkLayout, GroupLayout

    group = GroupLayout("packed", (1, LAYERS, CHUNK, HEADS * 2 * HEAD_DIM), "bfloat16", HEAD_DIM)
    return TurboQuantCodec().frame_size(ChunkLayout((group,)))


def _files(folder: Path) -> list[Path]:
    return sorted((folder / "l2").glob("*.data"))


def _wait_files(folder: Path, count: int) -> list[Path]:
    _eventually(lambda: len(_files(folder)) == count)
    return _files(folder)


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


def _file_of_chunk(engine: Engine, folder: Path, known: set[Path], tokens: list[int], chunk: int) -> Path:
    """The file of a chunk: the one whose hash LMCache computes for the prefix that ends there."""
    from lmcache.v1.multiprocess.token_hasher import TokenHasher

    hashes: list[Any] = TokenHasher(chunk_size=CHUNK, hash_algorithm="blake3").compute_chunk_hashes(tokens)
    value = hashes[chunk]
    text = value.hex() if isinstance(value, bytes) else f"{value:x}"
    return next(f for f in set(_files(folder)) - known if text in f.name)


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-64])


def _foreign(path: Path) -> None:
    path.write_bytes(b"\x80\x3f" * path.stat().st_size)
