"""Tiers and FrameStore where a store misbehaves: no exception leaves, every call has one counter, `/metrics` lives."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import REGISTRY, generate_latest
from support import layout_of, make_tensor

import tq_offload_connectors.tier as tier_module
from tq_offload.codec import TurboQuantCodec
from tq_offload.errors import StoreIOError
from tq_offload_connectors.disk import DiskStore
from tq_offload_connectors.disk.names import entry_name
from tq_offload_connectors.frame_store import FrameKey, FrameStore
from tq_offload_connectors.memory import MemoryStore
from tq_offload_connectors.tier import Frame, Tier

KEY = FrameKey.of("some/model@1@0@1@bfloat16", "some/model")


class Chunk:
    """A chunk that can be put into a FrameStore and read back."""

    def __init__(self) -> None:
        self.tensors = [make_tensor((2, 1, 64, 64))]
        self.layout = layout_of(*self.tensors)
        self.released = 0

    def put(self, frames: FrameStore) -> bool:
        taken = frames.put(KEY, self.tensors, self.layout, release=self.release)
        assert frames.drain(20)
        return taken

    def release(self) -> None:
        self.released += 1

    def get(self, frames: FrameStore) -> bool:
        return frames.get(KEY, lambda _: [torch.empty_like(self.tensors[0])])


@pytest.fixture
def frames(tmp_path: Path) -> Iterator[FrameStore]:
    store = FrameStore(TurboQuantCodec(), [Tier("disk", DiskStore(tmp_path), writers=1)], workers=1)
    yield store
    store.close()


def test_a_read_that_finds_no_memory_is_a_miss(frames: FrameStore, monkeypatch: pytest.MonkeyPatch) -> None:
    chunk, counters = Chunk(), frames.tiers[0].counters
    assert chunk.put(frames)

    def get(*_: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(frames.tiers[0].store, "get", get)
        assert not chunk.get(frames)
    assert counters.value("misses", "no_memory") == counters.value("gets") == 1
    assert chunk.get(frames)


def test_what_is_too_large_for_a_frame_is_not_read_and_not_kept(frames: FrameStore, tmp_path: Path) -> None:
    chunk, counters = Chunk(), frames.tiers[0].counters
    assert chunk.put(frames)
    (path,) = tmp_path.rglob(entry_name(KEY.name))
    with path.open("r+b") as file:
        file.truncate(3 << 30)
    frames.max_frame_bytes = 1 << 20
    assert not chunk.get(frames)
    assert counters.value("misses", "too_large") == counters.value("repairs", "too_large") == 1
    assert not path.exists()
    assert chunk.put(frames)
    assert chunk.get(frames)


def test_a_store_that_cannot_tell_its_size_does_not_break_the_metrics(
    frames: FrameStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def usage() -> None:
        raise StoreIOError("gone")

    Chunk().put(frames)
    assert REGISTRY.get_sample_value("tq_offload_tier_entries", {"tier": "disk"}) == 1
    monkeypatch.setattr(frames.tiers[0].store, "usage", usage)
    assert b'tq_offload_tier_entries{tier="disk"} NaN' in generate_latest()
    assert "entries" not in frames.status()["tiers"][0]
    monkeypatch.undo()
    frames.close()
    assert "entries" not in frames.status()["tiers"][0]


def test_what_a_remote_store_lost_is_stored_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(tier_module.time, "monotonic", lambda: now)
    tier = Tier("redis", MemoryStore(1 << 20), remote=True)
    try:
        assert tier.claim("k")
        tier.submit(Frame("k", memoryview(b"v"), 1, lambda _: None))
        assert not tier.claim("k")
        tier.store.delete("k")  # expired, evicted or flushed, and nobody has asked this tier for it
        assert not tier.claim("k")
        now += 61
        assert tier.claim("k")
        tier.submit(Frame("k", memoryview(b"v"), 1, lambda _: None))
        assert tier.store.contains("k")
        assert (tier.counters.value("stored"), tier.counters.value("present")) == (2, 2)
    finally:
        tier.close()


def test_a_search_for_a_module_does_not_use_up_its_hook(tmp_path: Path) -> None:
    (tmp_path / "watched.py").write_text("import os\nif os.environ.pop('FAIL', ''): raise OSError('not yet')\n")
    code = (
        "import importlib.util, os, sys\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "from tq_offload.integrations.lmcache.import_hook import after_import\n"
        "seen = []\n"
        "after_import('watched', lambda module: seen.append(module.__name__))\n"
        "importlib.util.find_spec('watched')\n"
        "os.environ['FAIL'] = '1'\n"
        "try: import watched\n"
        "except OSError: pass\n"
        "assert seen == []\n"
        "import watched\n"
        "assert seen == ['watched'], seen\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
