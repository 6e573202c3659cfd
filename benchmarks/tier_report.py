"""What `benchmarks.tiers` says at its end: the table, the checks, the JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from rich.table import Table

from benchmarks.deployment import CHUNK_TOKENS, RedisServer
from benchmarks.report import MIN_RATIO, first_words
from benchmarks.samples import Check
from benchmarks.tier_runs import TIERS, Held, Hit, TierRun

__all__ = ["as_json", "checks", "table", "uncompressed"]

MIN_GROWTH_RATIO = 3.5
"""Bytes of a prompt uncompressed over the growth of the process; pages and the allocator's own needs are in that."""


def uncompressed(run: TierRun, bytes_per_token: int, redis: RedisServer) -> dict[str, Held]:
    """Return what each tier would hold of the prompt as bf16: for runs without naive.

    By arithmetic; for Redis, which needs more for a value than its length, as this server says of such values.
    """
    chunk = CHUNK_TOKENS * bytes_per_token
    held = Held(run.chunks * chunk, run.chunks)
    return {"ram": held, "disk": held, "redis": Held(run.chunks * redis.usage_of_a_value(chunk), run.chunks)}


def checks(mode: str, runs: Mapping[str, TierRun], reference: Mapping[str, Held]) -> list[Check]:
    """Return what is required of one mode's runs; ``reference`` is what the tiers hold uncompressed."""
    out = []
    for name, run in runs.items():
        out += [_hit_check(mode, name, tier, hit, run) for tier, hit in run.hits.items()]
    run = runs.get("turboquant")
    if run is None:
        return out
    for tier in run.held:
        ratio = _ratio(reference, run, tier)
        out.append(
            Check(f"{mode}: {tier} holds at least {MIN_RATIO}x fewer bytes", ratio >= MIN_RATIO, f"{ratio:.2f}x")
        )
        count = run.start_up_lines.get(tier, 0)
        out.append(Check(f"{mode}: {tier} has one line at start", count == 1, str(count)))
    if mode == "in-process":  # a server has L1 beside its tiers, uncompressed, and grows by the buffers of its threads
        ratio = reference["ram"].bytes / max(1.0, run.growth_per_prompt)
        name = f"{mode}: the process grows by at least {MIN_GROWTH_RATIO}x less than a prompt's bf16 KV"
        seen = f"{run.growth_per_prompt:,.0f} bytes a prompt, {ratio:.2f}x"
        out.append(Check(name, ratio >= MIN_GROWTH_RATIO, seen))
        out.append(
            Check(f"{mode}: no chunk stays in LMCache's uncompressed memory", run.pool == 0, f"{run.pool:,} bytes")
        )
    for tier, hit in run.after_restart.items():
        out.append(_hit_check(f"{mode}, restarted", "turboquant", tier, hit, run))
    return out


def _hit_check(mode: str, name: str, tier: str, hit: Hit, run: TierRun) -> Check:
    """All whole chunks are hit, and where our counters can tell: by that tier, and no other."""
    wanted = {other: run.chunks if other == tier else 0 for other in hit.served}
    passed = hit.tokens == run.chunks * CHUNK_TOKENS and hit.served == wanted
    served = ", ".join(f"{count} chunks by {other}" for other, count in hit.served.items() if count)
    title = f"{mode}: {name} hits {run.chunks * CHUNK_TOKENS} tokens from {tier}"
    return Check(title, passed, f"{hit.tokens}" + (f" ({served})" if served else ""))


def _ratio(reference: Mapping[str, Held], run: TierRun, tier: str) -> float:
    return reference[tier].bytes / max(1, run.held[tier].bytes)


def table(mode: str, runs: Mapping[str, TierRun], reference: Mapping[str, Held]) -> Table:
    """Return the table of one mode, a tier and codec a row."""
    out = Table(title=f"{mode}: one prompt, bf16", title_justify="left")
    for head in ("tier", "codec"):
        out.add_column(head)
    for head in ("bytes held", "ratio", "files, keys", "hit tokens", "TTFT cold", "TTFT hit", "hit tokens, restarted"):
        out.add_column(head, justify="right", no_wrap=True)
    out.add_column("answer", overflow="fold")
    for tier in TIERS:
        if "naive" not in runs:
            out.add_row(tier, "bf16, computed", f"{reference[tier].bytes:,}", "1.00", *["-"] * 6)
        for name, run in runs.items():
            live, later = run.hits.get(tier), run.after_restart.get(tier)
            shown = live or later
            out.add_row(
                tier,
                name,
                f"{run.held[tier].bytes:,}",
                f"{_ratio(reference, run, tier):.2f}",
                str(run.held[tier].entries or "-"),
                str(live.tokens) if live else "-",
                f"{run.cold.ttft_s:.2f} s",
                f"{shown.answer.ttft_s:.2f} s" if shown and shown.tokens else "-",
                str(later.tokens) if later else "-",
                first_words(shown.answer.text) if shown else "-",
            )
    return out


def as_json(runs: Mapping[str, TierRun], reference: Mapping[str, Held]) -> dict[str, object]:
    """Return everything that was measured in one mode."""
    return {
        "uncompressed": {tier: held.bytes for tier, held in reference.items()},
        "runs": {name: asdict(run) for name, run in runs.items()},
    }
