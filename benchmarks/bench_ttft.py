"""Time to first token of vLLM + LMCache: cold, and hits from CPU RAM, disk and Redis over links of several rates.

usage: python -m benchmarks.bench_ttft [--check] [--short] [--ways naive,turboquant,mp-naive,mp-fp8,mp-turboquant]
       [--lengths 500,1500,3500] [--rates 100,1000,0] [--repeats 7] [--link auto] [--no-write] [--keep]

Real servers, ended afterwards. Writes benchmarks/results/ttft.{json,csv}, docs/ttft-*.svg, a section of
docs/benchmarks.md and README's table; with --short, ways, lengths or rates of its own it prints only.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.demo import require_plugin
from benchmarks.model import prepare_model
from benchmarks.process import DeploymentError
from benchmarks.render_docs import update
from benchmarks.samples import numbers, show_checks
from benchmarks.servers_run import BROKEN, FAILED, run_and_exit
from benchmarks.steps import Steps
from benchmarks.ttft.checks import checks
from benchmarks.ttft.link import LINKS, Rate, open_redis
from benchmarks.ttft.measure import STEPS, Plan, Run, measure, rate_name
from benchmarks.ttft.prompts import cut, whole_chunks
from benchmarks.ttft.report import Result, tables, write
from benchmarks.ttft.ways import WAYS

LENGTHS, RATES = "500,1500,3500", "100,1000,0"
_SLOW_REPEATS = 3
_SHORT_WAYS, _SHORT_LENGTHS, _SHORT_REPEATS = "naive,turboquant,mp-fp8", "1500", 3

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    ways: Annotated[str, typer.Option(help="Which, comma-separated, in this order.")] = ",".join(WAYS),
    lengths: Annotated[str, typer.Option(help="Prompt tokens; the next whole chunks and one token.")] = LENGTHS,
    rates: Annotated[str, typer.Option(help="Links to Redis in Mbit/s; 0: unshaped.")] = RATES,
    repeats: Annotated[int, typer.Option(min=3, help="Hits of each kind; three below 1 Gbit/s.")] = 7,
    link: Annotated[str, typer.Option(help=f"How the link is shaped: {', '.join(LINKS)}.")] = "auto",
    short: Annotated[bool, typer.Option("--short", help="Three ways, one length, three hits; prints only.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Fail when a check is missed.")] = False,
    no_write: Annotated[bool, typer.Option("--no-write", help="Print only.")] = False,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the logs.")] = False,
) -> None:
    """Measure, print, write, check."""
    console = Console(width=None if sys.stdout.isatty() else 200)
    whole = not short and (ways, lengths, rates) == (",".join(WAYS), LENGTHS, RATES)
    if short:
        ways, lengths, repeats = _SHORT_WAYS, _SHORT_LENGTHS, _SHORT_REPEATS
    names, kind = [name.strip() for name in ways.split(",")], link.strip()
    if not set(names) <= set(WAYS) or kind not in LINKS:
        raise typer.BadParameter(f"known ways: {', '.join(WAYS)}; known links: {', '.join(LINKS)}")
    sizes = sorted({whole_chunks(length) for length in numbers(lengths, "--lengths", int, 1)})
    wanted: list[Rate] = [rate or None for rate in numbers(rates, "--rates", float, 0)]

    def conclude(result: Result) -> tuple[int, bool]:
        met = _conclude(result, console, write_files=whole and not no_write)
        return (BROKEN if result.failed else 0) if met else FAILED if check else 0, bool(result.failed)

    run_and_exit(
        "ttft",
        console,
        lambda folder: _measure(names, sizes, wanted, repeats, kind, folder, console),
        conclude,
        keep=keep,
    )


def _measure(
    names: Sequence[str], sizes: list[int], rates: list[Rate], repeats: int, kind: str, folder: Path, console: Console
) -> Result:
    """Start Redis, measure the links, run one way after the other; a way that fails does not end the others."""
    began = time.monotonic()
    if any("turboquant" in name for name in names):
        require_plugin()
    steps = Steps(console, 2 + len(names) * (STEPS + len(rates)))
    with steps.step("the model") as progress:
        model = prepare_model(progress=progress)
        warm_up, *prompts = cut(model, [whole_chunks(1), *sizes])
    plan = Plan(model, warm_up, prompts, rates, repeats, min(repeats, _SLOW_REPEATS), folder)
    runs: dict[str, list[Run]] = {}
    failed: dict[str, str] = {}
    with open_redis(folder, kind) as redis:
        with steps.step(f"the links: {redis.link.how}"):
            seen = {rate: redis.measured_mbit(rate) for rate in rates}
        for rate, mbit in seen.items():
            console.print(f"      {rate_name(rate)}: a GET of 16 MiB reaches {mbit:,.1f} Mbit/s", highlight=False)
        for name in names:
            try:
                runs[name] = measure(WAYS[name], plan, redis, steps)
            except DeploymentError as error:
                failed[name] = error.what
                console.print(f"{name} could not be run: {error}", style="red", markup=False, highlight=False)
        how = redis.link.how
    return Result(runs, failed, seen, how, checks(runs, seen), time.monotonic() - began)


def _conclude(result: Result, console: Console, *, write_files: bool) -> bool:
    """Print the tables and checks, write the files; return whether the checks are met."""
    for table in tables(result):
        console.print()
        console.print(table)
    met = show_checks(console, result.checks)
    if write_files and not result.failed:
        write(result)
        update("ttft")
    return met


if __name__ == "__main__":
    app()
