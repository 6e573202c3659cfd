"""What TurboQuantPress saves and costs: resident bytes and peaks, predictions, decoding speed; on CPU.

usage: python -m benchmarks.bench_press [--only memory,quality,speed] [--check] [--json results.json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.press_caches import bf16_arithmetic
from benchmarks.press_memory import CASES, run_cases
from benchmarks.press_quality import PREFIX, SCORED, STARTS, quality
from benchmarks.press_speed import CONTEXT, Rates, preset_speed, ratio, speed

PARTS = ("memory", "quality", "speed")
SMALLER = {"4-bit": 3.8, "4-bit-exact-128": 3.5, "snapkv-4-bit": 7.5}
BOUND_TOKENS = 4096  # the bounds of the memory part are for this context and longer ones
PEAK_LAYERS = 2.0  # of full precision, above what is resident, while decoding
KL = {"turboquant": 0.003, "turboquant, no exact tokens": 0.006}
SPEED = 0.7  # of the fp cache's tokens per second
MB = 1e6


@dataclass
class Results:
    """What was measured, and which bounds it was held against."""

    measured: dict[str, Any] = field(default_factory=dict)
    bounds: list[tuple[str, float, str, float]] = field(default_factory=list)

    def bound(self, what: str, value: float, relation: str, limit: float) -> None:
        """Note that `value` has to be `>=`, `<=`, `<` or `>` the limit."""
        self.bounds.append((what, value, relation, limit))

    def missed(self) -> list[str]:
        """The bounds that do not hold."""
        holds = {
            ">=": lambda a, b: a >= b, "<=": lambda a, b: a <= b, ">": lambda a, b: a > b, "<": lambda a, b: a < b,
        }  # fmt: skip
        return [what for what, value, relation, limit in self.bounds if not holds[relation](value, limit)]


def _table(title: str, first: str, *heads: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column(first, no_wrap=True)
    for head in heads:
        table.add_column(head, justify="right")
    return table


def memory(tokens: int, results: Results, console: Console) -> None:
    """Resident bytes and peaks of every case, each in a process of its own."""
    measured: dict[str, dict[str, Any]] = {}
    with console.status("memory: warm-up") as status:
        for case, found in run_cases(tokens):
            measured[case] = found
            status.update(f"memory: {len(measured)} of {len(CASES)} cases")
    results.measured["memory"] = measured
    fp = measured["fp"]
    table = _table(
        f"Memory: 16 layers, 4 KV heads, head_dim 128, bf16, {tokens} tokens (MB = 10^6 bytes)", "cache", "resident",
        "smaller", "prefill peak", "decode peak", "above resident, layers", "process: prefill", "process: decode",
    )  # fmt: skip
    for case, of in measured.items():
        above = (of["decode_peak"] - of["resident_after"]) / of["fp_layer"]
        peaks = (of["prefill_peak"], of["decode_peak"])
        table.add_row(
            case, f"{of['resident'] / MB:.1f}", f"{fp['resident'] / of['resident']:.2f}x",
            *(f"{peak / MB:.1f}" for peak in peaks), f"{above:.2f}",
            *(f"{of['process'][name] / MB:.1f}" for name in ("prefill_peak", "decode_peak")),
        )  # fmt: skip
        if tokens < BOUND_TOKENS:
            continue
        if case in SMALLER:
            results.bound(f"{case}: times smaller", fp["resident"] / of["resident"], ">=", SMALLER[case])
        if "4-bit" in case:
            results.bound(f"{case}: decode peak above resident, layers", above, "<=", PEAK_LAYERS)
            results.bound(f"{case}: prefill peak, MB", of["prefill_peak"] / MB, "<", fp["prefill_peak"] / MB)
            process, fp_process = of["process"]["prefill_peak"] / MB, fp["process"]["prefill_peak"] / MB
            results.bound(f"{case}: prefill peak of the process, MB", process, "<", fp_process)
    console.print(table)


def predictions(results: Results, console: Console) -> None:
    """Perplexity, KL and top-1 of every preset."""
    table = _table(
        f"SmolLM2-135M, prefix {PREFIX}, {SCORED} tokens scored, {len(STARTS)} windows", "cache",
        "perplexity", "KL", "± (1 s.e.)", "top-1", "prefix smaller than bf16",
    )  # fmt: skip
    results.measured["quality"] = []
    with console.status("quality") as status:
        for row in quality():
            status.update(f"quality: after {row.name}")
            results.measured["quality"].append(asdict(row))
            table.add_row(
                row.name, f"{row.perplexity:+.2%}", f"{row.kl:.4f}", f"{row.error:.4f}", f"{row.top1:.1%}",
                f"{row.ratio:.2f}x",
            )  # fmt: skip
            if row.name in KL:
                results.bound(f"{row.name}: KL", row.kl, "<=", KL[row.name])
    console.print(table)


def rates(dtypes: list[str], rounds: int, tokens: int, results: Results, console: Console) -> None:
    """Decoded tokens per second beside the fp cache and quanto, then of every preset."""
    measured = results.measured["speed"] = {}
    for name in dtypes:
        with console.status("speed") as status:
            by_clock, by_cpu = speed(getattr(torch, name), rounds, tokens, status.update)
        measured[name] = {"tokens_per_s": by_clock, "tokens_per_cpu_s": by_cpu}
        _rate_table(f"SmolLM2-135M in {name}", by_clock, by_cpu, ("fp", "quanto 4-bit"), tokens, console)
        for way in by_clock:
            if way.startswith("TurboQuant"):
                results.bound(f"{name}, {way}: speed of fp", ratio(by_clock, way, "fp"), ">=", SPEED)
                results.bound(f"{name}, {way}: speed of quanto", ratio(by_clock, way, "quanto 4-bit"), ">", 1.0)
    with console.status("speed of the presets") as status:
        by_clock, by_cpu = preset_speed((rounds + 1) // 2, tokens, status.update)
    measured["presets"] = {"tokens_per_s": by_clock, "tokens_per_cpu_s": by_cpu}
    _rate_table("every preset, SmolLM2-135M in float32", by_clock, by_cpu, ("fp",), tokens, console)


def _rate_table(
    title: str, by_clock: Rates, by_cpu: Rates, bases: tuple[str, ...], tokens: int, console: Console
) -> None:
    table = _table(
        f"Decoding, {title}, context {CONTEXT}, {torch.get_num_threads()} threads, "
        f"{len(by_clock['fp'])} rounds of {tokens} tokens",
        "cache", "tokens/s (median)", *(f"of {base}" for base in bases), "of fp by CPU time",
    )  # fmt: skip
    for way, values in by_clock.items():
        shares = [ratio(by_clock, way, base) for base in bases] + [ratio(by_cpu, way, "fp")]
        table.add_row(way, f"{statistics.median(values):.1f}", *(f"{share:.2f}x" for share in shares))
    console.print(table)


def main() -> int:
    """Measure; 1 if a bound is missed and --check is given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), help="parts to run, comma-separated (%(default)s)")
    parser.add_argument("--tokens", type=int, default=4096, help="context length of the memory part (%(default)s)")
    parser.add_argument(
        "--rounds", type=int, default=9, help="rounds of the speed part, half as many for presets (%(default)s)"
    )
    parser.add_argument("--decode", type=int, default=12, help="tokens a round of the speed part (%(default)s)")
    parser.add_argument(
        "--dtype", default="float32,bfloat16" if bf16_arithmetic() else "float32",
        help="of the speed part; bfloat16 is left out where the CPU has no bf16 arithmetic (%(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--threads", type=int, help="threads of torch in the quality and speed parts (torch's own choice)"
    )
    parser.add_argument("--check", action="store_true", help="fail when a bound is missed")
    parser.add_argument("--json", type=Path, help="write everything measured here")
    options = parser.parse_args()
    parts = options.only.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--only: unknown {', '.join(sorted(unknown))}; known: {', '.join(PARTS)}")
    if options.threads:
        torch.set_num_threads(options.threads)
    results, console = Results(), Console(width=max(Console().width, 120))
    if "memory" in parts:
        memory(options.tokens, results, console)
    if "quality" in parts:
        predictions(results, console)
    if "speed" in parts:
        rates(options.dtype.split(","), options.rounds, options.decode, results, console)
    missed = results.missed()
    table = _table("Bounds", "what", "measured", "", "bound", "")
    for what, value, relation, limit in results.bounds:
        table.add_row(what, f"{value:.4g}", relation, f"{limit:.4g}", "MISSED" if what in missed else "ok")
    console.print(table)
    if options.json:
        report = {**results.measured, "bounds": results.bounds, "missed": missed}
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    return int(bool(missed) and options.check)


if __name__ == "__main__":
    sys.exit(main())
