"""Speed of the codec beside LMCache's fp8 serde and memcpy, in one run, on one thread; and with more threads.

usage: python benchmarks/bench_codec.py [--head-dim 128] [--bits 4] [--check] [--json results.json]

Rates are GB/s of uncompressed bf16 KV. Whole frames: header and checksum are included. Every round measures every
method once, so that a busy machine slows all of them alike; ratios are taken within a round. LMCache's fp8 serde is
the real class (`lmcache.v1.distributed.serde.fp8`) where lmcache is installed, else the same torch casts.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numba
import torch
from rich.console import Console
from rich.table import Table

if __name__ == "__main__":  # run as a file: the package beside this folder
    sys.path.insert(0, str(Path(__file__).parents[1]))

from tq_offload.codec import TurboQuantCodec
from tq_offload.layout import ChunkLayout, GroupLayout
from tq_offload.spec import CodecSpec

DECODE_FLOOR, ENCODE_FLOOR = 4.0, 0.3  # times LMCache's fp8, for --check


@dataclass(frozen=True)
class Result:
    """Rates of one method in GB/s, and its ratio to fp8 in the same direction; None where there is none."""

    method: str
    median: float
    low: float
    high: float
    ratio_to_fp8: float | None = None


class Tensor:
    """What LMCache's fp8 serde asks of a MemoryObj."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def fp8_serde() -> tuple[str, Callable[[Any, Any], Any], Callable[[Any, Any], Any]]:
    """Where it comes from, serialize(src, dst), deserialize(src, dst)."""
    try:
        from lmcache.v1.distributed.serde.fp8 import Fp8QuantizationDeserializer, Fp8QuantizationSerializer
    except ImportError:

        def serialize(src: Tensor, dst: Tensor) -> None:
            dst.tensor.copy_(src.tensor.to(torch.float8_e4m3fn).view(torch.uint8).flatten())

        def deserialize(src: Tensor, dst: Tensor) -> None:
            dst.tensor.copy_(src.tensor.view(torch.float8_e4m3fn).reshape(dst.tensor.shape).to(dst.tensor.dtype))

        return "torch casts (lmcache is not installed)", serialize, deserialize
    to_bytes, from_bytes = Fp8QuantizationSerializer(), Fp8QuantizationDeserializer()
    return (
        "lmcache",
        lambda src, dst: to_bytes.serialize(src, dst, None),
        lambda src, dst: from_bytes.deserialize(src, dst, None),
    )


def make_chunk(args: argparse.Namespace, seed: int = 0) -> torch.Tensor:
    """A packed chunk [L, T, H*2D] in bf16 with a mean for every channel."""
    generator = torch.Generator().manual_seed(seed)
    shape = (args.layers, args.tokens, args.heads * 2 * args.head_dim)
    x = torch.randn(shape, generator=generator) + torch.randn(shape[-1], generator=generator)
    return x.to(torch.bfloat16)


def methods(args: argparse.Namespace) -> tuple[dict[str, Callable[[], Any]], int]:
    """The calls to measure by name, and the bytes of the frame."""
    chunk = make_chunk(args)
    back, layout = torch.empty_like(chunk), layout_of(chunk, args.head_dim)
    codec = TurboQuantCodec(CodecSpec(args.bits, args.bits))
    frame = bytearray(codec.frame_size(layout))
    source, eight_bits, target = Tensor(chunk), Tensor(torch.empty(chunk.numel(), dtype=torch.uint8)), Tensor(back)
    _, serialize, deserialize = fp8_serde()
    calls: dict[str, Callable[[], Any]] = {
        "turboquant encode": lambda: codec.encode_into([chunk], layout, frame),
        "turboquant decode": lambda: codec.decode_into(frame, [back]),
        "fp8 encode": lambda: serialize(source, eight_bits),
        "fp8 decode": lambda: deserialize(eight_bits, target),
        "memcpy": lambda: back.copy_(chunk),
    }
    return calls, len(frame)


def layout_of(chunk: torch.Tensor, head_dim: int) -> ChunkLayout:
    """The layout of a packed chunk."""
    return ChunkLayout((GroupLayout("packed", tuple(chunk.shape), "bfloat16", head_dim),))


def seconds(call: Callable[[], Any]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure(args: argparse.Namespace) -> tuple[list[Result], int]:
    """Rates of all methods, and the bytes of the frame."""
    calls, frame_bytes = methods(args)
    for call in calls.values():
        call()
    rounds = [{name: seconds(call) for name, call in calls.items()} for _ in range(args.repeats)]
    nbytes = args.layers * args.tokens * args.heads * 2 * args.head_dim * 2
    results = []
    for name in calls:
        rates = sorted(nbytes / r[name] / 1e9 for r in rounds)
        base = "fp8 " + name.split()[-1]
        ratio = statistics.median(r[base] / r[name] for r in rounds) if base in calls else None
        results.append(Result(name, statistics.median(rates), rates[0], rates[-1], ratio))
    return results, frame_bytes


def measure_scaling(args: argparse.Namespace) -> dict[str, float]:
    """Throughput of `threads` threads over that of one, each with a chunk of its own."""
    codec = TurboQuantCodec(CodecSpec(args.bits, args.bits))
    chunks = [make_chunk(args, seed) for seed in range(args.threads)]
    layout = layout_of(chunks[0], args.head_dim)
    frames = [codec.encode([c], layout) for c in chunks]
    targets = [torch.empty_like(c) for c in chunks]

    def encode(i: int) -> None:
        codec.encode_into([chunks[i]], layout, frames[i])

    def decode(i: int) -> None:
        codec.decode_into(frames[i], [targets[i]])

    scaling = {}
    with ThreadPoolExecutor(args.threads) as pool:
        for name, work in (("encode", encode), ("decode", decode)):
            ratios = []
            for _ in range(args.repeats):
                one = seconds(lambda work=work: work(0))  # type: ignore[misc]
                many = seconds(lambda work=work: list(pool.map(work, range(args.threads))))  # type: ignore[misc]
                ratios.append(args.threads * one / many)
            scaling[name] = statistics.median(ratios)
    return scaling


def show(results: list[Result], title: str) -> None:
    """Print the table."""
    table = Table(title=title)
    for column in ("method", "GB/s, median", "lowest", "highest", "times fp8"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for r in results:
        ratio = "" if r.ratio_to_fp8 is None else f"{r.ratio_to_fp8:.2f}"
        table.add_row(r.method, f"{r.median:.2f}", f"{r.low:.2f}", f"{r.high:.2f}", ratio)
    Console().print(table)


def failures(results: list[Result]) -> list[str]:
    """What `--check` finds wrong."""
    floors = {"turboquant decode": DECODE_FLOOR, "turboquant encode": ENCODE_FLOOR}
    return [
        f"{r.method} is {r.ratio_to_fp8:.2f} times fp8, below {floors[r.method]}"
        for r in results
        if r.method in floors and r.ratio_to_fp8 is not None and r.ratio_to_fp8 < floors[r.method]
    ]


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2, help="for the scaling; 1 leaves it out")
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--json", type=Path, help="also write the results here")
    parser.add_argument("--check", action="store_true", help="fail below 4 times fp8 decoding or 0.3 times encoding")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Measure, print, check."""
    args = parse(argv)
    torch.set_num_threads(1)
    results, frame_bytes = measure(args)
    nbytes = args.layers * args.tokens * args.heads * 2 * args.head_dim * 2
    show(results, f"[{args.layers}, {args.tokens}, {args.heads}*2*{args.head_dim}] bf16, {args.bits} bits, one thread")
    print(f"frame: {frame_bytes} bytes, {nbytes / frame_bytes:.2f} times smaller; fp8 from {fp8_serde()[0]}")
    scaling = measure_scaling(args) if args.threads > 1 else {}
    for name, ratio in scaling.items():
        print(f"{name} with {args.threads} threads: {ratio:.2f} times one thread")
    wrong = failures(results)
    if args.json:
        versions = {"python": platform.python_version(), "torch": torch.__version__, "numba": numba.__version__}
        report = {
            "settings": {k: v for k, v in vars(args).items() if k not in ("json", "check")},
            "host": {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(), **versions},
            "results": [asdict(r) for r in results],
            "frame_bytes": frame_bytes,
            "scaling": scaling,
            "failures": wrong,
        }
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    for line in wrong:
        print(f"{'FAILED' if args.check else 'note'}: {line}", file=sys.stderr)
    return 1 if args.check and wrong else 0


if __name__ == "__main__":
    sys.exit(main())
