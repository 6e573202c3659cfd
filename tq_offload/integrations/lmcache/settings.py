"""Settings of the LMCache integration: `LMCACHE_SERDE`, `TQ_OFFLOAD_*` and the keys of a `"serde"` object, strictly."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tq_offload.errors import ConfigError
from tq_offload.kernels import BACKENDS
from tq_offload.layout import MAX_HEAD_DIM
from tq_offload.spec import SETTINGS as CODEC_SETTINGS
from tq_offload.spec import CodecSpec

__all__ = [
    "ENV_PREFIX",
    "ENV_SERDE",
    "SERDE_SETTINGS",
    "SERDE_TYPE",
    "UINT8_TYPES",
    "SerdeSettings",
    "serde_requested",
    "settings_from_env",
    "settings_from_serde",
]

ENV_SERDE = "LMCACHE_SERDE"
ENV_PREFIX = "TQ_OFFLOAD_"
REQUESTED = "turboquant"
SERDE_TYPE = "tq_offload"  # "turboquant" is taken by LMCache's own serde
LMCACHE_VALUES = ("naive", "cachegen", "kivi")  # names of LMCache's own serdes: left to LMCache
UINT8_TYPES = ("none", "float8_e4m3fn", "float8_e5m2")
MAX_WORKERS = 256

_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
_OWN_SETTINGS = ("head_dim", "workers", "uint8_as", "repair", "backend")
SERDE_SETTINGS = (*CODEC_SETTINGS, *_OWN_SETTINGS)

# Names under TQ_OFFLOAD_ that other parts of this package own; they are not settings of the serde.
_FOREIGN_NAMES: frozenset[str] = frozenset()


@dataclass(frozen=True)
class SerdeSettings:
    """What a serde is built from.

    Args:
        spec: Codec.
        head_dim: Elements of a K or V vector; None: from the model's config.
        workers: Threads that encode and decode.
        uint8_as: How uint8 tensors are read: `none` (raw bytes) or the fp8 type that they hold.
        repair: Delete entries that cannot be decoded, so that the next store can write them anew.
        backend: Kernel backend of the codec, or `auto`.
    """

    spec: CodecSpec
    head_dim: int | None = None
    workers: int = 4
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
    return _build(_env_settings(environ), {}, {})


def settings_from_serde(kwargs: Mapping[str, object], environ: Mapping[str, str] | None = None) -> SerdeSettings:
    """The settings of an explicit `"serde": {"type": "tq_offload", ...}`; what it leaves out comes from `TQ_OFFLOAD_*`.

    The codec settings (preset to protect_last) are taken from one place only: from the object if it has any of them.
    `max_workers`, LMCache's own name, is the same as `workers`.

    Raises:
        ConfigError: An unknown key or a value that is not allowed.
    """
    explicit = dict(kwargs)
    if "max_workers" in explicit:
        if "workers" in explicit:
            raise ConfigError("serde.max_workers", explicit["max_workers"], "either workers or max_workers")
        explicit["workers"] = explicit.pop("max_workers")
    for name in explicit:
        if name not in SERDE_SETTINGS:
            raise ConfigError(f"serde.{name}", explicit[name], "one of the keys " + ", ".join(SERDE_SETTINGS))
    env = _env_settings(environ)
    if any(name in CODEC_SETTINGS for name in explicit):
        env = {name: value for name, value in env.items() if name not in CODEC_SETTINGS}
    merged: dict[str, object] = {**env, **explicit}
    return _build(merged, explicit, kwargs)


def _env_settings(environ: Mapping[str, str] | None) -> dict[str, object]:
    found: dict[str, object] = {}
    for variable, value in (os.environ if environ is None else environ).items():
        if not variable.startswith(ENV_PREFIX) or variable in _FOREIGN_NAMES:
            continue
        name = variable.removeprefix(ENV_PREFIX).lower()
        if name not in SERDE_SETTINGS or variable != _env_name(name):
            raise ConfigError(variable, value, "one of the variables " + ", ".join(map(_env_name, SERDE_SETTINGS)))
        found[name] = value
    return found


def _env_name(name: str) -> str:
    return ENV_PREFIX + name.upper()


def _build(merged: dict[str, object], explicit: Mapping[str, object], kwargs: Mapping[str, object]) -> SerdeSettings:
    def shown(name: str) -> str:
        if name not in explicit:
            return _env_name(name)
        return "serde.max_workers" if name == "workers" and "max_workers" in kwargs else f"serde.{name}"

    codec = {name: value for name, value in merged.items() if name in CODEC_SETTINGS}
    values: dict[str, object] = {"workers": min(4, os.cpu_count() or 1)}
    for name, parse in _PARSERS.items():
        if name in merged:
            values[name] = parse(shown(name), merged[name])
    return SerdeSettings(spec=CodecSpec.from_settings(codec, shown=shown), **values)  # type: ignore[arg-type]


def _int(name: str, value: object, low: int, high: int) -> int:
    number = value
    if isinstance(value, str) and value.isascii() and value.isdigit():
        number = int(value)
    if isinstance(number, bool) or not isinstance(number, int) or not low <= number <= high:
        raise ConfigError(name, value, f"an integer from {low} to {high}")
    return number


def _bool(name: str, value: object) -> bool:
    text = str(value).lower()
    if text in _TRUE or text in _FALSE:
        return text in _TRUE
    raise ConfigError(name, value, [*_TRUE, *_FALSE])


def _choice(name: str, value: object, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise ConfigError(name, value, allowed)
    return str(value)


_PARSERS: dict[str, Callable[[str, object], object]] = {
    "head_dim": lambda name, value: _int(name, value, 1, MAX_HEAD_DIM),
    "workers": lambda name, value: _int(name, value, 1, MAX_WORKERS),
    "uint8_as": lambda name, value: _choice(name, value, UINT8_TYPES),
    "repair": _bool,
    "backend": lambda name, value: _choice(name, value, ("auto", *BACKENDS)),
}
