"""Layers of a cache to pieces and back."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from tq_offload.errors import CacheTypeError, FrameContentError, LayoutError
from tq_offload.hf_compat import layer_kind
from tq_offload.kv_cache import CacheOptions, TurboQuantLayer
from tq_offload.kv_cache.packed import PackedTokens
from tq_offload.kv_cache.runs import ExactRun, PackedRun, Sinks
from tq_offload.prefix.frames import Piece, shape_of
from tq_offload.prefix.manifest import LayerEntry

__all__ = ["join", "layers_of", "longest", "options_of", "split"]

Pieces = tuple[list[Piece], list[Piece]]
"""Of K and of V, a piece for each group."""

_NO_PARTS: tuple[tuple[bytes, ...], tuple[bytes, ...]] = ((), ())


def layers_of(cache: Any) -> list[Any]:
    """The layers of a cache that can be stored, with nothing left that waits to be packed.

    Raises:
        CacheTypeError: A cache or a layer of a kind that cannot be restored.
        LayoutError: No tokens, or a layer that somebody is just changing.
    """
    layers = getattr(cache, "layers", None)
    if not isinstance(cache, DynamicCache) or layers is None:
        raise CacheTypeError(f"a {type(cache).__name__} cannot be stored: use TurboQuantCache() or DynamicCache()")
    for index, layer in enumerate(layers):
        if isinstance(layer, TurboQuantLayer):
            layer.settle()
            if layer._assigned:
                raise LayoutError(f"layer {index}: keys and values have been given different numbers of tokens")
        elif layer_kind(layer) != "full" and type(layer) is not DynamicSlidingWindowLayer:
            raise CacheTypeError(
                f"layer {index}, a {type(layer).__name__}, cannot be stored: its state is more than K and V; "
                "use a model whose layers all have full attention or a sliding window"
            )
    if not any(map(_holds_tokens, layers)):
        raise LayoutError("the cache holds no tokens")
    return list(layers)


def longest(layers: list[Any]) -> int:
    """Tokens of the longest layer."""
    return max((int(layer.get_seq_length()) for layer in layers), default=0)


def options_of(cache: Any) -> CacheOptions:
    """Of the cache, or of its first packed layer."""
    holders = [cache, *(layer for layer in cache.layers if isinstance(layer, TurboQuantLayer))]
    return next((h.options for h in holders if hasattr(h, "options")), CacheOptions())


def _holds_tokens(layer: Any) -> bool:
    if isinstance(layer, TurboQuantLayer):
        return layer.store.length > 0
    return bool(layer.is_initialized and layer.keys is not None and layer.keys.numel())


def split(layer: Any) -> tuple[LayerEntry, Pieces]:
    """What there is to be stored of a layer of `layers_of`; the entry has no digests yet."""
    packed = isinstance(layer, TurboQuantLayer)
    kind = "packed" if packed else "sliding" if isinstance(layer, DynamicSlidingWindowLayer) else "full"
    window, seen = (layer.sliding_window, layer.cumulative_length) if kind == "sliding" else (0, 0)
    options = layer.options if packed else None
    if not _holds_tokens(layer):
        return LayerEntry(kind, options, 0, "", (), None, (), (), window, seen, _NO_PARTS), ([], [])
    if not packed:
        rows, _, n, _ = layer.keys.shape
        entry = LayerEntry(kind, None, rows, "e", (n,), None, (), (), window, seen, _NO_PARTS)
        return entry, ([layer.keys], [layer.values])
    store = layer.store
    parts: list[ExactRun | PackedRun] = list(store.runs)
    groups = "".join("p" if isinstance(run, PackedRun) else "e" for run in parts)
    if store.tail is not None:
        parts.append(store.tail)
        groups += "t"
    sinks = store.sinks if store.sinks is not None and store.sinks.exact.length else None
    if sinks is not None:
        parts.append(sinks.exact)
        groups += "s"
    entry = LayerEntry(
        kind,
        options,
        store.shape("K")[0],
        groups,
        tuple(part.length for part in parts),
        store.starts,
        sinks.starts if sinks else (),
        sinks.counts if sinks else (),
        window,
        seen,
        _NO_PARTS,
    )
    return entry, ([part.of("K") for part in parts], [part.of("V") for part in parts])


def join(entry: LayerEntry, pieces: Pieces, index: int, device: torch.device) -> Any:
    """The layer that `split` took apart.

    Raises:
        FrameContentError: The pieces do not fit each other or the entry.
    """
    for side in pieces:
        if len({shape_of(piece) for piece in side}) > 1:
            raise FrameContentError(f"layer {index}: runs of different shapes")
    for group, *both in zip(entry.groups, *pieces, strict=True):
        if any(isinstance(piece, PackedTokens) != (group == "p") for piece in both):
            raise FrameContentError(f"layer {index}: a run is not of the kind that the manifest says")
    if entry.kind != "packed":
        return _plain(entry, pieces, device)
    assert entry.options is not None
    layer = TurboQuantLayer(entry.options, index=index)
    if not entry.groups:
        return layer
    store = layer.store
    store.starts = entry.padding
    for group, keys, values in zip(entry.groups, *pieces, strict=True):
        if isinstance(keys, PackedTokens) and isinstance(values, PackedTokens):
            store.runs.append(PackedRun(keys, values))
            continue
        assert isinstance(keys, torch.Tensor)
        assert isinstance(values, torch.Tensor)
        exact = ExactRun(keys.to(device), values.to(device))
        if group == "e":
            store.runs.append(exact)
        elif group == "t":
            store.tail = exact
        else:
            store.sinks = Sinks(exact, entry.sink_starts, entry.sink_counts)
    layer.dtype, layer.device, layer.is_initialized = store.dtype("K"), device, True
    return layer


def _plain(entry: LayerEntry, pieces: Pieces, device: torch.device) -> Any:
    sliding = entry.kind == "sliding"
    kind: Any = DynamicSlidingWindowLayer if sliding else DynamicLayer
    layer = kind(sliding_window=entry.window) if sliding else kind()
    for keys, values in zip(*pieces, strict=True):
        assert isinstance(keys, torch.Tensor)
        assert isinstance(values, torch.Tensor)
        layer.update(keys.to(device), values.to(device))
        layer.keys, layer.values = keys.to(device), values.to(device)
    if sliding:
        layer.cumulative_length = entry.seen
    return layer
