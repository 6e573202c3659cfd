"""`load_prefix`: a cache out of a store."""

from __future__ import annotations

import logging
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicSlidingWindowLayer

from tq_offload.codec import CheckedFrame, TurboQuantCodec
from tq_offload.errors import FrameContentError, FrameError, FrameMismatchError, StoreError
from tq_offload.kv_cache import TurboQuantCache
from tq_offload.kv_cache.runs import SIDES
from tq_offload.prefix.frames import MAX_GROUPS, Piece, read_bytes, read_piece
from tq_offload.prefix.identity import MANIFEST, Identity, device_of, identify, part_name
from tq_offload.prefix.layers import join, longest
from tq_offload.prefix.manifest import LayerEntry, Manifest, parse_manifest, part_digest
from tq_offload.prefix.store import Store

__all__ = ["load_prefix"]

_log = logging.getLogger(__name__)


def load_prefix(
    store: Store, key: Any, *, model: Any, config: Any = None, strict: bool = False
) -> TurboQuantCache | None:
    """Load what `save_prefix` has stored; the cache goes on exactly as the one that was saved would.

    Args:
        store: Where from.
        key: As for `save_prefix`.
        model: As for `save_prefix`. Exact tokens are put on the device of a model; for a name on the CPU.
        config: The model's config; the cache must have the layers that it asks for. None: not compared.
        strict: Raise an error instead of returning None for what is damaged or does not fit.

    Returns:
        The cache, whose `context_length` is the position of the next token. None: absent; also damaged, of another
        model, incomplete, or the store failed, which is logged.

    Raises:
        FrameError, StoreError: With `strict`.
        CacheTypeError, ConfigError: A model or key that cannot be.
    """
    identity = identify(key, model)
    try:
        return _Reader(store, identity, device_of(model)).cache(config)
    except (FrameError, StoreError) as error:
        if strict:
            raise
        _log.warning("the prefix %s is not used (%s): %s", identity.entry(MANIFEST), error.reason, error)
        return None


class _Reader:
    """Reads the frames of a prefix."""

    def __init__(self, store: Store, identity: Identity, device: torch.device) -> None:
        self.store = store
        self.identity = identity
        self.device = device
        self.codec = TurboQuantCodec()

    def cache(self, config: Any) -> TurboQuantCache | None:
        """The whole cache; None if there is no manifest."""
        found = self.store.get(self.identity.entry(MANIFEST))
        if found is None:
            return None
        manifest = parse_manifest(read_bytes(self._open(MANIFEST, found)))
        if config is not None:
            _match_config(manifest, config)
        layers = [self._layer(entry, index) for index, entry in enumerate(manifest.layers)]
        if longest(layers) != manifest.tokens:
            raise FrameContentError("manifest: the layers hold another number of tokens")
        cache = TurboQuantCache.of_layers(manifest.options, layers)
        cache.context_length = manifest.context_length
        return cache

    def _open(self, part: str, found: memoryview) -> CheckedFrame:
        return self.codec.open(found, key=self.identity.frame_key(part), model=self.identity.model)

    def _layer(self, entry: LayerEntry, index: int) -> Any:
        keys, values = (self._side(entry, side, index) for side in SIDES)
        return join(entry, (keys, values), index, self.device)

    def _side(self, entry: LayerEntry, side: str, index: int) -> list[Piece]:
        pieces: list[Piece] = []
        for number, digest in enumerate(entry.parts[SIDES.index(side)]):
            part = part_name(index, side, number)
            frame = self._part(part, digest)
            lengths = entry.lengths[number * MAX_GROUPS :][:MAX_GROUPS]
            if frame.plan.spec != entry.frame_spec(side) or len(frame.plan.layout.groups) != len(lengths):
                raise FrameContentError(f"part {part} is not what the manifest says")
            pieces += [read_piece(frame, i, entry.rows, length) for i, length in enumerate(lengths)]
        return pieces

    def _part(self, part: str, digest: bytes) -> CheckedFrame:
        found = self.store.get(self.identity.entry(part))
        if found is None:
            error = FrameError(f"part {part} is missing: the store has evicted it")
            error.reason = "missing"
            raise error
        frame = self._open(part, found)
        if (held := part_digest(found)) != digest:
            raise FrameMismatchError("part", digest.hex(), held.hex())
        return frame


def _match_config(manifest: Manifest, config: Any) -> None:
    """Raises FrameMismatchError if a model of that config has other layers."""
    wanted = DynamicCache(config=config).layers
    if len(wanted) != len(manifest.layers):
        raise FrameMismatchError("kind", f"{len(wanted)} layers", f"{len(manifest.layers)} layers")
    for layer, entry in zip(wanted, manifest.layers, strict=True):
        window = layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else 0
        if entry.kind == "sliding" and entry.window != window:
            raise FrameMismatchError("kind", f"window {window}", f"window {entry.window}")
