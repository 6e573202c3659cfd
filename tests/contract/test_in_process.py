"""In-process mode against LMCache's own classes: every path of the backend, shapes, faults, memory at its baseline."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import tq_offload_connectors

pytest.importorskip("lmcache")

from in_process_worker import CHUNK, DIM, HEADS, LAYERS, Worker, config, fill, metadata, same, worker
from lmcache.v1.memory_management import MemoryFormat
from support import relative_mse

from tq_offload.integrations.lmcache.log import LOGGER_NAME
from tq_offload_connectors.in_process import TurboQuantBackend
from tq_offload_connectors.in_process.loads import Load


def test_blocking_batched_single_and_async_paths_serve_the_same_chunks() -> None:
    with worker() as w:
        keys = w.keys(4)
        copies = w.put(keys)
        assert w.backend.batched_contains([*keys, *w.keys(1, first=99)], pin=True) == 4
        for obj, copy in zip(w.backend.batched_get_blocking(keys), copies, strict=True):
            same(obj, copy)
        for key in keys:
            assert w.backend.unpin(key)
        same(w.backend.get_blocking(keys[2]), copies[2])
        same(w.backend.get_non_blocking(keys[3]).result(10), copies[3])
        for obj, copy in zip(w.get_async(keys), copies, strict=True):
            same(obj, copy)
        assert w.frames.tiers[0].counters.value("hits") == 10


def test_bytes_held_are_a_quarter() -> None:
    with worker({"turboquant.ram_gb": 0.05}, meta=metadata(kv_shape=(LAYERS, 2, 256, HEADS, 128), chunk_size=256)) as w:
        w.put(w.keys(3), tokens=256)
        counters = w.frames.tiers[0].counters
        raw = 3 * 2 * LAYERS * 256 * HEADS * 128 * 2
        assert counters.value("raw_bytes") == raw
        assert counters.value("stored_bytes") == w.frames.tiers[0].store.usage().nbytes
        assert raw / w.frames.tiers[0].store.usage().nbytes > 3.7


def test_a_chunk_is_encoded_once_for_all_tiers_and_a_hit_on_disk_is_promoted(tmp_path: Path) -> None:
    extra = {"turboquant.ram_gb": 0.05, "turboquant.disk": str(tmp_path)}
    with worker(extra) as w:
        keys = w.keys(3)
        copies = w.put(keys)
        ram, disk = w.frames.tiers
        assert (ram.counters.value("stored"), disk.counters.value("stored")) == (3, 3)
        assert disk.counters.value("encode_seconds") == 0
        names = [key.to_string() for key in keys]
        assert [bytes(ram.store.get(name)) == bytes(disk.store.get(name)) for name in names] == [True] * 3
    with worker(extra) as w:  # after a restart
        assert w.backend.batched_contains(keys) == 3
        for obj, copy in zip(w.backend.batched_get_blocking(keys), copies, strict=True):
            same(obj, copy)
        ram, disk = w.frames.tiers
        assert (disk.counters.value("hits"), ram.counters.value("promoted")) == (3, 3)
        same(w.backend.get_blocking(keys[0]), copies[0])
        assert (ram.counters.value("hits"), ram.counters.value("misses", "absent")) == (1, 3)


def test_a_prefix_may_be_spread_over_tiers(tmp_path: Path) -> None:
    with worker({"turboquant.ram_gb": 0.05, "turboquant.disk": str(tmp_path)}) as w:
        keys = w.keys(4)
        copies = w.put(keys)
        ram, disk = w.frames.tiers
        for n in (0, 2):
            assert ram.store.delete(keys[n].to_string())
        assert disk.store.delete(keys[1].to_string())
        assert w.backend.batched_contains(keys) == 4
        for obj, copy in zip(w.backend.batched_get_blocking(keys), copies, strict=True):
            same(obj, copy)
        for tier in w.frames.tiers:
            tier.store.delete(keys[2].to_string())
        assert w.backend.batched_contains(keys) == 2


def test_a_damaged_frame_in_ram_is_served_from_disk_and_repaired(tmp_path: Path) -> None:
    with worker({"turboquant.ram_gb": 0.05, "turboquant.disk": str(tmp_path)}) as w:
        (key,) = w.keys(1)
        (copy,) = w.put([key])
        ram = w.frames.tiers[0]
        damaged = bytearray(ram.store.get(key.to_string()))
        damaged[-70] ^= 1
        ram.store.put(key.to_string(), memoryview(damaged))
        same(w.backend.get_blocking(key), copy)
        assert ram.counters.value("misses", "checksum") == 1
        assert ram.counters.value("repairs", "checksum") == 1
        assert ram.counters.value("promoted") == 1
        same(w.backend.get_blocking(key), copy)
        assert ram.counters.value("hits") == 1


def test_frames_of_another_key_model_shape_or_program_are_misses() -> None:
    with worker() as w:
        keys = w.keys(3)
        w.put(keys[:1])
        store, counters = w.frames.tiers[0].store, w.frames.tiers[0].counters
        frame = bytes(store.get(keys[0].to_string()))
        store.put(keys[1].to_string(), memoryview(frame))
        store.put(keys[2].to_string(), memoryview(b"something else" * 100))
        assert w.backend.batched_get_blocking(keys[1:]) == [None, None]
        assert counters.value("misses", "mismatch_key") == 1
        assert counters.value("misses", "magic") == 1
        (other,) = w.keys(1, first=7, model_name="other/model")
        store.put(other.to_string(), memoryview(frame))
        assert w.backend.get_blocking(other) is None
        assert counters.value("misses", "mismatch_model") == 1
        w.backend.objects._metadata.kv_shape = (LAYERS + 1, 2, CHUNK, HEADS, DIM)
        assert w.backend.get_blocking(keys[0]) is None
        assert counters.value("misses", "mismatch_shape") == 1
        assert counters.value("gets") == counters.value("hits") + counters.value("misses") == 4


def test_the_prefix_ends_at_the_first_miss_and_what_follows_is_freed() -> None:
    with worker() as w:
        keys = w.keys(4)
        copies = w.put(keys)
        assert w.run(w.backend.batched_async_contains("id", keys, pin=True)) == 4
        w.frames.tiers[0].store.delete(keys[2].to_string())
        found = w.run(w.backend.batched_get_non_blocking("id", keys))
        assert len(found) == 2
        for obj, copy in zip(found, copies[:2], strict=True):
            same(obj, copy)


def test_a_full_queue_drops_the_rest_of_the_call_and_holds_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    with worker({"turboquant.ram_gb": 0.05, "turboquant.queue_gb": 0.0002, "turboquant.workers": 1}) as w:
        gate = threading.Event()
        encode = w.frames.codec.encode_into
        monkeypatch.setattr(
            type(w.frames.codec), "encode_into", lambda self, *a, **k: (gate.wait(10), encode(*a, **k))[1]
        )
        keys = w.keys(8)
        start = time.monotonic()
        w.put(keys, wait=False)
        assert time.monotonic() - start < 5  # the encoder waits ten seconds
        counters = w.frames.tiers[0].counters
        assert 0 < counters.value("dropped", "queue_full") < 8
        gate.set()
        assert w.frames.drain(20.0)
        stored = int(counters.value("stored"))
        assert stored + counters.value("dropped") == counters.value("puts") == 8
        assert w.backend.batched_contains(keys) == stored


def test_nan_is_refused_and_other_chunks_of_the_call_are_stored() -> None:
    with worker() as w:
        keys = w.keys(3)
        made = [w.chunk(n) for n in range(3)]
        made[1][0].tensor.view(-1)[5] = float("nan")
        done: list[Any] = []
        w.backend.batched_submit_put_task(keys, [obj for obj, _ in made], on_complete_callback=done.append)
        for obj, _ in made:
            obj.ref_count_down()
        assert w.frames.drain(20.0)
        assert w.frames.tiers[0].counters.value("refused", "non_finite") == 1
        assert [w.backend.contains(key) for key in keys] == [True, False, True]
        assert sorted(done, key=lambda key: key.chunk_hash) == [keys[0], keys[2]]


def test_a_second_put_of_a_chunk_is_present_not_stored_again() -> None:
    with worker() as w:
        keys = w.keys(2)
        w.put(keys)
        w.put(keys)
        counters = w.frames.tiers[0].counters
        assert (counters.value("puts"), counters.value("stored"), counters.value("present")) == (4, 2, 2)


def test_no_memory_on_load_is_a_miss_and_the_next_load_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tq_offload_connectors.in_process.objects.ALLOCATE_WAIT_S", 0.05)
    with worker() as w:
        (key,) = w.keys(1)
        (copy,) = w.put([key])
        held = []
        while (obj := w.cpu.allocate(w.meta.get_shapes(CHUNK), w.meta.get_dtypes(), busy_loop=False)) is not None:
            held.append(obj)
        assert w.backend.get_blocking(key) is None
        assert w.frames.tiers[0].counters.value("misses", "no_memory") == 1
        for obj in held:
            obj.ref_count_down()
        same(w.backend.get_blocking(key), copy)


def test_a_load_that_is_late_is_a_miss_and_frees_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    with worker({"turboquant.ram_gb": 0.05, "turboquant.workers": 1}) as w:
        keys = w.keys(2)
        copies = w.put(keys)
        w.backend._timeout = 0.1
        gate = threading.Event()
        read = w.frames.tiers[0].read
        monkeypatch.setattr(w.frames.tiers[0], "read", lambda *a, **k: (gate.wait(10), read(*a, **k))[1])
        assert w.backend.batched_get_blocking(keys) == [None, None]
        gate.set()
        counters = w.frames.tiers[0].counters
        deadline = time.monotonic() + 10
        while counters.value("misses", "timeout") < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert counters.value("misses", "timeout") == 2
        w.backend._timeout = 10.0
        for obj, copy in zip(w.backend.batched_get_blocking(keys), copies, strict=True):
            same(obj, copy)
        assert counters.value("gets") == counters.value("hits") + counters.value("misses")


def test_a_cancelled_async_load_frees_its_memory_and_pins(monkeypatch: pytest.MonkeyPatch) -> None:
    with worker() as w:
        keys = w.keys(2)
        w.put(keys)
        counters = w.frames.tiers[0].counters
        gate = threading.Event()
        read = w.frames.tiers[0].read
        monkeypatch.setattr(w.frames.tiers[0], "read", lambda *a, **k: (gate.wait(10), read(*a, **k))[1])
        assert w.run(w.backend.batched_async_contains("id", keys, pin=True)) == 2
        future = asyncio.run_coroutine_threadsafe(w.backend.batched_get_non_blocking("id", keys), w.loop)
        time.sleep(0.1)
        future.cancel()
        gate.set()
        monkeypatch.undo()
        deadline = time.monotonic() + 10
        while (w.frames.pins.count() or counters.value("gets") < 2) and time.monotonic() < deadline:
            time.sleep(0.01)
        _wait_for_memory(w)


def test_a_cancelled_load_frees_every_chunk_whatever_one_of_them_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    with worker() as w:
        keys = w.keys(3)
        w.put(keys)
        gate = threading.Event()
        read, free, calls = w.frames.tiers[0].read, Load.free, []

        def raising(load: Load) -> None:
            free(load)
            calls.append(load)
            if len(calls) == 1:
                raise OSError("disk gone")

        monkeypatch.setattr(w.frames.tiers[0], "read", lambda *a, **k: (gate.wait(10), read(*a, **k))[1])
        monkeypatch.setattr(Load, "free", raising)
        future = asyncio.run_coroutine_threadsafe(w.backend.batched_get_non_blocking("id", keys), w.loop)
        time.sleep(0.1)
        future.cancel()
        deadline = time.monotonic() + 10
        while len(calls) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        gate.set()
        assert len(calls) == 3
        monkeypatch.undo()
        _wait_for_memory(w)


def test_an_internal_error_of_a_load_is_a_miss_and_frees_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    with worker() as w:
        keys = w.keys(2)
        copies = w.put(keys)
        get = w.frames.get

        def broken(key: Any, destination: Any) -> bool:
            get(key, destination)
            raise KeyError("a bug")

        monkeypatch.setattr(w.frames, "get", broken)
        assert w.backend.batched_get_blocking(keys) == [None, None]
        assert w.backend.get_non_blocking(keys[0]).result(10) is None
        assert w.run(w.backend.batched_get_non_blocking("id", keys)) == []
        assert w.frames.tiers[0].counters.value("misses", "internal") == 5
        monkeypatch.undo()
        same(w.backend.get_blocking(keys[0]), copies[0])


def test_a_cancelled_lookup_leaves_no_pins(monkeypatch: pytest.MonkeyPatch) -> None:
    with worker({"turboquant.ram_gb": 0.05, "turboquant.workers": 1}) as w:
        keys = w.keys(3)
        w.put(keys)
        gate, begun = threading.Event(), threading.Event()
        contains = w.frames.tiers[0].store.contains

        def slow(name: str) -> bool:
            begun.set()
            gate.wait(10)
            return contains(name)

        monkeypatch.setattr(w.frames.tiers[0].store, "contains", slow)
        running, queued = (
            asyncio.run_coroutine_threadsafe(w.backend.batched_async_contains("id", keys, pin=True), w.loop)
            for _ in range(2)
        )
        assert begun.wait(10)
        time.sleep(0.1)
        running.cancel()
        queued.cancel()
        time.sleep(0.1)
        pinned: list[int] = []
        pin = w.frames.pins.pin
        monkeypatch.setattr(w.frames.pins, "pin", lambda names: (pin(names), pinned.append(w.frames.pins.count()))[0])
        gate.set()
        assert w.frames.submit(lambda: True).result(10)
        assert pinned == [3]  # and the one that had not begun pinned nothing
        monkeypatch.undo()
        assert w.frames.pins.count() == 0
        assert w.run(w.backend.batched_async_contains("id", keys, pin=True)) == 3
        assert w.frames.pins.count() == 3
        for key in keys:
            w.backend.unpin(key)


def test_a_load_of_nothing_is_nothing() -> None:
    with worker() as w:
        assert w.run(w.backend.batched_get_non_blocking("id", [])) == []
        assert w.run(w.backend.batched_async_contains("id", [])) == 0
        assert w.backend.batched_get_blocking([]) == []


@pytest.mark.parametrize("workers", [1, 4])
def test_a_batch_waits_for_memory_once_not_once_for_each_chunk(monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    monkeypatch.setattr("tq_offload_connectors.in_process.objects.ALLOCATE_WAIT_S", 0.5)
    with worker({"turboquant.ram_gb": 0.05, "turboquant.workers": workers}) as w:
        keys = w.keys(8)
        copies = w.put(keys)
        held = []
        while (obj := w.cpu.allocate(w.meta.get_shapes(CHUNK), w.meta.get_dtypes(), busy_loop=False)) is not None:
            held.append(obj)
        for load in (w.backend.batched_get_blocking, lambda ks: w.run(w.backend.batched_get_non_blocking("id", ks))):
            start = time.monotonic()
            assert not any(load(keys))
            assert 0.4 < time.monotonic() - start < 1.0
        for obj in held:
            obj.ref_count_down()
        for obj, copy in zip(w.backend.batched_get_blocking(keys), copies, strict=True):
            same(obj, copy)


def test_pinned_chunks_are_not_evicted() -> None:
    frame = 2 * LAYERS * CHUNK * HEADS * DIM * 2 / 3.5
    with worker({"turboquant.ram_gb": 4 * frame / (1 << 30)}) as w:
        keys = w.keys(3)
        w.put(keys)
        assert w.backend.batched_contains(keys[:1], pin=True) == 1
        w.put(w.keys(6, first=100))
        assert w.backend.contains(keys[0])
        assert not w.backend.contains(keys[1])
        w.backend.unpin(keys[0])
        w.put(w.keys(6, first=200))
        assert not w.backend.contains(keys[0])


def test_the_first_chunk_of_a_prefix_is_evicted_last() -> None:
    frame = 2 * LAYERS * CHUNK * HEADS * DIM * 2 / 3.5
    with worker({"turboquant.ram_gb": 4 * frame / (1 << 30)}) as w:
        keys = w.keys(4)
        w.put(keys)
        held = w.backend.batched_contains(keys)
        for obj in w.backend.batched_get_blocking(keys):
            if obj is not None:
                obj.ref_count_down()
        w.put(w.keys(2, first=100))
        left = [w.backend.contains(key) for key in keys[:held]]
        assert left[0]
        assert left == sorted(left, reverse=True)  # a prefix
        assert not all(left)


def test_partial_last_chunk() -> None:
    with worker() as w:
        (key,) = w.keys(1)
        (copy,) = w.put([key], tokens=19)
        obj = w.backend.get_blocking(key)
        assert tuple(obj.get_shapes()[0]) == (2, LAYERS, 19, HEADS * DIM)
        same(obj, copy)


@pytest.mark.parametrize("tokens", [CHUNK, 5])
def test_mla_latent(tokens: int) -> None:
    meta = metadata(use_mla=True, kv_shape=(LAYERS, 1, CHUNK, 1, 576))
    with worker(meta=meta) as w:
        (key,) = w.keys(1)
        (copy,) = w.put([key], tokens=tokens)
        obj = w.backend.get_blocking(key)
        assert obj.get_memory_format() == MemoryFormat.KV_MLA_FMT
        same(obj, copy)
        frame = w.frames.codec.inspect(w.frames.tiers[0].store.get(key.to_string()))
        assert (frame.layout.groups[0].kind, frame.layout.groups[0].head_dim) == ("latent", 576)


def test_fp8_kv_is_reinterpreted_where_the_user_says_so_and_kept_raw_otherwise() -> None:
    meta = metadata(kv_dtype=torch.uint8)
    with worker({"turboquant.ram_gb": 0.05, "turboquant.uint8_as": "float8_e4m3fn"}, meta=meta) as w:
        (key,) = w.keys(1)
        (copy,) = w.put([key])
        obj = w.backend.get_blocking(key)
        found, wanted = (x.view(torch.float8_e4m3fn).float() for x in (obj.get_tensor(0), copy[0]))
        assert relative_mse(found, wanted) < 0.02
        obj.ref_count_down()
    with worker(meta=meta) as w:
        (copy,) = w.put([key])
        obj = w.backend.get_blocking(key)
        assert torch.equal(obj.get_tensor(0), copy[0])
        obj.ref_count_down()


class _Group:
    """What LMCache's metadata asks of a group of layers."""

    def __init__(self, layers: int, width: int, dtype: torch.dtype, kv_size: int = 2) -> None:
        self.num_layers, self.hidden_dim_size, self.dtype = layers, width, dtype
        self.shape_desc = type("Shape", (), {"kv_size": kv_size})


def test_hybrid_groups_of_other_heads_dims_and_dtypes() -> None:
    meta = metadata()
    groups = [_Group(2, 2 * 64, torch.bfloat16), _Group(1, 4 * 128, torch.float16), _Group(3, 96, torch.float32, 1)]
    meta.kv_layer_groups_manager = type("Groups", (), {"kernel_groups": groups, "num_kernel_groups": 3})()
    with worker(meta=meta) as w:
        (key,) = w.keys(1)
        (copy,) = w.put([key])
        obj = w.backend.get_blocking(key)
        assert [tuple(s) for s in obj.get_shapes()] == [(2, 2, CHUNK, 128), (2, 1, CHUNK, 512), (1, 3, CHUNK, 96)]
        same(obj, copy)


def test_two_ranks_of_tensor_parallel_share_a_folder_and_not_their_chunks(tmp_path: Path) -> None:
    extra = {"turboquant.disk": str(tmp_path)}
    metas = [metadata(world_size=2, local_world_size=2, worker_id=n, local_worker_id=n) for n in range(2)]
    with worker(dict(extra), meta=metas[0]) as a, worker(dict(extra), meta=metas[1]) as b:
        keys = [w.keys(2, world_size=2, worker_id=n) for n, w in enumerate((a, b))]
        copies = a.put(keys[0])
        assert b.backend.batched_contains(keys[1]) == 0
        b.put(keys[1])
        assert b.backend.batched_contains(keys[1]) == 2
        same(a.backend.get_blocking(keys[0][1]), copies[1])
        assert a.backend.plan.disk_bytes is None


def test_mla_with_a_remote_tier_stores_on_rank_0_only_and_others_read_its_chunks() -> None:
    mla = {"use_mla": True, "kv_shape": (LAYERS, 1, CHUNK, 1, 576), "world_size": 2}
    w = Worker({"turboquant.ram_gb": 0.05}, meta=metadata(worker_id=1, **mla))
    try:
        w.backend._reads_as_first_rank = True  # as with a Redis tier
        (mine,) = w.keys(1, world_size=2, worker_id=1)
        (first,) = w.keys(1, world_size=2, worker_id=0)
        w.put([mine])
        assert w.frames.tiers[0].counters.value("puts") == 0
        w.backend._reads_as_first_rank = False
        (copy,) = w.put([first])
        w.backend._reads_as_first_rank = True
        assert w.backend.contains(mine)
        same(w.backend.get_blocking(mine), copy)
        w.check_baseline()
    finally:
        w.close()


@pytest.mark.parametrize("mla", [False, True])
def test_layerwise_in_ram(mla: bool) -> None:
    shape = (LAYERS, 1, CHUNK, 1, 576) if mla else (LAYERS, 2, CHUNK, HEADS, DIM)
    with worker(meta=metadata(use_mla=mla, kv_shape=shape), use_layerwise=True) as w:
        (key,) = w.keys(1)
        keys = key.split_layers(LAYERS)
        fmt = MemoryFormat.KV_MLA_FMT if mla else MemoryFormat.KV_T2D
        size = torch.Size([CHUNK, 576] if mla else [CHUNK, 2, HEADS * DIM])
        objs = w.cpu.batched_allocate(size, torch.bfloat16, batch_size=LAYERS, fmt=fmt)
        copies = [fill(obj, n) for n, obj in enumerate(objs)]
        for layer, obj in zip(keys, objs, strict=True):
            w.backend.batched_submit_put_task([layer], [obj])
            obj.ref_count_down()
        assert w.frames.drain(20.0)
        assert w.backend.batched_contains(keys, pin=True) == LAYERS
        held = []
        while (obj := w.cpu.allocate(size, torch.bfloat16, fmt, busy_loop=False)) is not None:
            held.append(obj)  # LMCache's memory is full: layers must come all the same
        for layer, copy in zip(keys, copies, strict=True):
            (obj,) = w.run(w.backend.batched_get_non_blocking("fake_lookup_id", [layer]))
            assert tuple(obj.get_shape()) == tuple(size)
            assert obj.get_memory_format() == fmt
            same(obj, copy)
        for obj in held:
            obj.ref_count_down()
        w.frames.tiers[0].store.delete(keys[1].to_string())
        with pytest.raises(RuntimeError, match="is gone"):
            w.run(w.backend.batched_get_non_blocking("fake_lookup_id", [keys[1]]))
        for layer in keys:
            w.backend.unpin(layer)


@pytest.mark.parametrize(
    ("extra", "changes", "message"),
    [
        ({"turboquant.ram_gb": 1, "turboquant.bitz": 4}, {}, "turboquant.bitz"),
        ({"turboquant.ram_gb": "much"}, {}, "turboquant.ram_gb"),
        ({"turboquant.ram_gb": 1, "turboquant.preset": "best"}, {}, "turboquant.preset='best'"),
        ({"turboquant.ram_gb": 1, "turboquant.bits": 9}, {}, "start: turboquant.bits=9"),
        ({"turboquant.ram_gb": 1, "turboquant.write_threads": 0}, {}, "start: turboquant.write_threads=0"),
        ({"turboquant.ram_gb": 1, "turboquant.disk_fsync": "x"}, {}, "start: turboquant.disk_fsync='x'"),
        ({"turboquant.redis_url": "redis://h", "turboquant.redis_ttl_s": -1}, {}, "start: turboquant.redis_ttl_s=-1"),
        ({"turboquant.ram_gb": 1, "turboquant.password": "hunter2"}, {}, "turboquant.password='...'"),
        ({"turboquant.ram_gb": 1, "turboquant.redispassword": "hunter2"}, {}, "turboquant.redispassword='...'"),
        ({"turboquant.ram_gb": 1, "turboquant.redis_passwd": "hunter2"}, {}, "start: turboquant.redis_passwd='...'"),
        ({"turboquant.ram_gb": 1, "turboquant.redisurl": "redis://:hunter2@h"}, {}, "turboquant.redisurl='...'"),
        ({"turboquant.ram_gb": 1, "turboquant.disk_gb": 5}, {}, "turboquant.disk_gb=5"),
        ({"turboquant.disk": 7}, {}, "turboquant.disk=7"),
        ({"turboquant.disk": ""}, {}, "turboquant.disk=''"),
        ({"turboquant.bits": 4}, {}, "one of ram_gb, disk and redis_url"),
        ({"turboquant.ram_gb": 1, "turboquant.redis_ttl_s": 5}, {}, "no Redis tier"),
        ({"turboquant.redis_url": "ftp://x"}, {}, "redis_url"),
        ({"turboquant.disk": "/proc/nothing/here"}, {}, "/proc/nothing/here"),
        ({"turboquant.ram_gb": 1, "turboquant.disk": "/tmp/x"}, {"use_layerwise": True}, "use_layerwise"),
        ({"turboquant.ram_gb": 1}, {"enable_blending": True, "use_layerwise": True}, "enable_blending"),
    ],
)
def test_settings_that_cannot_work_end_the_start(extra: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SystemExit, match="TQ-Offload: cannot start") as caught:
        TurboQuantBackend(config=config(extra, **changes), metadata=metadata(), local_cpu_backend=None, loop=None)
    assert message in str(caught.value)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("variable", "value"), [("BITS", "9"), ("WRITE_THREADS", "x"), ("DISK_FSYNC", "x"), ("REDIS_TTL_S", "-1")]
)
def test_a_wrong_variable_is_named_as_such(monkeypatch: pytest.MonkeyPatch, variable: str, value: str) -> None:
    monkeypatch.setenv(f"TQ_OFFLOAD_{variable}", value)
    extra = {"turboquant.redis_url": "redis://h", "turboquant.redis_key_prefix": "x"}
    with pytest.raises(SystemExit, match=f"cannot start: TQ_OFFLOAD_{variable}='?{value}'? is"):
        TurboQuantBackend(config=config(extra), metadata=metadata(), local_cpu_backend=None, loop=None)


def test_a_disk_that_cannot_be_written_is_said_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode, **k: not mode & os.W_OK and access(path, mode, **k))
    logging.getLogger(LOGGER_NAME).addHandler(caplog.handler)  # LMCache's logger does not propagate
    try:
        with worker({"turboquant.disk": str(tmp_path)}):
            pass
    finally:
        logging.getLogger(LOGGER_NAME).removeHandler(caplog.handler)
    lines = [m for m in caplog.messages if "nothing will be stored" in m]
    assert lines == [f"TQ-Offload: tier disk: nothing will be stored: {tmp_path} cannot be written"]


def test_the_scheduler_looks_up_on_disk_without_memory(tmp_path: Path) -> None:
    extra = {"turboquant.ram_gb": 0.05, "turboquant.disk": str(tmp_path)}
    with worker(dict(extra)) as w:
        keys = w.keys(2)
        w.put(keys)
        scheduler = TurboQuantBackend(
            config=config(dict(extra)), metadata=metadata(role="scheduler"), local_cpu_backend=None, loop=None
        )
        try:
            assert [tier.name for tier in scheduler.frames.tiers] == ["disk"]
            assert scheduler.batched_contains(keys) == 2
        finally:
            scheduler.close()


def test_the_status_of_the_process_shows_every_tier() -> None:
    assert tq_offload_connectors.status() == []
    with worker() as w:
        w.put(w.keys(2))
        (found,) = tq_offload_connectors.status()
        (ram,) = found["tiers"]
        assert (ram["tier"], ram["entries"], ram["stored"], ram["dropped"]) == ("ram", 2, 2, {})
        assert ram["bytes"] == ram["stored_bytes"]
        assert found["encode_queue_bytes"] == ram["queue_bytes"] == 0
    assert tq_offload_connectors.status() == []


def test_prometheus_shows_the_tiers_beside_lmcaches_own_metrics() -> None:
    from prometheus_client import REGISTRY, generate_latest

    with worker() as w:
        before = REGISTRY.get_sample_value("tq_offload_tier_stored_total", {"tier": "ram"}) or 0
        w.put(w.keys(3))
        assert REGISTRY.get_sample_value("tq_offload_tier_stored_total", {"tier": "ram"}) == before + 3
        held = w.frames.tiers[0].store.usage().nbytes
        assert REGISTRY.get_sample_value("tq_offload_tier_bytes", {"tier": "ram"}) == held > 0
        assert b"tq_offload_tier_misses_total" in generate_latest()
    assert REGISTRY.get_sample_value("tq_offload_tier_bytes", {"tier": "ram"}) == 0


def test_close_ends_all_threads_and_later_calls_are_misses() -> None:
    before = {t.name for t in threading.enumerate()}
    w = Worker({"turboquant.ram_gb": 0.05})
    keys = w.keys(2)
    w.put(keys)
    w.backend.close()
    assert w.run(w.backend.batched_async_contains("id", keys, pin=True)) == 0
    assert w.backend.get_non_blocking(keys[0]).result(0) is None
    assert w.run(w.backend.batched_get_non_blocking("id", keys)) == []
    w.close()
    assert {t.name for t in threading.enumerate() if t.name.startswith("tq-")} <= before
    assert w.backend.batched_contains(keys) == 0
    assert w.backend.batched_get_blocking(keys) == [None, None]


def test_vectors_have_the_head_dim_of_the_engine() -> None:
    with worker(meta=metadata(kv_shape=(LAYERS, 2, CHUNK, 3, 80))) as w:
        (key,) = w.keys(1)
        w.put([key])
        frame = w.frames.codec.inspect(w.frames.tiers[0].store.get(key.to_string()))
        assert frame.layout.groups[0].head_dim == 80


def _wait_for_memory(w: Worker) -> None:
    """Until the loads that nobody waits for have given theirs back; the caller's end checks that they did."""
    deadline = time.monotonic() + 10
    while w.free_bytes() != w.free and time.monotonic() < deadline:
        time.sleep(0.01)
