"""What bench_capacity says: tables, checks, results file; from that file plot and section of docs/benchmarks.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
from rich.table import Table

from benchmarks.capacity.fill import Filled
from benchmarks.capacity.replay import Replayed
from benchmarks.capacity.trace import Request, TraceSettings
from benchmarks.doc_sections import markdown_table, paragraph
from benchmarks.samples import Check, axes, check_lines, host_line, rich_table, write_results
from benchmarks.transfer.chunks import Shape

__all__ = ["Result", "checks", "plots", "readme", "section", "tables", "write"]

MIN_FEWER = 3.7
NAIVE, OURS = "naive", "TQ-Offload"
_GIB, _README_GIB = 1 << 30, 16
_FILL_HEADS = ("tier", "way", "budget, bytes", "chunks", "tokens", "× naive", "bytes of values", "seen from outside")
_HIT_HEADS = ("budget, GiB", "hit rate, naive", "hit rate, TQ-Offload", "tokens computed, naive", "TQ-Offload", "fewer")


@dataclass(frozen=True)
class Result:
    """All that was found; replays by way and budget in GiB."""

    shape: Shape
    filled: Sequence[Filled]
    settings: TraceSettings
    trace: Sequence[Request]
    sizes: Mapping[str, int]
    replays: Mapping[tuple[str, float], Replayed]
    unlimited: Replayed
    on_disk: Sequence[tuple[str, Replayed, Replayed]]
    seconds: float

    def ratio(self, tier: str) -> float:
        """Times the tokens in the same budget."""
        tokens = {one.way: one.tokens for one in self.filled if one.tier == tier}
        return tokens[OURS] / tokens[NAIVE]


def _fill_rows(filled: Sequence[Filled]) -> list[list[str]]:
    tokens = {(one.tier, one.way): one.tokens for one in filled}
    return [
        [
            one.tier, one.way, f"{one.budget:,}", f"{one.chunks:,}", f"{one.tokens:,}",
            f"{tokens[one.tier, OURS] / tokens[one.tier, NAIVE]:.2f}×" if one.way == OURS else "",
            f"{one.nbytes:,}", f"{one.outside:,}",
        ]
        for one in filled
    ]  # fmt: skip


def _hit_rows(replays: Mapping[tuple[str, float], Replayed]) -> list[list[str]]:
    rows = []
    for budget in _budgets(replays):
        naive, ours = (replays[way, budget] for way in (NAIVE, OURS))
        left = [one.prompt_tokens - one.hit_tokens for one in (naive, ours)]
        row = [f"{budget:g}", f"{naive.hit_rate:.1%}", f"{ours.hit_rate:.1%}", f"{left[0]:,}", f"{left[1]:,}"]
        rows.append([*row, f"{left[0] / left[1]:.2f}×"])
    return rows


def _budgets(replays: Mapping[tuple[str, float], Replayed]) -> list[float]:
    """In GiB."""
    return list(dict.fromkeys(budget for _, budget in replays))


def tables(result: Result) -> list[Table]:
    """For a terminal."""
    title = f"Token-level prefix hit rate, {len(result.trace):,} requests; unlimited: {result.unlimited.hit_rate:.1%}"
    return [
        rich_table(
            "What a budget holds when it evicts the first chunk", _FILL_HEADS, _fill_rows(result.filled), texts=2
        ),
        rich_table(title, _HIT_HEADS, _hit_rows(result.replays)),
    ]


def checks(result: Result) -> list[Check]:
    """What must hold."""
    out = []
    for tier in dict.fromkeys(one.tier for one in result.filled):
        ratio = result.ratio(tier)
        name = f"{tier}: at least {MIN_FEWER}x the tokens in the same budget"
        out.append(Check(name, ratio >= MIN_FEWER, f"{ratio:.2f}x"))
    rates = [(result.replays[NAIVE, b].hit_rate, result.replays[OURS, b].hit_rate) for b in _budgets(result.replays)]
    worse = sum(ours < naive for naive, ours in rates)
    out.append(Check("no budget has a lower hit rate than naive", not worse, f"{worse} of {len(rates)} lower"))
    agree = all(disk == memory for _, disk, memory in result.on_disk)
    seen = ", ".join(f"{way} {disk.hit_rate:.1%} / {memory.hit_rate:.1%}" for way, disk, memory in result.on_disk)
    out.append(Check("disk and memory stores replay alike", agree, seen))
    return out


def write(result: Result, held: Sequence[Check]) -> None:
    """Write benchmarks/results/capacity.json and .csv."""
    rows: list[dict[str, Any]] = [{"part": "fill", **asdict(one)} for one in result.filled]
    for (way, budget), one in result.replays.items():
        row = {"part": "replay", "tier": "memory", "way": way, "budget": int(budget * _GIB)}
        rows.append({**row, **asdict(one), "hit_rate": one.hit_rate})
    lengths = np.quantile([one.tokens for one in result.trace], (0.2, 0.5, 0.8))
    content = {
        "shape": asdict(result.shape), "trace": asdict(result.settings), "requests": len(result.trace),
        "prompt_tokens": dict(zip(("p20", "p50", "p80"), map(float, lengths), strict=True)),
        "value_bytes": dict(result.sizes), "unlimited": asdict(result.unlimited), "seconds": result.seconds,
        "checks": [asdict(one) for one in held],
    }  # fmt: skip
    write_results("capacity", content, rows)


def _read(results: Mapping[str, Any]) -> tuple[list[Filled], dict[tuple[str, float], Replayed], Replayed]:
    """What was filled, the replays by way and budget in GiB, and the one without limit, of a results file."""
    rows = results["rows"]
    filled = [Filled(**{k: v for k, v in row.items() if k != "part"}) for row in rows if row["part"] == "fill"]
    replays = {(row["way"], row["budget"] / _GIB): _replayed(row) for row in rows if row["part"] == "replay"}
    return filled, replays, _replayed(results["unlimited"])


def _replayed(row: Mapping[str, Any]) -> Replayed:
    return Replayed(**{field.name: row[field.name] for field in fields(Replayed)})


def plots(files: Mapping[str, Any]) -> dict[str, Any]:
    """Hit rate against the budget."""
    _, replays, unlimited = _read(files["capacity"])
    budgets, model = _budgets(replays), files["capacity"]["shape"]["model"]
    figure, (left,) = axes(7, 4)
    for way, colour in ((NAIVE, "#5b6770"), (OURS, "#0b6e4f")):
        rates = [100 * replays[way, budget].hit_rate for budget in budgets]
        left.plot(budgets, rates, "o-", color=colour, label=way, markersize=4)
    left.axhline(100 * unlimited.hit_rate, color="#c2571a", linewidth=0.8, label="unlimited")
    left.set_xscale("log", base=2)
    left.set_xticks(budgets, [f"{budget:g}" for budget in budgets])
    left.minorticks_off()
    left.set(xlabel=f"budget, GiB ({model}, bf16)", ylabel="tokens of prompts found, %", ylim=(0, 100))
    left.legend(frameon=False)
    return {"capacity-hit-rate": figure}


def section(files: Mapping[str, Any]) -> str:
    """The section of docs/benchmarks.md."""
    results = files["capacity"]
    filled, replays, unlimited = _read(results)
    s, sizes, lengths = results["trace"], results["value_bytes"], results["prompt_tokens"]
    shape = results["shape"]
    lines = [
        "## Prefixes in a budget: `make bench-capacity`", "",
        paragraph(
            f"Chunks of {shape['tokens']} tokens of {shape['model']} ({sizes[NAIVE]:,} bytes as they are,",
            f"{sizes[OURS]:,} packed). Every key has a frame of its own; a store is filled until a put evicts its",
            "first chunk. Seen from outside: growth of the process's memory, allocated blocks of the files.",
        ), "",
        *markdown_table(_FILL_HEADS, _fill_rows(filled)), "",
        paragraph(
            f"Hit rate: a generated trace (seed {s['seed']}) of {s['conversations']:,} conversations of {s['users']}",
            f"users (Zipf {s['zipf']}), {len(s['systems'])} shared system prompts, a context for each user, growing",
            f"prefixes; {results['requests']:,} requests, prompts of {lengths['p50']:,.0f} tokens",
            f"({lengths['p20']:,.0f}–{lengths['p80']:,.0f}). The real memory store evicts by last use and counts real",
            "sizes; its values share one buffer. Hits are whole chunks from the first token on without a gap, as a",
            "share of all tokens of prompts; an answer is stored with the next turn.",
            f"A store without limit finds {unlimited.hit_rate:.1%}.",
        ), "",
        *markdown_table(_HIT_HEADS, _hit_rows(replays)), "",
        "![Hit rate against the budget](capacity-hit-rate.svg)", "",
        *check_lines(results["checks"]), "",
        f"{results['seconds']:.0f} s. {host_line(results)}",
    ]  # fmt: skip
    return "\n".join(lines)


def readme(files: Mapping[str, Any]) -> dict[str, str]:
    """The sentence of README.md."""
    results = files["capacity"]
    filled, replays, _ = _read(results)
    tokens = {(one.tier, one.way): one.tokens for one in filled}
    times = [
        f"{tokens[tier, OURS] / tokens[tier, NAIVE]:.2f}× {'on' if tier == 'disk' else 'in'} {tier}"
        for tier, way in tokens
        if way == OURS
    ]
    budget = min((b for b in _budgets(replays)), key=lambda b: abs(b - _README_GIB))
    naive, ours = (replays[way, budget] for way in (NAIVE, OURS))
    left = [one.prompt_tokens - one.hit_tokens for one in (naive, ours)]
    text = paragraph(
        f"Tokens of prefix in the same budget ({results['shape']['model']}): {', '.join(times)}. A generated trace of",
        f"{results['requests']:,} requests, {budget:g} GiB: {naive.hit_rate:.1%} of the prompts' tokens are found",
        f"without and {ours.hit_rate:.1%} with TQ-Offload; {left[0] / left[1]:.2f} times fewer are computed",
        "(`make bench-capacity`).",
    )
    return {"capacity": text}
