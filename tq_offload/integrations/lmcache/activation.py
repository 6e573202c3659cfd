"""What `LMCACHE_SERDE=turboquant` does: every tier of LMCache is compressed. Unset: nothing at all.

In-process mode is in `in_process`. In multi-process mode every L2 adapter without a serde of its own gets ours: in the
server two names of `lmcache.v1.distributed.storage_manager` are replaced, right after its import, `create_l2_adapter`
(fills in the serde of a config that has none) and `SerdeL2AdapterWrapper` (our adapter where the serde is ours), and
`parse_args_to_l2_adapters_config` of `lmcache.v1.distributed.config` (checks our settings in the configuration before
anything starts). No class of LMCache is changed.
"""

from __future__ import annotations

import importlib
import itertools
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

from tq_offload.errors import ConfigError, IncompatibleError
from tq_offload.integrations.lmcache.import_hook import after_import
from tq_offload.integrations.lmcache.in_process import install_tiers
from tq_offload.integrations.lmcache.log import logger
from tq_offload.integrations.lmcache.settings import ENV_SERDE, SERDE_TYPE, serde_requested, settings_from_env
from tq_offload.integrations.lmcache.versions import check_lmcache, has_plugins, installed_lmcache

__all__ = ["activate", "activate_or_exit", "install_wrapper", "register_serde"]

STORAGE_MANAGER = "lmcache.v1.distributed.storage_manager"
SERVER_CONFIG = "lmcache.v1.distributed.config"
IN_PROCESS = "lmcache.v1.storage_backend.storage_manager"
MP_CLIENT = "lmcache.integration.vllm.vllm_multi_process_adapter"
L1_LINE = "L1 CPU RAM: not compressed"
UNTOUCHED = ("p2p",)  # reads other servers' L1, whose objects are not frames
_PLACES = ("base_path", "path", "host", "bucket", "bucket_name", "url", "endpoint")

_lock = threading.Lock()
_active = False


def activate_or_exit() -> None:
    """`activate`; what is not understood or not supported ends the process with one message on stderr.

    SystemExit, because LMCache's and vLLM's plugin loaders swallow every Exception.
    """
    try:
        activate()
    except (ConfigError, IncompatibleError) as error:
        raise SystemExit(f"TQ-Offload: cannot start: {error}") from None


def activate() -> bool:
    """Install the hooks if `LMCACHE_SERDE` asks for them. Imports nothing of LMCache. Safe to call again.

    Returns:
        True if this package is active.

    Raises:
        ConfigError: A setting that is not understood.
        IncompatibleError: The installed LMCache is not supported.
    """
    global _active
    if not serde_requested():
        return False
    settings_from_env()
    if installed_lmcache() is None:
        return False  # LMCACHE_SERDE is set, but there is no LMCache that could be affected
    check_lmcache()
    with _lock:
        if not _active:
            _active = True
            after_import(STORAGE_MANAGER, _patch_server)
            after_import(SERVER_CONFIG, _check_config)
            after_import(MP_CLIENT, _announce_client)
            after_import(IN_PROCESS, install_tiers)
    return True


def register_serde() -> None:
    """Register the serde type `tq_offload` with LMCache. Safe to call again."""
    from lmcache.v1.distributed.serde import get_registered_serde_types, register_serde_factory

    from tq_offload.integrations.lmcache.processor import create_processor

    if SERDE_TYPE not in get_registered_serde_types():
        register_serde_factory(SERDE_TYPE, create_processor)


def install_wrapper(module: ModuleType) -> None:
    """Let the storage manager wrap adapters whose serde is ours in our adapter. Safe to call again."""
    original: Any = module.SerdeL2AdapterWrapper
    if hasattr(original, "tq_offload_original"):
        return

    def wrap(inner: Any, serde: Any, l1_manager: Any) -> Any:
        from tq_offload.integrations.lmcache.adapter import TurboQuantL2Adapter
        from tq_offload.integrations.lmcache.processor import TurboQuantProcessor

        if isinstance(serde, TurboQuantProcessor):
            if not _active:  # the explicit way: nothing has named the tier yet
                spec, place = serde.settings.spec.describe(), inner.report_status().get("base_path", "")
                tier = f"{type(inner).__name__} ({place})" if place else type(inner).__name__
                logger().info("TQ-Offload: %s; L2 %s: compressed, turboquant %s", L1_LINE, tier, spec)
            return TurboQuantL2Adapter(inner, serde, l1_manager)
        return original(inner=inner, serde=serde, l1_manager=l1_manager)

    wrap.tq_offload_original = original  # type: ignore[attr-defined]
    module.SerdeL2AdapterWrapper = wrap  # type: ignore[attr-defined]


def _patch_server(module: ModuleType) -> None:
    settings = settings_from_env()
    register_serde()
    install_wrapper(module)
    module.create_l2_adapter = _with_serde(module.create_l2_adapter)  # type: ignore[attr-defined]
    logger().info(
        "TQ-Offload: active (%s=turboquant): %s; every L2 adapter without a serde of its own: compressed, %s",
        ENV_SERDE,
        L1_LINE,
        f"turboquant {settings.spec.describe()}",
    )


def _check_config(module: ModuleType) -> None:
    """End the start for a setting that is not understood; later it would be a traceback out of LMCache's server."""
    original = module.parse_args_to_l2_adapters_config

    def parse(args: Any) -> Any:
        parsed = original(args)
        for config in parsed.adapters:
            try:
                _how(config)
            except ConfigError as error:
                raise SystemExit(f"TQ-Offload: cannot start: {error}") from None
        return parsed

    module.parse_args_to_l2_adapters_config = parse  # type: ignore[attr-defined]


def _with_serde(create: Callable[..., Any]) -> Callable[..., Any]:
    numbers = itertools.count()

    def create_l2_adapter(config: Any, l1_memory_desc: Any = None) -> Any:
        from lmcache.v1.distributed.l2_adapters.config import get_type_name_for_config
        from lmcache.v1.distributed.serde import SerdeConfig

        kind, number = get_type_name_for_config(config), next(numbers)
        own = _own_adapter(config)
        if kind not in UNTOUCHED and config.serde_config is None and own is None:
            config.serde_config = SerdeConfig(type=SERDE_TYPE, kwargs={})
        how = _how(config)
        adapter = create(config, l1_memory_desc)
        if own is None:  # ours has said it itself
            logger().info("TQ-Offload: %s; L2 #%d %s: %s", L1_LINE, number, _place(kind, config), how)
        return adapter

    return create_l2_adapter


def _place(kind: str, config: Any) -> str:
    found = next((str(getattr(config, name)) for name in _PLACES if getattr(config, name, None)), "")
    return f"{kind} ({found})" if found else kind


def _own_adapter(config: Any) -> Any:
    """Our adapter class that the config of a plugin names, if it compresses by itself; else None."""
    path = getattr(config, "module_path", None)
    if not isinstance(path, str) or not path.startswith("tq_offload_connectors."):
        return None
    found = getattr(importlib.import_module(path), config.class_name, None)
    return found if getattr(found, "tq_offload_compresses", False) else None


def _how(config: Any) -> str:
    serde, own = config.serde_config, _own_adapter(config)
    if own is not None:
        if serde is not None:
            raise ConfigError("serde", serde.type, f"none: {config.class_name} compresses by itself")
        own.parse(config.adapter_params)
        return "compressed by the adapter itself"
    if serde is None:
        return "not compressed, reads other servers' L1"
    if serde.type != SERDE_TYPE:
        return f"left alone, has its own serde {serde.type}"
    from tq_offload.integrations.lmcache.settings import settings_from_serde

    settings = settings_from_serde(serde.kwargs)
    return f"compressed, turboquant {settings.spec.describe()}, serde {SERDE_TYPE}"


def _announce_client(module: ModuleType) -> None:
    found = installed_lmcache()
    if found is not None and not has_plugins(found):
        logger().warning(
            "TQ-Offload: lmcache %s has no entry point for plugins, so %s does nothing in its server: start the server "
            "by `python -m tq_offload.integrations.lmcache server`, or use the explicit adapter",
            found,
            ENV_SERDE,
        )
        return
    logger().info(
        "TQ-Offload: active (%s=turboquant), multi-process mode: this process hands its KV cache to the lmcache "
        "server, and compression happens there; the server needs the same setting",
        ENV_SERDE,
    )
