"""One process of `tests/kv_cache/test_prefix_process.py`: saves prefixes, or loads them and answers questions.

    python prefix_worker.py save|load FOLDER [REDIS_URL]

Prints one JSON object: for each store a digest of all codes, scales, means and exact tokens, and the answers. The
entries of the memory store go from one process to the other in a file.
"""

from __future__ import annotations

import copy
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import msgpack
import torch
from packed_support import ids, parts, small_llama

from tq_offload.kv_cache import TurboQuantCache
from tq_offload.prefix import load_prefix, save_prefix
from tq_offload_connectors.byte_store import ByteStore
from tq_offload_connectors.disk import DiskStore
from tq_offload_connectors.memory import MemoryStore

QUESTIONS, NEW_TOKENS = 3, 16


def fingerprint(cache: Any) -> str:
    """Digest of the bits of every tensor that a cache holds."""
    state = hashlib.sha256()
    for layer in cache.layers:
        for part in parts(layer.store):
            state.update(f"{part.dtype}{tuple(part.shape)}".encode())
            state.update(part.contiguous().view(torch.uint8).numpy().tobytes())
    return state.hexdigest()


def answers(model: Any, cache: Any, context_length: int) -> list[list[int]]:
    """Greedy answers to every question, each from a copy of the cache."""
    found = []
    for question in range(QUESTIONS):
        held, at = copy.deepcopy(cache), context_length
        new, tokens = ids(7, seed=100 + question), []
        for _ in range(NEW_TOKENS):
            positions = torch.arange(at, at + new.shape[1])[None]
            logits = model(new, past_key_values=held, position_ids=positions).logits
            at += new.shape[1]
            new = logits[:, -1:].argmax(-1)
            tokens.append(int(new))
        found.append(tokens)
    return found


def open_stores(folder: Path, url: str | None) -> dict[str, ByteStore]:
    """The stores of this process; that in memory is empty."""
    stores: dict[str, ByteStore] = {"memory": MemoryStore(64 << 20), "disk": DiskStore(folder / "disk")}
    if url:
        from tq_offload_connectors.redis import RedisSettings, RedisStore

        stores["redis"] = RedisStore(RedisSettings.from_url(url))
    return stores


def main(task: str, folder: Path, url: str | None = None) -> dict[str, Any]:
    """Save, or load and answer."""
    torch.set_num_threads(1)
    model, context = small_llama(), ids(700)
    stores, carried = open_stores(folder, url), folder / "memory.bin"
    result: dict[str, Any] = {}
    if task == "save":
        cache = TurboQuantCache()
        model(context, past_key_values=cache)
        for name, store in stores.items():
            info = save_prefix(store, cache, context, model="small")
            result[name] = [fingerprint(cache), answers(model, cache, 700), info.nbytes / cache.nbytes]
        held = {key: bytes(stores["memory"].get(key) or b"") for key in stores["memory"].keys()}  # noqa: SIM118
        carried.write_bytes(msgpack.packb(held))
    else:
        for key, value in msgpack.unpackb(carried.read_bytes()).items():
            stores["memory"].put(key, memoryview(value))
        for name, store in stores.items():
            loaded = load_prefix(store, context[0].tolist(), model="small", strict=True)
            assert loaded is not None
            assert loaded.context_length is not None
            result[name] = [fingerprint(loaded), answers(model, loaded, loaded.context_length)]
    for store in stores.values():
        store.close()
    return result


if __name__ == "__main__":
    with torch.no_grad():
        print(json.dumps(main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])))  # noqa: T201
