"""What bench_put says: a table for a terminal, and from its results file the section of docs/benchmarks.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from benchmarks.doc_sections import markdown_table, paragraph
from benchmarks.samples import check_lines, host_line, rich_table

__all__ = ["readme", "section", "table"]

_HEADS = ("way", "ms a chunk", "of encoding there")

Results = Mapping[str, Any]


def _cells(results: Results) -> list[list[str]]:
    cells = []
    for row in results["rows"]:
        held, share = row["held_ms"], row["share"]
        rate = f"{held['p50']:.3f} ({held['p20']:.3f}–{held['p80']:.3f})"
        cells.append([row["way"], rate, f"{share['p50']:.2%} ({share['p20']:.2%}–{share['p80']:.2%})"])
    return cells


def table(results: Results) -> Table:
    """For a terminal."""
    return rich_table(f"The engine's thread is held, {_what(results)}", _HEADS, _cells(results))


def _what(results: Results) -> str:
    s = results["settings"]
    return (
        f"calls of {s['chunks']} chunks of {s['tokens']} tokens, {s['layers']} layers, {s['heads']} heads of "
        f"{s['head_dim']} ({s['chunk_bytes']:,} bytes each), {s['rounds']} rounds"
    )


def section(files: Mapping[str, Results]) -> str:
    """The section of docs/benchmarks.md."""
    results = files["put"]
    lines = [
        "## What a store call costs the engine: `make bench-put`", "",
        paragraph(
            "How long the calling thread is held when LMCache stores a prompt in process, beside encoding the same",
            f"chunks in that thread: {_what(results)}, tiers {', '.join(results['settings']['tiers'])}. Milliseconds a",
            "chunk, median (20th to 80th percentile) of the rounds; every round takes both ways, and shares are within",
            "a round.",
        ), "",
        *markdown_table(_HEADS, _cells(results)), "",
        *check_lines(results["checks"]), "",
        host_line(results),
    ]  # fmt: skip
    return "\n".join(lines)


def readme(files: Mapping[str, Results]) -> dict[str, str]:
    """The sentence of README.md."""
    results = files["put"]
    encode, call = (next(row for row in results["rows"] if row["way"] == way) for way in ("encode", "store call"))
    return {
        "put": paragraph(
            f"A store call holds the engine's thread for {call['held_ms']['p50']:.3f} ms a chunk of",
            f"{results['settings']['chunk_bytes'] / 1e6:.1f} MB, {call['share']['p50']:.1%} of the",
            f"{encode['held_ms']['p50']:.1f} ms that encoding takes (`make bench-put`).",
        )
    }
