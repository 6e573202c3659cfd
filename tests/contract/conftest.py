"""Real classes of the installed LMCache: L1 manager, allocator, fs adapter, argument parser. No fakes of theirs."""

from __future__ import annotations

import inspect
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")

L, T, H, D = 3, 64, 2, 64
SHAPE = (1, L, T, H * 2 * D)  # as LMCache hands it over with vLLM 0.26 and later: K and V packed
CONFIG = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": H, "head_dim": D}


@pytest.fixture(scope="session", autouse=True)
def _needs_lmcache() -> None:
    pytest.importorskip("lmcache", reason="these tests need the extra [lmcache]")


@pytest.fixture(scope="session", autouse=True)
def _compiled_kernels(_needs_lmcache: None) -> None:
    """On a new machine the first read would else wait for the compiler, and count as a miss for being late."""
    from tq_offload.codec import TurboQuantCodec

    for head_dim in (64, 80, 128):
        TurboQuantCodec().warm_up(head_dim)


@pytest.fixture(autouse=True)
def _no_open_stores() -> Iterator[None]:
    """A test that leaves a store open would be seen in `tq_offload_connectors.status()` of the next one."""
    import tq_offload_connectors

    yield
    assert tq_offload_connectors.status() == []


@pytest.fixture
def model(tmp_path: Path) -> str:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return str(folder)


class Tier:
    """A TurboQuantL2Adapter over a real inner adapter, with a real L1 manager, driven as a controller drives it."""

    def __init__(
        self, folder: Path, l1_gb: float = 0.0625, spec: dict[str, Any] | None = None, **settings: Any
    ) -> None:
        from lmcache.v1.distributed.config import parse_args
        from lmcache.v1.distributed.l1_manager import L1Manager
        from lmcache.v1.distributed.l2_adapters import create_l2_adapter

        from tq_offload.integrations.lmcache.adapter import TurboQuantL2Adapter
        from tq_offload.integrations.lmcache.processor import create_processor

        self.folder = folder
        spec = spec or {"type": "fs", "base_path": str(folder)}
        size = ["--l1-size-gb", str(l1_gb), "--no-l1-use-lazy"]
        config = parse_args([*size, "--eviction-policy", "LRU", "--l2-adapter", json.dumps(spec)])
        config.l1_manager_config.memory_config.shm_name = ""  # several L1s in one process
        self.l1 = L1Manager(config.l1_manager_config)
        self.inner = create_l2_adapter(config.l2_adapter_config.adapters[0], self.l1.get_l1_memory_desc())
        self.processor = create_processor(dict(settings))
        self.adapter = TurboQuantL2Adapter(self.inner, self.processor, self.l1)
        self.held: list[Any] = []

    def close(self) -> None:
        self.adapter.close()
        self.l1.close()

    def objects(self, keys: list[Any], shapes: Any = (SHAPE,), dtypes: Any = (torch.bfloat16,)) -> list[Any]:
        """Objects of L1, write-locked, filled with zeros."""
        objects = allocate(self.l1, keys, shapes, dtypes)
        self.held += objects
        for obj in objects:
            obj.raw_tensor.zero_()
        return objects

    def store(self, keys: list[Any], objects: list[Any]) -> bool:
        task = self.adapter.submit_store_task(keys, objects)
        results: dict[int, Any] = {}

        def done() -> bool:
            results.update(self.adapter.pop_completed_store_tasks())
            return task in results

        wait_for(done)
        return bool(results[task].is_successful())

    def load(self, keys: list[Any], objects: list[Any]) -> list[bool]:
        task = self.adapter.submit_load_task(keys, objects)
        found: list[Any] = []

        def done() -> bool:
            bitmap = self.adapter.query_load_result(task)
            if bitmap is not None:
                found.append(bitmap)
            return bool(found)

        wait_for(done)
        return [found[0].test(i) for i in range(len(keys))]

    def files(self) -> list[Path]:
        return sorted(self.folder.glob("*.data"))

    def file_of(self, key: Any) -> Path:
        return next(p for p in self.files() if key.chunk_hash.hex() in p.name)


def allocate(l1: Any, keys: list[Any], shapes: Any, dtypes: Any) -> list[Any]:
    from lmcache.v1.distributed.api import MemoryLayoutDesc

    layout = MemoryLayoutDesc([torch.Size(s) for s in shapes], list(dtypes))
    kwargs = {"mode": "new"} if "mode" in inspect.signature(l1.reserve_write).parameters else {}
    temp = [key_like(key, bytes([i % 256]) + os.urandom(8)) for i, key in enumerate(keys)]
    result = l1.reserve_write(keys=temp, is_temporary=[False] * len(keys), layout_desc=layout, **kwargs)
    objects = [result[key][1] for key in temp]
    assert all(obj is not None for obj in objects), "the test's L1 is too small"
    return objects


def key_like(key: Any, chunk_hash: bytes) -> Any:
    from lmcache.v1.distributed.api import ObjectKey

    return ObjectKey(chunk_hash, key.model_name, key.kv_rank, key.object_group_id, key.cache_salt)


def make_keys(model: str, count: int, **fields: Any) -> list[Any]:
    from lmcache.v1.distributed.api import ObjectKey

    rank = ObjectKey.ComputeKVRank(1, 0, 1, 0)
    values = {"model_name": model, "kv_rank": rank, **fields}
    return [ObjectKey(chunk_hash=bytes([i]) + os.urandom(15), **values) for i in range(count)]


def fill(objects: list[Any], seed: int = 0) -> list[list[torch.Tensor]]:
    """Write KV-like values; returns copies, one list of groups for each object."""
    generator = torch.Generator().manual_seed(seed)
    copies = []
    for obj in objects:
        groups = [obj.get_tensor(i) for i in range(len(obj.get_shapes()))]
        for tensor in groups:
            tensor.copy_(torch.randn(tensor.shape, generator=generator).to(tensor.dtype))
        copies.append([tensor.clone() for tensor in groups])
    return copies


def relative_mse(found: torch.Tensor, wanted: torch.Tensor) -> float:
    found, wanted = found.double(), wanted.double()
    return float(((found - wanted) ** 2).sum() / (wanted**2).sum())


def flip(path: Path) -> None:
    """Change one bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


def wait_for(condition: Any, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"not within {seconds} s")
        time.sleep(0.002)


@pytest.fixture
def tools() -> SimpleNamespace:
    """Helpers for tests that pytest imports without a package."""
    return SimpleNamespace(
        allocate=allocate, fill=fill, flip=flip, key_like=key_like, make_keys=make_keys, relative_mse=relative_mse,
        wait_for=wait_for, SHAPE=SHAPE, D=D, CONFIG=CONFIG,
    )  # fmt: skip


@pytest.fixture
def make_tier(tmp_path: Path) -> Iterator[Any]:
    tiers: list[Tier] = []

    def make(folder: Path | None = None, **kwargs: Any) -> Tier:
        tiers.append(Tier(folder or tmp_path / "l2", **kwargs))
        return tiers[-1]

    yield make
    for tier in tiers:
        tier.close()


@pytest.fixture
def tier(make_tier: Any) -> Any:
    return make_tier()


class Counted:
    """Changes of the counters since the start of the test."""

    def __init__(self) -> None:
        from tq_offload.integrations.lmcache.metrics import METRICS

        self._metrics = METRICS
        self._start = dict(METRICS._values)

    def __call__(self, name: str, reason: str | None = None) -> float:
        before = sum(v for (n, r), v in self._start.items() if n == name and reason in (None, r))
        return self._metrics.value(name, reason) - before


@pytest.fixture
def counted() -> Counted:
    return Counted()
