"""How the time and the memory of a call grow with tokens, layers, heads, head_dim and threads.

usage: python -m benchmarks.bench_growth [--check] [--short] [--rounds 25] [--no-write]

Whole frames into buffers that are there. Times: every round measures every size. Memory: the peak of a call beyond
source and destination, in a process of its own. Writes benchmarks/results/growth.{json,csv}, docs/growth-*.svg and a
section of docs/benchmarks.md, unless told --short or --no-write.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Annotated

import torch
import typer
from rich.console import Console

from benchmarks.growth import report
from benchmarks.growth.cases import cases
from benchmarks.growth.memory import measure_extra
from benchmarks.growth.times import measure_times
from benchmarks.render_docs import update
from benchmarks.samples import show_checks

_SHORT_ROUNDS = 7


def main(
    rounds: Annotated[int, typer.Option(min=3, help="Rounds that count.")] = 25,
    short: Annotated[
        bool, typer.Option("--short", help="The smallest and three largest sizes, seven rounds; prints only.")
    ] = False,
    check: Annotated[bool, typer.Option("--check", help="Fail when a check is missed.")] = False,
    no_write: Annotated[bool, typer.Option("--no-write", help="Print only.")] = False,
) -> None:
    """Measure, print, write, check."""
    started, console = time.monotonic(), Console(width=None if sys.stdout.isatty() else 190)
    torch.set_num_threads(1)

    def say(what: str) -> None:
        console.print(f"[dim]{time.monotonic() - started:6.0f} s[/dim]  {what}")

    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    rounds = min(rounds, _SHORT_ROUNDS) if short else rounds
    wanted = cases(cores, short=short)
    say(f"{len(wanted)} sizes")
    times = measure_times(wanted, rounds, say)
    say("memory")
    extra = measure_extra(wanted, cores, short=short)
    result = report.Result(times, extra, rounds, time.monotonic() - started, (load, os.getloadavg()[0]))
    for table in report.tables(result):
        console.print(table)
    if not extra:
        console.print("memory: not measured, the kernel does not let the peak be reset (/proc/self/clear_refs)")
    held = report.checks(result)
    met = show_checks(console, held)
    say("done")
    if not (short or no_write):
        report.write(result, held)
        update("growth")
    if check and not met:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
