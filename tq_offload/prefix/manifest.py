"""The manifest of a stored prefix: what its frames hold, and a digest of each. Bytes only, parsed strictly.

It is MessagePack in the one `opaque` group of a frame, so that it has a checksum, a key and a model like the others.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import msgpack
import numpy as np
import xxhash

from tq_offload.errors import ConfigError, FrameContentError, LayoutError, UnsupportedVersionError
from tq_offload.kv_cache import CacheOptions
from tq_offload.prefix.frames import MAX_GROUPS, frame_spec
from tq_offload.spec import CodecSpec

__all__ = ["DIGEST_SIZE", "LayerEntry", "Manifest", "dump_manifest", "parse_manifest", "part_digest", "parts_of"]

VERSION = 1
DIGEST_SIZE = 16
MAX_LAYERS = 4096
MAX_ITEMS = 16384  # groups of a layer
MAX_COUNT = 1 << 40

_GROUPS = re.compile(r"[pe]*t?s?")
_ROWS = np.dtype("<i8")


@dataclass(frozen=True)
class LayerEntry:
    """What is stored of a layer.

    Args:
        kind: `packed`, `full` or `sliding`: a TurboQuantLayer, or a layer of transformers that is stored as it is.
        options: Of a packed layer.
        rows: B; 0 without tokens.
        groups: A letter for each group, in order: p packed and e exact run, t exact tail, s sinks.
        lengths: Tokens of each group in use.
        padding: Padding before the context of every row, if known.
        sink_starts: Slot of the first sink of every row.
        sink_counts: Sinks of every row.
        window: Of a sliding layer; 0 for the others.
        seen: Tokens that a sliding layer has seen; 0 for the others.
        parts: Digests of the frames of K and of V.
    """

    kind: str
    options: CacheOptions | None
    rows: int
    groups: str
    lengths: tuple[int, ...]
    padding: tuple[int, ...] | None
    sink_starts: tuple[int, ...]
    sink_counts: tuple[int, ...]
    window: int
    seen: int
    parts: tuple[tuple[bytes, ...], tuple[bytes, ...]]

    @property
    def tokens(self) -> int:
        """Tokens held."""
        return sum(n for kind, n in zip(self.groups, self.lengths, strict=True) if kind != "s")

    def frame_spec(self, side: str) -> CodecSpec:
        """The spec that the frames of K or V carry; the default where nothing is coded."""
        return frame_spec(CodecSpec() if self.options is None else self.options.spec, side)


@dataclass(frozen=True)
class Manifest:
    """What is stored of a cache.

    Args:
        tokens: Length of the cache.
        context_length: Position of the next token.
        options: Of the cache.
        layers: Of each layer.
    """

    tokens: int
    context_length: int
    options: CacheOptions
    layers: tuple[LayerEntry, ...]


def part_digest(frame: Any) -> bytes:
    """XXH3 of a whole frame, 16 bytes: frames of two saves do not mix. It is no protection against forgery."""
    digest: bytes = xxhash.xxh3_128(frame).digest()
    return digest


def parts_of(groups: int) -> int:
    """Frames for that many groups."""
    return -(-groups // MAX_GROUPS)


def dump_manifest(manifest: Manifest) -> bytes:
    """As bytes.

    Raises:
        LayoutError: More layers or groups than the format allows.
    """
    if len(manifest.layers) > MAX_LAYERS or any(len(layer.groups) > MAX_ITEMS for layer in manifest.layers):
        raise LayoutError(f"a prefix has at most {MAX_LAYERS} layers of {MAX_ITEMS} runs")
    packed: bytes = msgpack.packb(
        {
            "version": VERSION,
            "tokens": manifest.tokens,
            "context_length": manifest.context_length,
            "options": _dump_options(manifest.options),
            "layers": [_dump_layer(layer) for layer in manifest.layers],
        },
        use_bin_type=True,
    )
    return packed


def _dump_options(options: CacheOptions | None) -> dict[str, Any] | None:
    return None if options is None else asdict(options)


def _dump_layer(layer: LayerEntry) -> dict[str, Any]:
    return {
        "kind": layer.kind,
        "options": _dump_options(layer.options),
        "rows": layer.rows,
        "groups": layer.groups,
        "lengths": _dump_rows(layer.lengths),
        "padding": None if layer.padding is None else _dump_rows(layer.padding),
        "sink_starts": _dump_rows(layer.sink_starts),
        "sink_counts": _dump_rows(layer.sink_counts),
        "window": layer.window,
        "seen": layer.seen,
        "parts": [b"".join(side) for side in layer.parts],
    }


def _dump_rows(values: Sequence[int]) -> bytes:
    return np.asarray(values, _ROWS).tobytes()


def parse_manifest(data: bytes) -> Manifest:
    """Check a manifest in itself; that it fits its frames is checked when they are read.

    Raises:
        UnsupportedVersionError: Of a later release.
        FrameContentError: Anything that `dump_manifest` does not write.
    """
    try:
        found = msgpack.unpackb(
            data, raw=False, strict_map_key=True, max_str_len=MAX_ITEMS, max_bin_len=len(data),
            max_array_len=MAX_LAYERS, max_map_len=16, max_ext_len=0,
        )  # fmt: skip
        version = found.get("version") if isinstance(found, dict) else None
        if type(version) is int and version > VERSION:
            raise UnsupportedVersionError(f"a prefix of version {version}; this release reads {VERSION}")
        return _read_manifest(found)
    except (FrameContentError, UnsupportedVersionError):
        raise
    except ConfigError as error:
        raise FrameContentError(f"manifest: {error}") from error
    except Exception as error:  # msgpack raises a dozen kinds for malformed input
        raise FrameContentError(f"malformed manifest: {type(error).__name__}: {error}") from error


def _check(condition: bool, what: str) -> None:
    if not condition:
        raise FrameContentError(f"manifest: {what}")


def _fields(value: Any, *names: str) -> list[Any]:
    _check(isinstance(value, dict) and tuple(value) == names, f"expected the fields {', '.join(names)}")
    return list(value.values())


def _count(value: Any, what: str) -> int:
    _check(type(value) is int and 0 <= value <= MAX_COUNT, f"{what} is not a number of tokens")
    return int(value)


def _read_rows(value: Any, items: int, what: str) -> tuple[int, ...]:
    _check(type(value) is bytes and len(value) == items * _ROWS.itemsize, f"{what} are not {items} numbers")
    numbers = np.frombuffer(value, _ROWS)
    _check(not items or bool(numbers.min() >= 0 and numbers.max() <= MAX_COUNT), f"{what} are out of range")
    return tuple(numbers.tolist())


def _read_manifest(found: Any) -> Manifest:
    version, tokens, context_length, options, layers = _fields(
        found, "version", "tokens", "context_length", "options", "layers"
    )
    _check(version == VERSION and type(version) is int, "unknown version")
    _check(isinstance(layers, list) and bool(layers), "expected layers")
    tokens, context_length = _count(tokens, "tokens"), _count(context_length, "context_length")
    _check(0 < tokens <= context_length, "a context shorter than the cache")
    return Manifest(
        tokens,
        context_length,
        _read_options(options),
        tuple(_read_layer(layer) for layer in layers),
    )


def _read_options(found: Any) -> CacheOptions:
    spec, *numbers = _fields(found, *(f.name for f in fields(CacheOptions)))
    return CacheOptions(CodecSpec(*_fields(spec, *(f.name for f in fields(CodecSpec)))), *numbers)


def _read_layer(found: Any) -> LayerEntry:
    kind, options, rows, groups, lengths, padding, sink_starts, sink_counts, window, seen, parts = _fields(
        found, *(f.name for f in fields(LayerEntry))
    )
    packed = kind == "packed"
    _check(packed or kind in ("full", "sliding"), "unknown kind of layer")
    _check(isinstance(groups, str) and _GROUPS.fullmatch(groups) is not None, "unknown groups")
    _check(groups != "s" and (packed or groups in ("", "e")), "groups that a layer cannot have")
    rows, sinks = _count(rows, "rows"), "s" in groups
    _check(bool(rows) == bool(groups), "rows without tokens")
    _check(isinstance(parts, list) and len(parts) == 2, "expected the parts of K and V")
    entry = LayerEntry(
        kind,
        _read_options(options) if packed else options,
        rows,
        groups,
        _read_rows(lengths, len(groups), "lengths"),
        None if padding is None else _read_rows(padding, rows, "padding"),
        _read_rows(sink_starts, rows if sinks else 0, "sink_starts"),
        _read_rows(sink_counts, rows if sinks else 0, "sink_counts"),
        _count(window, "window"),
        _count(seen, "seen"),
        (_read_digests(parts[0], parts_of(len(groups))), _read_digests(parts[1], parts_of(len(groups)))),
    )
    _check(packed or (options is None and padding is None), "options of a layer that is not packed")
    _check(all(entry.lengths), "a group without tokens")
    sliding = kind == "sliding"
    _check(entry.window > 0 if sliding else not (entry.window or entry.seen), "a window of a layer that has none")
    _check(not sliding or entry.seen >= entry.tokens, "a window longer than the sequence")
    for start, count in zip(entry.sink_starts, entry.sink_counts, strict=True):
        inside = count <= entry.lengths[-1] and (not count or start + count <= entry.tokens)
        _check(inside, "sinks that are not in the sequence")
    return entry


def _read_digests(value: Any, items: int) -> tuple[bytes, ...]:
    _check(type(value) is bytes and len(value) == items * DIGEST_SIZE, f"expected {items} digests")
    return tuple(value[at : at + DIGEST_SIZE] for at in range(0, len(value), DIGEST_SIZE))
