"""How long a store call holds the engine's thread, beside encoding the same chunks in that thread.

usage: python -m benchmarks.bench_put [--rounds 7] [--check] [--no-write]

The real backend over LMCache's own memory: CPU RAM, a folder and, with --redis-url, Redis. A call stores a prompt of
several chunks, as LMCache does after a forward pass. Every round measures every way once, side by side. Writes
benchmarks/results/put.{json,csv}, a section of docs/benchmarks.md and README's sentence.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks import put_report
from benchmarks.render_docs import update
from benchmarks.samples import Check, Quantiles, show_checks, whole, write_results

ENCODE, CALL = "encode", "store call"
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
        ENCODE: engine.in_thread,
        CALL: engine.backend.batched_submit_put_task,
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
    """Measure, print, write, check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=whole(3), default=7)
    parser.add_argument("--chunks", type=whole(1), default=6, help="chunks a call; another number prints only")
    parser.add_argument("--redis-url", help="also store there; prints only")
    parser.add_argument("--check", action="store_true", help=f"fail above {CEILING:.0%}")
    parser.add_argument("--no-write", action="store_true", help="print only")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tq-offload-bench-") as folder:
        engine = Engine(Path(folder), args.redis_url, args.chunks)
        try:
            found = measure(engine, args.chunks, args.rounds)
        finally:
            engine.backend.close()
    rows = [
        {
            "way": way, "held_ms": Quantiles.of(times), "rounds_ms": times,
            "share": Quantiles.of(t / e for t, e in zip(times, found[ENCODE], strict=True)),
        }
        for way, times in found.items()
    ]  # fmt: skip
    share = next(row["share"].p50 for row in rows if row["way"] == CALL)  # type: ignore[attr-defined]
    held = [
        Check(f"a store call holds the thread for at most {CEILING:.0%} of encoding", share <= CEILING, f"{share:.2%}")
    ]
    settings = {
        "tiers": ["memory", "disk", *(["redis"] if args.redis_url else [])], "layers": LAYERS, "heads": HEADS,
        "head_dim": DIM, "tokens": TOKENS, "chunk_bytes": engine.chunk_bytes, "chunks": args.chunks,
        "rounds": args.rounds,
    }  # fmt: skip
    content = {"settings": settings, "checks": [asdict(one) for one in held]}
    console = Console(width=max(Console().width, 100))
    console.print(put_report.table(json.loads(json.dumps({**content, "rows": rows}, default=asdict))))
    met = show_checks(console, held)
    if not (args.no_write or args.redis_url or args.chunks != parser.get_default("chunks")):
        write_results("put", content, rows)
        update("put")
    if args.check and not met:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
