"""Speed of the codec beside LMCache's fp8 serde, other packages, zstd and memcpy: one run, one thread, interleaved.

usage: python -m benchmarks.bench_codec [--head-dim 128] [--bits 4] [--only-ours] [--check] [--no-write]

Rates are GB/s of uncompressed bf16 KV. Whole frames: header and checksum are included. Every round measures every
method once, so that a busy machine slows all of them alike; ratios are taken within a round. Slow methods are left out
after the first rounds. "AVX2 only" is a process for which numba compiles as for a CPU without AVX-512.

Writes benchmarks/results/codec.{json,csv} (head_dim 128, everything) and codec-D (other head_dims, ours beside fp8),
docs/codec-rates.svg, a section of docs/benchmarks.md and README's table. Runs with settings of their own print only.
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
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks import codec_peers, codec_report
from benchmarks.codec_ours import extra_memory, layout_of, make_chunk, ours
from benchmarks.codec_peers import Tensor, fp8_serde
from benchmarks.cores import pinned_pool
from benchmarks.peak_memory import MALLOC
from benchmarks.quality.peers import NotInstalledError
from benchmarks.render_docs import update
from benchmarks.samples import Quantiles, where, whole, write_results
from tq_offload.codec import TurboQuantCodec
from tq_offload.kernels.cpu_numba import NumbaBackend
from tq_offload.kernels.simd.config import host_lanes
from tq_offload.spec import CodecSpec

__all__ = ["Tensor", "fp8_serde", "main", "without_avx512"]

PEERS: dict[str, Any] = {
    "fp8": codec_peers.fp8,
    "lmcache-turbo-quant-serde": codec_peers.turbo_quant_serde,
    "quanto int4": codec_peers.quanto,
    "zstd": codec_peers.zstd,
    "memcpy": codec_peers.memcpy,
}
HEAD_DIMS, MLA_DIM = (128, 64, 96, 576), 576
SLOW_S, SLOW_ROUNDS = 0.4, 3
PREFIX = 4


@dataclass(frozen=True)
class Result:
    """Rates of one method in GB/s, and by how many times it is faster than others in the same direction and round."""

    method: str
    p20: float
    median: float
    p80: float
    rounds: int
    times: dict[str, float]


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
                prefixes = [calls[number :: args.threads] for number in range(args.threads)]
                ratios.append(one / seconds(lambda all_of=prefixes: list(pool.map(_call_all, all_of))))  # type: ignore[misc]
            found[way] = statistics.median(ratios)
    return found


def _call_all(calls: Sequence[Callable[[], Any]]) -> None:
    for call in calls:
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
    lanes, rows = in_a_process(args, "rates", **without_avx512())
    if lanes != 8:
        raise SystemExit(f"the process for AVX2 has registers of {lanes} lanes")
    found = [Result(**row) for row in rows]
    return [Result(**{**asdict(r), "method": "AVX2 only, " + r.method}) for r in found if "turboquant" in r.method]


def without_avx512() -> dict[str, str]:
    """Environment in which numba compiles as for a CPU that has AVX2 and nothing later.

    The name of a CPU alone leaves the features of this one.
    """
    from llvmlite.binding import get_host_cpu_features

    later = ("avx512", "avx10", "avxvnni", "avxifma", "avxne", "amx", "evex")
    features = get_host_cpu_features()
    kept = [f"{'-' if name.startswith(later) or not features[name] else '+'}{name}" for name in sorted(features)]
    return {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": ",".join(kept)}


def in_a_process(args: argparse.Namespace, part: str, **env: str) -> Any:
    """What `--part` prints in a process of its own with these variables."""
    settings = ["--head-dim", args.head_dim, "--bits", args.bits, "--tokens", args.tokens, "--layers", args.layers]
    settings += ["--heads", args.heads, "--repeats", args.repeats, "--threads", 1, "--only-ours", "--part", part]
    argv = [sys.executable, "-m", "benchmarks.bench_codec", *map(str, settings)]
    done = subprocess.run(argv, env={**os.environ, **env}, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Command line; `args.partial`: something else than what the results files are for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--head-dim", type=whole(1, 1024), help=f"this one alone (all of {', '.join(map(str, HEAD_DIMS))})"
    )
    parser.add_argument("--bits", type=whole(1, 8), default=4)
    parser.add_argument("--tokens", type=whole(1), default=256)
    parser.add_argument("--layers", type=whole(1), default=28)
    parser.add_argument("--heads", type=whole(1), default=8)
    parser.add_argument("--threads", type=whole(1, 256), default=2, help="of the second row; 1 leaves it out")
    parser.add_argument("--repeats", type=whole(3), default=15)
    parser.add_argument("--only-ours", action="store_true", help="the SIMD kernels, fp8 and memcpy only")
    parser.add_argument("--part", choices=("rates", "memory"), help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help="with --head-dim: also write the results here")
    parser.add_argument("--no-write", action="store_true", help="print only, as with any of the above but --repeats")
    parser.add_argument("--check", action="store_true", help="fail when a bound is missed")
    args = parser.parse_args(argv)
    if args.json and args.head_dim is None:
        parser.error("--json is for one --head-dim")
    same = ("head_dim", "bits", "tokens", "layers", "heads", "threads", "only_ours", "part")
    args.partial = any(getattr(args, name) != parser.get_default(name) for name in same)
    return args


def of_head_dim(args: argparse.Namespace, head_dim: int) -> argparse.Namespace:
    """The settings for one head_dim of all: everything for the first, ours and fp8 alone for the others."""
    first = head_dim == HEAD_DIMS[0]
    changed = {"head_dim": head_dim, "only_ours": args.only_ours or not first, "threads": args.threads if first else 1}
    return argparse.Namespace(**{**vars(args), **changed, "heads": 1 if head_dim == MLA_DIM else args.heads})


def run(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Everything for one head_dim: what the results file holds."""
    results = measure(args, console)
    if not args.only_ours:
        results += avx2_only(args)
    scaling = at_once(args) if args.threads > 1 else {}
    extra = in_a_process(args, "memory", **MALLOC)
    chunk = make_chunk(args)
    frame = TurboQuantCodec(CodecSpec(args.bits, args.bits)).frame_size(layout_of(chunk, args.head_dim))
    names = ("head_dim", "bits", "tokens", "layers", "heads", "threads", "repeats", "only_ours")
    rows = [asdict(r) for r in results]
    return {
        "settings": {name: getattr(args, name) for name in names}, "fp8_from": fp8_serde()[0],
        "frame_bytes": frame, "chunk_bytes": chunk.nbytes, "extra_bytes": extra, "scaling": scaling,
        "bounds": codec_report.bounds(rows, extra, scaling if args.threads == 2 else {}), "rows": rows,
    }  # fmt: skip


def show(results: dict[str, Any], console: Console, *, held: bool) -> bool:
    """Print; whether a bound is missed. Only those of `held` results count."""
    for table in codec_report.tables(results):
        console.print(table)
    console.print(codec_report.scaling(results), highlight=False)
    bad = False
    for bound in results["bounds"] if held else ():
        what, value, relation, limit = bound
        missed = codec_report.missed(bound)
        bad |= missed
        console.print(f"{'FAIL' if missed else 'PASS'}  {what}: {value:.2f} {relation} {limit:g}", highlight=False)
    return bad


def main(argv: list[str] | None = None) -> int:
    """Measure, print, write, check."""
    args = parse(argv)
    torch.set_num_threads(1)
    console = Console(width=max(Console().width, 140), stderr=args.part is not None)
    if args.part == "memory":
        print(json.dumps(extra_memory(args)))
        return 0
    if args.part == "rates":
        print(json.dumps((host_lanes(), [asdict(r) for r in measure(args, console)])))
        return 0
    bad = False
    for head_dim in HEAD_DIMS if args.head_dim is None else (args.head_dim,):
        results = run(of_head_dim(args, head_dim) if args.head_dim is None else args, console)
        bad |= show(results, console, held=head_dim == HEAD_DIMS[0] or args.head_dim is not None)
        if args.json:
            args.json.write_text(json.dumps({**where(), **results}, indent=1) + "\n", encoding="utf-8")
        if not (args.no_write or args.partial):
            name = "codec" if head_dim == HEAD_DIMS[0] else f"codec-{head_dim}"
            write_results(name, {k: v for k, v in results.items() if k != "rows"}, results["rows"])
    if not (args.no_write or args.partial):
        update("codec")
    return 1 if args.check and bad else 0


if __name__ == "__main__":
    sys.exit(main())
