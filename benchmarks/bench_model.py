"""From measured decoding and the speed of a link: when packed KV cache loads sooner than bf16, for models in use.

usage: python -m benchmarks.bench_model [--codec codec.json] [--tokens 8192,32768] [--threads 1,2,4,8,16]
       [--ttft benchmarks/results/ttft.json] [--no-write]

Decoding is measured first, on this machine, with as many threads as it has cores at most; rates of more threads are
scaled in proportion and marked ~. `--codec`: a results file of bench_codec, for its head_dim. Everything else is
arithmetic (benchmarks/planner.py): reading, then decoding, one after the other. `--ttft`: loads that bench_ttft
measured, which the same arithmetic predicts (benchmarks/planner_ttft.py). Writes benchmarks/results/model.{json,csv},
docs/transfer-break-even.svg and a section of docs/benchmarks.md; with any of these options it prints only.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from benchmarks import codec_peers, planner, planner_report, planner_ttft, planner_ttft_report
from benchmarks.cores import pinned_pool
from benchmarks.planner import CodecRate, Model
from benchmarks.planner_ttft_report import Against
from benchmarks.render_docs import update
from benchmarks.samples import RESULTS, Quantiles, numbers, show_checks
from tq_offload.codec import TurboQuantCodec
from tq_offload.layout import ChunkLayout

TOKENS, THREADS, TTFT = "8192,32768", "1,2,4,8,16", RESULTS / "ttft.json"
_CHUNK_BYTES = 8 << 20  # of what is measured with: a few layers of the model


def main(
    codec: Annotated[Path | None, typer.Option(help="Rates from this file of bench_codec instead.")] = None,
    tokens: Annotated[str, typer.Option(help="Lengths of the prefix, comma-separated.")] = TOKENS,
    threads: Annotated[str, typer.Option(help="Threads that decode, comma-separated.")] = THREADS,
    rounds: Annotated[int, typer.Option(min=3, help="Rounds of the measurement.")] = 15,
    ttft: Annotated[Path, typer.Option(help="Loads to predict: what bench_ttft wrote.")] = TTFT,
    check: Annotated[bool, typer.Option("--check", help="Fail when a check is missed.")] = False,
    no_write: Annotated[bool, typer.Option("--no-write", help="Print only.")] = False,
) -> None:
    """Measure, plan, print, write."""
    console = Console(width=None if sys.stdout.isatty() else 190)
    torch.set_num_threads(1)
    lengths, counts = numbers(tokens, "--tokens", int, 1), numbers(threads, "--threads", int, 1)
    known = read_rates(codec) if codec else {}
    samples: dict[int, dict[int, Quantiles]] = {}
    for model in (*planner.MODELS, planner.SMOLLM2):
        dim = model.head_dim
        if dim not in known and dim not in samples:
            samples[dim] = measure(model, [n for n in sorted({1, *counts}) if n <= _cores()], rounds)
    measured = {dim: CodecRate({n: q.p50 for n, q in found.items()}, "measured") for dim, found in samples.items()}
    plan = planner_report.Plan(planner.MODELS, known | measured, lengths, counts)
    for table in planner_report.tables(plan):
        console.print(table)
    against = compare(ttft, plan.rates[planner.SMOLLM2.head_dim], rounds) if ttft.exists() else None
    if against is None:
        console.print(f"{ttft} is not there: nothing to compare with. What to do: make bench-ttft", markup=False)
    else:
        for table in planner_ttft_report.tables(against):
            console.print(table)
        console.print(against.other_host or f"Measured on {against.measured.cpu}, as decoding was.", markup=False)
    held = [*planner_report.checks(plan), *(against.checks if against else ())]
    met = show_checks(console, held)
    if not (no_write or codec) and (tokens, threads, ttft) == (TOKENS, THREADS, TTFT):
        planner_report.write(plan, samples, against, held)
        update("model")
    if check and not met:
        raise typer.Exit(1)


def compare(path: Path, decoding: CodecRate, rounds: int) -> Against:
    """Predict the loads that bench_ttft measured. Raises SystemExit: the file is not what it writes."""
    found = planner_ttft.read_runs(path)
    origin, fp8 = codec_peers.fp8_serde()[0], measure_fp8(rounds)
    rates = {planner_ttft.OURS: decoding, "fp8": CodecRate({1: fp8.p50}, f"fp8 from {origin}")}
    predictions = planner_ttft.predict(found, rates)
    ours = ", ".join(f"×{n} {rate / 1e9:.2f}" for n, rate in sorted(decoding.by_threads.items()))
    words = f"vectors of {planner.SMOLLM2.head_dim} {ours} ({decoding.source}), LMCache's fp8 {fp8.p50 / 1e9:.2f}"
    return Against(path.name, found, predictions, planner_ttft.checks(predictions), words)


def measure_fp8(rounds: int) -> Quantiles:
    """LMCache's fp8 deserialiser on a chunk as bench_ttft has them, in bytes of uncompressed KV a second."""
    chunk = _chunk(planner.SMOLLM2.layout())
    encode, decode = codec_peers.fp8(chunk, torch.empty_like(chunk), planner.SMOLLM2.head_dim)
    encode()
    decode()
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        decode()
        seconds.append(time.perf_counter() - start)
    return Quantiles.of(chunk.nbytes / s for s in seconds)


def _chunk(layout: ChunkLayout) -> torch.Tensor:
    return torch.randn(layout.groups[0].shape, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)


def measure(model: Model, threads: Sequence[int], rounds: int) -> dict[int, Quantiles]:
    """Decoding, in bytes of uncompressed KV a second, by threads, every one with chunks of its own, interleaved."""
    layers = min(model.layers, max(1, _CHUNK_BYTES // (model.raw_bytes // model.layers * planner.CHUNK_TOKENS)))
    layout, codec, most = model.layout(layers), TurboQuantCodec(), max(threads)
    chunk = _chunk(layout)
    frame = codec.encode([chunk], layout)
    frames, targets = [bytes(frame) for _ in range(most)], [torch.empty_like(chunk) for _ in range(most)]
    seconds: dict[int, list[float]] = {count: [] for count in threads}
    with pinned_pool(most) as pool:
        for number in range(rounds + 1):
            for count in threads:
                start = time.perf_counter()
                work = [pool.submit(codec.decode_into, frames[i], [targets[i]]) for i in range(count)]
                for one in work:
                    one.result()
                if number:
                    seconds[count].append(time.perf_counter() - start)
    return {count: Quantiles.of(count * layout.nbytes / s for s in found) for count, found in seconds.items()}


def read_rates(path: Path) -> dict[int, CodecRate]:
    """The rates of decoding in a file of `bench_codec`, by head_dim.

    Raises:
        SystemExit: It is no such file, or has no rate of one thread.
    """
    rates = {}
    try:
        found: Any = json.loads(path.read_text(encoding="utf-8"))
        head_dim = int(found["settings"]["head_dim"])
        for row in found["rows"]:
            method = re.fullmatch(r"turboquant(?:, (\d+) threads)? decode", row["method"])
            if method:
                rates[int(method[1] or 1)] = float(row["median"]) * 1e9
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SystemExit(f"{path}: not what bench_codec writes: {type(error).__name__}: {error}") from error
    if 1 not in rates or min(rates.values()) <= 0:
        raise SystemExit(f"{path}: no rate of decoding with one thread, or one that is not above 0")
    return {head_dim: CodecRate(rates, path.name)}


def _cores() -> int:
    return len(os.sched_getaffinity(0))


if __name__ == "__main__":
    typer.run(main)
