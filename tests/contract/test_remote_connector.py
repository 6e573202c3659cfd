"""Compressed remote connectors: LMCache's real RemoteBackend, CPU memory and connectors, as its engine drives them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import struct
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("lmcache", reason="these tests need the extra [lmcache]")

from lmcache.v1.memory_management import MemoryFormat, TensorMemoryObj
from lmcache.v1.storage_backend import remote_backend
from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector
from lmcache.v1.storage_backend.connector.fs_connector import FSConnector
from remote_engine import (
    CHUNK,
    FOUR_BIT,
    MODEL,
    RemoteEngine,
    errors,
    groups_manager,
    make_metadata,
    open_engine,
    wait_for,
)

from tq_offload.codec import TurboQuantCodec
from tq_offload.errors import StoreFullError
from tq_offload_connectors.in_process import objects as in_process_objects
from tq_offload_connectors.remote import setup as remote_setup
from tq_offload_connectors.remote import view as remote_view
from tq_offload_connectors.remote.connector import CompressedConnector, install
from tq_offload_connectors.remote.setup import place_of
from tq_offload_connectors.remote.table import CONNECTORS, UNKNOWN, handling_of

__all__ = ["open_engine"]

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:opentelemetry.*"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

WAYS = ("single", "batched", "async")
MLA = {"use_mla": True, "kv_shape": (3, 1, CHUNK, 1, 576)}
FRAME_HEADER = 28  # LMCache's own header before a frame in a file: one group


@pytest.fixture
def open_fs(open_engine: Any, tmp_path: Path) -> Any:
    def make(*args: Any, folder: str = "fs", **kwargs: Any) -> RemoteEngine:
        engine = open_engine(f"fs://host:0{tmp_path / folder}", *args, **kwargs)
        engine.folder = tmp_path / folder
        return engine

    return make


def files(engine: Any) -> list[Path]:
    return sorted(engine.folder.glob("*.data"))


def file_of(engine: Any, key: Any) -> Path:
    return next(p for p in files(engine) if f"@{key.chunk_hash_hex}@" in p.name)


@contextlib.contextmanager
def plugin(cls: type) -> Iterator[dict[str, Any]]:
    """`extra_config` and `remote_storage_plugins` for a connector class of this test."""
    module = ModuleType("tq_test_plugin")
    module.Connector = cls  # type: ignore[attr-defined]
    sys.modules["tq_test_plugin"] = module
    extra = {
        "remote_storage_plugin.mine.module_path": "tq_test_plugin", "remote_storage_plugin.mine.class_name": "Connector"
    }  # fmt: skip
    yield {"extra_config": extra, "remote_storage_plugins": ["mine"], "plugin": "mine"}
    del sys.modules["tq_test_plugin"]


class Dict(RemoteConnector):
    """A third party's connector: whatever it is given in a dictionary; it can be told to fail or to wait."""

    def __init__(self, loop: Any, local_cpu_backend: Any, config: Any) -> None:
        super().__init__(local_cpu_backend.config, local_cpu_backend.metadata)
        self.cpu, self.data = local_cpu_backend, {}
        self.fail: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.threads: set[str] = set()

    async def _pass(self) -> None:
        self.threads.add(threading.current_thread().name)
        while not self.gate.is_set():
            await asyncio.sleep(0.002)
        if self.fail is not None:
            raise self.fail

    async def exists(self, key: Any) -> bool:
        await self._pass()
        return key in self.data

    def exists_sync(self, key: Any) -> bool:
        if self.fail is not None:
            raise self.fail
        return key in self.data

    async def put(self, key: Any, memory_obj: Any) -> None:
        await self._pass()
        self.data[key] = bytes(memory_obj.byte_array)

    async def get(self, key: Any) -> Any:
        await self._pass()
        data = self.data.get(key)
        if data is None:
            return None
        obj = self.cpu.allocate(self.meta_shapes, self.meta_dtypes, self.meta_fmt)
        memoryview(obj.byte_array).cast("B")[: len(data)] = data
        return self.reshape_partial_chunk(obj, len(data))

    def remove_sync(self, key: Any) -> bool:
        return self.data.pop(key, None) is not None

    async def list(self) -> Any:
        return list(self.data)

    async def close(self) -> None:
        self.data.clear()


# Round trips


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("extra", [None, {"save_chunk_meta": False}], ids=["header", "no_header"])
def test_chunks_go_to_files_and_come_back(open_fs: Any, way: str, extra: Any) -> None:
    engine = open_fs(extra_config=extra)
    keys = engine.keys(3)
    wanted = engine.put(keys)
    found = errors(engine.get(keys, way), wanted)
    assert all(0.003 < error < FOUR_BIT for error in found)
    size = engine.connector.frames.codec.frame_size(_layout(engine, keys[0]))
    assert {p.stat().st_size for p in files(engine)} == {size + (0 if extra else FRAME_HEADER)}
    assert (engine.count("stored"), engine.count("hits")) == (3, 3)
    assert engine.count("stored_bytes") == 3 * size
    assert engine.balanced()


def test_files_are_much_smaller(open_fs: Any) -> None:
    meta = make_metadata(kv_shape=(2, 2, 256, 2, 128), chunk_size=256)
    engine = open_fs(meta, chunk_size=256)
    keys = engine.keys(2)
    engine.put(keys, tokens=256)
    raw = 2 * 2 * 256 * 2 * 128 * 2
    assert all(raw / path.stat().st_size > 3.7 for path in files(engine))


@pytest.mark.parametrize("way", WAYS)
def test_latents_of_mla(open_fs: Any, way: str) -> None:
    engine = open_fs(make_metadata(**MLA), active=True)
    keys = engine.keys(2)
    wanted = engine.put(keys)
    found = engine.get(keys, way)
    assert [obj.get_memory_format() for obj in found] == [MemoryFormat.KV_MLA_FMT] * 2
    assert all(0.003 < error < FOUR_BIT for error in errors(found, wanted))
    assert {g.head_dim for path in files(engine) for g in _header(path).layout.groups} == {576}


def test_a_rank_of_mla_reads_what_rank_0_stored(open_fs: Any) -> None:
    first = open_fs(make_metadata(**MLA, world_size=2), active=True)
    keys = first.keys(1)
    wanted = first.put(keys)
    second = open_fs(make_metadata(**MLA, world_size=2, worker_id=1), active=True)
    found = second.get(second.keys(1, worker_id=1), "batched")
    assert max(errors(found, wanted)) < FOUR_BIT


def test_groups_of_a_hybrid_model(open_fs: Any) -> None:
    manager = groups_manager((2, 2, 128, torch.bfloat16), (1, 3, 576, torch.bfloat16), (2, 1, 64, torch.float16))
    engine = open_fs(make_metadata(kv_layer_groups_manager=manager), extra_config={"turboquant.head_dim": 64})
    keys = engine.keys(2)
    wanted = engine.put(keys)
    for way in WAYS:
        found = errors(engine.get(keys, way), wanted)
        assert len(found) == 6
        assert all(0.003 < error < FOUR_BIT for error in found)
    assert engine.balanced()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn])
def test_other_dtypes(open_fs: Any, dtype: torch.dtype) -> None:
    engine = open_fs(make_metadata(kv_dtype=dtype))
    keys = engine.keys(2)
    wanted = engine.put(keys)
    assert max(errors(engine.get(keys), wanted)) < 0.013


def test_uint8_is_exact_unless_it_is_fp8(open_fs: Any) -> None:
    engine = open_fs(make_metadata(kv_dtype=torch.uint8))
    wanted = engine.put(engine.keys(1))
    assert errors(engine.get(engine.keys(1)), wanted) == [0.0]
    fp8 = open_fs(
        make_metadata(kv_dtype=torch.uint8),
        folder="fp8",
        extra_config={"turboquant.uint8_as": "float8_e4m3fn"},
    )
    wanted = fp8.put(fp8.keys(1))
    obj = fp8.get(fp8.keys(1))[0]
    a, b = obj.tensor.view(torch.float8_e4m3fn).double(), wanted[0][0].view(torch.float8_e4m3fn).double()
    assert 0.001 < float(((a - b) ** 2).sum() / (b**2).sum()) < 0.02
    assert files(fp8)[0].stat().st_size < files(engine)[0].stat().st_size * 0.7
    obj.ref_count_down()


@pytest.mark.parametrize("extra", [None, {"save_chunk_meta": False}], ids=["header", "no_header"])
@pytest.mark.parametrize("tokens", [1, 17, CHUNK - 1])
def test_partial_chunks(open_fs: Any, tokens: int, extra: Any) -> None:
    engine = open_fs(extra_config=extra)
    keys = engine.keys(1)
    wanted = engine.put(keys, tokens)
    for way in WAYS:
        assert max(errors(engine.get(keys, way), wanted)) < 0.02
    assert engine.balanced()


def test_a_third_partys_connector_works_and_is_warned_of(open_engine: Any, caplog: pytest.LogCaptureFixture) -> None:
    with _log(caplog), plugin(Dict) as config:
        engine = open_engine(None, **config)
        keys = engine.keys(2)
        wanted = engine.put(keys)
        assert max(errors(engine.get(keys), wanted)) < FOUR_BIT
    assert "Dict is no connector of LMCache's" in caplog.text
    assert engine.balanced()


class Fixed(Dict):
    """As LMCache's S3 connector: it takes and gives objects of the size of a full chunk, and no others."""

    __module__ = "lmcache.test"

    async def put(self, key: Any, memory_obj: Any) -> None:
        if memory_obj.get_physical_size() != self.full_chunk_size_bytes:
            raise ValueError("size")
        await super().put(key, memory_obj)

    async def get(self, key: Any) -> Any:
        obj = await super().get(key)
        assert obj is None or obj.get_size() == self.full_chunk_size_bytes
        return obj


@pytest.mark.parametrize("tokens", [CHUNK, 17])
def test_connectors_of_one_size_get_padded_frames(
    open_engine: Any, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tq_offload_connectors.remote.table.CONNECTORS", {"Fixed": CONNECTORS["S3Connector"]})
    with plugin(Fixed) as config:
        engine = open_engine(None, **config)
        keys = engine.keys(2)
        wanted = engine.put(keys, tokens)
        sizes = {len(data) for data in _raw(engine).data.values()}
        assert sizes == {engine.connector.frames.codec.frame_size(_layout(engine, keys[0]))}
        assert max(errors(engine.get(keys), wanted)) < 0.02
    assert engine.balanced()


def test_mooncake_with_and_without_headers(open_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """LMCache's connector over a store of this test: its client needs a cluster."""
    monkeypatch.setitem(sys.modules, "mooncake", ModuleType("mooncake"))
    monkeypatch.setitem(sys.modules, "mooncake.store", _mooncake())
    for meta in (True, False):
        extra = {"save_chunk_meta": meta, "local_hostname": "here", "master_server_address": "there"}
        engine = open_engine("mooncakestore://host:1", extra_config=extra)
        keys = engine.keys(3)
        wanted = engine.put(keys)
        for way in ("batched", "async"):
            assert max(errors(engine.get(keys, way), wanted)) < FOUR_BIT
        partial = engine.keys(1, first=9)
        wanted = engine.put(partial, 17)
        assert max(errors(engine.get(partial), wanted)) < 0.02
        assert engine.balanced()
        assert all(inside for inside in _raw(engine).store.registered) is True


def test_an_audited_connector(open_engine: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    extra = {"audit_actual_remote_url": f"fs://host:0{tmp_path / 'fs'}", "audit_calc_checksum": True}
    with _log(caplog):
        engine = open_engine("audit://host:1", extra_config=extra)
    assert "remote audit://host:1 (FSConnector): compressed" in caplog.text
    keys = engine.keys(2)
    wanted = engine.put(keys)
    assert max(errors(engine.get(keys), wanted)) < FOUR_BIT
    assert len(list((tmp_path / "fs").glob("*.data"))) == 2


@pytest.mark.parametrize("url", ["mock://1/?peeking_latency=0", "blackhole://nowhere"])
def test_connectors_that_keep_nothing_miss(open_engine: Any, url: str, caplog: pytest.LogCaptureFixture) -> None:
    with _log(caplog):
        engine = open_engine(url)
        keys = engine.keys(2)
        engine.put(keys)
        assert engine.get(keys) == [None, None]
        assert engine.get(keys, "async") == []
    assert (engine.count("stored"), engine.count("hits")) == (2, 0)
    assert engine.count("misses") >= 1
    assert "keeps" in caplog.text
    assert engine.balanced()


# Threads, queues, references


def test_chunks_are_encoded_and_decoded_in_other_threads(open_fs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, set[str]] = {"encode": set(), "decode": set()}
    encode, decode = TurboQuantCodec.encode_into, TurboQuantCodec.open

    def encoding(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen["encode"].add(threading.current_thread().name)
        return encode(self, *args, **kwargs)

    def decoding(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen["decode"].add(threading.current_thread().name)
        return decode(self, *args, **kwargs)

    monkeypatch.setattr(TurboQuantCodec, "encode_into", encoding)
    monkeypatch.setattr(TurboQuantCodec, "open", decoding)
    engine = open_fs()
    keys = engine.keys(2)
    wanted = engine.put(keys)
    errors(engine.get(keys), wanted)
    names = seen["encode"] | seen["decode"]
    assert seen["encode"]
    assert seen["decode"]
    assert not names & {threading.current_thread().name, engine.thread.name}


def test_the_reference_goes_back_before_the_remote_has_the_chunk(open_engine: Any) -> None:
    with plugin(Dict) as config:
        engine = open_engine(None, **config)
        _raw(engine).gate.clear()
        engine.offer(engine.keys(2))
        wait_for(lambda: engine.free_bytes() == engine.free)
        assert engine.count("stored") == 0
        _raw(engine).gate.set()
        assert engine.connector.frames.drain(10.0)
    assert engine.count("stored") == 2
    assert engine.balanced()


def test_over_the_limit_chunks_are_dropped_and_the_engine_never_waits(
    open_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = threading.Event()
    encode = TurboQuantCodec.encode_into

    def slow(self: Any, *args: Any, **kwargs: Any) -> Any:
        assert held.wait(20)
        return encode(self, *args, **kwargs)

    monkeypatch.setattr(TurboQuantCodec, "encode_into", slow)
    chunk = 2 * 2 * CHUNK * 128 * 2
    with plugin(Dict) as config:
        config["extra_config"]["turboquant.queue_gb"] = 2.5 * chunk / 2**30
        engine = open_engine(None, **config)
        engine.offer(engine.keys(6))
        assert engine.count("dropped", "queue_full") == 4
        held.set()
        assert engine.connector.frames.drain(10.0)
    assert engine.count("stored") == 2
    assert engine.balanced()


def test_a_remote_that_hangs_fills_the_queue_and_then_drops(open_engine: Any) -> None:
    with plugin(Dict) as config:
        config["extra_config"]["turboquant.write_queue_gb"] = 40_000 / 2**30
        engine = open_engine(None, **config)
        raw = _raw(engine)
        raw.gate.clear()
        for n in range(0, 24, 4):
            engine.offer(engine.keys(4, first=n + 1))
            wait_for(lambda: engine.free_bytes() == engine.free)
        wait_for(lambda: engine.count("dropped", "write_queue_full") >= 1)
        raw.gate.set()
        assert engine.connector.frames.drain(10.0)
    assert engine.balanced()


def test_a_chunk_on_its_way_is_not_taken_twice(open_engine: Any) -> None:
    with plugin(Dict) as config:
        engine = open_engine(None, **config)
        _raw(engine).gate.clear()
        engine.offer(engine.keys(1))
        obj, _ = engine.chunk(1)
        pending = engine.connector.batched_put(engine.keys(1), [obj])
        assert engine.count("present") == 1
        _raw(engine).gate.set()
        engine.run(pending)
        assert engine.connector.frames.drain(10.0)
    assert engine.balanced()


def test_what_the_remote_lost_is_stored_again(open_engine: Any) -> None:
    with plugin(Dict) as config:
        engine = open_engine(None, **config)
        keys = engine.keys(3)
        engine.put(keys)
        _raw(engine).data.clear()
        assert engine.run(engine.backend.batched_async_contains("id", keys, False)) == 0
        engine.put(keys[:1])
        engine.put(keys[1:])
        assert len(_raw(engine).data) == 3
        _raw(engine).data.clear()
        assert not engine.backend.contains(keys[1])
        engine.put(keys)
        assert list(_raw(engine).data) == [keys[1]], "the others were not looked up, so they are taken for present"


def test_nan_is_refused(open_fs: Any) -> None:
    engine = open_fs()
    obj, _ = engine.chunk(1)
    obj.tensor[0, 0, 0, 0] = float("nan")
    engine.backend.submit_put_task(engine.keys(1)[0], obj).result(10)
    obj.ref_count_down()
    assert engine.count("refused", "non_finite") == 1
    assert files(engine) == []
    wait_for(engine.balanced)


def test_an_object_without_a_tensor_is_dropped(open_fs: Any) -> None:
    engine = open_fs()
    obj, _ = engine.chunk(1)
    obj.meta.shapes = None
    engine.backend.submit_put_task(engine.keys(1)[0], obj).result(10)
    obj.ref_count_down()
    assert engine.count("dropped", "layout") == 1
    wait_for(engine.balanced)


def test_a_put_that_fails_is_counted(open_engine: Any) -> None:
    with plugin(Dict) as config:
        engine = open_engine(None, **config)
        for error, reason in ((ConnectionResetError("gone"), "unavailable"), (ValueError("no"), "io")):
            _raw(engine).fail = error
            engine.put(engine.keys(1))
            wait_for(lambda reason=reason: engine.count("failed", reason) == 1)
        _raw(engine).fail = None
        engine.put(engine.keys(1))
    assert engine.count("stored") == 1
    assert engine.balanced()


# Loads that fail


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("damage", ["flip", "cut", "other_key", "no_frame"])
def test_a_bad_frame_is_a_miss_and_is_deleted(open_fs: Any, damage: str, way: str) -> None:
    engine = open_fs()
    keys = engine.keys(3)
    wanted = engine.put(keys)
    path = file_of(engine, keys[1])
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[len(data) // 2] ^= 16
    elif damage == "cut":
        struct.pack_into("<Q", data, FRAME_HEADER + 16, 4096)
    elif damage == "other_key":
        data = bytearray(file_of(engine, keys[2]).read_bytes())
    else:
        data[FRAME_HEADER:] = bytes(len(data) - FRAME_HEADER)
    path.write_bytes(data)
    found = engine.get(keys, way)
    whole = [obj for obj in found if obj is not None]
    served = [0, 2] if way == "single" else [0]
    assert max(errors(whole, [wanted[n] for n in served])) < FOUR_BIT
    assert engine.count("misses") == 1
    assert engine.count("repairs") == 1
    assert not path.exists()
    engine.put([keys[1]])
    assert max(errors(engine.get([keys[1]], way), [wanted[1]])) < FOUR_BIT
    wait_for(engine.balanced)


def test_without_repair_a_bad_frame_stays(open_fs: Any) -> None:
    engine = open_fs(extra_config={"turboquant.repair": False})
    keys = engine.keys(1)
    engine.put(keys)
    path = files(engine)[0]
    path.write_bytes(path.read_bytes()[:-64] + b"x" * 64)
    assert engine.get(keys) == [None]
    assert path.exists()


def test_what_lmcache_itself_stored_is_a_miss(open_fs: Any) -> None:
    plain = open_fs(remote_serde="naive")
    assert not isinstance(plain.connector, CompressedConnector)
    made = [plain.chunk(n) for n in (1, 2)]
    for key, (obj, _) in zip(plain.keys(2), made, strict=True):
        plain.backend.submit_put_task(key, obj).result(10)
        obj.ref_count_down()
    engine = open_fs()
    assert engine.get(engine.keys(2)) == [None, None]
    assert engine.balanced()


def test_a_damaged_header_cannot_allocate(open_fs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = open_fs()
    asked: list[int] = []
    real = remote_view.heap_object

    def watched(shapes: Any, *args: Any) -> Any:
        asked.append(sum(shape.numel() for shape in shapes))
        return real(shapes, *args)

    monkeypatch.setattr(remote_view, "heap_object", watched)
    keys = engine.keys(1)
    engine.put(keys)
    path = files(engine)[0]
    data = bytearray(path.read_bytes())
    struct.pack_into("<4i", data, 12, 1, 1, 2**31 - 1, 4)
    path.write_bytes(data)
    assert engine.get(keys) == [None]
    assert max(asked) < 1 << 20
    assert engine.balanced()


def test_pool_memory_that_runs_out_is_no_wait(open_engine: Any) -> None:
    """Mooncake and EIC need LMCache's own memory for frames too."""
    with plugin(Dict) as config:
        engine = open_engine(None, pool_gb=0.0008, **config)
        _cpu_view(engine).use_pool = True
        keys = engine.keys(2)
        wanted = engine.put(keys)
        assert max(errors(engine.get(keys), wanted)) < FOUR_BIT
        hold = []
        while obj := engine.cpu.allocate([torch.Size([4096])], [torch.uint8], MemoryFormat.KV_2LTD, busy_loop=False):
            hold.append(obj)
        start = time.monotonic()
        assert engine.get(keys) == [None, None]
        with pytest.raises(StoreFullError):
            engine.connector._store.object(memoryview(b"frame"))
        assert time.monotonic() - start < 5
        for obj in hold:
            obj.ref_count_down()
    assert engine.balanced()


def test_a_buffer_that_was_not_filled_is_no_frame(open_engine: Any) -> None:
    engine = open_engine("mock://1/?peeking_latency=0")
    _cpu_view(engine).use_pool = True  # which lends the block again that held the frame
    keys = engine.keys(1)
    engine.put(keys)
    assert engine.get(keys) == [None]
    assert engine.count("misses", "magic") == 1
    assert engine.balanced()


@pytest.mark.parametrize("way", WAYS)
def test_a_frame_of_another_shape_is_a_miss(open_fs: Any, way: str) -> None:
    engine = open_fs()
    keys = engine.keys(1)
    engine.put(keys)
    other = open_fs(make_metadata(kv_shape=(4, 2, CHUNK, 1, 64)))
    assert [obj for obj in other.get(keys, way) if obj is not None] == []
    assert other.count("misses", "mismatch_shape") == 1
    assert other.balanced()


def test_a_frame_of_another_spec_is_read(open_fs: Any) -> None:
    engine = open_fs(extra_config={"turboquant.preset": "turboquant_k8v4"})
    keys = engine.keys(1)
    wanted = engine.put(keys)
    other = open_fs()
    assert max(errors(other.get(keys), wanted)) < FOUR_BIT


@pytest.mark.parametrize("way", WAYS)
def test_no_memory_is_a_miss_after_a_bounded_wait(open_fs: Any, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_process_objects, "ALLOCATE_WAIT_S", 0.05)
    engine = open_fs(pool_gb=0.0008)
    keys = engine.keys(4)
    wanted = engine.put(keys)
    hold = []
    while True:
        obj = engine.cpu.allocate(engine.meta.get_shapes(), engine.meta.get_dtypes(), busy_loop=False)
        if obj is None:
            break
        hold.append(obj)
    hold.pop().ref_count_down()
    start = time.monotonic()
    found = [obj for obj in engine.get(keys, way) if obj is not None]
    assert time.monotonic() - start < 8
    assert max(errors(found, wanted[: len(found)])) < FOUR_BIT
    assert len(found) == 1
    assert engine.count("misses", "no_memory") >= 1
    assert engine.count("repairs") == 0
    for obj in hold:
        obj.ref_count_down()
    wait_for(engine.balanced)
    assert max(errors(engine.get(keys, way), wanted)) < FOUR_BIT


@pytest.mark.parametrize("way", WAYS)
def test_a_get_that_fails_is_a_miss(open_engine: Any, way: str) -> None:
    with plugin(Dict) as config:
        engine = open_engine(None, **config)
        keys = engine.keys(3)
        engine.put(keys)
        connector = _raw(engine)
        get = connector.get

        async def failing(key: Any) -> Any:
            if key == keys[1]:
                raise OSError("bad")
            return await get(key)

        connector.get = failing
        found = engine.get(keys, way)
        whole = [obj for obj in found if obj is not None]
        assert len(whole) == (2 if way == "single" else 1)
        for obj in whole:
            obj.ref_count_down()
    assert engine.count("misses", "io") == 1
    assert engine.balanced()


@pytest.mark.parametrize("way", WAYS)
def test_a_timeout_frees_what_comes_too_late(open_engine: Any, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    held = threading.Event()
    held.set()
    decode = TurboQuantCodec.decode_sections

    def slow(self: Any, *args: Any, **kwargs: Any) -> Any:
        assert held.wait(20)
        return decode(self, *args, **kwargs)

    monkeypatch.setattr(TurboQuantCodec, "decode_sections", slow)
    with plugin(Dict) as config:
        engine = open_engine(None, **config)
        engine.config.blocking_timeout_secs = 0.3
        keys = engine.keys(5)
        wanted = engine.put(keys)
        held.clear()  # first the decoder is late, then the connector
        assert not any(engine.get(keys, way))
        held.set()
        wait_for(engine.balanced)
        _raw(engine).gate.clear()
        assert not any(engine.get(keys, way) if way != "async" else _late(engine, keys))
        _raw(engine).gate.set()
        wait_for(engine.balanced)
        engine.config.blocking_timeout_secs = 10
        assert max(errors(engine.get(keys, way), wanted)) < FOUR_BIT
    wait_for(engine.balanced)


@pytest.mark.parametrize("use_pool", [False, True])
def test_a_cancelled_get_leaves_the_connector_alone(open_engine: Any, use_pool: bool) -> None:
    with plugin(Dict) as config:
        engine = open_engine(None, **config)
        _cpu_view(engine).use_pool = use_pool
        keys = engine.keys(2)
        engine.put(keys)
        connector = _raw(engine)
        connector.gate.clear()
        ended: list[bool] = []
        get = connector.get

        async def watched(key: Any) -> Any:
            obj = await get(key)
            ended.append(obj is not None)
            return obj

        connector.get = watched
        future = asyncio.run_coroutine_threadsafe(engine.connector.batched_get(keys), engine.loop)
        time.sleep(0.05)
        assert future.cancel()
        connector.gate.set()
        wait_for(lambda: ended == [True, True])
        connector.get = get
        wait_for(engine.balanced)


def test_lookups_that_fail_are_absent_and_counted(open_engine: Any) -> None:
    with plugin(Dict) as config:
        engine = open_engine(None, **config)
        keys = engine.keys(2)
        engine.put(keys)
        _raw(engine).fail = ConnectionRefusedError("down")
        assert engine.backend.contains(keys[0]) is False
        assert engine.connector.exists_sync(keys[0]) is False
        assert engine.run(engine.backend.batched_async_contains("id", keys, False)) == 0
        assert engine.count("lookup_failures", "unavailable") == 3
        _raw(engine).fail = None
        assert engine.backend.contains(keys[0]) is True
        assert engine.backend.remove(keys[0]) is True
        assert engine.backend.contains(keys[0]) is False


@pytest.mark.parametrize("use_pool", [False, True])
@pytest.mark.parametrize("damage", ["missing", "flipped"])
def test_many_chunks_in_waves(open_fs: Any, damage: str, use_pool: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tq_offload_connectors.remote.loads.WAVE_CHUNKS", 3)
    engine = open_fs()
    _cpu_view(engine).use_pool = use_pool
    keys = engine.keys(11)
    wanted = engine.put(keys)
    for way in ("batched", "async"):
        assert max(errors(engine.get(keys, way), wanted)) < FOUR_BIT
    for position in (7, 3, 0):
        path = file_of(engine, keys[position])
        path.unlink() if damage == "missing" else path.write_bytes(path.read_bytes()[:-64] + b"x" * 64)
        found = engine.get(keys, "batched")
        assert found[position:] == [None] * (11 - position)
        if position:
            assert max(errors(found[:position], wanted[:position])) < FOUR_BIT
        wait_for(engine.balanced)


# LMCache's health check


def test_the_health_check_can_recover(open_fs: Any) -> None:
    from lmcache.v1.health_monitor.checks.remote_backend_check import RemoteBackendHealthCheck

    engine = open_fs()
    check = RemoteBackendHealthCheck(engine.backend)
    assert check.check()
    assert check._put_and_get_check()
    assert engine.balanced()


# Start and end


def test_the_start_says_what_is_compressed(open_fs: Any, caplog: pytest.LogCaptureFixture) -> None:
    with _log(caplog):
        engine = open_fs()
    line = f"TQ-Offload: remote fs://host:0{engine.folder} (FSConnector): compressed, turboquant K4V4"
    assert line in caplog.text


def test_no_password_is_logged() -> None:
    assert place_of("redis://me:secret@host:1/0?x=token") == "redis://host:1/0"
    assert place_of("redis-cluster://u:p@a:1,u:p@b:2") == "redis-cluster://a:1,b:2"
    assert place_of("rediss://:p/w@host:1") == "rediss://host:1"
    assert place_of("fs:///tmp/a@b/c") == "fs:///tmp/a@b/c"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"use_layerwise": True}, "use_layerwise"),
        ({"enable_blending": True}, "enable_blending"),
        ({"extra_config": {"turboquant.key_bits": 77}}, "start: turboquant.key_bits=77"),
        ({"extra_config": {"turboquant.write_threads": 0}}, "start: turboquant.write_threads=0"),
        ({"extra_config": {"turboquant.password": "hunter2"}}, r"turboquant.password='\.\.\.'"),
        ({"extra_config": {"turboquant.keybits": 4}}, "turboquant.keybits"),
    ],
)
def test_what_cannot_work_ends_the_start(open_fs: Any, config: dict[str, Any], message: str) -> None:
    with pytest.raises(SystemExit, match=f"(?s)TQ-Offload: cannot .*{message}"):
        open_fs(**config)


def test_a_connector_that_cannot_work_is_named(open_engine: Any) -> None:
    with pytest.raises(SystemExit, match="Redis Sentinel never awaits"):
        open_engine("redis-sentinel://127.0.0.1:1")


def test_a_remote_that_is_down_is_no_error(open_engine: Any) -> None:
    engine = open_engine("lm://127.0.0.1:1")
    assert engine.connector is None
    obj, _ = engine.chunk(1)
    engine.backend.submit_put_task(engine.keys(1)[0], obj).result(5)
    obj.ref_count_down()
    assert engine.get(engine.keys(1)) == [None]
    assert engine.free_bytes() == engine.free


@pytest.mark.parametrize(
    ("serde", "active", "compressed"),
    [("turboquant", False, True), ("naive", True, True), ("naive", False, False), ("kivi", True, False)],
)
def test_which_backends_are_compressed(open_engine: Any, serde: str, active: bool, compressed: bool) -> None:
    engine = open_engine("blackhole://x", active=active, remote_serde=serde)
    assert isinstance(engine.connector, CompressedConnector) is compressed


def test_other_serdes_are_lmcaches(open_engine: Any) -> None:
    engine = open_engine("blackhole://x")
    assert type(engine.backend.serializer).__name__ == "NaiveSerializer"
    with pytest.raises(ValueError, match="Invalid type"):
        remote_backend.CreateSerde("zip", engine.meta, engine.config)


def test_installing_again_changes_nothing(open_engine: Any) -> None:
    open_engine("blackhole://x")
    before = remote_backend.CreateConnector, remote_backend.CreateSerde
    install(remote_backend, active=True)
    assert (remote_backend.CreateConnector, remote_backend.CreateSerde) == before
    assert remote_backend.CreateConnector.tq_offload_active


def test_the_scheduler_only_looks_up(open_fs: Any) -> None:
    worker = open_fs()
    keys = worker.keys(1)
    worker.put(keys)
    backend = remote_backend.RemoteBackend(worker.config, make_metadata(role="scheduler"), worker.loop, None, "cpu")
    assert backend.contains(keys[0])
    assert backend.get_blocking(keys[0]) is None
    backend.close()


def test_a_put_while_the_loop_stops_loses_nothing_of_lmcaches(open_fs: Any) -> None:
    engine = open_fs()
    engine.put(engine.keys(1))
    engine.loop.call_soon_threadsafe(engine.loop.stop)
    engine.thread.join(5)
    engine.offer(engine.keys(3, first=5))
    wait_for(lambda: engine.free_bytes() == engine.free)
    engine.connector.frames.close(0.2)
    wait_for(lambda: engine.count("failed", "closed") + engine.count("dropped", "closed") == 3)
    assert engine.balanced()


def test_a_put_after_the_loop_closed_loses_nothing_of_lmcaches(open_engine: Any) -> None:
    with plugin(Dict) as config:
        engine = open_engine(None, **config)
        _cpu_view(engine).use_pool = True
        engine.put(engine.keys(1))
        engine._end_loop()
        obj, _ = engine.chunk(9)
        engine.connector.put(engine.keys(1, first=9)[0], obj).close()
        wait_for(lambda: engine.count("failed", "closed") == 1)
    assert engine.balanced()


def test_close_stores_what_is_queued(open_fs: Any) -> None:
    engine = open_fs()
    engine.offer(engine.keys(4))
    engine.backend.close()
    assert len(files(engine)) == 4
    obj, _ = engine.chunk(9)
    engine.backend.submit_put_task(engine.keys(1, first=9)[0], obj).result(5)
    obj.ref_count_down()
    assert engine.get(engine.keys(1)) == [None]
    wait_for(lambda: engine.free_bytes() == engine.free)


# The table


def test_every_connector_of_lmcache_is_in_the_table() -> None:
    import ast

    import lmcache.v1.storage_backend.connector as package

    found = set()
    for path in Path(package.__path__[0]).glob("*_connector.py"):
        for node in ast.parse(path.read_text()).body:
            bases = [base.id for base in getattr(node, "bases", ()) if isinstance(base, ast.Name)]
            if isinstance(node, ast.ClassDef) and any(base.endswith("Connector") for base in bases):
                found.add(node.name)
    wrappers = {"AuditConnector", "InstrumentedRemoteConnector"}
    assert found - wrappers <= set(CONNECTORS)
    assert len(found) > 15


def test_a_subclass_is_handled_as_its_base() -> None:
    class Mine(FSConnector):
        pass

    assert handling_of(Mine.__new__(Mine)) is CONNECTORS["FSConnector"]
    assert handling_of(Dict.__new__(Dict)) is UNKNOWN


# Helpers


def _cpu_view(engine: RemoteEngine) -> Any:
    return engine.connector._store._cpu


def _raw(engine: RemoteEngine) -> Any:
    return engine.connector.getWrappedConnector()


def _layout(engine: RemoteEngine, key: Any) -> Any:
    obj, _ = engine.chunk(1)
    layout, _ = engine.connector._objects.source(obj, key)
    obj.ref_count_down()
    return layout


def _header(path: Path) -> Any:
    return TurboQuantCodec.inspect(path.read_bytes()[FRAME_HEADER:])


def _late(engine: RemoteEngine, keys: list[Any]) -> list[Any]:
    return list(engine.run(engine.backend.batched_get_non_blocking("lookup", keys)))


@contextlib.contextmanager
def _log(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    logger = remote_setup.logger()
    before = logger.propagate
    logger.propagate = True
    with caplog.at_level(logging.INFO, logger.name):
        yield
    logger.propagate = before


def _mooncake() -> ModuleType:
    """The part of `mooncake.store` that LMCache uses, over a dictionary and the memory addresses that it is given."""
    import ctypes

    class Store:
        def __init__(self) -> None:
            self.data: dict[str, bytes] = {}
            self.region = (0, 0)
            self.registered: list[bool] = []

        def setup(self, config: Any) -> None: ...

        def register_buffer(self, address: int, size: int) -> int:
            self.region = (address, address + size)
            return 0

        def unregister_buffer(self, address: int) -> int:
            return 0

        def _inside(self, address: int, size: int) -> None:
            self.registered.append(self.region[0] <= address and address + size <= self.region[1])

        def is_exist(self, key: str) -> bool:
            return key in self.data

        def put_parts(self, key: str, *parts: Any) -> int:
            self.data[key] = b"".join(bytes(part) for part in parts)
            return 0

        def put_from(self, key: str, address: int, size: int, config: Any) -> int:
            self._inside(address, size)
            self.data[key] = ctypes.string_at(address, size)
            return 0

        def batch_get_buffer(self, keys: list[str]) -> list[Any]:
            return [bytearray(self.data[key]) if key in self.data else None for key in keys]

        def batch_get_into(self, keys: list[str], addresses: list[int], sizes: list[int]) -> list[int]:
            found = []
            for key, address, size in zip(keys, addresses, sizes, strict=True):
                self._inside(address, size)
                data = self.data.get(key)
                if data is not None and len(data) <= size:
                    ctypes.memmove(address, data, len(data))
                found.append(-1 if data is None or len(data) > size else len(data))
            return found

        def close(self) -> None: ...

    module = ModuleType("mooncake.store")
    module.MooncakeDistributedStore = Store  # type: ignore[attr-defined]
    module.ReplicateConfig = SimpleNamespace  # type: ignore[attr-defined]
    return module


def test_the_helper_makes_real_objects(open_fs: Any) -> None:
    engine = open_fs()
    obj, _ = engine.chunk(1)
    assert isinstance(obj, TensorMemoryObj)
    assert engine.keys(1)[0].model_name == MODEL
    assert not engine.balanced()
    obj.ref_count_down()
    assert engine.balanced()
