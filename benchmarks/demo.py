"""`make demo`: bytes on disk and time to first token with naive, LMCache's fp8 and turboquant, all for real.

Each serde gets a fresh `lmcache server` and a fresh vLLM; turboquant differs from naive in one environment variable.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.measure import SERDES, STEPS, STEPS_OF_A_RESTART, STEPS_OF_FAULTS, Plan, Run, measure
from benchmarks.model import prepare_model
from benchmarks.process import DeploymentError
from benchmarks.report import as_json, checks, table
from benchmarks.servers_run import FAILED, run_and_exit
from benchmarks.steps import Steps

_PROMPT = Path(__file__).with_name("prompt.txt")

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def demo(
    only: Annotated[str, typer.Option(help="Which serdes, comma-separated, in this order.")] = ",".join(SERDES),
    short: Annotated[bool, typer.Option("--short", help="The same as --only naive,turboquant.")] = False,
    restart: Annotated[bool, typer.Option("--restart", help="Restart both processes before the hits.")] = False,
    hits: Annotated[int, typer.Option(min=1, help="How often the prompt is sent again; the median counts.")] = 3,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write everything measured here.")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the logs.")] = False,
) -> None:
    """Run one prompt of more than 1,500 tokens cold and from disk, for each serde, and compare."""
    console = Console(width=None if sys.stdout.isatty() else 150)
    names = ["naive", "turboquant"] if short else [name.strip() for name in only.split(",") if name.strip()]
    unknown = sorted(set(names) - set(SERDES))
    if unknown or not names:
        raise typer.BadParameter(f"unknown serde {', '.join(unknown)}; known: {', '.join(SERDES)}", param_hint="--only")
    run_and_exit(
        "demo",
        console,
        lambda folder: _run_all(names, folder, console, hits=hits, restart=restart),
        lambda runs: (_conclude(runs, console, json_path), False),
        keep=keep,
    )


def _run_all(names: list[str], folder: Path, console: Console, *, hits: int, restart: bool) -> dict[str, Run]:
    if "turboquant" in names:
        require_plugin()
    extra = sum(STEPS_OF_FAULTS for name in names if SERDES[name].faults)
    steps = Steps(console, 1 + extra + len(names) * (STEPS + (STEPS_OF_A_RESTART if restart else 0)))
    with steps.step("the model") as progress:
        model = prepare_model(progress=progress)
    plan = Plan(model, _PROMPT.read_text(encoding="utf-8").rstrip("\n"), folder, hits=hits, restart=restart)
    return {name: measure(SERDES[name], plan, steps) for name in names}


def require_plugin() -> None:
    """LMCache finds the package by its entry point: without it turboquant would silently be naive."""
    if not any(point.name == "tq_offload" for point in entry_points(group="lmcache.device_plugins")):
        what = "tq-offload is not installed in this environment, so LMCACHE_SERDE=turboquant would do nothing"
        raise DeploymentError(what, f"{sys.executable} -m pip install --no-deps -e .  (or `make env`)")


def _conclude(runs: dict[str, Run], console: Console, json_path: Path | None) -> int:
    """Print the table and the checks, write the JSON; return the exit status."""
    results = checks(runs)
    console.print()
    console.print(table(runs))
    for check in results:
        word, style = ("PASS", "green") if check.passed else ("FAIL", "bold red")
        console.print(f"{word}  {check.name}: {check.seen}", style=style, highlight=False)
    if json_path:
        json_path.write_text(json.dumps(as_json(runs, results), indent=2) + "\n", encoding="utf-8")
    return 0 if all(check.passed for check in results) else FAILED


if __name__ == "__main__":
    app()
