"""The ready files of configs/ for in-process mode are what LMCache and our plugin understand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lmcache")

from in_process_worker import metadata
from lmcache.v1.config import LMCacheEngineConfig
from redis_server import RedisServer

from tq_offload.integrations.lmcache.in_process import prepare
from tq_offload_connectors.in_process import TurboQuantBackend
from tq_offload_connectors.in_process.plan import plan_from_config

CONFIGS = Path(__file__).parents[2] / "configs"
TIERS = {"in-process-ram": ["ram"], "in-process-disk": ["ram", "disk"], "in-process-redis": ["ram", "redis"]}


def test_every_file_is_tested() -> None:
    found = {path.stem for path in CONFIGS.glob("in-process-*")}
    assert found == {*TIERS, "in-process-one-setting"}


@pytest.mark.parametrize("name", TIERS)
def test_a_file_starts_the_tiers_that_its_name_says(name: str, tmp_path: Path) -> None:
    config = LMCacheEngineConfig.from_file(str(CONFIGS / f"{name}.yaml"))
    assert (config.storage_plugins, config.local_cpu, config.local_disk, config.remote_url) == (
        ["turboquant"],
        False,
        None,
        None,
    )
    with RedisServer() as server:
        if "turboquant.disk" in config.extra_config:
            config.extra_config["turboquant.disk"] = str(tmp_path / "disk")
        if "turboquant.redis_url" in config.extra_config:
            config.extra_config["turboquant.redis_url"] = server.url
        backend = TurboQuantBackend(config=config, metadata=metadata(), local_cpu_backend=None, loop=None)
        try:
            assert [tier.name for tier in backend.frames.tiers] == TIERS[name]
            assert [tier.store.contains("x") for tier in backend.frames.tiers] == [False] * len(TIERS[name])
        finally:
            backend.close()


def test_the_one_setting_compresses_all_three_tiers(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = (CONFIGS / "in-process-one-setting.env").read_text().splitlines()
    for name, _, value in (line.partition("=") for line in lines if line and not line.startswith("#")):
        monkeypatch.setenv(name, value)
    config: Any = LMCacheEngineConfig.from_env()
    prepare(config, metadata())
    plan = plan_from_config(config, metadata())
    assert plan.ram_bytes == int(3.75 * (1 << 30))
    assert plan.disk == "/var/cache/tq-offload"
    assert plan.redis is not None
    assert (config.local_cpu, config.local_disk, config.remote_url) == (False, None, None)
