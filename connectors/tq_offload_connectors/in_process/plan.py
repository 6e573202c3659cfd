"""Which tiers an in-process worker has, from `turboquant.*` in LMCache's `extra_config`, and the tiers themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from tq_offload.errors import ConfigError
from tq_offload.integrations.lmcache.log import logger
from tq_offload.integrations.lmcache.settings import (
    EXTRA_PREFIX,
    GIB,
    REDIS_PREFIX,
    SERDE_SETTINGS,
    TIER_SETTINGS,
    SerdeSettings,
    TierSettings,
    gib_to_bytes,
    settings_from_serde,
    shown_value,
    tier_settings,
)
from tq_offload_connectors.redis.settings import RedisSettings
from tq_offload_connectors.tier import Tier

__all__ = ["TierPlan", "given_settings", "make_tiers", "plan_from_config"]

PLACES = ("ram_gb", "disk", "disk_gb", "redis_url")


@dataclass(frozen=True)
class TierPlan:
    """The tiers of one worker, fastest first.

    Args:
        serde: Codec, threads and so on.
        tiers: Queues, writers, options of Redis.
        ram_bytes: Budget of frames in CPU RAM; None: no such tier.
        staging_bytes: LMCache's own CPU memory, for uncompressed chunks on their way.
        disk: Folder; None: no disk tier.
        disk_bytes: Budget of the folder; None: no budget.
        redis: Where Redis is; None: no such tier.
        rank, world_size: This worker, for log lines.
        reads_as_first_rank: MLA with a shared remote tier: only rank 0 stores, and the others read its chunks.
    """

    serde: SerdeSettings
    tiers: TierSettings
    ram_bytes: int | None = None
    staging_bytes: int = 0
    disk: str | None = None
    disk_bytes: int | None = None
    redis: RedisSettings | None = None
    rank: int = 0
    world_size: int = 1
    reads_as_first_rank: bool = False

    @property
    def queue_bytes(self) -> int:
        """Uncompressed bytes that may wait to be encoded."""
        return int(self.tiers.queue_gb * GIB) if self.tiers.queue_gb else max(1, self.staging_bytes // 2)

    def lines(self) -> list[str]:
        """A line for each tier, for the start of the log."""
        how, who = f"compressed, turboquant {self.serde.spec.describe()}", f"rank {self.rank} of {self.world_size}"
        found = []
        if self.ram_bytes is not None:
            found.append(f"tier CPU RAM ({_gib(self.ram_bytes)}, {who}): {how}")
        if self.disk is not None:
            budget = _gib(self.disk_bytes) if self.disk_bytes is not None else "no budget"
            found.append(f"tier disk ({self.disk}, {budget}): {how}")
        if self.redis is not None:
            found.append(f"tier redis ({self.redis.describe()}): {how}")
        staging = f"{_gib(self.staging_bytes)} of LMCache's CPU memory ({who}): not compressed, chunks on their way"
        return [*found, staging]


def given_settings(config: Any) -> dict[str, Any]:
    """What LMCache's `extra_config` sets of ours, by names without the prefix.

    Raises:
        ConfigError: A `turboquant.*` key that is not known.
    """
    extra: Mapping[str, Any] = config.extra_config or {}
    given = {str(k).removeprefix(EXTRA_PREFIX): v for k, v in extra.items() if str(k).startswith(EXTRA_PREFIX)}
    for name, value in given.items():
        if name not in (*PLACES, *SERDE_SETTINGS, *TIER_SETTINGS) and not name.startswith(REDIS_PREFIX):
            known = ", ".join((*PLACES, *SERDE_SETTINGS, *TIER_SETTINGS, REDIS_PREFIX + "*"))
            allowed = f"one of the keys {known} after {EXTRA_PREFIX}"
            raise ConfigError(EXTRA_PREFIX + name, shown_value(name, value), allowed)
    return given


def plan_from_config(config: Any, metadata: Any, dst_device: str = "cpu") -> TierPlan:
    """The plan of a worker.

    Args:
        config: LMCache's configuration.
        metadata: LMCache's metadata of the worker.
        dst_device: The worker's device: several disk folders are shared out by it, as LMCache does.

    Raises:
        ConfigError: A `turboquant.*` key that is not known, a value that is not allowed, or no tier at all.
    """
    given = given_settings(config)
    codec = {name: value for name, value in given.items() if name in SERDE_SETTINGS}
    serde = settings_from_serde(codec, prefix=EXTRA_PREFIX)
    options = {n: v for n, v in given.items() if n not in PLACES and n not in SERDE_SETTINGS}
    tiers = tier_settings(options)
    redis = _redis(given.get("redis_url"), tiers)
    disk, disk_bytes = _disk(given, config, metadata, dst_device)
    ram = _bytes("ram_gb", given.get("ram_gb"))
    if ram is None and disk is None and redis is None:
        raise ConfigError(EXTRA_PREFIX + "*", "no tier", "one of ram_gb, disk and redis_url")
    _check_paths(config, disk, redis)
    staging = 0 if metadata.role == "scheduler" else int(float(config.max_local_cpu_size) * GIB)
    return TierPlan(
        serde=serde,
        tiers=tiers,
        ram_bytes=None if metadata.role == "scheduler" else ram,
        staging_bytes=staging,
        disk=disk,
        disk_bytes=disk_bytes,
        redis=redis,
        rank=int(metadata.worker_id),
        world_size=int(metadata.world_size),
        reads_as_first_rank=redis is not None and _reads_as_first_rank(config, metadata),
    )


def make_tiers(plan: TierPlan) -> list[Tier]:
    """The tiers of a plan, with their threads running.

    Raises:
        StoreError: The disk folder can be neither made nor read.
        ConfigError: redis-py is not installed.
    """
    found: list[Tier] = []
    slow = partial(Tier, writers=plan.tiers.write_threads, queue_bytes=int(plan.tiers.write_queue_gb * GIB))
    try:
        if plan.ram_bytes is not None:
            from tq_offload_connectors.memory import MemoryStore

            found.append(Tier("ram", MemoryStore(plan.ram_bytes)))
        if plan.disk is not None:
            from tq_offload_connectors.disk import DiskStore

            store = DiskStore(plan.disk, plan.disk_bytes, plan.tiers.disk_fsync)
            if store.problem:
                logger().warning("TQ-Offload: tier disk: nothing will be stored: %s", store.problem)
            found.append(slow("disk", store))
        if plan.redis is not None:
            from tq_offload_connectors.redis import RedisStore

            found.append(slow("redis", RedisStore(plan.redis), remote=True))
    except BaseException:
        for tier in found:
            tier.close()
        raise
    return found


def _redis(url: object, tiers: TierSettings) -> RedisSettings | None:
    if url is None:
        if tiers.redis:
            raise ConfigError(next(iter(tiers.redis_names.values())), "...", "unset: there is no Redis tier")
        return None
    return RedisSettings.from_mapping(
        {"url": url, **tiers.redis},
        shown=lambda name: tiers.redis_names.get(name, EXTRA_PREFIX + REDIS_PREFIX + name),
    )


def _disk(given: Mapping[str, Any], config: Any, metadata: Any, dst_device: str) -> tuple[str | None, int | None]:
    """Folder and its budget: `disk_gb` for each worker of this host that uses it, as LMCache counts it."""
    folders = given.get("disk")
    if folders is None:
        if given.get("disk_gb") is not None:
            raise ConfigError(EXTRA_PREFIX + "disk_gb", given["disk_gb"], f"unset without {EXTRA_PREFIX}disk")
        return None, None
    if not isinstance(folders, str) or not folders.strip():
        raise ConfigError(EXTRA_PREFIX + "disk", folders, "the path of a folder, or of several with commas")
    from lmcache.v1.storage_backend.path_sharder import PathSharder

    try:
        sharder = PathSharder(folders, config.local_disk_path_sharding, dst_device)
    except ValueError as error:
        raise ConfigError(EXTRA_PREFIX + "disk", folders, str(error)) from None
    sharing = -(-max(1, int(metadata.local_world_size)) // len(sharder.all_paths))
    budget = _bytes("disk_gb", given.get("disk_gb"))
    return sharder.selected, None if budget is None else budget * sharing


def _check_paths(config: Any, disk: str | None, redis: RedisSettings | None) -> None:
    if config.enable_blending:
        raise ConfigError("enable_blending", True, "false: frames do not keep the positions that blending needs")
    if config.use_layerwise and (disk is not None or redis is not None):
        raise ConfigError(
            "use_layerwise",
            True,
            "false with a compressed disk or Redis tier: LMCache has no way to hear that a layer could not be loaded, "
            "and would use what is not there; with CPU RAM alone it works",
        )


def _reads_as_first_rank(config: Any, metadata: Any) -> bool:
    wanted = config.get_extra_config_value("remote_enable_mla_worker_id_as0", metadata.use_mla)
    return bool(wanted and metadata.use_mla and metadata.world_size > 1 and metadata.worker_id != 0)


def _bytes(name: str, value: object) -> int | None:
    return None if value is None else gib_to_bytes(EXTRA_PREFIX + name, value)


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.2f} GiB"
