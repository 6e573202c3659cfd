"""Settings of the LMCache integration: `LMCACHE_SERDE`, `TQ_OFFLOAD_*` and the keys of a `"serde"` object, strictly."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tq_offload.errors import ConfigError
from tq_offload.kernels import BACKENDS
from tq_offload.layout import MAX_HEAD_DIM
from tq_offload.spec import SETTINGS as CODEC_SETTINGS
from tq_offload.spec import CodecSpec
from tq_offload.values import boolean, choice, integer

__all__ = [
    "ENV_PREFIX",
    "ENV_SERDE",
    "EXTRA_PREFIX",
    "GIB",
    "SERDE_SETTINGS",
    "SERDE_TYPE",
    "TIER_SETTINGS",
    "UINT8_TYPES",
    "SerdeSettings",
    "TierSettings",
    "gib_to_bytes",
    "serde_requested",
    "settings_from_env",
    "settings_from_serde",
    "shown_value",
    "tier_settings",
]

ENV_SERDE = "LMCACHE_SERDE"
ENV_PREFIX = "TQ_OFFLOAD_"
EXTRA_PREFIX = "turboquant."  # of the keys in LMCache's extra_config
GIB = 1 << 30
REQUESTED = "turboquant"
SERDE_TYPE = "tq_offload"  # "turboquant" is taken by LMCache's own serde
LMCACHE_VALUES = ("naive", "cachegen", "kivi")  # names of LMCache's own serdes: left to LMCache
UINT8_TYPES = ("none", "float8_e4m3fn", "float8_e5m2")
MAX_WORKERS = 256

_SECRET = ("pass", "url")  # a URL may hold a password
_OWN_SETTINGS = ("head_dim", "workers", "threads", "uint8_as", "repair", "backend")
SERDE_SETTINGS = (*CODEC_SETTINGS, *_OWN_SETTINGS)

TIER_SETTINGS = ("staging_gb", "queue_gb", "write_queue_gb", "write_threads", "disk_fsync")
REDIS_PREFIX = "redis_"  # the rest of the name is an option of the Redis store
FSYNC = ("none", "data", "full")


@dataclass(frozen=True)
class TierSettings:
    """How compressed tiers work.

    Args:
        staging_gb: GiB of LMCache's CPU memory that stay uncompressed, for chunks on their way; None: a quarter of it
            with a CPU RAM tier, else all of it.
        queue_gb: GiB of uncompressed chunks that may wait to be encoded; None: half of the staging memory.
        write_queue_gb: GiB of frames that may wait to be written to a tier.
        write_threads: Threads that write to a tier.
        disk_fsync: `none`, `data` (the file) or `full` (its folder too).
        redis: Options of the Redis store.
        redis_names: What the user called each of them.
    """

    staging_gb: float | None = None
    queue_gb: float | None = None
    write_queue_gb: float = 0.25
    write_threads: int = 2
    disk_fsync: str = "none"
    redis: Mapping[str, object] = field(default_factory=dict)
    redis_names: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class SerdeSettings:
    """What a serde is built from.

    Args:
        spec: Codec.
        head_dim: Elements of a K or V vector; None: from the model's config.
        workers: Chunks that are encoded and decoded at the same time, each by a thread.
        threads: Threads that work on one chunk; more than 1 pays where fewer chunks than `workers` are under way.
        uint8_as: How uint8 tensors are read: `none` (raw bytes) or the fp8 type that they hold.
        repair: Delete entries that cannot be decoded, so that the next store can write them anew.
        backend: Kernel backend of the codec, or `auto`.
    """

    spec: CodecSpec
    head_dim: int | None = None
    workers: int = 4
    threads: int = 1
    uint8_as: str = "none"
    repair: bool = True
    backend: str = "auto"


def serde_requested(environ: Mapping[str, str] | None = None) -> bool:
    """True if `LMCACHE_SERDE` asks for this package; False if it is unset, empty or names a serde of LMCache.

    Raises:
        ConfigError: Any other value.
    """
    value = (os.environ if environ is None else environ).get(ENV_SERDE, "")
    if value == REQUESTED:
        return True
    if value in ("", *LMCACHE_VALUES):
        return False
    raise ConfigError(ENV_SERDE, value, f"{REQUESTED}; unset, empty, {', '.join(LMCACHE_VALUES)} leave LMCache alone")


def settings_from_env(environ: Mapping[str, str] | None = None) -> SerdeSettings:
    """The settings of the `TQ_OFFLOAD_*` variables.

    Raises:
        ConfigError: An unknown variable of that prefix, or a value that is not allowed.
    """
    tier_settings({}, environ)  # what is wrong there ends the start as well
    return _build(_env_settings(environ, SERDE_SETTINGS), {}, {})


def tier_settings(
    explicit: Mapping[str, object],
    environ: Mapping[str, str] | None = None,
    shown: Callable[[str], str] = EXTRA_PREFIX.__add__,
) -> TierSettings:
    """The settings of the tiers: from `explicit`, else from the `TQ_OFFLOAD_*` variables.

    Args:
        explicit: Fields of TierSettings, and `redis_<option>`.
        environ: None: this process's environment.
        shown: From a name in `explicit` to what the user called it, for messages.

    Raises:
        ConfigError: A value that is not allowed.
    """

    def written(name: str) -> str:
        return shown(name) if name in explicit else _env_name(name)

    merged = {**_env_settings(environ, TIER_SETTINGS), **explicit}
    found: dict[str, object] = {}
    for name, value in merged.items():
        if name in TIER_SETTINGS:
            found[name] = _TIER_PARSERS[name](written(name), value)
    options = {name: name.removeprefix(REDIS_PREFIX) for name in merged if name.startswith(REDIS_PREFIX)}
    redis = {option: merged[name] for name, option in options.items()}
    names = {option: written(name) for name, option in options.items()}
    return TierSettings(redis=redis, redis_names=names, **found)  # type: ignore[arg-type]


def settings_from_serde(
    kwargs: Mapping[str, object], environ: Mapping[str, str] | None = None, prefix: str = "serde."
) -> SerdeSettings:
    """The settings of an explicit `"serde": {"type": "tq_offload", ...}`; what it leaves out comes from `TQ_OFFLOAD_*`.

    The codec settings (preset to protect_last) are taken from one place only: from the object if it has any of them.
    `max_workers`, LMCache's own name, is the same as `workers`.

    Args:
        kwargs: The keys and values of the object.
        environ: None: this process's environment.
        prefix: What comes before a key of `kwargs` in messages.

    Raises:
        ConfigError: An unknown key or a value that is not allowed.
    """
    explicit = dict(kwargs)
    if "max_workers" in explicit:
        if "workers" in explicit:
            raise ConfigError(f"{prefix}max_workers", explicit["max_workers"], "either workers or max_workers")
        explicit["workers"] = explicit.pop("max_workers")
    for name in explicit:
        if name not in SERDE_SETTINGS:
            value = shown_value(name, explicit[name])
            raise ConfigError(prefix + name, value, "one of the keys " + ", ".join(SERDE_SETTINGS))
    env = _env_settings(environ, SERDE_SETTINGS)
    if any(name in CODEC_SETTINGS for name in explicit):
        env = {name: value for name, value in env.items() if name not in CODEC_SETTINGS}
    merged: dict[str, object] = {**env, **explicit}
    return _build(merged, explicit, kwargs, prefix)


def _env_settings(environ: Mapping[str, str] | None, wanted: tuple[str, ...]) -> dict[str, object]:
    """The variables of our prefix whose names are wanted; with TIER_SETTINGS the options of the Redis store too."""
    found: dict[str, object] = {}
    for variable, value in (os.environ if environ is None else environ).items():
        if not variable.startswith(ENV_PREFIX):
            continue
        name = variable.removeprefix(ENV_PREFIX).lower()
        known = name in (*SERDE_SETTINGS, *TIER_SETTINGS) or name.startswith(REDIS_PREFIX)
        if not known or variable != _env_name(name):
            names = [*map(_env_name, (*SERDE_SETTINGS, *TIER_SETTINGS)), _env_name(REDIS_PREFIX) + "*"]
            raise ConfigError(variable, shown_value(name, value), "one of the variables " + ", ".join(names))
        if name in wanted or (wanted is TIER_SETTINGS and name.startswith(REDIS_PREFIX)):
            found[name] = value
    return found


def shown_value(name: str, value: object) -> object:
    """The value of a setting of unknown name as a message may show it: what may hold a password is hidden."""
    return "..." if any(word in name.lower() for word in _SECRET) else value


def gib_to_bytes(name: str, value: object) -> int:
    """Bytes of a size in GiB, given as a number or as text.

    Raises:
        ConfigError: Not a size; its message calls it `name`.
    """
    return max(1, int(_gb(name, value) * GIB))


def _env_name(name: str) -> str:
    return ENV_PREFIX + name.upper()


def _build(
    merged: dict[str, object], explicit: Mapping[str, object], kwargs: Mapping[str, object], prefix: str = ""
) -> SerdeSettings:
    def shown(name: str) -> str:
        if name not in explicit:
            return _env_name(name)
        return prefix + ("max_workers" if name == "workers" and "max_workers" in kwargs else name)

    codec = {name: value for name, value in merged.items() if name in CODEC_SETTINGS}
    values: dict[str, object] = {"workers": min(4, os.cpu_count() or 1)}
    for name, parse in _PARSERS.items():
        if name in merged:
            values[name] = parse(shown(name), merged[name])
    return SerdeSettings(spec=CodecSpec.from_settings(codec, shown=shown), **values)  # type: ignore[arg-type]


def _gb(name: str, value: object) -> float:
    try:
        number = float(value) if isinstance(value, (str, int, float)) and not isinstance(value, bool) else 0.0
    except ValueError:
        number = 0.0
    if not 0 < number < 1 << 20:
        raise ConfigError(name, value, "a size in GiB, more than 0")
    return number


_TIER_PARSERS: dict[str, Callable[[str, object], object]] = {
    "staging_gb": _gb,
    "queue_gb": _gb,
    "write_queue_gb": _gb,
    "write_threads": lambda name, value: integer(name, value, 1, MAX_WORKERS),
    "disk_fsync": lambda name, value: choice(name, value, FSYNC),
}

_PARSERS: dict[str, Callable[[str, object], object]] = {
    "head_dim": lambda name, value: integer(name, value, 1, MAX_HEAD_DIM),
    "workers": lambda name, value: integer(name, value, 1, MAX_WORKERS),
    "threads": lambda name, value: integer(name, value, 1, MAX_WORKERS),
    "uint8_as": lambda name, value: choice(name, value, UINT8_TYPES),
    "repair": boolean,
    "backend": lambda name, value: choice(name, value, ("auto", *BACKENDS)),
}
