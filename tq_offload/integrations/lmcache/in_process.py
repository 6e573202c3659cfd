"""`LMCACHE_SERDE=turboquant` in in-process mode: the user's own tiers, compressed by the storage plugin.

`CreateStorageBackends`, as `lmcache.v1.storage_backend.storage_manager` knows it, is replaced. Before LMCache reads its
configuration the tiers that it would hold uncompressed are taken out of it and written into `extra_config` for our
plugin; afterwards it is checked that every plugin is there, since LMCache goes on without one that fails.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, MutableMapping
from types import ModuleType
from typing import Any

from tq_offload.errors import ConfigError
from tq_offload.integrations.lmcache.log import logger
from tq_offload.integrations.lmcache.settings import tier_settings

__all__ = ["PLUGIN", "install_tiers", "prepare"]

PLUGIN = "turboquant"
MODULE, CLASS = "tq_offload_connectors.in_process", "TurboQuantBackend"
REMOTE_CONNECTOR = "tq_offload_connectors.remote"
REMOTE_BACKEND = "lmcache.v1.storage_backend.remote_backend"
REDIS_SCHEMES = (
    "redis://",
    "rediss://",
    "unix://",
    "valkey://",
    "valkeys://",
    "resp://",
    "redis-cluster://",
    "redis-sentinel://",
)
_PLACES = ("ram_gb", "disk", "redis_url")
_LMCACHE_TIERS = ("LocalCPUBackend", "LocalDiskBackend", "RemoteBackend")
_UNCOMPRESSED = {"gds_path": "GDS", "maru_path": "Maru", "enable_p2p": "P2P", "enable_pd": "prefill-decode transfer"}
_REDIS_LOGINS = (  # LMCache's own ways to give a user and password beside the URL
    ("redis_username", ("valkey_username", "username"), "LMCACHE_RESP_USERNAME"),
    ("redis_password", ("valkey_password", "password"), "LMCACHE_RESP_PASSWORD"),
)


def install_tiers(module: ModuleType) -> None:
    """Replace `CreateStorageBackends` in LMCache's storage manager. Safe to call again."""
    original: Any = module.CreateStorageBackends
    if hasattr(original, "tq_offload_original"):
        return

    def create(config: Any, metadata: Any, loop: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            prepare(config, metadata)
            _install_remote(config)
            plugins = list(config.storage_plugins or ())
            if PLUGIN in (kwargs.get("skip_backends") or ()):  # LMCache would start a plugin that runs once more
                config.storage_plugins = [name for name in plugins if name != PLUGIN]
            try:
                backends = original(config, metadata, loop, *args, **kwargs)
            finally:
                config.storage_plugins = plugins or None
            _check_plugins(config, {*backends, *(kwargs.get("skip_backends") or ())})
        except ConfigError as error:
            _stop(loop)
            raise SystemExit(f"TQ-Offload: cannot start: {error}") from None
        except SystemExit:
            _stop(loop)
            raise
        return _arranged(backends)

    create.tq_offload_original = original  # type: ignore[attr-defined]
    module.CreateStorageBackends = create  # type: ignore[attr-defined]


def prepare(config: Any, metadata: Any) -> None:
    """Move the tiers that we compress from LMCache's settings to those of our plugin. Safe to call again.

    Raises:
        ConfigError: A combination that would silently not work.
    """
    extra: dict[str, Any] = dict(config.extra_config or {})
    if PLUGIN in (config.storage_plugins or ()):
        return
    for what, name in _UNCOMPRESSED.items():
        if getattr(config, what, None):
            logger().info("TQ-Offload: %s: not compressed", name)
    if config.enable_pd:
        return
    for name in ("store_location", "retrieve_locations"):
        chosen = getattr(config, name, None) or ()
        taken = {chosen} if isinstance(chosen, str) else set(chosen)
        if taken & set(_LMCACHE_TIERS):
            raise ConfigError(name, chosen, f"unset, or {PLUGIN!r}: the compressed tiers together")
    _take_ram(config, metadata, extra)
    _take_disk(config, extra)
    _take_redis(config, extra)
    if not any(f"{PLUGIN}.{place}" in extra for place in _PLACES):
        logger().warning(
            "TQ-Offload: LMCache has no tier that could be compressed: CPU RAM, disk and Redis are all off"
        )
        config.extra_config = extra or None
        return
    extra[f"storage_plugin.{PLUGIN}.module_path"], extra[f"storage_plugin.{PLUGIN}.class_name"] = MODULE, CLASS
    config.extra_config = extra
    config.storage_plugins = [*(config.storage_plugins or ()), PLUGIN]


def _take_ram(config: Any, metadata: Any, extra: MutableMapping[str, Any]) -> None:
    """A quarter of LMCache's CPU memory stays with it for chunks on their way; the rest holds frames."""
    if not config.local_cpu or config.max_local_cpu_size <= 0:
        return
    if config.enable_p2p:
        logger().info("TQ-Offload: tier CPU RAM: not compressed, other engines read it by P2P")
        return
    first_rank = "first_rank_max_local_cpu_size"
    key = first_rank if first_rank in extra and metadata.use_mla and metadata.is_first_rank() else None
    total = float(extra[key] if key else config.max_local_cpu_size)
    staging = tier_settings(_tier_options(extra)).staging_gb or total / 4
    if staging >= total:
        raise ConfigError("staging_gb", staging, f"less than the {total} GiB of max_local_cpu_size")
    extra[f"{PLUGIN}.ram_gb"] = total - staging
    if key:
        extra[key] = staging
    config.max_local_cpu_size, config.local_cpu = staging, False


def _take_disk(config: Any, extra: MutableMapping[str, Any]) -> None:
    if config.local_disk and config.max_local_disk_size > 0:
        extra[f"{PLUGIN}.disk"], extra[f"{PLUGIN}.disk_gb"] = config.local_disk, config.max_local_disk_size
        config.local_disk, config.max_local_disk_size = None, 0.0


def _take_redis(config: Any, extra: MutableMapping[str, Any]) -> None:
    """A remote tier in Redis or Valkey, given by `remote_url` or by LMCache's built-in plugin `redis`."""
    url, plugins = config.remote_url, list(config.remote_storage_plugins or ())
    if "redis" in plugins and "remote_storage_plugin.redis.module_path" not in extra:
        named = extra.get("remote_storage_plugin.redis.redis_url") or extra.get("redis_url")
        if named or url is None or not str(url).startswith(REDIS_SCHEMES):
            extra[f"{PLUGIN}.redis_url"] = named or "redis://localhost:6379"
        plugins.remove("redis")
        config.remote_storage_plugins = plugins or None
    if url is not None and str(url).startswith(REDIS_SCHEMES) and f"{PLUGIN}.redis_url" not in extra:
        extra[f"{PLUGIN}.redis_url"] = _with_service(str(url))
        config.remote_url = None
    if f"{PLUGIN}.redis_url" not in extra:
        return
    for option, names, variable in _REDIS_LOGINS:
        value = next((extra[name] for name in names if extra.get(name)), None) or os.environ.get(variable)
        if value and f"{PLUGIN}.{option}" not in extra:
            extra[f"{PLUGIN}.{option}"] = value


def _with_service(url: str) -> str:
    """LMCache takes the name of a Sentinel service from the environment."""
    service = os.environ.get("REDIS_SERVICE_NAME")
    if url.startswith("redis-sentinel://") and service and "/" not in url.removeprefix("redis-sentinel://").rstrip("/"):
        return f"{url.rstrip('/')}/{service}"
    return url


def _tier_options(extra: Mapping[str, Any]) -> dict[str, Any]:
    return {"staging_gb": extra[f"{PLUGIN}.staging_gb"]} if f"{PLUGIN}.staging_gb" in extra else {}


def _install_remote(config: Any) -> None:
    """Compress what goes through LMCache's other connectors."""
    if config.remote_url is not None or config.remote_storage_plugins:
        importlib.import_module(REMOTE_CONNECTOR).install(importlib.import_module(REMOTE_BACKEND), active=True)


def _check_plugins(config: Any, present: set[str]) -> None:
    """Raise for our plugin, and say for every other one, that it is missing and why."""
    for name in config.storage_plugins or ():
        if name in present:
            continue
        path = (config.extra_config or {}).get(f"storage_plugin.{name}.module_path")
        try:
            importlib.import_module(str(path))
            why = "it was imported, but could not be created: see LMCache's message above"
        except Exception as error:
            why = f"its module {path} cannot be imported: {error!r}"
        if name == PLUGIN:
            raise SystemExit(f"TQ-Offload: cannot start: the storage plugin {name!r} is missing: {why}")
        logger().error("TQ-Offload: the storage plugin %r is missing, LMCache goes on without it: %s", name, why)


def _arranged(backends: Any) -> Any:
    """Our tiers before the remote ones: LMCache asks in this order."""
    if PLUGIN in backends:
        for name in [name for name in backends if str(name).startswith("RemoteBackend")]:
            backends.move_to_end(name)
    return backends


def _stop(loop: Any) -> None:
    """End LMCache's event loop: its thread would keep the process from ending."""
    if loop is not None and loop.is_running():
        loop.call_soon_threadsafe(loop.stop)
