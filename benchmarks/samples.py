"""What the transfer, capacity and planner benchmarks share: quantiles, result files, checks, axes of plots."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.report import Check, where

__all__ = [
    "DOCS",
    "RESULTS",
    "Quantiles",
    "axes",
    "host_line",
    "rich_table",
    "save_svg",
    "show_checks",
    "write_results",
]

_ROOT = Path(__file__).resolve().parents[1]
RESULTS, DOCS = _ROOT / "benchmarks" / "results", _ROOT / "docs"


@dataclass(frozen=True)
class Quantiles:
    """The 20th, 50th and 80th percentile of some values."""

    p20: float
    p50: float
    p80: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Quantiles:
        """Those of the values, interpolated."""
        return cls(*(float(q) for q in np.quantile(list(values), (0.2, 0.5, 0.8))))

    def __str__(self) -> str:
        return f"{self.p50:.2f} ({self.p20:.2f}–{self.p80:.2f})"


def write_results(
    name: str, content: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], folder: Path = RESULTS
) -> None:
    """Write ``name``.json, everything, and ``name``.csv, the rows; both with host and versions."""
    folder.mkdir(parents=True, exist_ok=True)
    place = where()
    text = json.dumps({**place, **content, "rows": list(rows)}, indent=1, ensure_ascii=False)
    (folder / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    same = {f"host.{key}": value for key, value in place["host"].items()}  # type: ignore[attr-defined]
    same |= {f"version.{key}": value for key, value in place["versions"].items()}  # type: ignore[attr-defined]
    flat = [{**_flat(row), **same} for row in rows]
    with (folder / f"{name}.csv").open("w", encoding="utf-8", newline="") as sink:
        writer = csv.DictWriter(sink, list(dict.fromkeys(key for row in flat for key in row)), lineterminator="\n")
        writer.writeheader()
        writer.writerows(flat)


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """One level: a mapping or Quantiles under `a` becomes `a.p20` and so on."""
    out: dict[str, Any] = {}
    for key, value in row.items():
        inner = asdict(value) if isinstance(value, Quantiles) else value
        if isinstance(inner, Mapping):
            out |= {f"{key}.{name}": one for name, one in inner.items()}
        else:
            out[key] = inner
    return out


def host_line() -> str:
    """The host and the versions in a line."""
    place: Any = where()
    versions = ", ".join(f"{name} {version}" for name, version in place["versions"].items() if version)
    return f"{place['host']['cpu']}, {place['host']['cores']} cores. {versions}."


def rich_table(title: str, heads: Sequence[str], rows: Iterable[Sequence[str]], texts: int = 1) -> Table:
    """A table for a terminal; the first ``texts`` columns are text."""
    table = Table(title=title, title_justify="left")
    for number, head in enumerate(heads):
        table.add_column(head, justify="left" if number < texts else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def show_checks(console: Console, checks: Iterable[Check]) -> bool:
    """Print the checks; return whether all are met."""
    met = True
    for check in checks:
        word, style = ("PASS", "green") if check.passed else ("FAIL", "bold red")
        console.print(f"{word}  {check.name}: {check.seen}", style=style, highlight=False)
        met = met and check.passed
    return met


def axes(width: float, height: float, columns: int = 1) -> tuple[Any, list[Any]]:
    """A figure of matplotlib and its axes, side by side."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    matplotlib.rcParams.update({"svg.hashsalt": "tq-offload", "svg.fonttype": "none", "font.size": 9})
    figure, grid = pyplot.subplots(1, columns, figsize=(width, height), layout="constrained", squeeze=False)
    for one in grid[0]:
        one.spines[["top", "right"]].set_visible(False)
    return figure, list(grid[0])


def save_svg(figure: Any, name: str) -> None:
    """Write docs/``name``.svg without a date, so that the same figures make the same file."""
    figure.savefig(DOCS / f"{name}.svg", metadata={"Date": None})
