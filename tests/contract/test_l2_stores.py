"""The L2 adapters over the memory, disk and Redis stores, driven as LMCache's controllers do, with a real L1."""

from __future__ import annotations

import json
import os
import select
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from redis_server import RedisServer

FOUR_BIT_MSE = 0.0096  # E of relative MSE at 4 bits: 0.009497 (docs/wire-format.md)
CONFIGS = Path(__file__).parents[2] / "configs"
CLASSES = {"ram": "MemoryL2Adapter", "disk": "DiskL2Adapter", "redis": "RedisL2Adapter"}
KINDS = tuple(CLASSES)


class Rig:
    """An adapter that LMCache's factory made from its spec, and a real L1 manager."""

    def __init__(self, spec: dict[str, Any], tools: Any, l1_gb: float = 0.0625) -> None:
        from lmcache.v1.distributed.config import parse_args
        from lmcache.v1.distributed.l1_manager import L1Manager
        from lmcache.v1.distributed.l2_adapters import create_l2_adapter

        self.tools = tools
        size = ["--l1-size-gb", str(l1_gb), "--no-l1-use-lazy"]
        config = parse_args([*size, "--eviction-policy", "LRU", "--l2-adapter", json.dumps(spec)])
        config.l1_manager_config.memory_config.shm_name = ""  # several L1s in one process
        self.l1 = L1Manager(config.l1_manager_config)
        self.adapter = create_l2_adapter(config.l2_adapter_config.adapters[0], self.l1.get_l1_memory_desc())
        self.listener = _listener()
        self.adapter.register_listener(self.listener)

    def close(self) -> None:
        self.adapter.close()
        self.l1.close()

    def objects(self, keys: list[Any], shapes: Any = None, dtypes: Any = (torch.bfloat16,)) -> list[Any]:
        objects = self.tools.allocate(self.l1, keys, shapes or (self.tools.SHAPE,), dtypes)
        for obj in objects:
            obj.raw_tensor.zero_()
        return objects

    def filled(self, keys: list[Any], **kwargs: Any) -> tuple[list[Any], list[list[torch.Tensor]]]:
        objects = self.objects(keys, **kwargs)
        return objects, self.tools.fill(objects)

    def store(self, keys: list[Any], objects: list[Any]) -> Any:
        return self.stored(self.adapter.submit_store_task(keys, objects))

    def stored(self, task: int) -> Any:
        results: dict[int, Any] = {}
        while task not in results:
            _wait_readable(self.adapter.get_store_event_fd())
            results.update(self.adapter.pop_completed_store_tasks())
        return results[task]

    def lookup(self, keys: list[Any]) -> list[bool]:
        task = self.adapter.submit_lookup_and_lock_task(keys, {})
        return _bits(self.adapter.get_lookup_and_lock_event_fd(), task, self.adapter.query_lookup_and_lock_result, keys)

    def load(self, keys: list[Any], objects: list[Any]) -> list[bool]:
        task = self.adapter.submit_load_task(keys, objects)
        return _bits(self.adapter.get_load_event_fd(), task, self.adapter.query_load_result, keys)

    @property
    def store_(self) -> Any:
        """The ByteStore itself."""
        return self.adapter._store._inner

    @property
    def counters(self) -> Any:
        return self.adapter._tier.counters


def _listener() -> Any:
    from lmcache.v1.distributed.internal_api import L2AdapterListener

    class Listener(L2AdapterListener):
        def __init__(self) -> None:
            self.known: dict[Any, int] = {}
            self.accessed: list[Any] = []

        def on_l2_keys_stored(self, keys: Any, sizes: Any) -> None:
            self.known.update(zip(keys, sizes, strict=True))

        def on_l2_keys_accessed(self, keys: Any) -> None:
            self.accessed += keys

        def on_l2_keys_deleted(self, keys: Any) -> None:
            for key in keys:
                del self.known[key]

    return Listener()


def _wait_readable(fd: int, seconds: float = 60) -> None:
    """As a controller waits: until the file descriptor is readable, which it consumes."""
    from lmcache.v1.platform import consume_fd

    poller = select.poll()
    poller.register(fd, select.POLLIN)
    assert poller.poll(seconds * 1000), f"nothing within {seconds} s"
    consume_fd(fd)


def _bits(fd: int, task: int, query: Callable[[int], Any], keys: list[Any]) -> list[bool]:
    _wait_readable(fd)
    bitmap = query(task)
    assert bitmap is not None
    assert query(task) is None, "a result is given once"
    return [bitmap.test(i) for i in range(len(keys))]


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture
def make_rig(tmp_path: Path, tools: Any, request: pytest.FixtureRequest) -> Iterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def make(kind: str, l1_gb: float = 0.0625, **params: Any) -> Rig:
        if kind == "redis":
            server = request.getfixturevalue("redis")
            params = {"url": server.url, "key_prefix": f"{tmp_path.name}:", **params}
        elif kind == "disk":
            params = {"folder": str(tmp_path / "l2"), **params}
        else:
            params = {"capacity_gb": 0.125, **params}
        rigs.append(Rig(_spec(kind, params), tools, l1_gb))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


def _spec(kind: str, params: dict[str, Any]) -> dict[str, Any]:
    module = "tq_offload_connectors.multi_process"
    return {"type": "plugin", "module_path": module, "class_name": CLASSES[kind], "adapter_params": params}


@pytest.mark.parametrize("kind", KINDS)
def test_store_lookup_load_unlock_delete(kind: str, make_rig: Any, model: str, tools: Any) -> None:
    rig = make_rig(kind)
    keys = tools.make_keys(model, 5)
    objects, wanted = rig.filled(keys)
    assert rig.lookup(keys) == [False] * 5
    result = rig.store(keys, objects)
    frame = rig.adapter._frames.codec.frame_size(_layout(rig, keys[0], objects[0]))
    assert result.is_successful()
    assert result.bytes_transferred() == 5 * frame < 5 * objects[0].get_size() / 3
    assert rig.listener.known == dict.fromkeys(keys, frame)
    assert rig.adapter.get_usage().total_bytes_used == 5 * frame

    strange = tools.make_keys(model, 1)
    assert rig.lookup([keys[0], *strange, *keys[1:]]) == [True, False, True, True, True, True]
    pins = 0 if kind == "redis" else 5
    assert rig.adapter.report_status()["tq_offload"]["pins"] == pins
    targets = rig.objects(keys)
    assert rig.load([*keys, *strange], [*targets, *rig.objects(strange)]) == [True] * 5 + [False]
    for obj, (copy,) in zip(targets, wanted, strict=True):
        assert 0.003 < tools.relative_mse(obj.get_tensor(0), copy) < FOUR_BIT_MSE * 1.1
    assert rig.listener.accessed == keys
    rig.adapter.submit_unlock(keys)
    assert rig.adapter.report_status()["tq_offload"]["pins"] == 0

    rig.adapter.delete(keys[:2])
    assert rig.lookup(keys) == [False] * 2 + [True] * 3
    assert list(rig.listener.known) == keys[2:]
    assert rig.adapter.get_usage().total_bytes_used == 3 * frame
    assert rig.counters.value("hits") == 5
    assert rig.counters.value("misses", "absent") == rig.counters.value("misses") == 1


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_there_already_is_a_success_of_no_bytes(kind: str, make_rig: Any, model: str, tools: Any) -> None:
    rig = make_rig(kind)
    keys = tools.make_keys(model, 3)
    objects, _ = rig.filled(keys)
    once = rig.store(keys[:2], objects[:2]).bytes_transferred()
    again = rig.store(keys, objects)
    assert again.is_successful()
    assert again.bytes_transferred() == once / 2
    assert rig.counters.value("stored") == 3
    assert rig.counters.value("present") == 2
    empty = rig.store([], [])
    assert empty.is_successful()
    assert empty.bytes_transferred() == 0
    assert rig.load([], []) == []


@pytest.mark.parametrize("kind", ["disk", "redis"])
def test_another_server_finds_what_the_first_one_stored(kind: str, make_rig: Any, model: str, tools: Any) -> None:
    first = make_rig(kind)
    keys = tools.make_keys(model, 3, cache_salt="tenant")
    objects, wanted = first.filled(keys)
    first.store(keys, objects)
    first.adapter.close()
    second = make_rig(kind, bits=3)  # the frames say how they were encoded
    assert second.lookup(keys) == [True] * 3
    targets = second.objects(keys)
    assert second.load(keys, targets) == [True] * 3
    assert tools.relative_mse(targets[2].get_tensor(0), wanted[2][0]) < FOUR_BIT_MSE * 1.1


def test_a_batch_may_hold_objects_of_several_shapes(make_rig: Any, model: str, tools: Any) -> None:
    rig = make_rig("ram")
    keys = tools.make_keys(model, 2) + tools.make_keys(model, 1, object_group_id=1)
    objects, wanted = rig.filled(keys[:2])
    shapes, dtypes = ((1, 2, 64, 256), (1, 1, 64, 512)), (torch.bfloat16, torch.float16)
    (other,), (copies,) = rig.filled(keys[2:], shapes=shapes, dtypes=dtypes)
    assert rig.store(keys, [*objects, other]).is_successful()
    targets = [*rig.objects(keys[:2]), *rig.objects(keys[2:], shapes=shapes, dtypes=dtypes)]
    assert rig.load(keys, targets) == [True] * 3
    for group, copy in enumerate(copies):
        assert tools.relative_mse(targets[2].get_tensor(group), copy) < FOUR_BIT_MSE * 1.1
    assert tools.relative_mse(targets[0].get_tensor(0), wanted[0][0]) < FOUR_BIT_MSE * 1.1


def test_head_dim_comes_from_the_config_of_the_key_s_model(make_rig: Any, model: str, tools: Any) -> None:
    rig = make_rig("ram")
    keys = tools.make_keys(model, 1)
    objects, _ = rig.filled(keys)
    rig.store(keys, objects)
    (name,) = rig.store_.keys()
    (group,) = rig.adapter._frames.codec.inspect(rig.store_.get(name)).layout.groups
    assert (group.kind, group.head_dim) == ("packed", tools.D)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("damage", "reason"),
    [("flip", "checksum"), ("truncate", "length"), ("other", "mismatch_key"), ("shape", "mismatch_shape")],
)
def test_a_bad_entry_is_a_miss_of_its_key_alone_and_repaired(
    kind: str, damage: str, reason: str, make_rig: Any, model: str, tools: Any
) -> None:
    rig = make_rig(kind)
    keys = tools.make_keys(model, 3)
    objects, wanted = rig.filled(keys)
    rig.store(keys, objects)
    targets = rig.objects(keys)
    if damage == "shape":
        (targets[1],) = rig.objects(keys[1:2], shapes=((1, 3, 32, 256),))
    else:
        _damage(rig, keys[1], damage, keys[0])
    assert rig.load(keys, targets) == [True, False, True]
    assert not targets[1].get_tensor(0).any(), "the destination of a miss must be untouched"
    assert tools.relative_mse(targets[2].get_tensor(0), wanted[2][0]) < FOUR_BIT_MSE * 1.1
    assert rig.counters.value("misses", reason) == rig.counters.value("misses") == 1
    assert rig.counters.value("repairs", reason) == 1
    assert keys[1] not in rig.listener.known
    assert rig.lookup(keys) == [True, False, True]
    assert rig.store(keys, objects).is_successful()
    assert rig.load(keys, rig.objects(keys)) == [True] * 3


def test_a_chunk_with_nan_fails_the_task_and_its_neighbours_are_stored(make_rig: Any, model: str, tools: Any) -> None:
    rig = make_rig("ram")
    keys = tools.make_keys(model, 3)
    objects, _ = rig.filled(keys)
    objects[1].get_tensor(0)[0, 0, 0, 0] = float("nan")
    assert not rig.store(keys, objects).is_successful()
    assert rig.lookup(keys) == [True, False, True]
    assert rig.counters.value("refused", "non_finite") == 1
    assert set(rig.listener.known) == {keys[0], keys[2]}


def test_a_full_queue_fails_and_counts_and_never_waits(
    make_rig: Any, model: str, tools: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig("ram", queue_gb=3 * 3 * 64 * 256 * 2 / (1 << 30))  # three chunks
    open_gate = _gate(rig, monkeypatch)
    keys = tools.make_keys(model, 5)
    objects, _ = rig.filled(keys)
    task = rig.adapter.submit_store_task(keys, objects)  # returns although nothing can be encoded
    assert rig.counters.value("dropped", "queue_full") == 2
    assert rig.adapter.report_status()["tq_offload"]["encode_queue_chunks"] >= 1
    assert not rig.adapter.pop_completed_store_tasks(), "LMCache must hold the memory until it was encoded"
    open_gate()
    assert not rig.stored(task).is_successful()
    assert rig.lookup(keys) == [True, True, True, False, False]


def test_memory_that_lmcache_gave_away_is_never_stored(
    make_rig: Any, model: str, tools: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig("disk")
    open_gate = _gate(rig, monkeypatch)
    keys = tools.make_keys(model, 2)
    objects, _ = rig.filled(keys)
    task = rig.adapter.submit_store_task(keys, objects)
    rig.l1._memory_manager.free([objects[0]])
    open_gate()
    assert not rig.stored(task).is_successful()
    assert rig.counters.value("failed", "source_gone") == 1
    assert rig.lookup(keys) == [False, True]


def test_closing_ends_every_task_and_leaves_no_thread_and_no_descriptor(
    make_rig: Any, model: str, tools: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_rig("disk").close()  # what LMCache opens once for a process
    rig = make_rig("ram")  # keeps L1 and the data for the measured one
    keys = tools.make_keys(model, 8)
    objects, _ = rig.filled(keys)
    for kind in KINDS:
        make_rig(kind).adapter.close()
    threads, fds = _threads(), _fds()
    for kind in KINDS:
        busy = _bare(make_rig, kind, monkeypatch)
        busy.submit_store_task(keys, objects)
        busy.submit_lookup_and_lock_task(keys, {})
        busy.submit_load_task(keys, objects)
        busy.close()
        assert busy._sources._unreleased == 0
        assert not busy._sources._objects
        assert busy.report_status()["is_healthy"] is False
        busy.submit_store_task(keys, objects)
        busy.submit_lookup_and_lock_task(keys, {})
        busy.submit_load_task(keys, objects)
        busy.submit_unlock(keys)
        busy.delete(keys)
        busy.close()
        assert busy.pop_completed_store_tasks() is not None
    tools.wait_for(lambda: _threads() <= threads)
    assert _fds() <= fds


def test_closing_waits_for_those_who_read_lmcache_s_memory(
    make_rig: Any, model: str, tools: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig("ram")
    open_gate = _gate(rig, monkeypatch)
    monkeypatch.setattr(rig.adapter._frames, "close", partial(rig.adapter._frames.close, 0.01))
    keys = tools.make_keys(model, 2)
    objects, _ = rig.filled(keys)
    rig.adapter.submit_store_task(keys, objects)
    closing = threading.Thread(target=rig.adapter.close)
    closing.start()
    closing.join(0.3)
    assert closing.is_alive(), "LMCache frees L1 once this returns"
    open_gate()
    closing.join(60)
    assert not closing.is_alive()


def test_memory_evicts_the_oldest_tells_lmcache_and_keeps_what_is_locked(make_rig: Any, model: str, tools: Any) -> None:
    probe = make_rig("ram")
    keys = tools.make_keys(model, 12)
    objects, _ = probe.filled(keys)
    frame = probe.store(keys[:1], objects[:1]).bytes_transferred()
    rig = make_rig("ram", capacity_gb=(6 * frame + 100) / (1 << 30))
    for i in range(6):
        rig.store([keys[i]], [objects[i]])
    assert rig.lookup(keys[:2]) == [True, True]  # locked
    for i in range(6, 10):
        assert rig.store([keys[i]], [objects[i]]).is_successful()
    assert set(rig.listener.known) == {*keys[:2], *keys[6:10]}
    assert rig.adapter.get_usage().total_bytes_used == 6 * frame == rig.store_.usage().nbytes
    assert rig.adapter.get_usage().usage_fraction > 0.99
    rig.adapter.submit_unlock(keys[:2])
    rig.adapter.submit_unlock(keys[:2])  # once too often
    for i in range(10, 12):
        rig.store([keys[i]], [objects[i]])
    assert set(rig.listener.known) == {*keys[:2], *keys[8:]} or set(rig.listener.known) == set(keys[6:])
    assert len(rig.adapter._residents) == 6


def test_what_goes_behind_lmcache_s_back_is_told_and_counted_once(make_rig: Any, model: str, tools: Any) -> None:
    from tq_offload_connectors.multi_process.keys import object_name

    rig = make_rig("disk")
    keys = tools.make_keys(model, 6)
    objects, _ = rig.filled(keys)
    frame = rig.store(keys, objects).bytes_transferred() / 6
    rig.store_.delete(object_name(keys[5]))
    rig.store([keys[5]], [objects[5]])
    assert rig.adapter.get_usage().total_bytes_used == 6 * frame
    rig.store_.delete(object_name(keys[5]))
    assert rig.load(keys[5:], rig.objects(keys[5:])) == [False]
    assert set(rig.listener.known) == set(keys[:5])
    assert rig.adapter.get_usage().total_bytes_used == 5 * frame


def test_lmcache_s_own_eviction_works_on_it(make_rig: Any, model: str, tools: Any) -> None:
    from lmcache.v1.distributed.config import EvictionConfig
    from lmcache.v1.distributed.storage_controllers.eviction_controller import (
        L2AdapterEvictionState,
        L2EvictionController,
    )

    rig = make_rig("ram", capacity_gb=0.0005)
    assert rig.adapter.supports_global_eviction
    config = EvictionConfig(eviction_policy="LRU", trigger_watermark=0.1, eviction_ratio=0.5)
    state = L2AdapterEvictionState(0, rig.adapter, config)
    keys = tools.make_keys(model, 4)
    objects, _ = rig.filled(keys)
    rig.store(keys, objects)
    L2EvictionController([state])._check_and_evict(state)
    assert len(list(rig.store_.keys())) == 2
    assert len(rig.listener.known) == 2


def test_redis_that_forgot_is_written_again_and_an_outage_is_a_miss(make_rig: Any, model: str, tools: Any) -> None:
    with RedisServer() as server:
        rig = make_rig("redis", url=server.url, backoff_base_s=0.01, backoff_cap_s=0.05, connect_timeout_s=0.5)
        keys = tools.make_keys(model, 2)
        objects, _ = rig.filled(keys)
        assert rig.store(keys, objects).is_successful()
        server.command("FLUSHALL")
        assert rig.lookup(keys) == [False, False]
        assert not rig.listener.known
        assert rig.store(keys, objects).bytes_transferred() > 0, "must not be taken for present"
        server.kill()
        assert rig.load(keys, rig.objects(keys)) == [False, False]
        assert rig.lookup(keys) == [False, False]
        assert not rig.store(tools.make_keys(model, 1), objects[:1]).is_successful()
        assert rig.counters.value("lookup_failures") == 1
        server.start()
        tools.wait_for(lambda: not any(rig.lookup(keys)) and rig.store(keys, objects).bytes_transferred() > 0)
        assert rig.lookup(keys) == [True, True]


def test_names_differ_for_every_field_and_fit(model: str, tools: Any) -> None:
    from lmcache.v1.distributed.api import ObjectKey

    from tq_offload_connectors.byte_store import MAX_KEY_BYTES
    from tq_offload_connectors.multi_process.keys import frame_key, object_name

    base = {"chunk_hash": b"\x01" * 32, "model_name": "org/model", "kv_rank": 0x01000100, "object_group_id": 0}
    others = [
        {"chunk_hash": b"\x02" * 32}, {"model_name": "org/model2"}, {"kv_rank": 0x02000100}, {"object_group_id": 1},
        {"cache_salt": "a"}, {"cache_salt": "0"}, {"model_name": ""}, {"model_name": "/x" * 900},
        {"model_name": "/x" * 900 + "y"}, {"cache_salt": "ü" * 128, "model_name": "/x" * 450},
    ]  # fmt: skip
    keys = [ObjectKey(**base)] + [ObjectKey(**{**base, **other}) for other in others]
    names = [object_name(key) for key in keys]
    assert names[0] == f"org/model@01000100@0@{'01' * 32}"
    assert len(set(names)) == len({frame_key(key).digest for key in keys}) == len(keys)
    assert max(len(name.encode()) for name in names) <= MAX_KEY_BYTES


@pytest.mark.parametrize(
    ("kind", "params", "text"),
    [
        ("ram", {}, "adapter_params.capacity_gb=None is not understood; allowed: a size in GiB"),
        ("ram", {"capacity_gb": "much"}, "adapter_params.capacity_gb='much'"),
        ("ram", {"capacity_gb": 1, "write_threads": 0}, "adapter_params.write_threads=0"),
        ("ram", {"capacity_gb": 1, "max_workers": 0}, "adapter_params.max_workers=0"),
        ("ram", {"capacity_gb": True}, "adapter_params.capacity_gb=True"),
        ("ram", {"capacity_gb": float("nan")}, "adapter_params.capacity_gb=nan"),
        ("ram", {"capacity_gb": 1, "bits": 9}, "adapter_params.bits=9 is not understood; allowed: an integer from 1 "),
        ("ram", {"capacity_gb": 1, "url": "redis://:secret@x"}, "adapter_params.url='...'"),
        ("ram", {"capacity_gb": 1, "queue_gb": 0}, "adapter_params.queue_gb=0"),
        ("ram", {"capacity_gb": 1, "backend": "cuda13"}, "adapter_params.backend='cuda13'"),
        ("disk", {"folder": ""}, "adapter_params.folder=''"),
        ("disk", {"folder": 7}, "adapter_params.folder=7"),
        ("disk", {"folder": "/dev/null/x"}, "DiskL2Adapter"),
        ("disk", {"folder": "x", "fsync": "yes"}, "adapter_params.fsync='yes' is not understood; allowed: none"),
        ("redis", {}, "adapter_params.url"),
        ("redis", {"url": "http://:secret@host"}, "adapter_params.url"),
        ("redis", {"url": "redis://host", "ttl_s": -1}, "adapter_params.ttl_s=-1"),
    ],
)  # fmt: skip
def test_what_is_not_understood_ends_the_start(kind: str, params: dict[str, Any], text: str, tools: Any) -> None:
    import tq_offload_connectors.multi_process as module
    from tq_offload.errors import ConfigError, TQOffloadError

    if "/dev/null" not in str(params):
        with pytest.raises(ConfigError):
            getattr(module, CLASSES[kind]).parse(params)
    with pytest.raises(SystemExit) as error:
        getattr(module, CLASSES[kind])(params)
    assert str(error.value).startswith("TQ-Offload: cannot start: ")
    assert text in str(error.value)
    assert "secret" not in str(error.value)
    found: list[BaseException] = []

    def add_at_run_time() -> None:
        try:
            getattr(module, CLASSES[kind])(params)
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=add_at_run_time)
    thread.start()
    thread.join()
    assert isinstance(found[0], TQOffloadError), "it must not end a server that runs"


def test_settings_come_from_the_environment_too(make_rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TQ_OFFLOAD_BITS", "3")
    monkeypatch.setenv("TQ_OFFLOAD_REPAIR", "0")
    assert make_rig("ram").adapter._frames.codec.spec.key_bits == 3
    rig = make_rig("ram", bits=8, repair=True, capacity_gb="0.25")
    assert rig.adapter._max_capacity_bytes == 1 << 28
    assert rig.adapter._frames.codec.spec.key_bits == 8
    assert rig.adapter._frames._repair is True


def test_a_wrong_variable_is_named_as_such(monkeypatch: pytest.MonkeyPatch, tools: Any) -> None:
    from tq_offload.errors import ConfigError
    from tq_offload_connectors.multi_process import RedisL2Adapter

    for variable, value in (("REDIS_TTL_S", "-1"), ("WRITE_THREADS", "x"), ("BITS", "9")):
        monkeypatch.setenv(f"TQ_OFFLOAD_{variable}", value)
        with pytest.raises(ConfigError, match=f"^TQ_OFFLOAD_{variable}='?{value}'? is"):
            RedisL2Adapter.parse({"url": "redis://host", "db": 1})
        monkeypatch.delenv(f"TQ_OFFLOAD_{variable}")


def test_the_start_says_what_is_compressed(make_rig: Any, caplog: pytest.LogCaptureFixture) -> None:
    from tq_offload.integrations.lmcache.log import LOGGER_NAME, logger

    logger()
    import logging

    logging.getLogger(LOGGER_NAME).addHandler(caplog.handler)
    try:
        for kind in KINDS:
            make_rig(kind)
    finally:
        logging.getLogger(LOGGER_NAME).removeHandler(caplog.handler)
    head = "TQ-Offload: L1 CPU RAM: not compressed; L2 "
    lines = [m for m in caplog.messages if m.startswith(head)]
    assert [line.removeprefix(head).split(" (")[0] for line in lines] == list(KINDS)
    assert lines[0].startswith(head + "ram (0.125 GiB): compressed, turboquant K4V4")
    assert "/l2, no budget): compressed" in lines[1]
    assert "redis://" in lines[2]


def test_it_also_works_under_another_serde(make_tier: Any, model: str, tools: Any) -> None:
    """Its frames are bytes then, and stored as they are."""
    tier = make_tier(spec=_spec("ram", {"capacity_gb": 0.125}))
    keys = tools.make_keys(model, 2)
    objects = tier.objects(keys)
    wanted = tools.fill(objects)
    assert tier.store(keys, objects)
    targets = tier.objects(keys)
    assert tier.load(keys, targets) == [True, True]
    assert tools.relative_mse(targets[1].get_tensor(0), wanted[1][0]) < FOUR_BIT_MSE * 1.1


@pytest.mark.parametrize("kind", KINDS)
def test_the_example_configs_load(kind: str, tmp_path: Path, model: str, tools: Any, redis: RedisServer) -> None:
    spec = json.loads((CONFIGS / f"multi-process-{kind}.json").read_text())
    params = spec["adapter_params"]
    if kind == "redis":
        params["url"] = redis.url
    elif kind == "disk":
        params["folder"] = str(tmp_path / "l2")
    rig = Rig(spec, tools)
    try:
        keys = tools.make_keys(model, 1)
        objects, _ = rig.filled(keys)
        assert rig.store(keys, objects).is_successful()
        assert rig.load(keys, rig.objects(keys)) == [True]
    finally:
        rig.close()


def _layout(rig: Rig, key: Any, obj: Any) -> Any:
    return rig.adapter._layouts.resolve(obj.get_shapes(), obj.get_dtypes(), key)


def _damage(rig: Rig, key: Any, how: str, other: Any) -> None:
    from tq_offload_connectors.multi_process.keys import object_name

    name = object_name(other if how == "other" else key)
    data = bytearray(rig.store_.get(name))
    if how == "flip":
        data[len(data) // 2] ^= 0x10
    elif how == "truncate":
        del data[-64:]
    rig.store_.put(object_name(key), memoryview(bytes(data)))


def _gate(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Hold the encoders until the returned function is called."""
    gate = threading.Event()
    encode = rig.adapter._frames._encode

    def held(put: Any) -> Any:
        assert gate.wait(60)
        return encode(put)

    monkeypatch.setattr(rig.adapter._frames, "_encode", held)
    return gate.set


def _bare(make_rig: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An adapter without an L1 of its own, whose descriptors and threads would blur the count."""
    from lmcache.v1.distributed import l1_manager

    class NoL1:
        def __init__(self, config: Any) -> None:
            pass

        def get_l1_memory_desc(self) -> None:
            return None

        def close(self) -> None:
            pass

    with monkeypatch.context() as patched:
        patched.setattr(l1_manager, "L1Manager", NoL1)
        return make_rig(kind).adapter


def _threads() -> int:
    return sum(thread.name.startswith("tq-") for thread in threading.enumerate())


def _fds() -> int:
    return len(os.listdir("/proc/self/fd"))
