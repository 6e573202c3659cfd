"""What packing the prefix does to a model, ours beside other codecs, in one run; bits as stored.

usage: python -m benchmarks.bench_quality [--short] [--check] [--only NAME] [--gaussian-only] [--no-write]

Gaussian data against theory; SmolLM2 on three texts; SmolLM2 with biased keys; pass keys. Writes
benchmarks/results/quality.{json,csv}, docs/quality-*.svg, a section of docs/benchmarks.md and README's tables. Same
seeds and threads, same figures.
"""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from benchmarks.quality.gaussian import gaussian_rows, gaussian_table
from benchmarks.quality.peers import use_peers
from benchmarks.render_docs import update
from benchmarks.samples import write_results

PACKAGES = (
    "torch", "transformers", "lmcache", "numba", "numpy", "optimum-quanto", "hqq", "tqai", "lmcache-turbo-quant-serde",
)  # fmt: skip
THREADS = 2


def main(
    short: Annotated[
        bool, typer.Option(help="Fewer and shorter windows, two biased models, four pass keys; prints only.")
    ] = False,
    check: Annotated[bool, typer.Option(help="Fail when a check is missed.")] = False,
    only: Annotated[str, typer.Option(help="Rows whose name contains this; prints only.")] = "",
    gaussian_only: Annotated[bool, typer.Option(help="Print the table of Gaussian data and stop.")] = False,
    no_write: Annotated[bool, typer.Option("--no-write", help="Print only.")] = False,
) -> None:
    """Measure, print, write, check."""
    started, console = time.monotonic(), Console(width=None if sys.stdout.isatty() else 200)
    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    use_peers()

    def say(what: str) -> None:
        console.print(f"[dim]{time.monotonic() - started:6.0f} s[/dim]  {what}")

    gaussian = gaussian_rows()
    console.print(gaussian_table(gaussian))
    if gaussian_only:
        return
    with torch.no_grad():
        missed = _measure(console, say, started, gaussian, short=short, only=only, no_write=no_write)
    if check and missed:
        raise typer.Exit(1)


def _measure(
    console: Console, say: Any, started: float, gaussian: list[list[str]], *, short: bool, only: str, no_write: bool
) -> bool:
    """All but the Gaussian table. True if a check was missed."""
    from benchmarks.quality import biased, checks, measure, methods, report, texts

    sizes = texts.Sizes(1024, 128, 3) if short else texts.Sizes(1024, 512, 5)
    biased_sizes = texts.Sizes(1024, 256, 1 if short else 2)
    model, tokenizer = texts.load_model()
    tokens = texts.text_tokens(tokenizer)
    rows = [codec for codec in methods.codecs() if only in codec.name]
    where = texts.places(tokens, sizes, sizes.windows)
    scores = measure.on_text(model, tokens, where, sizes, rows, say)
    needle = measure.on_pass_keys(model, tokenizer, tokens["gpl-3.txt"], rows, scores, short, say)
    console.print(report.quality_table(scores))
    rms = biased.key_rms(model, tokens[texts.TUNED_ON][:512])
    some, chosen = methods.under_bias(rows), biased.variants(short)
    few = texts.places(tokens, biased_sizes, biased_sizes.windows)
    models = list(measure.on_biased_models(model, rms, chosen, tokens, few, biased_sizes, some, say))
    console.print(report.bias_table(models))
    if only:
        return False
    held = checks.checks(scores, models)
    for one in held:
        console.print(
            f"{'met   ' if one.met else '[bold red]MISSED[/bold red]'} ({one.number}) {one.what}", highlight=False
        )
    settings = {
        "short": short, "sizes": asdict(sizes), "biased_sizes": asdict(biased_sizes),
        "chunk_tokens": methods.CHUNK_TOKENS, "threads": THREADS,
        "windows": [asdict(place) for place in where],
        "seeds": {"rotation": 0, "peers": "their own defaults", "biases": 7, "pass keys": 11, "gaussian": 1},
        "seconds": round(time.monotonic() - started),
    }  # fmt: skip
    if not (short or no_write):
        _write(settings, gaussian, scores, models, needle, held)
    say("done")
    return not all(one.met for one in held)


def _write(settings: Any, gaussian: Any, scores: Any, models: Any, needle: Any, held: Any) -> None:
    content = {
        "settings": settings,
        "biased": [asdict(m) for m in models],
        "pass_keys": needle,
        "gaussian": gaussian,
        "checks": [asdict(c) for c in held],
    }
    rows = [asdict(s) | {"attention_mean": s.attention_mean} for s in scores]
    write_results("quality", content, rows, packages=PACKAGES)
    update("quality")


if __name__ == "__main__":
    typer.run(main)
