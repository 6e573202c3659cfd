"""README's tables of `make demo` and `make demo-tiers`, from benchmarks/results/demo.json and tiers.json.

The demos write there when they are told to: DEMO_ARGS="--json benchmarks/results/demo.json", or tiers.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from benchmarks.doc_sections import markdown_table, paragraph
from benchmarks.samples import cores

__all__ = ["readme"]

_TIERS = {"ram": "CPU RAM (bytes held)", "disk": "disk (allocated blocks)", "redis": "Redis (`MEMORY USAGE`)"}

Results = Mapping[str, Any]


def readme(files: Mapping[str, Results]) -> dict[str, str]:
    """Those tables of README.md for which there is a file."""
    makers = {"demo": _demo, "tiers": _tiers}
    return {name: "\n".join(makers[name](results)) for name, results in files.items()}


def _demo(results: Results) -> list[str]:
    runs = results["runs"]
    naive = runs["naive"]["stored"]["bytes"]
    rows = []
    for name, run in runs.items():
        times = [hit["ttft_s"] for hit in run["hits"]]
        rows.append([
            name, f"{run['stored']['bytes']:,}", f"{naive / run['stored']['bytes']:.2f}×",
            f"{min(run['hit_tokens']):,}",
            f"{run['cold']['ttft_s']:.1f} s", f"{median(times):.2f} s ({min(times):.2f}–{max(times):.2f})",
        ])  # fmt: skip
    tokens = next(iter(runs.values()))["cold"]["prompt_tokens"]
    return [
        paragraph(
            f"What `make demo` found ({results['host']['cpu']}, {cores(results)}; {tokens:,} tokens, chunks of",
            "256, hits",
            "from files in the page cache, median of three):",
        ),
        "",
        *markdown_table(("serde", "bytes on disk", "fewer", "hit tokens", "TTFT cold", "TTFT hit"), rows),
    ]


def _tiers(results: Results) -> list[str]:
    mode = results["modes"]["in-process"]
    held, runs = mode["uncompressed"], mode["runs"]
    rows = []
    for tier, title in _TIERS.items():
        ours = runs["turboquant"]["held"][tier]["bytes"]
        later = [_later(runs, name, tier) for name in ("naive", "turboquant")]
        shown = " / ".join(later) if any(later) else ""
        rows.append([title, f"{held[tier]:,}", f"{ours:,}", f"{held[tier] / ours:.2f}×", shown])
    return [
        paragraph(
            f"What `make demo-tiers` found ({results['host']['cpu']}, {cores(results)}; the same prompt,",
            "LMCache inside the",
            "engine, `LMCACHE_SERDE=turboquant` as the only difference):",
        ),
        "",
        *markdown_table(
            ("tier", "naive", "turboquant", "fewer", "hit tokens after a restart, naive / turboquant"), rows
        ),
    ]


def _later(runs: Mapping[str, Any], name: str, tier: str) -> str:
    hit = runs[name]["after_restart"].get(tier) if name in runs else None
    return f"{hit['tokens']:,}" if hit else ""
