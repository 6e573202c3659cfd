"""`tq-offload check` against a measurement: what it predicts from its own text, and what packing costs on another one.

usage: python -m benchmarks.bench_guard [--check] [--no-write]

SmolLM2 as it is and with biased keys. The guard sees its default text; measured is every window of alice.txt, by the
code of `bench_quality`. A recommendation is right if it holds the guard's bounds where it is measured and no cheaper
preset does. Writes benchmarks/results/guard.{json,csv} and a section of docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from typing import Any

import torch
from rich.console import Console

from benchmarks import guard_report
from benchmarks.quality import biased, measure, methods, texts
from benchmarks.render_docs import update
from benchmarks.samples import Check, show_checks, write_results
from tq_offload.check.guard import check_model
from tq_offload.check.report import Bounds
from tq_offload.check.sample import Sample

MODELS = (None, biased.Variant("low", biased.CHECKED_BETA), biased.Variant("turning", biased.CHECKED_BETA))
PRESETS = ("turboquant_k4v3", "turboquant", "turboquant_robust", "turboquant_k8v4")
PREFIX, SCORED, WINDOWS = 512, 256, 3
WITHIN = 0.25
PACKAGES = ("tq-offload", "transformers", "torch", "numba")


def measured(model: Any, tokens: dict[str, torch.Tensor]) -> dict[str, measure.Score]:
    """Every preset on windows of alice.txt."""
    sizes = texts.Sizes(PREFIX, SCORED, WINDOWS)
    where = texts.places({texts.TUNED_ON: tokens[texts.TUNED_ON]}, sizes, WINDOWS)
    rows = [codec for codec in methods.codecs() if codec.name in PRESETS]
    return {s.name: s for s in measure.on_text(model, tokens, where, sizes, rows, lambda _what: None)}


def main() -> int:
    """Measure, print; 1 if a prediction is far off and --check is given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="fail when a check is missed")
    parser.add_argument("--no-write", action="store_true", help="print only")
    options = parser.parse_args()
    torch.set_num_threads(2)
    console, bounds = Console(width=max(Console().width, 120)), Bounds()
    model, tokenizer = texts.load_model()
    tokens, rows, checks = texts.text_tokens(tokenizer), [], []
    with torch.no_grad():
        rms = biased.key_rms(model, tokens[texts.TUNED_ON][:512])
        for variant in MODELS:
            name = "as it is" if variant is None else variant.name
            changed = model if variant is None else biased.biased(model, rms, variant)
            report = check_model(changed, tokenizer, presets=PRESETS, sample=Sample(PREFIX, SCORED * WINDOWS))
            found = measured(changed, tokens)
            for result in report.presets:
                real = found[result.name]
                rows.append({
                    "model": name, "preset": result.name, "bits": real.bits, "predicted": result.kl,
                    "measured": real.kl, "s.e.": real.error, "off": result.kl / real.kl - 1,
                    "perplexity": real.perplexity, "recommended": result.name == report.recommended,
                })  # fmt: skip
            holds = [p for p in PRESETS if found[p].kl <= bounds.kl and abs(found[p].perplexity) <= bounds.perplexity]
            right = report.recommended is not None and report.recommended == min(holds, key=lambda p: found[p].bits)
            checks.append(Check(f"{name}: the cheapest preset that holds the bounds is recommended", right,
                                f"{report.recommended}; measured: {', '.join(holds)}"))  # fmt: skip
            if report.recommended is not None:
                row = next(r for r in rows if r["model"] == name and r["recommended"])
                name = f"{name}: KL of {report.recommended} within {WITHIN:.0%} of measured"
                checks.append(Check(name, abs(row["off"]) <= WITHIN, f"{row['predicted']:.4f}, {row['off']:+.0%}"))
    results = {"checks": [asdict(one) for one in checks]}
    console.print(guard_report.table({**results, "rows": rows}))
    met = show_checks(console, checks)
    if not options.no_write:
        write_results("guard", results, rows, packages=PACKAGES)
        update("guard")
    return int(options.check and not met)


if __name__ == "__main__":
    sys.exit(main())
