"""What bench_growth says: tables, checks, results file; from that file plots and section of docs/benchmarks.md."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from benchmarks.doc_sections import markdown_table, paragraph
from benchmarks.growth.cases import FITTED, SWEEPS
from benchmarks.growth.fit import Line
from benchmarks.growth.result import WAYS, Result, read
from benchmarks.growth.work import Work
from benchmarks.samples import Check, Quantiles, axes, check_lines, host_line, rich_table, write_results

__all__ = ["WAYS", "Result", "checks", "plots", "section", "tables", "write"]

SLOPE = (0.9, 1.1)
MOST_EXTRA = 2 << 20
_MIB = 1 << 20
_COLOURS = {"encode": "#c2571a", "decode": "#0b6e4f"}

Cells = tuple[list[str], list[list[str]]]


def checks(result: Result) -> list[Check]:
    """What must hold: times in proportion to the work where it dominates, memory within a bound at every size."""
    out = []
    for (sweep, way), line in result.lines.items():
        first = result.of(sweep)[line.first].size
        name = f"{way}, {sweep} from {first:,}: slope of time {SLOPE[0]} to {SLOPE[1]}"
        out.append(Check(name, SLOPE[0] <= line.slope <= SLOPE[1], f"{line.slope:.3f}; {_off(line)} off it at most"))
    for way in WAYS if result.extra else ():
        most = max(result.extra, key=lambda case: getattr(result.extra[case], way))
        seen = getattr(result.extra[most], way)
        name = f"{way}: at most {MOST_EXTRA / _MIB:g} MiB of memory beyond source and destination at every size"
        text = f"{seen / _MIB:.2f} MiB ({most.sweep} {most.size:,}, {most.nbytes / 1e6:,.0f} MB of KV)"
        out.append(Check(name, seen <= MOST_EXTRA, text))
    return out


def _off(line: Line) -> str:
    return f"{100 * line.worst:.1f} %"


def _lines(result: Result) -> Cells:
    heads = ["what grows", "call", "sizes", "line from", "slope", "off it, worst", "fixed cost, µs", "rest, GB/s"]
    rows = []
    for (sweep, way), line in result.lines.items():
        cases = result.of(sweep)
        sizes = f"{cases[0].size:,}–{cases[-1].size:,}"
        fitted = [f"{cases[line.first].size:,}", f"{line.slope:.3f}", _off(line)]
        rows.append([sweep, way, sizes, *fitted, f"{line.fixed_s * 1e6:,.0f}", f"{line.rate / 1e9:.2f}"])
    return heads, rows


def _sizes(result: Result) -> Cells:
    heads = [
        "what grows", "size", "KV, MB", "frame, fewer", "encode, ms", "decode, ms", "encode GB/s", "decode GB/s",
        "encode, extra KiB", "decode, extra KiB",
    ]  # fmt: skip
    rows = []
    for case in result.times:
        frames = case.chunks * Work.frame_bytes(case)
        extra = result.extra.get(case)
        rows.append(
            [
                case.sweep, f"{case.size:,}", f"{case.nbytes / 1e6:,.1f}", f"{case.nbytes / frames:.2f}×",
                *(_ms(result.time(case, way)) for way in WAYS),
                *(f"{case.nbytes / result.time(case, way).p50 / 1e9:.2f}" for way in WAYS),
                *(f"{getattr(extra, way) / 1024:,.0f}" if extra else "–" for way in WAYS),
            ]
        )  # fmt: skip
    return heads, rows


def _ms(seconds: Quantiles) -> str:
    return str(Quantiles(*(1e3 * value for value in (seconds.p20, seconds.p50, seconds.p80))))


def _threads(result: Result) -> Cells:
    """By how many times more bytes a second than with one thread."""
    ones, each = SWEEPS[-2:]
    heads = ["threads", *(f"{way}, {what.removeprefix('threads, ')}" for what in (ones, each) for way in WAYS)]
    rows = []
    for number, case in enumerate(result.of(ones)):
        row = [f"{case.size:,}"]
        for sweep in (ones, each):
            cases = result.of(sweep)
            for way in WAYS:
                base, now = (c.nbytes / result.time(c, way).p50 for c in (cases[0], cases[number]))
                row.append(f"{now / base:.2f}×")
        rows.append(row)
    return heads, rows


def tables(result: Result) -> list[Table]:
    """For a terminal."""
    title = "Whole frames, bf16, 4 bits; median (20th–80th percentile)"
    return [
        rich_table(title, *_sizes(result)),
        rich_table("Straight lines through the medians, waits for a core left out", *_lines(result), texts=2),
        rich_table("Bytes a second, times those of one thread", *_threads(result)),
    ]


def write(result: Result, held: Sequence[Check]) -> None:
    """Write benchmarks/results/growth.json and .csv."""
    rows = list(_rows(result))
    lines = [{"sweep": sweep, "way": way, **asdict(line)} for (sweep, way), line in result.lines.items()]
    run = {"rounds": result.rounds, "seconds": result.seconds, "load": list(result.load)}
    write_results("growth", {"run": run, "lines": lines, "checks": [asdict(one) for one in held]}, rows)


def plots(files: Mapping[str, Any]) -> dict[str, Any]:
    """Times by size; memory by size, where it was measured."""
    result = read(files["growth"])
    out = {"growth-time": _plot_times(result)}
    return {**out, "growth-memory": _plot_memory(result)} if result.extra else out


def section(files: Mapping[str, Any]) -> str:
    """The section of docs/benchmarks.md."""
    return "\n".join(_markdown(read(files["growth"]), files["growth"]))


def _rows(result: Result) -> Iterable[dict[str, Any]]:
    for case in result.times:
        shape = {name: getattr(case.shape, name) for name in ("layers", "tokens", "heads", "head_dim")}
        counts = {"threads": case.threads, "chunks": case.chunks, "kv_bytes": case.nbytes}
        row = {"sweep": case.sweep, "size": case.size, **shape, **counts, "frame_bytes": Work.frame_bytes(case)}
        for way in WAYS:
            row[f"{way}_s"] = asdict(result.time(case, way))
            if case.threads == case.chunks == 1:
                row[f"{way}_alone_s"] = asdict(result.time(case, f"{way}_alone"))
            row[f"{way}_extra_bytes"] = getattr(result.extra.get(case), way, None)
        yield row


def _plot_times(result: Result) -> Any:
    figure, panels = axes(3.3 * len(FITTED), 3.4, len(FITTED))
    for panel, sweep in zip(panels, FITTED, strict=True):
        cases = result.of(sweep)
        sizes = [case.size for case in cases]
        for way in WAYS:
            seconds, colour = [result.time(case, way) for case in cases], _COLOURS[way]
            panel.plot(sizes, [1e3 * q.p50 for q in seconds], "o-", color=colour, markersize=3, label=way)
            panel.fill_between(
                sizes, [1e3 * q.p20 for q in seconds], [1e3 * q.p80 for q in seconds],
                color=colour, alpha=0.2, linewidth=0,
            )  # fmt: skip
            last = 1e3 * seconds[-1].p50
            straight = [last * size / sizes[-1] for size in sizes]
            panel.plot(
                sizes, straight, "--", color="#5b6770", linewidth=0.8, label="slope 1" if way == "decode" else ""
            )
        panel.set(xscale="log", yscale="log", xlabel=sweep)
        panel.grid(which="major", alpha=0.2)
    panels[0].set_ylabel("a call, ms")
    panels[0].legend(frameon=False)
    return figure


def _plot_memory(result: Result) -> Any:
    figure, (panel,) = axes(6, 3.4)
    for way in WAYS:
        points = sorted((case.nbytes / 1e6, getattr(extra, way) / _MIB) for case, extra in result.extra.items())
        panel.plot(*zip(*points, strict=True), "o", color=_COLOURS[way], markersize=3, label=way)
    panel.axhline(MOST_EXTRA / _MIB, color="#5b6770", linestyle="--", linewidth=0.8, label="bound")
    panel.set(xscale="log", xlabel="KV of a call, MB", ylabel="extra memory at the peak, MiB")
    panel.set_ylim(bottom=0)
    panel.legend(frameon=False)
    return figure


def _markdown(result: Result, results: Mapping[str, Any]) -> list[str]:
    kept = ["![Extra memory against the size of a chunk](growth-memory.svg)", ""] if result.extra else []
    refused = "" if result.extra else "Not measured here: the kernel does not let the peak be reset. "
    return [
        "## How cost grows: `make bench-growth`", "",
        paragraph(
            "Encoding and decoding of whole frames, header and checksum included, into buffers that are there, while",
            "one of tokens, layers, heads, head_dim and threads grows. Normal values with a mean for every channel, K",
            "and V of 4 bits, one thread where nothing else is said. Every round measures every size; median",
            f"(20th–80th percentile) of {result.rounds} rounds, kernels warm. GB/s of uncompressed bf16 KV.",
        ), "",
        paragraph(
            "Fixed cost: what a call takes that does not grow, from seconds = fixed + bytes / rate through all sizes,",
            "each of the same weight. Slope: of log time against log size, from the first size in which the fixed cost",
            "is a tenth of the time at most; 1 is in proportion. Off it: the largest distance of a median from that",
            "straight line. Both go through times less what a call waited for a core that another process had (run",
            "delay in `/proc/self/task/*/schedstat`; none on a quiet machine); all other figures are as the clock has",
            "them.",
        ), "",
        *markdown_table(*_lines(result)), "",
        "![Time of a call against tokens, layers and heads](growth-time.svg)", "",
        paragraph(
            "Bytes a second with more threads, times those of one: on one chunk (`TurboQuantCodec(threads=n)`), and",
            "with a chunk each on so many threads:",
        ), "",
        *markdown_table(*_threads(result)), "",
        paragraph(
            "All sizes. Extra: resident memory at the peak of a call beyond that before it, with source, frame and",
            "destination there already, in a process of its own; the most of three calls.",
            f"{refused}head_dim has no slope: its sizes take different kernels.",
        ), "",
        *markdown_table(*_sizes(result)), "", *kept,
        *check_lines(results["checks"]), "",
        f"{result.seconds:.0f} s; load average {result.load[0]:.1f} before, {result.load[1]:.1f} after.",
        host_line(results),
    ]  # fmt: skip
