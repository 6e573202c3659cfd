"""One malformed frame for each error, every truncation length, every flipped byte, and a fuzzer.

Whatever the bytes are: a FrameError with a reason, or a sound frame; and the destination untouched on failure.
"""

import random
import struct
from collections.abc import Callable

import msgpack
import numpy as np
import pytest
import torch
import xxhash
from support import layout_of, make_tensor

from tq_offload.codec import TurboQuantCodec, cache_key_digest, model_fingerprint
from tq_offload.errors import (
    BadMagicError,
    ChecksumError,
    FrameContentError,
    FrameError,
    FrameHeaderError,
    FrameLengthError,
    UnsupportedVersionError,
)
from tq_offload.frame import make_plan
from tq_offload.spec import CodecSpec

X = make_tensor((2, 1, 3, 32))
LAYOUT = layout_of(X, head_dim=32)
KEY, MODEL = cache_key_digest(b"k"), model_fingerprint("m")
CODEC = TurboQuantCodec(CodecSpec(), "reference")
FRAME = bytes(CODEC.encode([X], LAYOUT, key=KEY, model=MODEL))
HEADER_LENGTH = struct.unpack_from("<I", FRAME, 12)[0]
HEADER = msgpack.unpackb(FRAME[32 : 32 + HEADER_LENGTH])


def fails(data: bytes) -> FrameError:
    """Decode into a destination that must stay as it is; return the error."""
    target = torch.full_like(X, 3)
    with pytest.raises(FrameError) as caught:
        CODEC.decode_into(data, [target], key=KEY, model=MODEL)
    assert (target == 3).all(), "the destination was touched"
    with pytest.raises(FrameError):
        CODEC.decode(data, key=KEY, model=MODEL)
    return caught.value


def sealed(data: bytes) -> bytes:
    """The same bytes with a right checksum."""
    state = xxhash.xxh3_64(data[:24])
    state.update(data[32:])
    return data[:24] + struct.pack("<Q", state.intdigest()) + data[32:]


def with_header(header: object, raw: bytes | None = None) -> bytes:
    """The frame with another header in place of its own, padded, or over the sections if longer; sealed."""
    packed = msgpack.packb(header) if raw is None else raw
    room = max(-(-(32 + HEADER_LENGTH) // 64) * 64, 32 + len(packed))
    body = (packed + bytes(room - 32 - len(packed)) + FRAME[room:])[: len(FRAME) - 32]
    return sealed(FRAME[:12] + struct.pack("<I", len(packed)) + FRAME[16:32] + body)


def changed(**changes: object) -> dict:
    return {**HEADER, **changes}


def test_the_frame_itself_is_sound() -> None:
    header = CODEC.decode_into(FRAME, [torch.empty_like(X)], key=KEY, model=MODEL)
    assert (header.key, header.model, header.length) == (KEY, MODEL, len(FRAME))
    assert sealed(FRAME) == FRAME
    assert with_header(HEADER) == FRAME


@pytest.mark.parametrize("length", range(len(FRAME)))
def test_every_truncation(length: int) -> None:
    error = fails(FRAME[:length])
    assert error.reason == "length"


@pytest.mark.parametrize("more", [b"\0", b"\0" * 64, FRAME])
def test_extended(more: bytes) -> None:
    assert isinstance(fails(FRAME + more), FrameLengthError)


def test_every_byte_flipped() -> None:
    for at in range(len(FRAME)):
        for mask in (0x01, 0x80, 0xFF):
            data = bytearray(FRAME)
            data[at] ^= mask
            fails(bytes(data))


def test_empty_and_foreign_bytes() -> None:
    assert isinstance(fails(b""), FrameLengthError)
    for foreign in (b"PK\x03\x04", bytes(4096), b"\x80\x02}q", X.view(torch.uint8).numpy().tobytes() * 9):
        assert isinstance(fails(foreign), BadMagicError)


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (FRAME[:8] + b"\x02\x00" + FRAME[10:], UnsupportedVersionError),
        (FRAME[:10] + b"\x01\x00" + FRAME[12:], UnsupportedVersionError),
        (FRAME[:12] + b"\xff\xff\xff\xff" + FRAME[16:], FrameHeaderError),
        (FRAME[:12] + struct.pack("<I", 60000) + FRAME[16:], FrameLengthError),
        (FRAME[:12] + struct.pack("<I", 0) + FRAME[16:], FrameHeaderError),
        (FRAME[:16] + struct.pack("<Q", len(FRAME) + 64) + FRAME[24:], FrameLengthError),
        (FRAME[:24] + bytes(8) + FRAME[32:], ChecksumError),
    ],
    ids=["version", "flags", "header cap", "header beyond the end", "no header", "length field", "checksum"],
)
def test_preamble(data: bytes, error: type[FrameError]) -> None:
    assert type(fails(data)) is error


SPEC, GROUP = HEADER["spec"], HEADER["groups"][0]


@pytest.mark.parametrize(
    ("header", "error"),
    [
        ([], FrameHeaderError),
        ("turboquant", FrameHeaderError),
        (changed(codec="zfp"), UnsupportedVersionError),
        (changed(spec={**SPEC, "cb": "lm-n01-2"}), UnsupportedVersionError),
        (changed(more=1), FrameHeaderError),
        ({k: v for k, v in HEADER.items() if k != "model"}, FrameHeaderError),
        (dict(reversed(HEADER.items())), FrameHeaderError),
        (changed(key=KEY[:15]), FrameHeaderError),
        (changed(key="k" * 16), FrameHeaderError),
        (changed(spec={**SPEC, "kb": 0}), FrameHeaderError),
        (changed(spec={**SPEC, "kb": 9}), FrameHeaderError),
        (changed(spec={**SPEC, "kb": 3.0}), FrameHeaderError),
        (changed(spec={**SPEC, "kb": True}), FrameHeaderError),
        (changed(spec={**SPEC, "kb": 8}), FrameLengthError),
        (changed(spec={**SPEC, "seed": -1}), FrameHeaderError),
        (changed(spec={**SPEC, "mean": 1}), FrameHeaderError),
        (changed(spec={**SPEC, "kr": "magic"}), FrameHeaderError),
        (changed(spec={**SPEC, "first": 1 << 20}), FrameHeaderError),
        (changed(groups={}), FrameHeaderError),
        (changed(groups=[]), FrameLengthError),
        (changed(groups=[GROUP, GROUP]), FrameLengthError),
        (changed(groups=[[]] * 300), FrameHeaderError),
        (changed(groups=[{**GROUP, "kind": "cube"}]), FrameHeaderError),
        (changed(groups=[{**GROUP, "dtype": "int4"}]), FrameHeaderError),
        (changed(groups=[{**GROUP, "dtype": "uint8"}]), FrameHeaderError),
        (changed(groups=[{**GROUP, "dim": 0}]), FrameHeaderError),
        (changed(groups=[{**GROUP, "dim": 33}]), FrameHeaderError),
        (changed(groups=[{**GROUP, "dim": 1 << 20}]), FrameHeaderError),
        (changed(groups=[{**GROUP, "shape": [2, 1, 3]}]), FrameHeaderError),
        (changed(groups=[{**GROUP, "shape": [2, 1, -3, 32]}]), FrameHeaderError),
        (changed(groups=[{**GROUP, "shape": [2, 1, 3.0, 32]}]), FrameHeaderError),
        (changed(groups=[{**GROUP, "shape": [2, True, 3, 32]}]), FrameHeaderError),
        (changed(groups=[{**GROUP, "shape": [2, 1 << 40, 1 << 40, 32]}]), FrameHeaderError),
        (changed(groups=[{**GROUP, "shape": [2, 1 << 62, 0, 32]}]), FrameHeaderError),
        (changed(groups=[{**GROUP, "shape": [2, 1 << 63, 0, 32]}]), FrameHeaderError),
        (changed(groups=[{**GROUP, "shape": [1] * 9}]), FrameHeaderError),
        (changed(groups=[{**GROUP, "shape": [2, 1, 0, 32]}]), FrameLengthError),
    ],
)
def test_header(header: object, error: type[FrameError]) -> None:
    assert type(fails(with_header(header))) is error


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xc1" * HEADER_LENGTH,
        b"\x81" + b"\xa1a" * 3,
        b"\xdf\xff\xff\xff\xff",
        b"\xdd\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\x91" * 5000,
        msgpack.packb(HEADER) + b"\xc0",
        msgpack.packb({**HEADER, "spec": {**SPEC, b"kb": 4}}),
        msgpack.packb(msgpack.ExtType(1, b"x")),
        msgpack.packb(HEADER).replace(b"\xa2kb\x04", b"\xa2kb\xcc\x04"),
    ],
    ids=range(11),
)
def test_header_bytes(raw: bytes) -> None:
    error = fails(with_header(None, raw))
    assert error.reason in ("header", "length")


def test_signed_integers_where_unsigned_ones_are_as_short() -> None:
    """Seed 1000 as int16 in place of uint16: as long, and not the one form of the header."""
    codec = TurboQuantCodec(CodecSpec(seed=1000), "reference")
    frame = bytes(codec.encode([X], LAYOUT, key=KEY, model=MODEL))
    assert frame.count(b"\xa4seed\xcd\x03\xe8") == 1
    data = sealed(frame.replace(b"\xa4seed\xcd\x03\xe8", b"\xa4seed\xd1\x03\xe8"))
    assert fails(data).reason == "header"


def test_padding_is_under_the_checksum_and_content_is_checked() -> None:
    plan = make_plan(CODEC.spec, LAYOUT)
    at = plan.groups[0][0].scales.offset
    data = sealed(FRAME[:at] + b"\x80\x7f" + FRAME[at + 2 :])  # a scale of Inf with a right checksum
    assert isinstance(fails(data), FrameContentError)


@pytest.mark.parametrize(
    ("section", "offset", "value"),
    [("outlier_channels", 0, b"\x20\x00"), ("outlier_channels", 0, b"\x1f\x00"), ("outlier_ranges", 2, b"\xc0\x7f")],
)
def test_outlier_channels_that_no_encoder_writes(section: str, offset: int, value: bytes) -> None:
    """A channel outside the vector, one that does not ascend, and a range that is NaN; each with a right checksum."""
    codec = TurboQuantCodec(CodecSpec(key_outliers=3), "reference")
    frame = bytes(codec.encode([X], LAYOUT, key=KEY, model=MODEL))
    at = getattr(make_plan(codec.spec, LAYOUT).groups[0][0], section).offset + offset
    assert isinstance(fails(sealed(frame[:at] + value + frame[at + 2 :])), FrameContentError)


def test_an_outlier_channel_with_a_mean_is_not_what_an_encoder_writes() -> None:
    """Backends would differ: the kernels put the coarse value in the place of the mean."""
    x = make_tensor((2, 1, 64, 32))
    layout, codec = layout_of(x, head_dim=32), TurboQuantCodec(CodecSpec(key_outliers=3), "reference")
    frame = bytes(codec.encode([x], layout))
    plan = make_plan(codec.spec, layout).groups[0][0]
    assert plan.means is not None
    assert plan.outlier_channels is not None
    channels = np.frombuffer(frame, np.uint16, 3, plan.outlier_channels.offset)
    for channel in range(32):
        at = plan.means.offset + 2 * channel
        data, target = sealed(frame[:at] + b"\x80\x3f" + frame[at + 2 :]), torch.full_like(x, 3)
        if channel in channels:
            with pytest.raises(FrameContentError):
                codec.decode_into(data, [target])
            assert torch.equal(target, torch.full_like(x, 3))
        else:
            codec.decode_into(data, [target])


def mutations() -> list[Callable[[random.Random, bytearray], None]]:
    def flip(r: random.Random, d: bytearray) -> None:
        d[r.randrange(len(d))] ^= 1 << r.randrange(8)

    def cut(r: random.Random, d: bytearray) -> None:
        del d[r.randrange(len(d)) :]

    def splice(r: random.Random, d: bytearray) -> None:
        a, b = sorted((r.randrange(len(d)), r.randrange(len(d))))
        d[a:b] = bytes(r.randrange(256) for _ in range(r.randrange(20)))

    def number(r: random.Random, d: bytearray) -> None:
        at = r.randrange(min(len(d), 300))
        d[at : at + 4] = struct.pack("<I", r.choice([0, 1, 2**31, 2**32 - 1, len(d)]))

    return [flip, cut, splice, number]


@pytest.mark.parametrize("seal", [False, True])
def test_fuzz(seal: bool) -> None:
    """Random damage, with and without a checksum made right again: our own errors only, no crash, no hang."""
    r = random.Random(20261129 + seal)
    tools = mutations()
    refused = 0
    for _ in range(3000):
        data = bytearray(FRAME)
        for _ in range(r.randrange(1, 4)):
            if len(data) > 40:
                r.choice(tools)(r, data)
        damaged = sealed(bytes(data)) if seal and len(data) >= 32 else bytes(data)
        target = torch.full_like(X, 3)
        try:
            CODEC.decode_into(damaged, [target], key=KEY, model=MODEL)
        except FrameError:
            refused += 1
            assert (target == 3).all()
        else:
            assert seal or damaged == FRAME
            assert torch.isfinite(target).all()
    assert refused > (1500 if seal else 2900)
