"""The frame: a self-describing, checksummed container of one encoded chunk (docs/wire-format.md, section 1).

Bytes only. The length is a function of layout and spec, and so is the place of every section: both come from a
`FramePlan`, which writer and reader make alike.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

import msgpack
import xxhash

from tq_offload.bitpack import packed_size
from tq_offload.codebook import CODEBOOK_ID
from tq_offload.errors import (
    BadMagicError,
    ChecksumError,
    ConfigError,
    FrameHeaderError,
    FrameLengthError,
    LayoutError,
    UnsupportedVersionError,
)
from tq_offload.layout import ChunkLayout, GroupLayout, Stream
from tq_offload.spec import OUTLIER_BITS, CodecSpec

__all__ = [
    "DIGEST_SIZE",
    "MAGIC",
    "UNBOUND",
    "VERSION",
    "FrameHeader",
    "FramePlan",
    "Section",
    "StreamPlan",
    "digest",
    "make_plan",
    "read_header",
    "write_checksum",
    "write_header",
]

MAGIC = b"\x89TQKV\r\n\x1a"
VERSION = 1
DIGEST_SIZE = 16
UNBOUND = bytes(DIGEST_SIZE)

_PREAMBLE = struct.Struct("<8sHHIQQ")  # magic, version, flags, header length, frame length, checksum
_CHECKSUM_AT = 24
_ALIGN = 64
_MAX_HEADER = 64 * 1024
_MAX_GROUPS = 256
_MAX_LENGTH = 1 << 40
_MODEL_AT = -DIGEST_SIZE  # from the end of a header in its shortest form, which ends with the key and the model
_KEY_AT = _MODEL_AT - len(msgpack.packb("model")) - 2 - DIGEST_SIZE
_SPEC_KEYS = {
    "kb": "key_bits", "vb": "value_bits", "seed": "seed", "mean": "mean", "kr": "key_rule", "vr": "value_rule",
    "fit": "fit_range", "qjl": "qjl", "ko": "key_outliers", "first": "protect_first", "last": "protect_last",
}  # fmt: skip


@dataclass(frozen=True)
class Section:
    """A run of `nbytes` bytes in the frame from `offset`: an array of `shape` with `item_size` bytes an item."""

    offset: int
    nbytes: int
    shape: tuple[int, ...]
    item_size: int

    def rows(self, start: int, stop: int) -> Section:
        """The part of it that holds rows of its first dimension."""
        one = self.nbytes // self.shape[0]
        return Section(self.offset + start * one, (stop - start) * one, (stop - start, *self.shape[1:]), self.item_size)


@dataclass(frozen=True)
class StreamPlan:
    """Where the vectors of one stream are in the chunk (`coded`, `raw`: grids) and in the frame (sections)."""

    side: str
    bits: int
    rule: str
    mean: bool
    fit_range: bool
    qjl: bool
    outliers: int
    coded: Stream
    raw: tuple[Stream, ...]
    means: Section | None
    scales: Section
    codes: Section
    outlier_channels: Section | None
    outlier_ranges: Section | None
    outlier_codes: Section | None
    sketch_scales: Section | None
    sketch: Section | None
    raw_section: Section | None

    def sections(self) -> list[Section]:
        """Those that are there."""
        found = (getattr(self, name) for name in (*_BY_PLANE, "raw_section"))
        return [section for section in found if section is not None]

    def cut(self, parts: int) -> list[StreamPlan]:
        """The coded planes in up to `parts` runs, without the protected ones."""
        bounds = [self.coded.planes * i // parts for i in range(parts + 1)]
        return [self._planes(start, stop) for start, stop in pairwise(bounds) if start < stop]

    def _planes(self, start: int, stop: int) -> StreamPlan:
        offset = self.coded.offset + start * self.coded.plane_stride
        coded = replace(self.coded, planes=stop - start, offset=offset)
        sections = {name: getattr(self, name) for name in _BY_PLANE}
        cut: dict[str, Any] = {name: s if s is None else s.rows(start, stop) for name, s in sections.items()}
        return replace(self, coded=coded, raw=(), raw_section=None, **cut)


_BY_PLANE = (
    "means", "scales", "codes", "outlier_channels", "outlier_ranges", "outlier_codes", "sketch_scales", "sketch",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class FramePlan:
    """The map of a frame: for every group its streams, or the section of an opaque group, and the length in bytes.

    There is one for a spec and a layout as long as `make_plan` remembers it: plans are compared and hashed by identity.
    """

    spec: CodecSpec
    layout: ChunkLayout
    header_length: int
    groups: tuple[tuple[StreamPlan, ...], ...]
    opaque: tuple[Section | None, ...]
    length: int


@dataclass(frozen=True)
class FrameHeader:
    """What a frame says about itself."""

    version: int
    spec: CodecSpec
    layout: ChunkLayout
    key: bytes
    model: bytes
    length: int
    checksum: int


class _Cursor:
    """Hands out sections one after the other, each at a multiple of 64 bytes."""

    def __init__(self, start: int) -> None:
        self.at = _align(start)

    def take(self, shape: tuple[int, ...], item_size: int) -> Section:
        nbytes = item_size
        for n in shape:
            nbytes *= n
        section = Section(self.at, nbytes, shape, item_size)
        self.at = _align(self.at + nbytes)
        return section


def _align(n: int) -> int:
    return -(-n // _ALIGN) * _ALIGN


def digest(*fields: bytes) -> bytes:
    """BLAKE2b of length-prefixed fields, 16 bytes: distinct lists of fields have distinct inputs."""
    state = hashlib.blake2b(digest_size=DIGEST_SIZE)
    for field in fields:
        state.update(struct.pack("<I", len(field)))
        state.update(field)
    return state.digest()


def _pack_header(spec: CodecSpec, layout: ChunkLayout, key: bytes, model: bytes) -> bytes:
    header = {
        "codec": "turboquant",
        "spec": {short: getattr(spec, name) for short, name in _SPEC_KEYS.items()} | {"cb": CODEBOOK_ID},
        "groups": [
            {"kind": g.kind, "shape": list(g.shape), "dtype": g.dtype, "dim": g.head_dim} for g in layout.groups
        ],
        "key": key,
        "model": model,
    }
    packed: bytes = msgpack.packb(header, use_bin_type=True)
    return packed


def _split(stream: Stream, first: int, last: int) -> tuple[Stream, tuple[Stream, ...]]:
    """Cut a stream into the coded planes in the middle and the protected ones around them."""

    def planes(start: int, count: int) -> Stream:
        offset = stream.offset + start * stream.plane_stride
        return Stream(
            count, stream.tokens, stream.vectors, stream.dim, offset, stream.plane_stride, stream.token_stride,
            stream.vector_stride,
        )  # fmt: skip

    if first + last >= stream.planes:
        return planes(0, 0), (stream,)
    raw = [planes(0, first), planes(stream.planes - last, last)]
    return planes(first, stream.planes - first - last), tuple(s for s in raw if s.planes)


def _plan_stream(side: str, stream: Stream, group: GroupLayout, spec: CodecSpec, cursor: _Cursor) -> StreamPlan:
    coding = spec.side(side, stream.tokens)
    protect = (spec.protect_first, spec.protect_last) if group.layered else (0, 0)
    coded, raw = _split(stream, *protect)
    grid = (coded.planes, coded.tokens, coded.vectors)
    outliers = coding.outliers_of(coded.dim)
    columns = (coded.planes, coded.vectors, outliers)
    return StreamPlan(
        side=side,
        bits=coding.bits,
        rule=coding.rule,
        mean=coding.mean,
        fit_range=spec.fit_range,
        qjl=coding.qjl,
        outliers=outliers,
        coded=coded,
        raw=raw,
        means=cursor.take((coded.planes, coded.vectors, coded.dim), 2) if coding.mean else None,
        scales=cursor.take(grid, 2),
        codes=cursor.take((*grid, packed_size(coded.dim, coding.bits)), 1),
        outlier_channels=cursor.take(columns, 2) if outliers else None,
        outlier_ranges=cursor.take((*columns, 2), 4) if outliers else None,
        outlier_codes=cursor.take((*grid, packed_size(outliers, OUTLIER_BITS)), 1) if outliers else None,
        sketch_scales=cursor.take(grid, 2) if coding.qjl else None,
        sketch=cursor.take((*grid, packed_size(coded.dim, 1)), 1) if coding.qjl else None,
        raw_section=cursor.take(
            (sum(s.planes for s in raw), stream.tokens, stream.vectors, stream.dim), group.item_size
        )
        if raw
        else None,
    )


@lru_cache(maxsize=256)
def make_plan(spec: CodecSpec, layout: ChunkLayout) -> FramePlan:
    """The map of the frames of that spec and layout.

    Raises:
        LayoutError: More groups, a longer header or a longer frame than the format allows.
    """
    if len(layout.groups) > _MAX_GROUPS:
        raise LayoutError(f"{len(layout.groups)} groups in a chunk; the format allows {_MAX_GROUPS}")
    header_length = len(_pack_header(spec, layout, UNBOUND, UNBOUND))
    if header_length > _MAX_HEADER:
        raise LayoutError(f"a header of {header_length} bytes; the format allows {_MAX_HEADER}")
    cursor = _Cursor(_PREAMBLE.size + header_length)
    groups: list[tuple[StreamPlan, ...]] = []
    opaque: list[Section | None] = []
    for group in layout.groups:
        opaque.append(cursor.take((group.nbytes,), 1) if group.kind == "opaque" else None)
        groups.append(tuple(_plan_stream(side, s, group, spec, cursor) for side, s in group.streams().items()))
    if cursor.at > _MAX_LENGTH:
        raise LayoutError(f"a frame of {cursor.at} bytes; the format allows {_MAX_LENGTH}")
    return FramePlan(spec, layout, header_length, tuple(groups), tuple(opaque), cursor.at)


@lru_cache(maxsize=256)
def _fixed_parts(plan: FramePlan) -> tuple[bytes, list[tuple[int, int]]]:
    """What is the same in every frame of a plan: the header with a key and a model of zeros, and where padding is."""
    found = [s for s in plan.opaque if s is not None]
    found += [section for group in plan.groups for stream in group for section in stream.sections()]
    at, gaps = _PREAMBLE.size + plan.header_length, []
    for section in sorted(found, key=lambda s: s.offset):
        gaps.append((at, section.offset))
        at = section.offset + section.nbytes
    gaps.append((at, plan.length))
    return _pack_header(plan.spec, plan.layout, UNBOUND, UNBOUND), [(a, b) for a, b in gaps if a < b]


def write_header(plan: FramePlan, out: memoryview, *, key: bytes, model: bytes) -> None:
    """Write everything but the sections and the checksum: preamble, header and all padding.

    Args:
        plan: The plan of the frame.
        out: Writable bytes, `plan.length` of them.
        key: Digest of the cache key, 16 bytes.
        model: Fingerprint of the model, 16 bytes.
    """
    header, gaps = _fixed_parts(plan)
    header = header[:_KEY_AT] + key + header[_KEY_AT + DIGEST_SIZE : _MODEL_AT] + model
    out[: _PREAMBLE.size] = _PREAMBLE.pack(MAGIC, VERSION, 0, len(header), plan.length, 0)
    out[_PREAMBLE.size : _PREAMBLE.size + len(header)] = header
    for start, stop in gaps:
        out[start:stop] = bytes(stop - start)


def _checksum(frame: memoryview) -> int:
    state = xxhash.xxh3_64(frame[:_CHECKSUM_AT])
    state.update(frame[_PREAMBLE.size :])
    return state.intdigest()


def write_checksum(frame: memoryview) -> None:
    """Close a frame whose sections are written."""
    frame[_CHECKSUM_AT : _PREAMBLE.size] = struct.pack("<Q", _checksum(frame))


def read_header(frame: memoryview) -> tuple[FrameHeader, FramePlan]:
    """Check a frame from its magic to its checksum and say what it holds. Writes and allocates nothing large.

    Args:
        frame: Bytes, exactly one frame.

    Raises:
        BadMagicError, UnsupportedVersionError, FrameLengthError, FrameHeaderError, ChecksumError: in this order.
    """
    if bytes(frame[: len(MAGIC)]) != MAGIC[: len(frame)]:
        raise BadMagicError("not a TQ-Offload frame")
    if len(frame) < _PREAMBLE.size:
        raise FrameLengthError(f"{len(frame)} bytes are less than a preamble")
    _, version, flags, header_length, length, checksum = _PREAMBLE.unpack_from(frame)
    if version != VERSION or flags:
        raise UnsupportedVersionError(f"frame version {version}, flags {flags}; this release reads {VERSION}, 0")
    if header_length > _MAX_HEADER:
        raise FrameHeaderError(f"a header of {header_length} bytes; the format allows {_MAX_HEADER}")
    if length != len(frame):
        raise FrameLengthError(f"the frame says {length} bytes, the buffer has {len(frame)}")
    end = _PREAMBLE.size + header_length
    if end > len(frame):
        raise FrameLengthError("the header does not end inside the buffer")
    header = bytes(frame[_PREAMBLE.size : end])
    key, model = header[_KEY_AT : _KEY_AT + DIGEST_SIZE], header[_MODEL_AT:]
    plan = _plan_of(header[:_KEY_AT] + UNBOUND + header[_KEY_AT + DIGEST_SIZE : _MODEL_AT] + UNBOUND)
    if plan.length != length:
        raise FrameLengthError(f"the layout needs {plan.length} bytes, the frame has {length}")
    if _checksum(frame) != checksum:
        raise ChecksumError("the checksum does not match")
    return FrameHeader(version, plan.spec, plan.layout, key, model, length, checksum), plan


@lru_cache(maxsize=256)
def _plan_of(header: bytes) -> FramePlan:
    """The plan of all frames that have this header but for key and model, which are zeros here."""
    spec, layout = _parse_header(header)
    if header != _pack_header(spec, layout, UNBOUND, UNBOUND):
        raise FrameHeaderError("the header is not in its shortest form")
    try:
        return make_plan(spec, layout)
    except LayoutError as error:
        raise FrameHeaderError(str(error)) from error


def _parse_header(data: bytes) -> tuple[CodecSpec, ChunkLayout]:
    try:
        header = msgpack.unpackb(
            data, raw=False, strict_map_key=True, max_str_len=256, max_bin_len=256, max_array_len=_MAX_GROUPS,
            max_map_len=16, max_ext_len=0,
        )  # fmt: skip
        return _read_fields(header)
    except (FrameHeaderError, UnsupportedVersionError):
        raise
    except (ConfigError, LayoutError) as error:
        raise FrameHeaderError(str(error)) from error
    except Exception as error:  # msgpack raises a dozen kinds for malformed input
        raise FrameHeaderError(f"malformed header: {type(error).__name__}: {error}") from error


def _fields(value: Any, names: tuple[str, ...]) -> list[Any]:
    if not isinstance(value, dict) or tuple(value) != names:
        raise FrameHeaderError(f"expected the fields {', '.join(names)}")
    return list(value.values())


def _typed(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise FrameHeaderError(f"expected {kind.__name__}, found {type(value).__name__}")
    return value


def _read_fields(header: Any) -> tuple[CodecSpec, ChunkLayout]:
    codec, spec_map, groups, key, model = _fields(header, ("codec", "spec", "groups", "key", "model"))
    if codec != "turboquant":
        raise UnsupportedVersionError(f"unknown codec {str(codec)[:32]!r}")
    *values, book = _fields(spec_map, (*_SPEC_KEYS, "cb"))
    if book != CODEBOOK_ID:
        raise UnsupportedVersionError(f"unknown codebook {str(book)[:32]!r}")
    spec = CodecSpec(**dict(zip(_SPEC_KEYS.values(), values, strict=True)))
    layouts = []
    for group in _typed(groups, list):
        kind, shape, dtype, dim = _fields(group, ("kind", "shape", "dtype", "dim"))
        sizes = tuple(_typed(n, int) for n in _typed(shape, list))
        layouts.append(GroupLayout(_typed(kind, str), sizes, _typed(dtype, str), _typed(dim, int)))
    for value in (key, model):
        if len(_typed(value, bytes)) != DIGEST_SIZE:
            raise FrameHeaderError(f"a digest has {DIGEST_SIZE} bytes")
    return spec, ChunkLayout(tuple(layouts))
