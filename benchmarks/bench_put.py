"""How long a store call holds the engine's thread, beside encoding the same chunks in that thread.

usage: python -m benchmarks.bench_put [--rounds 7] [--check] [--json results.json]

The real backend over LMCache's own memory: CPU RAM, a folder and, with --redis-url, Redis. A call stores a prompt of
several chunks, as LMCache does after a forward pass. Every round measures every way once, side by side.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

CEILING = 0.10  # of encoding in the engine's thread, for --check
LAYERS, HEADS, DIM, TOKENS = 28, 8, 128, 256  # Llama-3.2-3B


class Engine:
    """LMCache's memory and our backend, as an engine's worker has them."""

    def __init__(self, folder: Path, redis_url: str | None, chunks: int) -> None:
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.metadata import LMCacheMetadata
        from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

        from tq_offload_connectors.in_process import TurboQuantBackend

        self.metadata = LMCacheMetadata(
            model_name="bench", world_size=1, local_world_size=1, worker_id=0, local_worker_id=0,
            kv_dtype=torch.bfloat16, kv_shape=(LAYERS, 2, TOKENS, HEADS, DIM), chunk_size=TOKENS, role="worker",
        )  # fmt: skip
        self.chunk_bytes = LAYERS * 2 * TOKENS * HEADS * DIM * 2
        extra: dict[str, Any] = {"turboquant.ram_gb": 2, "turboquant.disk": str(folder), "turboquant.queue_gb": 2}
        extra |= {"turboquant.redis_url": redis_url} if redis_url else {}
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=TOKENS, local_cpu=False, extra_config=extra,
            max_local_cpu_size=(2 * chunks * self.chunk_bytes + (64 << 20)) / (1 << 30),
        )  # fmt: skip
        self.cpu = LocalCPUBackend(config, self.metadata, "cpu", None)
        self.backend = TurboQuantBackend(config=config, metadata=self.metadata, local_cpu_backend=self.cpu)
        self.stored = 0

    def chunks(self, count: int) -> tuple[list[Any], list[Any]]:
        """Keys never seen before, and filled objects in LMCache's memory."""
        from lmcache.utils import CacheEngineKey

        keys, objs = [], []
        for _ in range(count):
            self.stored += 1
            keys.append(CacheEngineKey("bench", 1, 0, self.stored, torch.bfloat16))
            obj = self.cpu.allocate(self.metadata.get_shapes(TOKENS), self.metadata.get_dtypes(), busy_loop=False)
            obj.tensor.normal_()
            objs.append(obj)
        return keys, objs

    def in_thread(self, keys: list[Any], objs: list[Any]) -> None:
        """What a serde that is called on the store path does: encode here and now."""
        from tq_offload_connectors.frame_store import FrameKey

        codec = self.backend.frames.codec
        for key, obj in zip(keys, objs, strict=True):
            layout, tensors = self.backend.objects.source(obj, key)
            frame_key = FrameKey.of(key.to_string(), key.model_name)
            codec.encode(tensors, layout, key=frame_key.digest, model=frame_key.model)

    def settle(self, objs: list[Any]) -> None:
        """Let go of the objects and wait for what goes on behind the call."""
        for obj in objs:
            obj.ref_count_down()
        if not self.backend.frames.drain(120):
            raise SystemExit("the puts did not end within two minutes")


def measure(engine: Engine, count: int, rounds: int) -> dict[str, list[float]]:
    """Milliseconds a chunk that the calling thread was held, by way and round."""
    ways: dict[str, Callable[[list[Any], list[Any]], Any]] = {
        "encode in the engine's thread": engine.in_thread,
        "store call": engine.backend.batched_submit_put_task,
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):  # the first one warms up
        for name, way in ways.items():
            keys, objs = engine.chunks(count)
            start = time.perf_counter()
            way(keys, objs)
            held = time.perf_counter() - start
            engine.settle(objs)
            if number:
                found[name].append(held / count * 1e3)
    return found


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--chunks", type=int, default=6, help="chunks a call")
    parser.add_argument("--redis-url")
    parser.add_argument("--check", action="store_true", help=f"fail above {CEILING:.0%}")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tq-offload-bench-") as folder:
        engine = Engine(Path(folder), args.redis_url, args.chunks)
        try:
            found = measure(engine, args.chunks, args.rounds)
        finally:
            engine.backend.close()
    encode, call = found.values()
    ratio = statistics.median(c / e for c, e in zip(call, encode, strict=True))
    table = Table(title=f"engine's thread held, ms a chunk of {engine.chunk_bytes / 1e6:.1f} MB ({args.rounds} rounds)")
    for column in ("way", "median", "lowest", "highest"):
        table.add_column(column, justify="left" if column == "way" else "right")
    for name, times in found.items():
        table.add_row(name, f"{statistics.median(times):.3f}", f"{min(times):.3f}", f"{max(times):.3f}")
    console = Console()
    console.print(table)
    console.print(f"store call / encoding in the thread: {ratio:.2%} (median of the rounds)")
    if args.json:
        args.json.write_text(
            json.dumps({"ms_a_chunk": found, "ratio": ratio, "chunk_bytes": engine.chunk_bytes}, indent=2)
        )
    if args.check and ratio > CEILING:
        raise SystemExit(f"the store call holds the engine's thread for more than {CEILING:.0%} of encoding there")


if __name__ == "__main__":
    main()
