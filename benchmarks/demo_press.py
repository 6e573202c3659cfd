"""`make demo-press`: kvpress's pipeline with and without TurboQuantPress, for real, on SmolLM2.

One text, three questions. The table shows what the cache holds after the context, the highest sum of live tensors, and
the answers. `make bench-press` measures more, and plots resident bytes against the length of the context.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.press_caches import bf16_arithmetic, float32_products, fp_cache, load_smollm2
from benchmarks.press_memory import LiveBytes
from tq_offload.kv_cache import resident_bytes

QUESTIONS = (
    "In which year was the mill built?",
    "Where does the mill stand?",
    "How often do people grind flour in the mill now?",
)
MB = 1e6


def presses() -> dict[str, Callable[[], Any]]:
    """What is compared: name and how to make the press."""
    from kvpress import SnapKVPress

    from tq_offload.press import TurboQuantPress

    return {
        "no press": lambda: None,
        "TurboQuantPress()": TurboQuantPress,
        "TurboQuantPress(press=SnapKVPress(0.5))": lambda: TurboQuantPress(press=SnapKVPress(0.5)),
    }


def ask(pipe: Any, context: str, press: Any) -> dict[str, Any]:
    """The three answers, and what the cache took."""
    cache = fp_cache(pipe.model.config)
    started = time.perf_counter()
    with LiveBytes([*pipe.model.parameters(), *pipe.model.buffers()]) as live:
        answers = pipe(context, questions=list(QUESTIONS), press=press, cache=cache, max_new_tokens=20)["answers"]
    return {
        "resident": resident_bytes(cache),
        "peak": live.peak,
        "seconds": time.perf_counter() - started,
        "answers": answers,
    }


def show(results: dict[str, dict[str, Any]], tokens: int, products: str, console: Console) -> None:
    """Two tables: bytes, and answers."""
    fp = results["no press"]
    table = Table(
        title=f"SmolLM2-135M in bf16{products}, context of {tokens} tokens, {torch.get_num_threads()} threads",
        title_justify="left",
    )
    for head in ("press", "resident MB", "smaller", "peak MB", "seconds", "answers as without"):
        table.add_column(head, justify="left" if head == "press" else "right")
    for name, of in results.items():
        same = sum(a == b for a, b in zip(of["answers"], fp["answers"], strict=True))
        table.add_row(
            name, f"{of['resident'] / MB:.1f}", f"{fp['resident'] / of['resident']:.2f}x", f"{of['peak'] / MB:.1f}",
            f"{of['seconds']:.1f}", f"{same} of {len(QUESTIONS)}",
        )  # fmt: skip
    console.print(table)
    for number, question in enumerate(QUESTIONS):
        console.print(f"[bold]{question}[/bold]")
        for name, of in results.items():
            console.print(f"  {name:42}", of["answers"][number].strip().replace("\n", " "), markup=False)


def main() -> int:
    """Run everything; 1 if the press did not make the cache three times smaller."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write everything measured here")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (%(default)s)")
    parser.add_argument(
        "--float32-products", action="store_true", help="multiply in float32, as where the CPU has no bf16 arithmetic"
    )
    options = parser.parse_args()
    import kvpress  # noqa: F401  registers the pipeline
    from transformers import pipeline

    console = Console(width=max(Console().width, 120))
    if options.threads:
        torch.set_num_threads(options.threads)
    model, tokenizer = load_smollm2(torch.bfloat16)
    native = bf16_arithmetic() and not options.float32_products
    if not native:
        float32_products(model)
    pipe = pipeline("kv-press-text-generation", model=model, tokenizer=tokenizer)
    context = (Path(__file__).parent / "prompt.txt").read_text(encoding="utf-8").strip() + "\n\n"
    results = {}
    for name, make in presses().items():
        with console.status(f"context and three questions: {name}"):
            results[name] = ask(pipe, context, make())
    tokens = len(tokenizer(context).input_ids)
    show(
        results, tokens, "" if native else " (products of weights in float32: this CPU has no bf16 arithmetic)", console
    )
    if options.json:
        options.json.write_text(json.dumps({"runs": results, "tokens": tokens}, indent=2) + "\n")
    return int(results["no press"]["resident"] < 3 * results["TurboQuantPress()"]["resident"])


if __name__ == "__main__":
    sys.exit(main())
