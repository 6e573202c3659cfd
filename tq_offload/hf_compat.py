"""What differs between the supported releases of transformers and kvpress, in one place. Imports neither by itself.

A hook on an attention module gets the arguments that its decoder layer passed:

| transformers | position of the new tokens | the cache          |
|--------------|----------------------------|--------------------|
| 4.57 to 5.3  | `cache_position`           | `past_key_values`  |
| 5.4 to 5.23  | only `position_ids`        | `past_key_values`  |
| 5.24         | only `position_ids`        | `cache`            |

The presses of kvpress 0.5.2 to 0.5.5 know the first row. `patched_kvpress` makes them work with the others.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import inspect
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch

from tq_offload.errors import IncompatibleError

__all__ = [
    "TESTED", "LayerKind", "attention_modules", "check_versions", "complete_hook_kwargs", "decoder", "hook_cache",
    "installed", "layer_kind", "model_keyword", "patched_kvpress",
]  # fmt: skip

_log = logging.getLogger(__name__)

# Oldest and newest release that the tests have run with (`make test-kvpress-versions`).
TESTED: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "transformers": ((4, 57), (5, 24)),
    "kvpress": ((0, 5, 2), (0, 5, 5)),
}

LayerKind = Literal["full", "sliding", "linear", "static", "quantized", "other"]


@functools.cache
def installed(package: str) -> tuple[int, ...]:
    """Version of an installed package, without importing it, such as `(5, 2, 0)`.

    Raises:
        IncompatibleError: It is not installed.
    """
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        raise IncompatibleError(f"TQ-Offload: {package} is not installed; install tq-offload[kvpress]") from None
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


@functools.cache
def check_versions(*packages: str) -> None:
    """Check that these packages are there and not too old; one newer than tested is said once, in the log.

    Args:
        packages: Names in `TESTED`; none: all of them.

    Raises:
        IncompatibleError: One is not installed, or older than what can work. The message names both versions.
    """
    for package in packages or TESTED:
        first, last = TESTED[package]
        found = installed(package)
        text = f"{package} {_dotted(found)} is installed; tested: {_dotted(first)} to {_dotted(last)}"
        if found < first:
            raise IncompatibleError(f"TQ-Offload: {text}")
        if found[: len(last)] > last:
            _log.warning("%s", text)


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def layer_kind(layer: Any) -> LayerKind:
    """What a layer of a transformers cache holds.

    Returns:
        "full": exact K and V of all tokens, and nothing else: what can be packed. "sliding": a window of tokens.
        "linear": the state of linear attention or of a convolution, also beside K and V. "static", "quantized":
        transformers' own. "other": anything else, such as an index beside K and V, or a layer without a cache.
    """
    kinds = importlib.import_module("transformers.cache_utils")
    if type(layer) is kinds.DynamicLayer:
        return "full"
    by_class: dict[str, LayerKind] = {  # the first that fits; not every release has each of them
        "LinearAttentionCacheLayerMixin": "linear",
        "StaticLayer": "static",
        "QuantizedLayer": "quantized",
        "BaseQuantizedLayer": "quantized",
        "DynamicSlidingWindowLayer": "sliding",
    }
    for name, kind in by_class.items():
        known = getattr(kinds, name, None)
        if known is not None and isinstance(layer, known):
            return kind
    return "other"


def hook_cache(kwargs: Mapping[str, Any]) -> Any:
    """The cache among the keyword arguments of an attention module, under either name; None if there is none."""
    cache = kwargs.get("past_key_values")
    return kwargs.get("cache") if cache is None else cache


def model_keyword(model: Any) -> str:
    """The name under which a model takes its cache: `past_key_values`, or `cache` from transformers 5.24."""
    parameters = inspect.signature(type(model).forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"


def complete_hook_kwargs(kwargs: dict[str, Any]) -> None:
    """Add to the keyword arguments that a forward hook of an attention module gets what kvpress's presses read.

    Args:
        kwargs: Changed in place. `cache_position`, i64 [n], is taken from `position_ids`, i64 [B, n], where missing:
            the row that has no padding counts, so a context starts at 0 and eviction changes nothing.
    """
    if kwargs.get("cache_position") is None:
        positions, n = kwargs.get("position_ids"), kwargs["hidden_states"].shape[1]
        if positions is not None:
            first = (positions.max() + 1 - n).clamp(min=0)
            kwargs["cache_position"] = first + torch.arange(n, device=positions.device)
    if kwargs.get("past_key_values") is None and kwargs.get("cache") is not None:
        kwargs["past_key_values"] = kwargs["cache"]


def decoder(model: Any) -> Any:
    """The module of a model that has the decoder layers as `layers`; None if it cannot be found."""
    body = getattr(model, "model", None)
    body = getattr(body, "language_model", body)
    return body if hasattr(body, "layers") else None


def attention_modules(model: Any) -> list[Any]:
    """The `self_attn` of every decoder layer that has one: a layer of linear attention has none."""
    layers = getattr(decoder(model), "layers", ())
    return [layer.self_attn for layer in layers if hasattr(layer, "self_attn")]


@contextmanager
def patched_kvpress(model: Any) -> Iterator[None]:
    """Let kvpress's presses work on this model with any supported transformers. Does nothing where they do anyway.

    Enter it before the press: `with patched_kvpress(model), press(model): ...`, or around a call of kvpress's pipeline.
    """
    with ExitStack() as stack:
        if installed("transformers") >= (5, 4):
            for module in attention_modules(model):
                # Before all other hooks. They get the same dict, and the forward pass is over.
                handle = module.register_forward_hook(_complete, with_kwargs=True, prepend=True)
                stack.callback(handle.remove)
        if model_keyword(model) == "cache":
            stack.enter_context(_old_keyword(model, is_decoder=False))
            body = decoder(model)
            if body is not None:
                stack.enter_context(_old_keyword(body, is_decoder=True))
        yield


def _complete(_module: Any, _inputs: Any, kwargs: dict[str, Any], _output: Any) -> None:
    complete_hook_kwargs(kwargs)


@contextmanager
def _old_keyword(module: Any, *, is_decoder: bool) -> Iterator[None]:
    """Let a module be called with `past_key_values` without a warning; a press that has put its own `forward` into the
    decoder (KVzip, KVgrad, KVCompose) gets the cache under that name, whoever calls."""
    before = module.__dict__.get("forward")
    module.forward = _with_new_keyword(module.forward)
    handle = module.register_forward_pre_hook(_to_old_keyword, with_kwargs=True) if is_decoder else None
    try:
        yield
    finally:
        if handle is not None:
            handle.remove()
        if before is None:
            del module.forward
        else:
            module.forward = before


def _with_new_keyword(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)  # generate() reads the signature
    def renamed(*args: Any, **kwargs: Any) -> Any:
        old = kwargs.pop("past_key_values", None)
        if old is not None and kwargs.get("cache") is None:
            kwargs["cache"] = old
        return forward(*args, **kwargs)

    return renamed


def _to_old_keyword(_module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    cache = kwargs.get("cache")
    if cache is None:
        return args, kwargs
    return args, {**{name: value for name, value in kwargs.items() if name != "cache"}, "past_key_values": cache}
