"""`make demo-tiers`: CPU RAM, disk and Redis of LMCache, naive and turboquant: bytes held, hits, hits after a restart.

Real vLLM, real LMCache, real redis-server. LMCache runs inside the engine (in-process mode, where turboquant differs
from naive in one environment variable) or as a server (multi-process mode). Fails when turboquant holds more than one
byte for 3.7 of naive in a tier, or when a hit finds fewer tokens.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks import tier_report
from benchmarks.demo import require_plugin
from benchmarks.deployment import RedisServer
from benchmarks.model import prepare_model
from benchmarks.samples import where
from benchmarks.servers_run import FAILED, run_and_exit
from benchmarks.steps import Steps
from benchmarks.tier_modes import MODES, run
from benchmarks.tier_runs import CODECS, STEPS, Held, Plan, TierRun

_PROMPT = Path(__file__).with_name("prompt.txt")

Runs = dict[str, TierRun]
Reference = dict[str, Held]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def tiers(
    mode: Annotated[str, typer.Option(help="Which modes, comma-separated: in-process, multi-process.")] = "in-process",
    only: Annotated[str, typer.Option(help="Which codecs, comma-separated, in this order.")] = ",".join(CODECS),
    short: Annotated[
        bool, typer.Option("--short", help="Turboquant alone, beside the size of bf16 by arithmetic.")
    ] = False,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write everything measured here.")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the logs.")] = False,
) -> None:
    """Run one prompt of more than 1,500 tokens cold and from each tier, for each codec, and compare."""
    console = Console(width=None if sys.stdout.isatty() else 170)
    names = ["turboquant"] if short else _names(only, CODECS, "--only")
    modes = _names(mode, MODES, "--mode")
    run_and_exit(
        "tiers",
        console,
        lambda folder: _run(modes, names, folder, console),
        lambda found: (_conclude(found, console, json_path), False),
        keep=keep,
    )


def prompt() -> str:
    """The text that is sent: more than 1,500 tokens."""
    return _PROMPT.read_text(encoding="utf-8").rstrip("\n")


def _names(given: str, known: Collection[str], option: str) -> list[str]:
    names = [name.strip() for name in given.split(",") if name.strip()]
    if not names or not set(names) <= set(known):
        raise typer.BadParameter(f"{given!r}; known: {', '.join(known)}", param_hint=option)
    return names


def _run(modes: list[str], names: list[str], folder: Path, console: Console) -> dict[str, tuple[Runs, Reference]]:
    if "turboquant" in names:
        require_plugin()
    steps = Steps(console, 1 + sum(STEPS[mode][name] for mode in modes for name in names))
    with steps.step("the model") as progress:
        model = prepare_model(progress=progress)
    plan = Plan(model, prompt(), folder)
    found = {}
    for mode in modes:
        runs = {name: run(mode, name, plan, steps) for name in names}
        if "naive" in runs:
            reference = dict(runs["naive"].held)
        else:
            with RedisServer(folder) as redis:
                reference = tier_report.uncompressed(runs["turboquant"], _bytes_per_token(model), redis)
        found[mode] = (runs, reference)
    return found


def _bytes_per_token(model: Path) -> int:
    """K and V of a token in bf16, from the model's config."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return int(config["num_hidden_layers"] * 2 * config["num_key_value_heads"] * head_dim * 2)


def _conclude(found: dict[str, tuple[Runs, Reference]], console: Console, json_path: Path | None) -> int:
    """Print the tables and the checks, write the JSON; return the exit status."""
    results = [
        check for mode, (runs, reference) in found.items() for check in tier_report.checks(mode, runs, reference)
    ]
    for mode, (runs, reference) in found.items():
        console.print()
        console.print(tier_report.table(mode, runs, reference))
        for name, one in runs.items():
            grown = f"{one.growth_per_prompt:,.0f} more for each prompt"
            console.print(f"{mode}, {name}: the process holds {one.memory:,} bytes of memory, {grown}", highlight=False)
    for check in results:
        word, style = ("PASS", "green") if check.passed else ("FAIL", "bold red")
        console.print(f"{word}  {check.name}: {check.seen}", style=style, highlight=False)
    if json_path:
        measured = {mode: tier_report.as_json(runs, reference) for mode, (runs, reference) in found.items()}
        content = where() | {"modes": measured, "checks": [vars(check) for check in results]}
        json_path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return 0 if all(check.passed for check in results) else FAILED


if __name__ == "__main__":
    app()
