"""What bench_guard says: a table for a terminal, and from its results file the section of docs/benchmarks.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from benchmarks.doc_sections import markdown_table, paragraph
from benchmarks.samples import check_lines, host_line, rich_table

__all__ = ["section", "table"]

_HEADS = ("model", "preset", "bits", "KL predicted", "KL measured", "off", "perplexity", "recommended")

Results = Mapping[str, Any]


def _cells(results: Results) -> list[list[str]]:
    return [
        [
            row["model"], row["preset"], f"{row['bits']:.2f}", f"{row['predicted']:.4f}",
            f"{row['measured']:.4f} ± {row['s.e.']:.4f}", f"{row['off']:+.0%}", f"{row['perplexity']:+.1%}",
            "yes" if row["recommended"] else "",
        ]
        for row in results["rows"]
    ]  # fmt: skip


def table(results: Results) -> Table:
    """For a terminal."""
    return rich_table("tq-offload check, and measured on another text", _HEADS, _cells(results), texts=2)


def section(files: Mapping[str, Results]) -> str:
    """The section of docs/benchmarks.md."""
    results = files["guard"]
    lines = [
        "## What `tq-offload check` predicts: `make bench-guard`", "",
        paragraph(
            "SmolLM2-135M as it is, and with constant biases on two RoPE pairs of every head, in rms of the keys.",
            "Predicted: by `tq-offload check` from its default text. Measured: on windows of alice.txt, by the code of",
            "`make bench-quality`; KL to the unquantised model in nats a token ± its standard error over the tokens,",
            "and change of the perplexity.",
        ), "",
        *markdown_table(_HEADS, _cells(results)), "",
        *check_lines(results["checks"]), "",
        host_line(results),
    ]  # fmt: skip
    return "\n".join(lines)
