"""What the demo says at its end: the table, the checks, the JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from rich.table import Table

from benchmarks.deployment import CHUNK_TOKENS
from benchmarks.faults import EXPECTED_REASONS, Faults
from benchmarks.measure import Run
from benchmarks.samples import Check, where

__all__ = ["MIN_RATIO", "as_json", "checks", "first_words", "table"]

MIN_RATIO = 3.7
"""How many times fewer bytes than naive bf16 the turboquant files must have, as stored, at head_dim 64."""


def checks(runs: Mapping[str, Run], *, min_ratio: float = MIN_RATIO) -> list[Check]:
    """Return what is required of these runs; comparisons with naive only where it was run."""
    out: list[Check] = []
    naive = runs.get("naive")
    if naive and "turboquant" in runs:
        ratio = naive.stored.bytes / max(1, runs["turboquant"].stored.bytes)
        name = f"turboquant stores at least {min_ratio}x fewer bytes than naive"
        out.append(Check(name, ratio >= min_ratio, f"{ratio:.2f}x"))
    for run in runs.values():
        wanted, whose = run.cold.prompt_tokens // CHUNK_TOKENS * CHUNK_TOKENS, "all full chunks"
        if naive and run is not naive:
            wanted, whose = naive.hit_tokens[0], "as many as naive"
        seen = ", ".join(map(str, run.hit_tokens))
        out.append(
            Check(f"{run.serde}: each hit finds {wanted} tokens, {whose}", set(run.hit_tokens) == {wanted}, seen)
        )
    for run in runs.values():
        seen = f"{run.ttft_hit:.2f} s against {run.cold.ttft_s:.2f} s"
        out.append(Check(f"{run.serde}: first token from disk sooner than cold", run.ttft_hit < run.cold.ttft_s, seen))
    for run in runs.values():
        if run.faults is not None:
            out += _fault_checks(run.serde, run.faults)
    return out


def _fault_checks(serde: str, faults: Faults) -> list[Check]:
    """Three damaged files: three misses in metrics and log, each with its reason, and an answer all the same."""
    seen = ", ".join(f"{count} {reason}" for reason, count in sorted(faults.misses.items())) or "none"
    counted = faults.misses == EXPECTED_REASONS
    logged = all(sum(f"reason {reason} " in line for line in faults.log_lines) == 1 for reason in EXPECTED_REASONS)
    answered = bool(faults.answer.text) and faults.healthy and faults.hit_tokens < faults.answer.prompt_tokens
    return [
        Check(
            f"{serde}: a flipped byte, a short and a foreign file are three misses, counted by reason", counted, seen
        ),
        Check(f"{serde}: the server's log names each of them", logged, f"{len(faults.log_lines)} lines"),
        Check(
            f"{serde}: answered by recomputing, and both processes go on",
            answered,
            f"{faults.hit_tokens} tokens from disk, {faults.answer.ttft_s:.2f} s, {first_words(faults.answer.text)!r}",
        ),
    ]


def table(runs: Mapping[str, Run]) -> Table:
    """Return the table of all runs, one serde a row."""
    out = Table(title="One prompt, bf16, from disk", title_justify="left")
    out.add_column("serde")
    for head in ("bytes on disk", "ratio", "hit tokens", "TTFT cold", "TTFT hit (min-max)"):
        out.add_column(head, justify="right", no_wrap=True)
    out.add_column("answer, cold / hit", overflow="fold")
    naive = runs.get("naive")
    for run in runs.values():
        low, high = run.ttft_hit_range
        out.add_row(
            run.serde,
            f"{run.stored.bytes:,}",
            f"{naive.stored.bytes / max(1, run.stored.bytes):.2f}" if naive else "-",
            " ".join(str(tokens) for tokens in sorted(set(run.hit_tokens))),
            f"{run.cold.ttft_s:.2f} s",
            f"{run.ttft_hit:.2f} s ({low:.2f}-{high:.2f})",
            f"{first_words(run.cold.text)} / {first_words(run.hits[-1].text)}",
        )
    return out


def as_json(runs: Mapping[str, Run], results: Sequence[Check]) -> dict[str, object]:
    """Return everything that was measured, with the host and the versions."""
    return where() | {
        "runs": {name: asdict(run) | {"ttft_hit_median_s": run.ttft_hit} for name, run in runs.items()},
        "checks": [asdict(check) for check in results],
    }


def first_words(text: str, count: int = 7) -> str:
    """The first words of an answer."""
    return " ".join(text.split()[:count])
