"""What TurboQuantPress saves and costs: resident bytes and peaks, predictions, decoding speed; on CPU.

usage: python -m benchmarks.bench_press [--only memory,quality,speed] [--check] [--no-write]

Writes benchmarks/results/press.{json,csv}, docs/press-memory.svg, a section of docs/benchmarks.md and the tables of
README.md. Runs with --only, --tokens or --dtype print only.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from rich.console import Console

from benchmarks import press_report
from benchmarks.press_caches import bf16_arithmetic
from benchmarks.press_curves import LENGTHS, curves
from benchmarks.press_memory import CASES, run_cases
from benchmarks.press_quality import PREFIX, SCORED, STARTS, quality
from benchmarks.press_speed import CONTEXT, Rates, preset_speed, ratio, speed
from benchmarks.render_docs import update
from benchmarks.samples import Check, Quantiles, show_checks, whole, write_results

PARTS = ("memory", "quality", "speed")
SMALLER = {"4-bit": 3.8, "4-bit-exact-128": 3.5, "snapkv-4-bit": 7.5}
BOUND_TOKENS = 4096  # the bounds of the memory part are for this context and longer ones
PEAK_LAYERS = 2.0  # of full precision, above what is resident, while decoding
KL = {"turboquant": 0.003, "turboquant, no exact tokens": 0.006}
SPEED = 0.7  # of the fp cache's tokens per second
MB = 1e6
PACKAGES = ("tq-offload", "kvpress", "transformers", "torch", "numba", "optimum-quanto")


@dataclass
class Results:
    """What was measured, and what it was held against."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)

    def bound(self, what: str, value: float, relation: str, limit: float) -> None:
        """Note whether `value` is `>=`, `<=`, `<` or `>` the limit."""
        met = {">=": value >= limit, "<=": value <= limit, ">": value > limit, "<": value < limit}[relation]
        self.checks.append(Check(f"{what} {relation} {limit:.4g}", met, f"{value:.4g}"))


def memory(tokens: int, results: Results, console: Console) -> None:
    """Resident bytes and peaks of every case, each in a process of its own."""
    found: dict[str, dict[str, Any]] = {}
    with console.status("memory: warm-up") as status:
        for case, of in run_cases(tokens):
            found[case] = {k: v for k, v in of.items() if k != "case"}
            found[case]["layers_above"] = (of["decode_peak"] - of["resident_after"]) / of["fp_layer"]
            status.update(f"memory: {len(found)} of {len(CASES)} cases")
    results.rows += [{"part": "memory", "cache": case, **of} for case, of in found.items()]
    fp = found["fp"]
    for case, of in found.items() if tokens >= BOUND_TOKENS else ():
        if case in SMALLER:
            results.bound(f"{case}: times smaller", fp["resident"] / of["resident"], ">=", SMALLER[case])
        if "4-bit" in case:
            results.bound(f"{case}: decode peak above resident, layers", of["layers_above"], "<=", PEAK_LAYERS)
            results.bound(f"{case}: prefill peak, MB", of["prefill_peak"] / MB, "<", fp["prefill_peak"] / MB)
            process, fp_process = of["process"]["prefill_peak"] / MB, fp["process"]["prefill_peak"] / MB
            results.bound(f"{case}: prefill peak of the process, MB", process, "<", fp_process)


def predictions(results: Results, console: Console) -> None:
    """Perplexity, KL and top-1 of every preset; and resident bytes by length."""
    with console.status("quality") as status:
        for row in quality():
            status.update(f"quality: after {row.name}")
            results.rows.append({"part": "quality", "cache": row.name, **asdict(row)})
            del results.rows[-1]["name"]
            if row.name in KL:
                results.bound(f"{row.name}: KL", row.kl, "<=", KL[row.name])
        status.update("resident bytes by length")
        for name, taken in curves().items():
            for tokens, nbytes in zip(LENGTHS, taken, strict=True):
                results.rows.append({"part": "curve", "cache": name, "tokens": tokens, "resident": nbytes})


def rates(dtypes: list[str], rounds: int, tokens: int, results: Results, console: Console) -> None:
    """Decoded tokens per second beside the fp cache and quanto, then of every preset."""
    for name in dtypes:
        with console.status("speed") as status:
            by_clock, by_cpu = speed(getattr(torch, name), rounds, tokens, status.update)
        results.rows += _rate_rows(name, by_clock, by_cpu, ("fp", "quanto 4-bit"))
        for way in by_clock:
            if way.startswith("TurboQuant"):
                results.bound(f"{name}, {way}: speed of fp", ratio(by_clock, way, "fp"), ">=", SPEED)
                results.bound(f"{name}, {way}: speed of quanto", ratio(by_clock, way, "quanto 4-bit"), ">", 1.0)
    with console.status("speed of the presets") as status:
        by_clock, by_cpu = preset_speed((rounds + 1) // 2, tokens, status.update)
    results.rows += _rate_rows("presets", by_clock, by_cpu, ("fp",))


def _rate_rows(group: str, by_clock: Rates, by_cpu: Rates, bases: tuple[str, ...]) -> list[dict[str, Any]]:
    return [
        {
            "part": "speed", "group": group, "cache": way, "tokens_per_s": Quantiles.of(values), "rounds": values,
            "tokens_per_cpu_s": Quantiles.of(by_cpu[way]),
            "share": {base: ratio(by_clock, way, base) for base in bases},
            "cpu_share": {base: ratio(by_cpu, way, base) for base in bases},
        }
        for way, values in by_clock.items()
    ]  # fmt: skip


def main() -> int:
    """Measure; 1 if a bound is missed and --check is given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), help="parts to run, comma-separated (%(default)s)")
    parser.add_argument("--tokens", type=whole(1), default=4096, help="context length of the memory part (%(default)s)")
    parser.add_argument(
        "--rounds", type=whole(1), default=9, help="rounds of the speed part, half as many for presets (%(default)s)"
    )
    parser.add_argument("--decode", type=whole(1), default=12, help="tokens a round of the speed part (%(default)s)")
    parser.add_argument(
        "--dtype", default="float32,bfloat16" if bf16_arithmetic() else "float32",
        help="of the speed part; bfloat16 is left out where the CPU has no bf16 arithmetic (%(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--threads", type=whole(1), help="threads of torch in the quality and speed parts (torch's own choice)"
    )
    parser.add_argument("--check", action="store_true", help="fail when a bound is missed")
    parser.add_argument("--no-write", action="store_true", help="print only")
    options = parser.parse_args()
    parts = options.only.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--only: unknown {', '.join(sorted(unknown))}; known: {', '.join(PARTS)}")
    if options.threads:
        torch.set_num_threads(options.threads)
    found, console, started = Results(), Console(width=max(Console().width, 120)), time.monotonic()
    if "memory" in parts:
        memory(options.tokens, found, console)
    if "quality" in parts:
        predictions(found, console)
    if "speed" in parts:
        rates(options.dtype.split(","), options.rounds, options.decode, found, console)
    settings = {
        "tokens": options.tokens, "prefix": PREFIX, "scored": SCORED, "starts": STARTS, "context": CONTEXT,
        "decode": options.decode, "threads": torch.get_num_threads(),
    }  # fmt: skip
    content = {
        "settings": settings,
        "seconds": time.monotonic() - started,
        "checks": [asdict(one) for one in found.checks],
    }
    results = json.loads(json.dumps({**content, "rows": found.rows}, default=asdict))
    for table in press_report.tables(results):
        console.print(table)
    met = show_checks(console, found.checks)
    partial = any(getattr(options, name) != parser.get_default(name) for name in ("only", "tokens", "dtype"))
    if not (options.no_write or partial):
        write_results("press", content, found.rows, packages=PACKAGES)
        update("press")
    return int(options.check and not met)


if __name__ == "__main__":
    sys.exit(main())
