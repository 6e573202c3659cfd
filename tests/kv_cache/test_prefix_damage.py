"""What is damaged, mixed, incomplete or of something else is a miss, and with `strict` an error of its kind."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgpack
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_support import ids, kv, small_llama

from tq_offload.codec import TurboQuantCodec
from tq_offload.errors import (
    ConfigError,
    FrameContentError,
    FrameError,
    FrameMismatchError,
    StoreError,
    StoreFullError,
    StoreTimeoutError,
    UnsupportedVersionError,
)
from tq_offload.kv_cache import TurboQuantCache
from tq_offload.layout import ChunkLayout, GroupLayout
from tq_offload.prefix import load_prefix, save_prefix
from tq_offload.prefix.frames import frame_spec, read_bytes, write_bytes, write_frame
from tq_offload.prefix.identity import MANIFEST, identify
from tq_offload.prefix.manifest import parse_manifest, part_digest
from tq_offload.spec import CodecSpec
from tq_offload_connectors.memory import MemoryStore

Entries = dict[str, bytes]


def make(seed: int = 0, tokens: int = 200, key: Any = "k", model: Any = "m", **settings_: Any) -> Entries:
    """The entries of a stored prefix: a packed run, an exact end and sinks in both layers."""
    cache = TurboQuantCache(chunk_tokens=64, window=20, **settings_)
    for index in range(2):
        cache.update(*kv(tokens, seed=seed + index, dim=16), index)
    store = MemoryStore(1 << 30)
    save_prefix(store, cache, key, model=model)
    return {name: bytes(store.get(name) or b"") for name in store.keys()}  # noqa: SIM118


def load(entries: Entries, *, key: Any = "k", model: Any = "m", **given_: Any) -> TurboQuantCache | None:
    store = MemoryStore(1 << 30)
    for name, value in entries.items():
        store.put(name, memoryview(value))
    return load_prefix(store, key, model=model, **given_)


def is_miss(entries: Entries, wanted: type[Exception] = FrameError, **given_: Any) -> bool:
    """True if both ways of asking say so."""
    with pytest.raises(wanted):
        load(entries, strict=True, **given_)
    return load(entries, **given_) is None


def name_of(part: str, key: Any = "k") -> str:
    return identify(key, "m").entry(part)


SOUND = make()
PARTS = sorted(SOUND)


def test_the_sound_one_is_loaded() -> None:
    assert len(PARTS) == 5
    assert load(SOUND, strict=True) is not None
    assert load({}, strict=True) is None


@settings(max_examples=150, deadline=None)
@given(part=st.sampled_from(PARTS), at=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_every_flipped_bit_is_a_miss(part: str, at: float, bit: int) -> None:
    damaged = bytearray(SOUND[part])
    damaged[int(at * len(damaged))] ^= 1 << bit
    assert is_miss({**SOUND, part: bytes(damaged)})


@settings(max_examples=100, deadline=None)
@given(part=st.sampled_from(PARTS), size=st.floats(0, 1, exclude_max=True))
def test_every_truncation_is_a_miss(part: str, size: float) -> None:
    value = SOUND[part]
    assert is_miss({**SOUND, part: value[: int(size * len(value))]})
    assert is_miss({**SOUND, part: value + b"\0"})


@pytest.mark.parametrize("part", [part for part in PARTS if not part.endswith(MANIFEST)])
def test_a_missing_part_is_a_miss(part: str) -> None:
    kept = {name: value for name, value in SOUND.items() if name != part}
    with pytest.raises(FrameError, match="missing") as caught:
        load(kept, strict=True)
    assert caught.value.reason == "missing"
    assert load(kept) is None


@pytest.mark.parametrize("part", PARTS)
def test_parts_of_two_saves_do_not_mix(part: str) -> None:
    other = make(seed=5)
    assert is_miss({**SOUND, part: other[part]}, FrameMismatchError)
    assert load(other, strict=True) is not None


def test_parts_of_one_save_do_not_change_places() -> None:
    for first, second in (("0K0", "1K0"), ("0K0", "0V0"), ("1V0", MANIFEST)):
        a, b = name_of(first), name_of(second)
        assert is_miss({**SOUND, a: SOUND[b], b: SOUND[a]}, FrameMismatchError)


def test_another_key_or_model_is_a_miss() -> None:
    assert load(SOUND, key="K", strict=True) is None
    assert load(SOUND, model="M", strict=True) is None
    for key, model in (("K", "m"), ("k", "M")):  # also where the entries lie under the names of another
        there = identify(key, model)
        moved = {there.entry(name.rsplit("/", 1)[1]): value for name, value in SOUND.items()}
        assert is_miss(moved, FrameMismatchError, key=key, model=model)


class Failing(MemoryStore):
    """Raises from the n-th call on."""

    def __init__(self, calls: int, error: StoreError) -> None:
        super().__init__(1 << 30)
        self.calls, self.error = calls, error

    def count(self) -> None:
        self.calls -= 1
        if self.calls < 0:
            raise self.error

    def get(self, key: str, allocate: Any = None) -> memoryview | None:
        self.count()
        return super().get(key, allocate)

    def put(self, key: str, value: memoryview, *, owned: bool = False) -> None:
        self.count()
        super().put(key, value, owned=owned)


def test_errors_of_the_store(caplog: pytest.LogCaptureFixture) -> None:
    for calls in range(5):
        store = Failing(5 + calls, StoreTimeoutError("no answer"))
        for name, value in SOUND.items():
            store.put(name, memoryview(value))
        with caplog.at_level(logging.WARNING):
            caplog.clear()
            assert load_prefix(store, "k", model="m") is None
            assert len(caplog.records) == 1
            assert "timeout" in caplog.text
        with pytest.raises(StoreTimeoutError):
            load_prefix(store, "k", model="m", strict=True)
    cache = TurboQuantCache()
    cache.update(*kv(20), 0)
    for calls in range(3):
        store = Failing(calls, StoreFullError("full"))
        with pytest.raises(StoreFullError):
            save_prefix(store, cache, "k", model="m")
        store.calls = 99
        assert load_prefix(store, "k", model="m", strict=True) is None


def rewritten(change: Callable[[dict[str, Any]], Any], entries: Entries = SOUND) -> Entries:
    """With a manifest that says something else, under a right checksum."""
    identity = identify("k", "m")
    opened = TurboQuantCodec().open(entries[name_of(MANIFEST)])
    found = msgpack.unpackb(read_bytes(opened))
    changed = change(found)
    data = changed if isinstance(changed, bytes) else msgpack.packb(found if changed is None else changed)
    frame = write_bytes(data, key=identity.frame_key(MANIFEST), model=identity.model)
    return {**entries, name_of(MANIFEST): frame.tobytes()}


def _set(*path: Any) -> Callable[[dict[str, Any]], None]:
    *where, last, value = path

    def change(found: dict[str, Any]) -> None:
        for step in where:
            found = found[step]
        found[last] = value

    return change


N = (1).to_bytes(8, "little")
HOSTILE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no map": lambda _: [1],
    "empty": lambda _: b"",
    "an array of 2**32 items": lambda _: b"\xdd\xff\xff\xff\xff",
    "a map of 2**32 items": lambda _: b"\xdf\xff\xff\xff\xff",
    "bytes beyond the end": lambda _: b"\xc6\xff\xff\xff\xff",
    "deep": lambda _: b"\x91" * 5000,
    "trailing": lambda m: msgpack.packb(m) + b"\0",
    "more fields": _set("more", 1),
    "version 0": _set("version", 0),
    "version true": _set("version", True),
    "no layers": _set("layers", []),
    "layers no list": _set("layers", {}),
    "tokens": _set("tokens", 201),
    "no tokens": _set("tokens", 0),
    "tokens huge": _set("tokens", 1 << 60),
    "context": _set("context_length", 199),
    "context negative": _set("context_length", -1),
    "context a float": _set("context_length", 200.0),
    "bits": _set("options", "spec", "key_bits", 9),
    "bits of a layer": _set("layers", 0, "options", "spec", "key_bits", 3),
    "rule": _set("layers", 0, "options", "spec", "key_rule", "best"),
    "chunk": _set("layers", 0, "options", "chunk_tokens", 1 << 40),
    "window negative": _set("layers", 1, "options", "window", -1),
    "no options": _set("layers", 0, "options", None),
    "kind": _set("layers", 0, "kind", "linear"),
    "kind full": _set("layers", 0, "kind", "full"),
    "kind a list": _set("layers", 0, "kind", []),
    "rows 0": _set("layers", 0, "rows", 0),
    "rows 2": _set("layers", 0, "rows", 2),
    "rows 3": _set("layers", 0, "rows", 3),
    "rows huge": _set("layers", 0, "rows", 1 << 40),
    "groups": _set("layers", 0, "groups", "pxes"),
    "groups exact": _set("layers", 0, "groups", "eees"),
    "groups packed": _set("layers", 0, "groups", "ppps"),
    "groups fewer": _set("layers", 0, "groups", "pp"),
    "groups sinks only": _set("layers", 0, "groups", "s"),
    "groups none": _set("layers", 0, "groups", ""),
    "lengths zero": lambda m: _set("layers", 0, "lengths", bytes(len(m["layers"][0]["lengths"])))(m),
    "lengths one": lambda m: _set("layers", 0, "lengths", N * (len(m["layers"][0]["lengths"]) // 8))(m),
    "lengths odd": _set("layers", 0, "lengths", b"x"),
    "lengths text": _set("layers", 0, "lengths", "text"),
    "padding": _set("layers", 0, "padding", b""),
    "padding negative": _set("layers", 0, "padding", b"\xff" * 8),
    "sinks beyond": _set("layers", 0, "sink_starts", (198).to_bytes(8, "little")),
    "sinks more": _set("layers", 0, "sink_counts", (5).to_bytes(8, "little")),
    "sinks negative": _set("layers", 0, "sink_counts", b"\xff" * 8),
    "window of none": _set("layers", 0, "window", 5),
    "seen of none": _set("layers", 0, "seen", 5),
    "parts": _set("layers", 0, "parts", [b"", b""]),
    "parts one": _set("layers", 0, "parts", [b""]),
    "parts other": lambda m: m["layers"][0]["parts"].reverse(),
    "parts text": _set("layers", 0, "parts", ["", ""]),
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE)
def test_hostile_manifests(change: Callable[[dict[str, Any]], Any]) -> None:
    assert is_miss(rewritten(change))


def test_the_way_to_rewrite_is_right() -> None:
    assert load(rewritten(lambda _: None), strict=True) is not None
    assert is_miss(rewritten(_set("version", 2)), UnsupportedVersionError)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_damaged_manifests_raise_our_errors_only(data: st.DataObject) -> None:
    sound = read_bytes(TurboQuantCodec().open(SOUND[name_of(MANIFEST)]))
    damaged = bytearray(sound)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        parse_manifest(bytes(damaged))
    except (FrameContentError, UnsupportedVersionError):
        return
    with contextlib.suppress(FrameError):  # sound in itself, and then it must fit the frames
        load(rewritten(lambda _: bytes(damaged)), strict=True)


FOREIGN = {
    "protected planes": ("latent", (2, 64, 32), "float32", 16, CodecSpec(protect_first=1)),
    "rank 4": ("latent", (1, 2, 64, 32), "float32", 16, CodecSpec()),
    "another kind": ("kv_first", (2, 1, 64, 32), "float32", 16, CodecSpec()),
    "another D": ("latent", (2, 64, 32), "float32", 8, CodecSpec()),
    "no chunk": ("latent", (0, 64, 32), "float32", 16, CodecSpec()),
    "no vectors": ("latent", (2, 64, 0), "float32", 16, CodecSpec()),
    "another dtype": ("latent", (2, 64, 32), "bfloat16", 16, CodecSpec()),
    "opaque": ("opaque", (1, 2, 128, 16), "float32", 0, CodecSpec()),
    "no tensor": ("opaque", (), "int64", 0, CodecSpec()),
}


@pytest.mark.parametrize("form", FOREIGN.values(), ids=FOREIGN)
def test_frames_that_are_no_parts(form: tuple[str, tuple[int, ...], str, int, CodecSpec]) -> None:
    """Sound frames under the right key, of which the manifest has the digest: only their contents are wrong."""
    kind, shape, dtype, dim, spec = form
    identity, part = identify("k", "m"), name_of("0K0")
    groups = TurboQuantCodec().open(SOUND[part]).header.layout.groups
    layout = ChunkLayout((GroupLayout(kind, shape, dtype, dim), *groups[1:]))
    tensors = [torch.zeros(g.shape, dtype=getattr(torch, g.dtype)) for g in layout.groups]
    frame = bytes(TurboQuantCodec(spec).encode(tensors, layout, key=identity.frame_key("0K0"), model=identity.model))

    def change(found: dict[str, Any]) -> None:
        found["layers"][0]["parts"][0] = part_digest(frame)

    assert is_miss(rewritten(change, {**SOUND, part: frame}), FrameContentError)


def test_scales_that_are_not_finite_are_refused() -> None:
    cache = load(SOUND, strict=True)
    assert cache is not None
    store = cache.layers[0].store
    pieces = [run.keys for run in store.runs]
    pieces[0] = replace(pieces[0], scales=torch.full_like(pieces[0].scales, 0x7F80))
    assert store.sinks is not None
    spec, identity = frame_spec(store.options.spec, "K"), identify("k", "m")
    frame = write_frame(
        [*pieces, store.sinks.exact.keys], spec, key=identity.frame_key("0K0"), model=identity.model
    ).tobytes()

    def change(found: dict[str, Any]) -> None:
        found["layers"][0]["parts"][0] = part_digest(frame)

    assert is_miss(rewritten(change, {**SOUND, name_of("0K0"): frame}), FrameContentError)


def test_a_config_of_other_layers_is_a_miss() -> None:
    assert load(SOUND, config=small_llama(layers=2).config, strict=True) is not None
    assert is_miss(SOUND, FrameMismatchError, config=small_llama(layers=3).config)


def test_keys() -> None:
    tokens = ids(9)
    same = [tokens, tokens[0], tokens[0].tolist(), tokens.tolist(), tokens.to(torch.int32), tokens[0].numpy()]
    assert len({identify(key, "m").key for key in same}) == 1
    others = [tokens, tokens.flip(1), tokens.repeat(2, 1), tokens.repeat(1, 2), "text", "Text", "\ud800", [0], [0, 0]]
    assert len({identify(key, "m").key for key in others}) == len(others)
    for bad in ("", [], None, 5, [1.5], [[[1]]], torch.zeros(3), torch.zeros(3, dtype=torch.bool), [[1], [2, 3]], b"x"):
        with pytest.raises(ConfigError, match="key"):
            identify(bad, "m")


def test_models() -> None:
    def fingerprint(name: str = "org/small", **form: Any) -> bytes:
        model = small_llama(**form)
        model.name_or_path = name
        return identify("k", model).model

    assert fingerprint() == fingerprint() != fingerprint(seed=3)  # other weights
    others = [fingerprint(name="org/other"), fingerprint(layers=2), fingerprint(dtype=torch.bfloat16)]
    assert len({fingerprint(), identify("k", "org/small").model, *others}) == 5
    with pytest.raises(ConfigError, match="name of your own"):
        fingerprint(name="")
    with pytest.raises(ConfigError, match="a name or a Hugging Face model"):
        identify("k", 5)
