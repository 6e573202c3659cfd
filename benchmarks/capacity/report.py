"""What bench_capacity says: tables, checks, files, plot, section of docs/benchmarks.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.table import Table

from benchmarks.capacity.fill import Filled
from benchmarks.capacity.replay import Replayed
from benchmarks.capacity.trace import Request, TraceSettings
from benchmarks.doc_sections import markdown_table, write_section
from benchmarks.report import Check
from benchmarks.samples import axes, host_line, rich_table, save_svg, write_results
from benchmarks.transfer.chunks import Shape

__all__ = ["Result", "checks", "tables", "write"]

MIN_FEWER = 3.7
NAIVE, OURS = "naive", "TQ-Offload"
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

    @property
    def budgets(self) -> list[float]:
        """In GiB."""
        return list(dict.fromkeys(budget for _, budget in self.replays))

    def ratio(self, tier: str) -> float:
        """Times the tokens in the same budget."""
        tokens = {one.way: one.tokens for one in self.filled if one.tier == tier}
        return tokens[OURS] / tokens[NAIVE]


def _fill_rows(result: Result) -> list[list[str]]:
    return [
        [
            one.tier, one.way, f"{one.budget:,}", f"{one.chunks:,}", f"{one.tokens:,}",
            f"{result.ratio(one.tier):.2f}×" if one.way == OURS else "", f"{one.nbytes:,}", f"{one.outside:,}",
        ]
        for one in result.filled
    ]  # fmt: skip


def _hit_rows(result: Result) -> list[list[str]]:
    rows = []
    for budget in result.budgets:
        naive, ours = (result.replays[way, budget] for way in (NAIVE, OURS))
        left = [one.prompt_tokens - one.hit_tokens for one in (naive, ours)]
        row = [f"{budget:g}", f"{naive.hit_rate:.1%}", f"{ours.hit_rate:.1%}", f"{left[0]:,}", f"{left[1]:,}"]
        rows.append([*row, f"{left[0] / left[1]:.2f}×"])
    return rows


def tables(result: Result) -> list[Table]:
    """For a terminal."""
    title = f"Token-level prefix hit rate, {len(result.trace):,} requests; unlimited: {result.unlimited.hit_rate:.1%}"
    return [
        rich_table("What a budget holds when it evicts the first chunk", _FILL_HEADS, _fill_rows(result), texts=2),
        rich_table(title, _HIT_HEADS, _hit_rows(result)),
    ]


def checks(result: Result) -> list[Check]:
    """What must hold."""
    out = []
    for tier in dict.fromkeys(one.tier for one in result.filled):
        ratio = result.ratio(tier)
        name = f"{tier}: at least {MIN_FEWER}x the tokens in the same budget"
        out.append(Check(name, ratio >= MIN_FEWER, f"{ratio:.2f}x"))
    rates = [(result.replays[NAIVE, b].hit_rate, result.replays[OURS, b].hit_rate) for b in result.budgets]
    worse = sum(ours < naive for naive, ours in rates)
    out.append(Check("no budget has a lower hit rate than naive", not worse, f"{worse} of {len(rates)} lower"))
    agree = all(disk == memory for _, disk, memory in result.on_disk)
    seen = ", ".join(f"{way} {disk.hit_rate:.1%} / {memory.hit_rate:.1%}" for way, disk, memory in result.on_disk)
    out.append(Check("disk and memory stores replay alike", agree, seen))
    return out


def write(result: Result, held: Sequence[Check]) -> None:
    """Write results, plot and section."""
    rows: list[dict[str, Any]] = [{"part": "fill", **asdict(one)} for one in result.filled]
    for (way, budget), one in result.replays.items():
        row = {"part": "replay", "tier": "memory", "way": way, "budget": int(budget * (1 << 30))}
        rows.append({**row, **asdict(one), "hit_rate": one.hit_rate})
    lengths = np.quantile([one.tokens for one in result.trace], (0.2, 0.5, 0.8))
    content = {
        "shape": asdict(result.shape), "trace": asdict(result.settings), "requests": len(result.trace),
        "prompt_tokens": dict(zip(("p20", "p50", "p80"), map(float, lengths), strict=True)),
        "value_bytes": dict(result.sizes), "unlimited": asdict(result.unlimited), "seconds": result.seconds,
        "checks": [asdict(one) for one in held],
    }  # fmt: skip
    write_results("capacity", content, rows)
    _plot(result)
    write_section("capacity", _markdown(result, held, lengths))


def _plot(result: Result) -> None:
    figure, (left,) = axes(7, 4)
    for way, colour in ((NAIVE, "#5b6770"), (OURS, "#0b6e4f")):
        rates = [100 * result.replays[way, budget].hit_rate for budget in result.budgets]
        left.plot(result.budgets, rates, "o-", color=colour, label=way, markersize=4)
    left.axhline(100 * result.unlimited.hit_rate, color="#c2571a", linewidth=0.8, label="unlimited")
    left.set_xscale("log", base=2)
    left.set_xticks(result.budgets, [f"{budget:g}" for budget in result.budgets])
    left.minorticks_off()
    left.set(xlabel=f"budget, GiB ({result.shape.model}, bf16)", ylabel="tokens of prompts found, %", ylim=(0, 100))
    left.legend(frameon=False)
    save_svg(figure, "capacity-hit-rate")


def _markdown(result: Result, held: Sequence[Check], lengths: np.ndarray) -> str:
    s, sizes = result.settings, result.sizes
    lines = [
        "## Prefixes in a budget: `make bench-capacity`", "",
        f"Chunks of {result.shape.tokens} tokens of {result.shape.model} ({sizes[NAIVE]:,} bytes as they are,",
        f"{sizes[OURS]:,} packed). Every key has a frame of its own; a store is filled until a put evicts its first",
        "chunk. Seen from outside: growth of the process's memory, allocated blocks of the files.", "",
        *markdown_table(_FILL_HEADS, _fill_rows(result)), "",
        f"Hit rate: a generated trace (seed {s.seed}) of {s.conversations:,} conversations of {s.users} users (Zipf",
        f"{s.zipf}), {len(s.systems)} shared system prompts, a context for each user, growing prefixes;",
        f"{len(result.trace):,} requests, prompts of {lengths[1]:,.0f} tokens ({lengths[0]:,.0f}–{lengths[2]:,.0f}).",
        "The real memory store evicts by last use and counts real sizes; its values share one buffer. Hits are whole",
        "chunks from the first token on without a gap, as a share of all tokens of prompts; an answer is stored with",
        "the next turn.",
        f"A store without limit finds {result.unlimited.hit_rate:.1%}.", "",
        *markdown_table(_HIT_HEADS, _hit_rows(result)), "",
        "![Hit rate against the budget](capacity-hit-rate.svg)", "",
        "Checks:", "", *(f"* {'met' if c.passed else 'MISSED'}: {c.name}: {c.seen}" for c in held), "",
        f"{result.seconds:.0f} s. {host_line()}",
    ]  # fmt: skip
    return "\n".join(lines)
