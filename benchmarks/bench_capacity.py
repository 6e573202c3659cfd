"""How many tokens of reusable prefix fit in a budget, and what that does to the hit rate of a trace of conversations.

usage: python -m benchmarks.bench_capacity [--ram-gb 1] [--disk-gb 2] [--budgets 4,8,16] [--check] [--no-write]

Budgets are GiB. Filling is real: chunks of Llama-3.1-8B, a frame of its own for each key, into the real memory and disk
stores until they evict; memory and blocks are measured from outside. The replay runs the real memory store over a
seeded trace with the real sizes; its values share one buffer, so that budgets larger than this machine can be replayed.
Writes benchmarks/results/capacity.{json,csv}, docs/capacity-hit-rate.svg, a section of docs/benchmarks.md and README's
sentence; with budgets of its own it prints only.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console

from benchmarks.capacity import report
from benchmarks.capacity.fill import FORMATS, Values, fill
from benchmarks.capacity.replay import Replayed, replay
from benchmarks.capacity.trace import Request, TraceSettings, make_trace
from benchmarks.render_docs import update
from benchmarks.samples import numbers, show_checks
from benchmarks.transfer.chunks import Shape
from tq_offload_connectors.disk import DiskStore
from tq_offload_connectors.memory import MemoryStore

SHAPE = Shape("Llama-3.1-8B", 32, 8, 128)
BUDGETS = "4,8,16,32,64,128,256,512"
TINY = Shape("one layer, one head", 1, 1, 64)  # for the replay on disk, where every value is written
LEAST_GIB, MOST_GIB = 0.125, float(1 << 20)  # from four chunks as they are


def _gib(value: float) -> float:
    """For typer: a budget."""
    if not LEAST_GIB <= value <= MOST_GIB:
        raise typer.BadParameter(f"{value:g}: GiB, from {LEAST_GIB:g} to {MOST_GIB:g}")
    return value


def main(
    ram_gb: Annotated[float, typer.Option(callback=_gib, help="Budget of memory that is filled.")] = 1.0,
    disk_gb: Annotated[float, typer.Option(callback=_gib, help="Budget of disk that is filled.")] = 2.0,
    budgets: Annotated[str, typer.Option(help="Budgets of the replay, comma-separated.")] = BUDGETS,
    check: Annotated[bool, typer.Option("--check", help="Fail when a check is missed.")] = False,
    no_write: Annotated[bool, typer.Option("--no-write", help="Print only.")] = False,
) -> None:
    """Fill, replay, print, write, check."""
    started, console = time.monotonic(), Console(width=None if sys.stdout.isatty() else 170)
    torch.set_num_threads(1)
    gib = numbers(budgets, "--budgets", float, LEAST_GIB, MOST_GIB)

    def say(what: str) -> None:
        console.print(f"[dim]{time.monotonic() - started:6.0f} s[/dim]  {what}")

    sizes = {way: Values(SHAPE, way, sources=1).nbytes for way in FORMATS}
    filled = []
    with tempfile.TemporaryDirectory(prefix="tq-offload-capacity-") as folder:
        for tier, budget in (("memory", ram_gb), ("disk", disk_gb)):
            for way in FORMATS:
                say(f"filling {budget:g} GiB of {tier}, {way}")
                filled.append(fill(tier, Values(SHAPE, way), int(budget * (1 << 30)), Path(folder)))
        settings = TraceSettings()
        trace = make_trace(settings, SHAPE.tokens)
        say(f"replaying {len(trace):,} requests")
        replays = {
            (way, one): replay(trace, MemoryStore(int(one * (1 << 30))), _value(size))
            for way, size in sizes.items()
            for one in gib
        }
        unlimited = replay(trace, MemoryStore(1 << 60), _value(1))
        say("the beginning of the trace, on disk and in memory")
        on_disk = _disk_agrees(trace[:400], Path(folder))
    seconds = time.monotonic() - started
    result = report.Result(SHAPE, filled, settings, trace, sizes, replays, unlimited, on_disk, seconds)
    for table in report.tables(result):
        console.print(table)
    held = report.checks(result)
    met = show_checks(console, held)
    say("done")
    if not no_write and (ram_gb, disk_gb, budgets) == (1.0, 2.0, BUDGETS):
        report.write(result, held)
        update("capacity")
    if check and not met:
        raise typer.Exit(1)


def _value(nbytes: int) -> memoryview:
    return np.zeros(nbytes, np.uint8).data


def _disk_agrees(trace: list[Request], folder: Path) -> list[tuple[str, Replayed, Replayed]]:
    """For each way the replay with real files and that in memory, in a budget of 1,000 chunks as they are."""
    found = []
    for way in FORMATS:
        value, budget = _value(Values(TINY, way, sources=1).nbytes), 1000 * TINY.nbytes
        with DiskStore(folder / f"replay-{way}", budget) as disk, MemoryStore(budget) as memory:
            found.append((way, replay(trace, disk, value), replay(trace, memory, value)))
    return found


if __name__ == "__main__":
    typer.run(main)
