"""`save_prefix`: a cache into a store."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tq_offload.buffers import Array
from tq_offload.errors import ConfigError
from tq_offload.kv_cache.runs import SIDES
from tq_offload.prefix.frames import MAX_GROUPS, Piece, shape_of, write_bytes, write_frame
from tq_offload.prefix.identity import MANIFEST, Identity, identify, part_name, tokens_of_key
from tq_offload.prefix.layers import layers_of, longest, options_of, split
from tq_offload.prefix.manifest import MAX_COUNT, LayerEntry, Manifest, dump_manifest, part_digest, parts_of
from tq_offload.prefix.store import Store

__all__ = ["PrefixInfo", "save_prefix"]


@dataclass(frozen=True)
class PrefixInfo:
    """What has been stored.

    Args:
        entries: Keys of the entries in the store, the manifest last: delete these to delete the prefix.
        tokens: Length of the cache.
        context_length: Position of the next token.
        nbytes: Bytes stored.
        elements: Elements of K and V that these bytes stand for.
    """

    entries: tuple[str, ...]
    tokens: int
    context_length: int
    nbytes: int
    elements: int

    @property
    def bits(self) -> float:
        """Bits an element; 16 in a cache of bfloat16."""
        return 8 * self.nbytes / self.elements


def save_prefix(store: Store, cache: Any, key: Any, *, model: Any, context_length: int | None = None) -> PrefixInfo:
    """Store a cache as it is: codes, scales and means are copied, exact tokens stay exact.

    Two entries a layer, K and V, and a manifest, which is written last: until then the prefix is absent, or the one
    that it replaces is damaged, which is a miss as well. The cache can be used further.

    Args:
        store: Where to.
        cache: A `TurboQuantCache`, or a `DynamicCache` (whose layers a `TurboQuantPress` has packed). What waits to be
            packed is packed first.
        key: Name of the prefix, or its token ids [T] or [B, T].
        model: What made it: a name, or the Hugging Face model. `load_prefix` needs the same.
        context_length: Position of the next token, where a press has evicted tokens; None: the length of the cache,
            which must then be that of the key's token ids.

    Raises:
        StoreError: The store failed, or has no room.
        CacheTypeError: A cache or layer that cannot be restored, or a model on which a press has left a mask.
        ConfigError, LayoutError: A key, a model or a length that cannot be; a cache without tokens.
    """
    identity = identify(key, model)
    layers = layers_of(cache)
    tokens = longest(layers)
    named = tokens_of_key(key)
    if named is not None and tokens > named:
        raise ConfigError("key", f"{named} token ids", f"the ids of all {tokens} tokens in the cache, or a text")
    if context_length is None:
        if named is not None and tokens < named:
            raise ConfigError("context_length", None, f"a length: the cache holds {tokens} of the {named} tokens")
        context_length = tokens
    if type(context_length) is not int or not tokens <= context_length <= MAX_COUNT:
        raise ConfigError("context_length", context_length, f"an integer of at least {tokens}, the tokens in the cache")
    writer = _Writer(store, identity)
    entries = []
    elements = 0
    for index, layer in enumerate(layers):
        entry, pieces = split(layer)
        digests = [writer.write_side(entry, side, index, held) for side, held in zip(SIDES, pieces, strict=True)]
        entries.append(replace(entry, parts=(digests[0], digests[1])))
        elements += sum(entry.tokens * shape_of(held[0]).elements for held in pieces if held)
    manifest = dump_manifest(Manifest(tokens, context_length, options_of(cache), tuple(entries)))
    writer.put(MANIFEST, write_bytes(manifest, **writer.binding(MANIFEST)))
    return PrefixInfo(tuple(writer.entries), tokens, context_length, writer.nbytes, elements)


class _Writer:
    """Writes the frames of a prefix."""

    def __init__(self, store: Store, identity: Identity) -> None:
        self.store = store
        self.identity = identity
        self.entries: list[str] = []
        self.nbytes = 0

    def write_side(self, entry: LayerEntry, side: str, index: int, pieces: list[Piece]) -> tuple[bytes, ...]:
        """The frames of K or V of a layer. Returns their digests."""
        spec, digests = entry.frame_spec(side), []
        for number in range(parts_of(len(pieces))):
            part = part_name(index, side, number)
            frame = write_frame(pieces[number * MAX_GROUPS :][:MAX_GROUPS], spec, **self.binding(part))
            digests.append(part_digest(frame))
            self.put(part, frame)
        return tuple(digests)

    def binding(self, part: str) -> dict[str, bytes]:
        """Key and model that the frame of an entry carries."""
        return {"key": self.identity.frame_key(part), "model": self.identity.model}

    def put(self, part: str, frame: Array) -> None:
        """Store a frame."""
        name = self.identity.entry(part)
        self.store.put(name, frame.data, owned=True)
        self.entries.append(name)
        self.nbytes += frame.nbytes
