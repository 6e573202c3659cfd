"""`TurboQuantCache`: a Hugging Face cache whose attention layers are packed."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from tq_offload.kv_cache.layer import TurboQuantLayer
from tq_offload.kv_cache.options import CacheOptions, make_options, protected
from tq_offload.kv_cache.workspace import Workspace
from tq_offload.spec import CodecSpec

__all__ = ["TurboQuantCache"]


class TurboQuantCache(DynamicCache):
    """A `DynamicCache` that holds full-attention layers packed; give it to `generate`, a model or kvpress's pipeline.

    A layer is packed when the model has gone on to the next one, so that presses meet it exact; the last one at the
    next call of the cache (its length, its size, the next forward pass), or with `pack`. Layers with a sliding window
    and linear attention, known from the model's config, are left as transformers makes them.

    Args:
        spec: A `CodecSpec` or the name of a preset.
        config: The model's, as for `DynamicCache`. Without it every layer is taken for full attention.
        sink_tokens: First tokens that stay exact.
        window: Last tokens of a context that stay exact.
        chunk_tokens: Tokens that share a mean.
        settings: Fields of `CodecSpec` and `bits`, `preset`.

    Raises:
        ConfigError: A setting that is not understood.
    """

    context_length: int | None = None
    """Position of the next token, where that is known: `load_prefix` sets it."""

    def __init__(
        self,
        spec: CodecSpec | str | None = None,
        *,
        config: Any = None,
        sink_tokens: int = CacheOptions.sink_tokens,
        window: int = CacheOptions.window,
        chunk_tokens: int = CacheOptions.chunk_tokens,
        **settings: Any,
    ) -> None:
        self.options = make_options(spec, sink_tokens=sink_tokens, window=window, chunk_tokens=chunk_tokens, **settings)
        self.workspace = Workspace()
        self._current: TurboQuantLayer | None = None
        super().__init__() if config is None else super().__init__(config=config)
        if config is None:
            self.layer_class_to_replicate = None  # layers are made here
            protected(self.options.spec, 0, None)
        for index, layer in enumerate(self.layers):
            if type(layer) is DynamicLayer and not protected(self.options.spec, index, len(self.layers)):
                self.layers[index] = self._new_layer(index)
        self._mark_last()

    @classmethod
    def of_layers(cls, options: CacheOptions, layers: Sequence[Any]) -> TurboQuantCache:
        """A cache of these layers; the packed ones get its workspace."""
        cache = cls(replace(options.spec, protect_first=0, protect_last=0))
        cache.options = options
        cache.layers = list(layers)
        for layer in cache.layers:
            if isinstance(layer, TurboQuantLayer):
                layer.workspace = cache.workspace
        cache._mark_last()
        return cache

    def _new_layer(self, index: int) -> TurboQuantLayer:
        return TurboQuantLayer(self.options, index=index, workspace=self.workspace)

    def _mark_last(self) -> None:
        packed = [layer for layer in self.layers if isinstance(layer, TurboQuantLayer)]
        for layer in packed:
            layer.last = layer is packed[-1]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Cache.update`."""
        while self.layer_class_to_replicate is None and len(self.layers) <= layer_idx:
            self.layers.append(self._new_layer(len(self.layers)))
            self._mark_last()
        layer = self.layers[layer_idx]
        if self._current is not None and self._current is not layer:
            self._current.settle()
        if isinstance(layer, TurboQuantLayer):
            layer.waiting = True
            self._current = layer
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return keys, values

    def pack(self) -> None:
        """Pack what is still waiting."""
        if self._current is not None:
            self._current.settle()
            self._current = None

    def seal(self) -> None:
        """The context is complete: pack it up to its window, which stays exact for good.

        The first forward pass does so by itself. Call this after a context that came in several, so that cropping an
        answer away leaves the context bit by bit as it was.
        """
        self.pack()
        for layer in self.layers:
            if isinstance(layer, TurboQuantLayer):
                layer.finish()

    @property
    def nbytes(self) -> int:
        """Bytes of K and V held by all layers, packed or not."""
        self.pack()
        return sum(_layer_bytes(layer) for layer in self.layers)

    def get_seq_length(self, *args: Any, **kwargs: Any) -> int:
        """See `Cache.get_seq_length`."""
        self.pack()
        length: int = super().get_seq_length(*args, **kwargs)
        return length

    def __deepcopy__(self, memo: dict[int, Any]) -> TurboQuantCache:
        """A copy whose packed tokens are shared: they never change."""
        self.pack()
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        for name, value in self.__dict__.items():
            new.__dict__[name] = copy.deepcopy(value, memo)
        return new


def _layer_bytes(layer: Any) -> int:
    if isinstance(layer, TurboQuantLayer):
        return layer.nbytes
    held = [getattr(layer, name, None) for name in ("keys", "values", "conv_states", "recurrent_states")]
    return sum(x.untyped_storage().nbytes() for x in held if isinstance(x, torch.Tensor))
