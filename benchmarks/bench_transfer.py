"""Puts and gets of KV chunks through memory, disk and Redis: as they are, as LMCache's fp8, as our frames, in one run.

usage: python -m benchmarks.bench_transfer [--small] [--rounds 7] [--check] [--places disk,redis] [--no-write]

Real stores, an own redis-server on loopback (ended afterwards), real files. Rates are GB/s of uncompressed KV. Every
round takes every way to every place; ratios are taken within a round. Writes benchmarks/results/transfer.{json,csv},
docs/transfer-rates.svg, a section of docs/benchmarks.md and README's table.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from benchmarks.process import stop_on_signals
from benchmarks.render_docs import update
from benchmarks.samples import show_checks
from benchmarks.transfer import report
from benchmarks.transfer.chunks import LLAMA_3B, SMOLLM2, Shape, make_chunk
from benchmarks.transfer.lmcache_ways import LMCacheWay
from benchmarks.transfer.measure import Row, measure, summarise
from benchmarks.transfer.places import PLACES, open_places, redis_version
from benchmarks.transfer.ways import Fp8, Naive, Ours, Way


def main(
    small: Annotated[
        bool, typer.Option("--small", help="Shapes of SmolLM2-135M instead of Llama-3.2-3B; prints only.")
    ] = False,
    chunks: Annotated[int, typer.Option(min=0, help="Chunks of 256 tokens a round, prints only; 0: about 120 MB.")] = 0,
    rounds: Annotated[int, typer.Option(min=3, help="Rounds that count.")] = 7,
    places: Annotated[
        str, typer.Option(help="Places that contain one of these texts, comma-separated; prints only.")
    ] = "",
    check: Annotated[bool, typer.Option("--check", help="Fail when a check is missed.")] = False,
    no_write: Annotated[bool, typer.Option("--no-write", help="Print only.")] = False,
) -> None:
    """Measure, print, write, check."""
    started, console = time.monotonic(), Console(width=None if sys.stdout.isatty() else 190)
    os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
    shape = SMOLLM2 if small else LLAMA_3B
    count = chunks or max(2, 120_000_000 // shape.nbytes // 2 * 2)
    names = [name for name in PLACES if not places or any(word.strip() in name for word in places.split(","))]
    if not names:
        raise typer.BadParameter(f"{places!r}; known: {'; '.join(PLACES)}")

    def say(what: str) -> None:
        console.print(f"[dim]{time.monotonic() - started:6.0f} s[/dim]  {what}")

    load = os.getloadavg()[0]
    with stop_on_signals():
        rows = _rows(shape, count, names, rounds, say)
    run = report.Run(shape, count, rounds, time.monotonic() - started, (load, os.getloadavg()[0]), redis_version())
    held = report.checks(rows)
    console.print(report.table(rows, run))
    met = show_checks(console, held)
    say("done")
    if not (no_write or small or places or chunks):
        report.write(rows, held, run)
        update("transfer")
    if check and not met:
        raise typer.Exit(1)


def _rows(shape: Shape, count: int, names: list[str], rounds: int, say: report.Say) -> list[Row]:
    chunks = [make_chunk(shape, seed) for seed in range(count)]
    targets = [torch.empty_like(chunk) for chunk in chunks]
    stores = [(Naive, 1), (Naive, 2), (Fp8, 1), (Ours, 1), (Ours, 2)]
    ways: list[Way] = [way(shape, chunks, targets, workers) for way, workers in stores]
    ways.append(LMCacheWay(shape, chunks))
    try:
        with (
            tempfile.TemporaryDirectory(prefix="tq-offload-transfer-") as folder,
            open_places(names, Path(folder), 4 * count * shape.nbytes) as places,
        ):
            found = measure(places, ways, chunks, rounds, say)
            return summarise(found, ways, count * shape.nbytes)
    finally:
        for way in ways:
            way.close()


if __name__ == "__main__":
    typer.run(main)
