"""Speed of the codec beside LMCache's fp8 serde, other packages, zstd and memcpy: one run, one thread, interleaved.

usage: python -m benchmarks.bench_codec [--head-dim 128] [--bits 4] [--check] [--json results.json] [--save]

Rates are GB/s of uncompressed bf16 KV. Whole frames: header and checksum are included. Every round measures every
method once, so that a busy machine slows all of them alike; ratios are taken within a round. Slow methods are left out
after the first rounds. "AVX2 only" is a process for which numba compiles as for a CPU without AVX-512.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks import codec_peers
from benchmarks.codec_peers import Tensor, fp8_serde
from benchmarks.cores import pinned_pool
from benchmarks.peak_memory import MALLOC, extra_bytes
from benchmarks.quality.peers import NotInstalledError
from benchmarks.samples import Quantiles, host_line, rich_table, write_results
from tq_offload.codec import TurboQuantCodec
from tq_offload.kernels.cpu_numba import NumbaBackend
from tq_offload.layout import ChunkLayout, GroupLayout
from tq_offload.spec import CodecSpec

__all__ = ["Tensor", "fp8_serde", "main"]

PEERS: dict[str, Any] = {
    "fp8": codec_peers.fp8,
    "lmcache-turbo-quant-serde": codec_peers.turbo_quant_serde,
    "quanto int4": codec_peers.quanto,
    "zstd": codec_peers.zstd,
    "memcpy": codec_peers.memcpy,
}
SLOW_S, SLOW_ROUNDS = 0.4, 3
PREFIX = 4
MIB = 1 << 20


@dataclass(frozen=True)
class Result:
    """Rates of one method in GB/s, and by how many times it is faster than others in the same direction and round."""

    method: str
    p20: float
    median: float
    p80: float
    rounds: int
    times: dict[str, float]


def make_chunk(args: argparse.Namespace, seed: int = 0) -> torch.Tensor:
    """A packed chunk [L, T, H*2D] in bf16 with a mean for every channel."""
    generator = torch.Generator().manual_seed(seed)
    shape = (args.layers, args.tokens, args.heads * 2 * args.head_dim)
    x = torch.randn(shape, generator=generator) + torch.randn(shape[-1], generator=generator)
    return x.to(torch.bfloat16)


def layout_of(chunk: torch.Tensor, head_dim: int) -> ChunkLayout:
    """The layout of a packed chunk."""
    return ChunkLayout((GroupLayout("packed", tuple(chunk.shape), "bfloat16", head_dim),))


def ours(codec: TurboQuantCodec, chunk: torch.Tensor, back: torch.Tensor, head_dim: int) -> codec_peers.Pair:
    """A codec on a chunk, into a buffer that is there."""
    layout = layout_of(chunk, head_dim)
    frame = bytearray(codec.frame_size(layout))
    return lambda: codec.encode_into([chunk], layout, frame), lambda: codec.decode_into(frame, [back])


def methods(args: argparse.Namespace, console: Console) -> dict[str, Callable[[], Any]]:
    """The calls to measure by name: `<method> encode` and `<method> decode`."""
    chunk, spec = make_chunk(args), CodecSpec(args.bits, args.bits)
    back = torch.empty_like(chunk)
    pairs = {"turboquant": ours(TurboQuantCodec(spec), chunk, back, args.head_dim)}
    if args.threads > 1:
        name = f"turboquant, {args.threads} threads"
        pairs[name] = ours(TurboQuantCodec(spec, threads=args.threads), chunk, back, args.head_dim)
    if not args.only_ours:
        plain = TurboQuantCodec(spec, NumbaBackend(simd=False))
        pairs["turboquant, plain loops"] = ours(plain, chunk, back, args.head_dim)
    for name, make in PEERS.items():
        if args.only_ours and name not in ("fp8", "memcpy"):
            continue
        try:
            pairs[name] = make(chunk, back, args.head_dim)
        except NotInstalledError as error:
            console.print(f"{name}: left out: {error}", highlight=False)
    return {
        f"{name} {way}": call
        for name, pair in pairs.items()
        for way, call in zip(("encode", "decode"), pair, strict=True)
    }


def at_once(args: argparse.Namespace) -> dict[str, float]:
    """Throughput of `threads` threads over that of one, on a prefix of PREFIX chunks for each; median of the rounds."""
    codec = TurboQuantCodec(CodecSpec(args.bits, args.bits))
    chunks = [make_chunk(args, seed) for seed in range(PREFIX * args.threads)]
    pairs = [ours(codec, chunk, torch.empty_like(chunk), args.head_dim) for chunk in chunks]
    found = {}
    with pinned_pool(args.threads) as pool:
        for way, index in (("encode", 0), ("decode", 1)):
            calls = [pair[index] for pair in pairs]
            for call in calls:
                call()
            ratios = []
            for _ in range(args.repeats):
                one = sum(map(seconds, calls))
                ratios.append(one / seconds(lambda calls=calls: list(pool.map(_call, calls))))  # type: ignore[misc]
            found[way] = statistics.median(ratios)
    return found


def _call(call: Callable[[], Any]) -> None:
    call()


def seconds(call: Callable[[], Any]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure(args: argparse.Namespace, console: Console) -> list[Result]:
    """Rates of all methods."""
    calls, rounds = methods(args, console), []
    slow = {name for name, call in calls.items() if (call(), seconds(call))[1] > SLOW_S}
    for number in range(args.repeats):
        rounds.append({name: seconds(call) for name, call in calls.items() if number < SLOW_ROUNDS or name not in slow})
    nbytes = args.layers * args.tokens * args.heads * 2 * args.head_dim * 2
    results = []
    for name in calls:
        q = Quantiles.of(nbytes / r[name] / 1e9 for r in rounds if name in r)
        times = {}
        for other in ("fp8", "lmcache-turbo-quant-serde", "turboquant"):
            base = f"{other} {name.split()[-1]}"
            if base in calls and base != name:
                times[other] = statistics.median(r[base] / r[name] for r in rounds if name in r and base in r)
        results.append(Result(name, q.p20, q.p50, q.p80, sum(name in r for r in rounds), times))
    return results


def avx2_only(args: argparse.Namespace) -> list[Result]:
    """The same with code for AVX2; nothing where numba does not compile for x86-64."""
    if platform.machine() != "x86_64":
        return []
    found = [Result(**row) for row in in_a_process(args, "rates", NUMBA_CPU_NAME="haswell")]
    return [Result(**{**asdict(r), "method": "AVX2 only, " + r.method}) for r in found if "turboquant" in r.method]


def in_a_process(args: argparse.Namespace, part: str, **env: str) -> Any:
    """What `--part` prints in a process of its own with these variables."""
    settings = ["--head-dim", args.head_dim, "--bits", args.bits, "--tokens", args.tokens, "--layers", args.layers]
    settings += ["--heads", args.heads, "--repeats", args.repeats, "--threads", 1, "--only-ours", "--part", part]
    argv = [sys.executable, "-m", "benchmarks.bench_codec", *map(str, settings)]
    done = subprocess.run(argv, env={**os.environ, **env}, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def extra_memory(args: argparse.Namespace) -> dict[str, int]:
    """Bytes of resident memory at the peak of a call beyond those before it; nothing where that cannot be told."""
    chunk, spec = make_chunk(args), CodecSpec(args.bits, args.bits)
    back, found = torch.zeros_like(chunk), {}
    for name, make in (("turboquant", lambda *a: ours(TurboQuantCodec(spec), *a)), ("fp8", codec_peers.fp8)):
        for way, call in zip(("encode", "decode"), make(chunk, back, args.head_dim), strict=True):
            call()
            extra = extra_bytes(call)
            if extra is not None:
                found[f"{name} {way}"] = extra
    return found


def bounds(
    results: list[Result], extra: dict[str, int], scaling: dict[str, float]
) -> list[tuple[str, float, str, float]]:
    """What is measured, and the bound that it has to meet."""
    from tq_offload.kernels.simd.config import host_lanes

    wide = host_lanes() == 16
    found = []
    for r in results:
        times, way = r.times, r.method.split()[-1]
        if r.method == f"turboquant {way}":
            bound = {"decode": 9.0 if wide else 4.0, "encode": 0.8 if wide else 0.3}[way]
            found.append((f"{way}: times fp8", times["fp8"], ">=", bound))
            if "lmcache-turbo-quant-serde" in times:
                found.append(
                    (f"{way}: times lmcache-turbo-quant-serde", times["lmcache-turbo-quant-serde"], ">=", 20.0)
                )
        if r.method == "AVX2 only, turboquant decode":
            found.append(("AVX2 only, decode: times fp8", times["fp8"], ">=", 4.0))
        if r.method.startswith("turboquant, 2 threads"):
            found.append((f"{way}: 2 threads on one chunk, by 1", times["turboquant"], ">=", 1.8))
    found += [(f"{way}: 2 threads on a prefix of chunks, by 1", ratio, ">=", 1.8) for way, ratio in scaling.items()]
    return found + [(f"{name}: extra MiB", n / MIB, "<=", 2.0) for name, n in extra.items() if "turboquant" in name]


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2, help="of the second row; 1 leaves it out")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--only-ours", action="store_true", help="the SIMD kernels, fp8 and memcpy only")
    parser.add_argument("--part", choices=("rates", "memory"), help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help="also write the results here")
    parser.add_argument(
        "--save",
        action="store_true",
        help="write benchmarks/results/codec.json and .csv (codec-D for another head_dim)",
    )
    parser.add_argument("--check", action="store_true", help="fail when a bound is missed")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Measure, print, check."""
    args = parse(argv)
    torch.set_num_threads(1)
    console = Console(width=max(Console().width, 140), stderr=args.part is not None)
    if args.part == "memory":
        print(json.dumps(extra_memory(args)))
        return 0
    results = measure(args, console)
    if args.part == "rates":
        print(json.dumps([asdict(r) for r in results]))
        return 0
    if not args.only_ours:
        results += avx2_only(args)
    scaling = at_once(args) if args.threads > 1 else {}
    extra = in_a_process(args, "memory", **MALLOC)
    chunk = make_chunk(args)
    frame, nbytes = (
        TurboQuantCodec(CodecSpec(args.bits, args.bits)).frame_size(layout_of(chunk, args.head_dim)),
        chunk.nbytes,
    )
    title = f"[{args.layers}, {args.tokens}, {args.heads}*2*{args.head_dim}] bf16, {args.bits} bits, GB/s of bf16 KV"
    others = ("fp8", "lmcache-turbo-quant-serde", "turboquant")
    rows = [
        (
            r.method,
            f"{r.median:.3g}",
            f"{r.p20:.3g}–{r.p80:.3g}",
            *(f"{r.times[o]:.2f}" if o in r.times else "" for o in others),
        )
        for r in results
    ]
    console.print(rich_table(title, ("method", "p50", "p20–p80", *(f"times {o}" for o in others)), rows))
    console.print(
        f"frame: {frame} bytes, {nbytes / frame:.2f} times smaller; fp8 from {fp8_serde()[0]}", highlight=False
    )
    for name, n in extra.items():
        console.print(f"{name}: {n / MIB:.2f} MiB of memory beyond source and destination", highlight=False)
    checked = bounds(results, extra, scaling if args.threads == 2 else {})
    missed = [
        what for what, value, relation, bound in checked if not (value >= bound if relation == ">=" else value <= bound)
    ]
    for what, value, relation, bound in checked:
        console.print(
            f"{'FAIL' if what in missed else 'PASS'}  {what}: {value:.2f} {relation} {bound:g}", highlight=False
        )
    console.print(host_line(), highlight=False)
    report = {
        "settings": {k: v for k, v in vars(args).items() if k not in ("json", "check", "save", "part")},
        "results": [asdict(r) for r in results],
        "frame_bytes": frame, "chunk_bytes": nbytes, "extra_bytes": extra,
        "scaling": scaling, "bounds": checked, "missed": missed,
    }  # fmt: skip
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    if args.save:
        name = "codec" if args.head_dim == 128 else f"codec-{args.head_dim}"
        write_results(name, report, [asdict(r) for r in results])
    return 1 if args.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
