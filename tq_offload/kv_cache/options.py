"""`CacheOptions`: what of a resident cache is packed, and how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tq_offload.errors import ConfigError
from tq_offload.spec import DEFAULT_PRESET, CodecSpec

__all__ = ["CacheOptions", "make_options", "protected"]

DEFAULT_SPEC = CodecSpec.preset(DEFAULT_PRESET)


@dataclass(frozen=True)
class CacheOptions:
    """What is packed and how.

    Args:
        spec: The codec's.
        sink_tokens: First tokens of the sequence that stay exact as well (attention sinks).
        window: Last tokens of a context that stay exact.
        chunk_tokens: Tokens that share a mean.

    Raises:
        ConfigError: A value out of range.
    """

    spec: CodecSpec = DEFAULT_SPEC
    sink_tokens: int = 4
    window: int = 124
    chunk_tokens: int = 256

    def __post_init__(self) -> None:
        if not isinstance(self.spec, CodecSpec):
            raise ConfigError("spec", self.spec, "a CodecSpec")
        for name, low in (("sink_tokens", 0), ("window", 0), ("chunk_tokens", 16)):
            value = getattr(self, name)
            if type(value) is not int or not low <= value <= 1 << 20:
                raise ConfigError(name, value, f"an integer from {low} to {1 << 20}")


def make_options(
    spec: CodecSpec | str | None = None,
    *,
    sink_tokens: int = CacheOptions.sink_tokens,
    window: int = CacheOptions.window,
    chunk_tokens: int = CacheOptions.chunk_tokens,
    **settings: Any,
) -> CacheOptions:
    """Options from a spec or the name of a preset, and the settings of `CodecSpec.from_settings`; None: not set.

    Raises:
        ConfigError: A name or value that is not understood.
    """
    given = {name: value for name, value in settings.items() if value is not None}
    if isinstance(spec, CodecSpec):
        if given:
            raise ConfigError("spec", spec, f"a preset's name beside {', '.join(given)}, or a CodecSpec alone")
    else:
        if spec is not None:
            given["preset"] = spec
        spec = CodecSpec.from_settings(given)
    return CacheOptions(spec, sink_tokens, window, chunk_tokens)


def protected(spec: CodecSpec, index: int, layers: int | None) -> bool:
    """True if the spec leaves that layer as it is.

    Raises:
        ConfigError: It protects layers, and it is not known how many there are.
    """
    if not spec.protect_first and not spec.protect_last:
        return False
    if layers is None:
        raise ConfigError(
            "protect_last", spec.protect_last, "0, or give the cache the model's config: config=model.config"
        )
    return index < spec.protect_first or index >= layers - spec.protect_last
