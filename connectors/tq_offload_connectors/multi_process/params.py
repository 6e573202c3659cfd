"""`adapter_params` of the L2 adapters, strictly; and how a start ends that cannot go on."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tq_offload.errors import ConfigError, TQOffloadError
from tq_offload.integrations.lmcache.log import logger
from tq_offload.integrations.lmcache.settings import (
    GIB,
    SERDE_SETTINGS,
    SerdeSettings,
    TierSettings,
    gib_to_bytes,
    settings_from_serde,
    tier_settings,
)
from tq_offload.integrations.lmcache.versions import check_lmcache

__all__ = ["GIB", "PARAMS_PREFIX", "AdapterParams", "parse_params", "starting"]

PARAMS_PREFIX = "adapter_params."
_TIER_KEYS = ("queue_gb", "write_queue_gb", "write_threads")
_CODEC_KEYS = (*SERDE_SETTINGS, "max_workers")


@dataclass(frozen=True)
class AdapterParams:
    """What an adapter is built from.

    Args:
        settings: Codec, threads and so on.
        tier: Queues and threads of the tier.
        own: The keys of this kind of adapter alone, as given.
    """

    settings: SerdeSettings
    tier: TierSettings
    own: Mapping[str, Any]

    def capacity(self) -> int | None:
        """`capacity_gb` in bytes; None: not given.

        Raises:
            ConfigError: Not a size.
        """
        value = self.own.get("capacity_gb")
        return None if value is None else gib_to_bytes(_shown("capacity_gb"), value)


def parse_params(
    params: Mapping[str, Any], own: tuple[str, ...], tier_names: Mapping[str, str] | None = None
) -> AdapterParams:
    """The settings in `adapter_params`; of the codec and the queues, what it leaves out comes from `TQ_OFFLOAD_*`.

    Args:
        params: As the user wrote them.
        own: Names of the keys of this kind of adapter alone.
        tier_names: More of its keys, and the settings of the tier that they are.

    Raises:
        ConfigError: An unknown key or a value that is not allowed.
    """
    names = {**{name: name for name in _TIER_KEYS}, **(tier_names or {})}
    allowed = (*own, *names, *SERDE_SETTINGS)
    for name in params:
        if name not in (*allowed, *_CODEC_KEYS):  # the value is not shown: it may be a mistyped password
            raise ConfigError(_shown(name), "...", "one of the keys " + ", ".join(allowed))
    written = {setting: name for name, setting in names.items()}
    tier = tier_settings(
        {setting: params[name] for name, setting in names.items() if name in params},
        shown=lambda setting: _shown(written[setting]),
    )
    codec = {name: params[name] for name in _CODEC_KEYS if name in params}
    settings = settings_from_serde(codec, prefix=PARAMS_PREFIX)
    return AdapterParams(settings, tier, {name: params[name] for name in own if name in params})


def _shown(name: str) -> str:
    return PARAMS_PREFIX + name


@contextmanager
def starting(kind: str) -> Iterator[None]:
    """What keeps an adapter from being built ends LMCache's start with one line.

    SystemExit in the main thread, where LMCache builds its first adapters; the error itself in any other: there an
    adapter is added to a server that runs. The HTTP server's framework prints a traceback after the line either way.
    """
    try:
        check_lmcache()
        yield
    except TQOffloadError as error:
        message = f"TQ-Offload: cannot start: {kind}: {error}"
        logger().error(message)
        if threading.current_thread() is threading.main_thread():
            raise SystemExit(message) from None
        raise
