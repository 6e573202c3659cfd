"""`TurboQuantPress`: a KVPress press that holds the resident cache packed. The one module that imports kvpress."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from kvpress import DecodingPress, PrefillDecodingPress
from kvpress.presses.base_press import BasePress

from tq_offload.errors import CacheTypeError, IncompatibleError
from tq_offload.hf_compat import (
    attention_modules,
    check_versions,
    decoder,
    hook_cache,
    installed,
    layer_kind,
    patched_kvpress,
)
from tq_offload.kv_cache.layer import TurboQuantLayer
from tq_offload.kv_cache.options import CacheOptions, make_options, protected
from tq_offload.kv_cache.workspace import Workspace

__all__ = ["TurboQuantPress"]

_log = logging.getLogger(__name__)

_PLAIN_CONTEXTS = (BasePress.__call__, DecodingPress.__call__, PrefillDecodingPress.__call__)  # hooks, and no more
# The pipeline of kvpress asks for these classes by isinstance: inside another press they are not seen.
_ASKED_FOR = ("DecodingPress", "PrefillDecodingPress", "DMSPress", "KeyRerotationPress", "FinchPress", "RestoreKVPress")


@dataclass
class TurboQuantPress(BasePress):
    """Pack the KV cache with TurboQuant (arXiv 2504.19874), after another press has evicted what it wants to.

    Within `with press(model):` every full-attention layer of the cache is replaced by a `TurboQuantLayer` as soon as
    the model and the other press are done with it. The packed layers stay in the cache when the context has ended, and
    pack what is generated later.

    Args:
        press: A press that runs first, on exact K and V.
        preset: Name of a preset of the codec.
        bits: Bits of K and V codes; None: the preset's.
        key_bits: Bits of K codes, likewise.
        value_bits: Bits of V codes, likewise.
        sink_tokens: First tokens of the context that stay exact.
        window: Last tokens of the context that stay exact.
        chunk_tokens: Tokens that share a mean.

    Raises:
        ConfigError: A setting that is not understood.
        CacheTypeError: `press` is not a press, or packs by itself.
    """

    press: BasePress | None = None
    preset: str = "turboquant"
    bits: int | None = None
    key_bits: int | None = None
    value_bits: int | None = None
    key_outliers: int | None = None
    protect_first: int | None = None
    protect_last: int | None = None
    sink_tokens: int = CacheOptions.sink_tokens
    window: int = CacheOptions.window
    chunk_tokens: int = CacheOptions.chunk_tokens

    def __post_init__(self) -> None:
        check_versions()
        for risk in self.options().spec.risks():
            _log.warning("%s; `tq-offload check MODEL` measures it", risk)
        inner = self.press
        if inner is None:
            return
        if not isinstance(inner, BasePress):
            raise CacheTypeError(f"press={inner!r} is not a press: give an instance, such as SnapKVPress(0.5)")
        if any(isinstance(p, TurboQuantPress) for p in _presses(inner)):
            raise CacheTypeError("the press inside packs already: use one TurboQuantPress, around the other presses")
        if type(inner).__name__ in _ASKED_FOR:
            _log.warning(
                "kvpress's pipeline treats %s in a way of its own, which it cannot do inside TurboQuantPress; "
                "there, use pipe(..., press=%s(...), cache=TurboQuantCache()) instead",
                type(inner).__name__,
                type(inner).__name__,
            )

    def options(self) -> CacheOptions:
        """The settings, checked. Raises ConfigError."""
        return make_options(
            self.preset,
            bits=self.bits,
            key_bits=self.key_bits,
            value_bits=self.value_bits,
            key_outliers=self.key_outliers,
            protect_first=self.protect_first,
            protect_last=self.protect_last,
            sink_tokens=self.sink_tokens,
            window=self.window,
            chunk_tokens=self.chunk_tokens,
        )

    @property
    def compression_ratio(self) -> float:
        """Part of the tokens that the other press evicts; packing evicts none."""
        return getattr(self.press, "compression_ratio", None) or 0.0

    @compression_ratio.setter
    def compression_ratio(self, value: float) -> None:
        if self.press is None:
            return
        try:
            self.press.compression_ratio = value
        except AttributeError as error:  # such as ThinKPress, which drops channels
            _log.warning("%s takes no compression_ratio: %s", type(self.press).__name__, error)

    def post_init_from_model(self, model: Any) -> None:
        """See `BasePress`."""
        if self.press is not None:
            self.press.post_init_from_model(model)

    def compress(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """What the other press makes of K and V; packing is done by the hook."""
        if self.press is None:
            raise CacheTypeError(
                "TurboQuantPress replaces cache layers: it works through its hook, not through compress"
            )
        compressed: tuple[torch.Tensor, torch.Tensor] = self.press.compress(*args, **kwargs)
        return compressed

    def forward_hook(self, module: Any, inputs: Any, kwargs: dict[str, Any], output: Any) -> Any:
        """For presses that call this one, such as `ComposedPress`: the other press, then packing.

        Raises:
            PressOrderError: From a press that changes K and V after this one.
        """
        if self.press is not None and type(self.press).__call__ not in _PLAIN_CONTEXTS:
            name = type(self.press).__name__
            raise CacheTypeError(
                f"{name} needs a context of its own, which it has not inside another press: use "
                f"TurboQuantPress(press={name}(...)) by itself"
            )
        layers = getattr(getattr(module, "config", None), "num_hidden_layers", None)
        layer = _adopt(self.options, module, kwargs, layers)
        if self.press is not None:
            output = self.press.forward_hook(module, inputs, kwargs, output)
        if layer is not None:
            name = type(self.press).__name__ if self.press is not None else "SnapKVPress"
            layer.sealed = (
                "a press changes keys or values after TurboQuantPress has packed them: put TurboQuantPress last in "
                f"ComposedPress, or around the other press: TurboQuantPress(press={name}(...))"
            )
            layer.settle()
        return output

    @contextmanager
    def __call__(self, model: Any) -> Generator[None, None, None]:
        """Pack the caches that the model fills meanwhile.

        Raises:
            CacheTypeError: A model whose layers cannot be found, or a cache of a kind that cannot be packed.
        """
        inside = {type(press).__name__ for press in _presses(self.press)}
        if "KVgradPress" in inside and installed("transformers") >= (5, 24):
            raise IncompatibleError("KVgradPress works with transformers up to 5.23: use an older one or another press")
        session = _Session(self.options(), _count_layers(model))
        with ExitStack() as stack:
            stack.enter_context(session)
            stack.enter_context(_hooks(model, session.own(session.expect), before=True))
            stack.enter_context(_hooks(model, session.own(session.adopt)))
            if self.press is not None:
                stack.enter_context(patched_kvpress(model))
                stack.enter_context(self.press(model))
            with _hooks(model, session.own(session.pack)):
                yield
            session.ending = True
        session.end()


class _Session:
    """One `with press(model)`: which layers it has packed.

    The hooks of all sessions are on the same modules. In a thread that has sessions of its own only these act; in any
    other, such as one that streams what `generate` writes, all of them do.
    """

    _here = threading.local()

    def __init__(self, options: CacheOptions, layers: int) -> None:
        self.options = options
        self.layers = layers
        self.ending = False  # the other press may still run the model, and assigns K and V for good
        self._packed: weakref.WeakKeyDictionary[TurboQuantLayer, None] = weakref.WeakKeyDictionary()  # in order

    def __enter__(self) -> _Session:
        self._here.sessions = (*self._in_this_thread(), self)
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self._here.sessions = tuple(other for other in self._in_this_thread() if other is not self)

    def _in_this_thread(self) -> tuple[_Session, ...]:
        return getattr(self._here, "sessions", ())

    def own(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """The hook, for forward passes that concern this session."""

        def run(*args: Any) -> Any:
            sessions = self._in_this_thread()
            return hook(*args) if self in sessions or not sessions else None

        return run

    def expect(self, module: Any, _inputs: Any, kwargs: dict[str, Any]) -> None:
        """Before attention: a layer that is packed already, and empty again, must not pack before the other press.

        What cannot be packed is refused now, not when its layer has taken the tokens: transformers 4.57 catches a
        TypeError of a model's layers and runs them again.
        """
        layers = getattr(hook_cache(kwargs), "layers", ())
        layer = layers[module.layer_idx] if module.layer_idx < len(layers) else None
        _kind(layer)
        if isinstance(layer, TurboQuantLayer):
            layer.waiting = not self.ending

    def adopt(self, module: Any, _inputs: Any, kwargs: dict[str, Any], output: Any) -> Any:
        """Before the other press: it works on exact K and V in a layer that keeps track of positions."""
        layer = _adopt(lambda: self.options, module, kwargs, self.layers)
        if layer is not None:
            layer.waiting = not self.ending
            self._packed[layer] = None
        return output

    def pack(self, module: Any, _inputs: Any, kwargs: dict[str, Any], output: Any) -> Any:
        """After the other press: pack what came in, in whole chunks, since more of the context may follow."""
        held = hook_cache(kwargs)
        layer = None if held is None else _layer(held, module)
        if isinstance(layer, TurboQuantLayer) and layer.waiting:
            layer.finish(everything=False)
        return output

    def end(self) -> None:
        """The context is complete: pack the rest, and let the exact tokens stay exact."""
        for layer in list(self._packed):
            layer.finish()


def _presses(press: Any) -> Iterator[Any]:
    """A press and those inside it; nothing for None."""
    if press is None:
        return
    yield press
    for value in vars(press).values():
        for inner in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(inner, BasePress):
                yield from _presses(inner)


def _count_layers(model: Any) -> int:
    body = decoder(model)
    if body is None:
        raise CacheTypeError(
            f"{type(model).__name__} has no model.layers: "
            "give TurboQuantCache() to its generate() as past_key_values instead"
        )
    return len(body.layers)


@contextmanager
def _hooks(model: Any, hook: Callable[..., Any], *, before: bool = False) -> Iterator[None]:
    """The hook on every attention module of the model."""
    handles = [
        (module.register_forward_pre_hook if before else module.register_forward_hook)(hook, with_kwargs=True)
        for module in attention_modules(model)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _layer(cache: Any, module: Any) -> Any:
    """The cache layer of an attention module; None if the cache has no layers, which is said once."""
    layers = getattr(cache, "layers", None)
    if layers is None:
        _warn_once(type(cache).__name__)
        return None
    return layers[module.layer_idx]


@cache
def _warn_once(kind: str) -> None:
    _log.warning("TurboQuantPress packs nothing: a %s has no layers that could be replaced", kind)


def _adopt(
    options: Callable[[], CacheOptions], module: Any, kwargs: dict[str, Any], layers: int | None = None
) -> TurboQuantLayer | None:
    """The packed layer of an attention module, put in place of the one that is there; None if it is to be left."""
    held = hook_cache(kwargs)
    layer = None if held is None else _layer(held, module)
    if layer is not None and not isinstance(layer, TurboQuantLayer):
        layer = _replace(options(), held.layers, module.layer_idx, kwargs["hidden_states"].shape[1], layers)
    if layer is None:
        return None
    layer.waiting = True
    if layer.fresh and layer.get_seq_length():
        layer.store.starts = _left_padding(kwargs.get("attention_mask"), *layer.store.shape("K")[0:3:2])
    return layer


def _replace(
    options: CacheOptions, held: list[Any], index: int, new_tokens: int, layers: int | None
) -> TurboQuantLayer | None:
    """Put a packed layer in place of the layer `index` of a cache; None if that is to be left as it is."""
    layer = held[index]
    if _kind(layer) != "full" or protected(options.spec, index, layers):
        return None
    if layer.keys.shape[2] < new_tokens:  # evicted before this press could see in which order
        options = replace(options, sink_tokens=0, window=0)
    others = [other for other in held if isinstance(other, TurboQuantLayer)]
    workspace = others[0].workspace if others else Workspace()
    for other in others:
        other.last = False
    held[index] = new = TurboQuantLayer.adopt(layer, options, index=index, workspace=workspace)
    return new


def _kind(layer: Any) -> str:
    """The kind of a cache layer. Raises CacheTypeError where transformers keeps tokens in a form of its own."""
    kind = layer_kind(layer)
    if kind in ("static", "quantized"):
        raise CacheTypeError(
            f"a {type(layer).__name__} cannot be packed: use DynamicCache() or TurboQuantCache(), and neither "
            "cache_implementation nor cache_config"
        )
    return kind


def _left_padding(mask: Any, rows: int, tokens: int) -> tuple[int, ...] | None:
    """Padding tokens before each row's context, from an attention mask [B, T] or [B, 1, n, T]; None: not known."""
    if not isinstance(mask, torch.Tensor) or mask.dim() not in (2, 4) or mask.shape[-1] != tokens:
        return None
    last = mask if mask.dim() == 2 else mask[:, 0, -1]
    visible = last if last.dtype == torch.bool else (last != 0 if mask.dim() == 2 else last >= 0)
    return tuple(visible.int().argmax(dim=1).expand(rows).tolist())
