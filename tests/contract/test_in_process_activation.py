"""`LMCACHE_SERDE=turboquant` in in-process mode: which of the user's settings become which compressed tier."""

from __future__ import annotations

import asyncio
import logging
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("lmcache")

import lmcache.v1.storage_backend.storage_manager as lmcache_storage
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.metadata import LMCacheMetadata

from tq_offload.errors import ConfigError
from tq_offload.integrations.lmcache.in_process import install_tiers, prepare
from tq_offload_connectors.in_process.plan import plan_from_config

GIB = 1 << 30


def metadata(**changes: Any) -> LMCacheMetadata:
    fields: dict[str, Any] = {
        "model_name": "some/model", "world_size": 1, "local_world_size": 1, "worker_id": 0, "local_worker_id": 0,
        "kv_dtype": torch.bfloat16, "kv_shape": (2, 2, 64, 2, 64), "chunk_size": 64, "role": "worker",
    }  # fmt: skip
    return LMCacheMetadata(**(fields | changes))


def config(**fields: Any) -> Any:
    return LMCacheEngineConfig.from_defaults(**({"chunk_size": 64} | fields))


def planned(meta: LMCacheMetadata | None = None, **fields: Any) -> tuple[Any, Any]:
    made = config(**fields)
    prepare(made, meta or metadata())
    return made, plan_from_config(made, meta or metadata())


def test_ram_keeps_its_size_a_quarter_of_it_as_staging() -> None:
    made, plan = planned(local_cpu=True, max_local_cpu_size=4.0)
    assert (made.local_cpu, made.max_local_cpu_size) == (False, 1.0)
    assert (plan.ram_bytes, plan.staging_bytes, plan.queue_bytes) == (3 * GIB, GIB, GIB // 2)
    assert made.storage_plugins == ["turboquant"]


def test_staging_is_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TQ_OFFLOAD_STAGING_GB", "0.5")
    _, plan = planned(local_cpu=True, max_local_cpu_size=4.0)
    assert (plan.ram_bytes, plan.staging_bytes) == (int(3.5 * GIB), GIB // 2)
    with pytest.raises(ConfigError, match="staging_gb"):
        planned(local_cpu=True, max_local_cpu_size=0.5)


def test_disk_alone_keeps_all_memory_as_staging(tmp_path: Path) -> None:
    made, plan = planned(local_cpu=False, max_local_cpu_size=2.0, local_disk=str(tmp_path), max_local_disk_size=5.0)
    assert (made.local_disk, made.max_local_cpu_size) == (None, 2.0)
    assert (plan.ram_bytes, plan.disk, plan.disk_bytes) == (None, str(tmp_path), 5 * GIB)


def test_the_budget_of_a_folder_is_that_of_all_workers_that_share_it(tmp_path: Path) -> None:
    folders = f"{tmp_path}/a,{tmp_path}/b"
    meta = metadata(world_size=4, local_world_size=4, worker_id=1, local_worker_id=1)
    made = config(local_cpu=False, local_disk=folders, max_local_disk_size=5.0)
    prepare(made, meta)
    plan = plan_from_config(made, meta, "cuda:1")
    assert (plan.disk, plan.disk_bytes) == (f"{tmp_path}/b", 10 * GIB)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://:secret@localhost:7001/2", "redis://localhost:7001, database 2"),
        ("rediss://user:secret@host:7001", "rediss://host:7001"),
        ("valkey://host:7001", "redis://host:7001"),
        ("redis-cluster://a:1,b:2", "redis-cluster://a:1,b:2"),
    ],
)
def test_redis_in_all_its_forms(url: str, shown: str) -> None:
    made, plan = planned(local_cpu=False, remote_url=url)
    assert made.remote_url is None
    assert plan.redis.describe().startswith(shown)
    assert not any("secret" in line for line in plan.lines())


def test_a_login_beside_the_url_is_used() -> None:
    _, plan = planned(local_cpu=False, remote_url="resp://h:1", extra_config={"username": "me", "password": "p@ss"})
    assert (plan.redis.username, plan.redis.password) == ("me", "p@ss")


def test_the_built_in_plugin_redis_is_taken_over() -> None:
    extra = {"remote_storage_plugin.redis.redis_url": "redis://h:7"}
    made, plan = planned(local_cpu=False, remote_storage_plugins=["redis"], extra_config=extra)
    assert made.remote_storage_plugins is None
    assert plan.redis.addresses == (("h", 7),)


def test_redis_options_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TQ_OFFLOAD_REDIS_TTL_S", "60")
    monkeypatch.setenv("TQ_OFFLOAD_REDIS_KEY_PREFIX", "team:")
    _, plan = planned(local_cpu=False, remote_url="redis://h:7")
    assert (plan.redis.ttl_s, plan.redis.key_prefix) == (60, "team:")
    monkeypatch.setenv("TQ_OFFLOAD_REDIS_TTL", "60")
    with pytest.raises(ConfigError, match=r"TQ_OFFLOAD_REDIS_TTL='\.\.\.'"):
        planned(local_cpu=False, remote_url="redis://h:7")


def test_mla_first_rank_has_its_own_size() -> None:
    meta = metadata(use_mla=True, kv_shape=(2, 1, 64, 1, 576))
    extra = {"first_rank_max_local_cpu_size": 8.0}
    made, plan = planned(meta, local_cpu=True, max_local_cpu_size=1.0, extra_config=extra)
    assert plan.ram_bytes == 6 * GIB
    assert made.extra_config["first_rank_max_local_cpu_size"] == 2.0


def test_other_remotes_and_prefill_decode_are_left_to_lmcache() -> None:
    made, _ = planned(local_cpu=True, max_local_cpu_size=1.0, remote_url="fs:///somewhere")
    assert made.remote_url == "fs:///somewhere"
    made = config(local_cpu=False, remote_url="fs:///somewhere")
    prepare(made, metadata())
    assert made.storage_plugins is None


def test_an_explicit_plugin_is_not_touched() -> None:
    extra = {"turboquant.ram_gb": 1.0, "storage_plugin.turboquant.module_path": "m"}
    made = config(local_cpu=True, max_local_cpu_size=2.0, storage_plugins=["turboquant"], extra_config=dict(extra))
    prepare(made, metadata())
    assert (made.local_cpu, made.max_local_cpu_size, made.extra_config) == (True, 2.0, extra)


def test_a_second_call_changes_nothing() -> None:
    made, plan = planned(local_cpu=True, max_local_cpu_size=4.0)
    prepare(made, metadata())
    assert plan_from_config(made, metadata()) == plan


@pytest.mark.parametrize("name", ["store_location", "retrieve_locations"])
def test_names_of_tiers_that_are_gone_are_refused(name: str) -> None:
    value = "LocalCPUBackend" if name == "store_location" else ["LocalCPUBackend"]
    with pytest.raises(ConfigError, match=name):
        planned(local_cpu=True, max_local_cpu_size=1.0, **{name: value})


class Manager:
    """What StorageManager does with the function that we replace."""

    def __init__(self) -> None:
        self.module = SimpleNamespace(CreateStorageBackends=lmcache_storage.CreateStorageBackends)
        original = getattr(self.module.CreateStorageBackends, "tq_offload_original", None)
        self.module.CreateStorageBackends = original or self.module.CreateStorageBackends
        install_tiers(self.module)  # type: ignore[arg-type]
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.backends: dict[str, Any] = {}

    def start(self, made: Any, **arguments: Any) -> dict[str, Any]:
        new = self.module.CreateStorageBackends(made, metadata(), self.loop, "cpu", None, **arguments)
        self.backends |= new
        return dict(new)

    def close(self) -> None:
        for backend in self.backends.values():
            backend.close()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)
        self.loop.close()


@pytest.fixture
def manager() -> Any:
    made = Manager()
    yield made
    made.close()


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Any:
    logging.getLogger("tq_offload.lmcache").addHandler(caplog.handler)  # LMCache's logger does not propagate
    yield lambda: [r.getMessage() for r in caplog.records if "TQ-Offload" in r.getMessage()]
    logging.getLogger("tq_offload.lmcache").removeHandler(caplog.handler)


def test_lmcache_starts_our_backend_after_its_memory_and_says_so(manager: Manager, tmp_path: Path, lines: Any) -> None:
    made = config(local_cpu=True, max_local_cpu_size=0.08, local_disk=str(tmp_path), max_local_disk_size=0.1)
    backends = manager.start(made)
    assert list(backends) == ["LocalCPUBackend", "turboquant"]
    assert not backends["LocalCPUBackend"].use_hot
    assert [tier.name for tier in backends["turboquant"].frames.tiers] == ["ram", "disk"]
    text = "\n".join(lines())
    assert "tier CPU RAM (0.06 GiB, rank 0 of 1): compressed, turboquant" in text
    assert f"tier disk ({tmp_path}, 0.10 GiB): compressed, turboquant" in text
    assert "0.02 GiB of LMCache's CPU memory (rank 0 of 1): not compressed" in text
    assert manager.start(made, skip_backends=set(backends), existing_backends=manager.backends) == {}  # no second one
    assert made.storage_plugins == ["turboquant"]


def test_a_broken_plugin_ends_the_start_and_stops_lmcaches_loop(
    manager: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tq_offload.integrations.lmcache.in_process.MODULE", "tq_offload_connectors.not_there")
    with pytest.raises(SystemExit, match=r"TQ-Offload: cannot start.*not_there cannot be imported"):
        manager.start(config(local_cpu=True, max_local_cpu_size=0.08))
    manager.thread.join(5)
    assert not manager.thread.is_alive()
    manager.thread = threading.Thread(target=manager.loop.run_forever, daemon=True)
    manager.thread.start()


def test_a_broken_plugin_of_somebody_else_is_named_and_lmcache_goes_on(manager: Manager, lines: Any) -> None:
    extra = {"storage_plugin.theirs.module_path": "their_module", "storage_plugin.theirs.class_name": "X"}
    made = config(local_cpu=True, max_local_cpu_size=0.08, storage_plugins=["theirs"], extra_config=extra)
    assert list(manager.start(made)) == ["LocalCPUBackend", "turboquant"]
    assert any("'theirs' is missing" in line and "their_module cannot be imported" in line for line in lines())


def test_no_tier_is_said(manager: Manager, lines: Any) -> None:
    assert list(manager.start(config(local_cpu=False, max_local_cpu_size=0.08))) == ["LocalCPUBackend"]
    assert any("no tier that could be compressed" in line for line in lines())
