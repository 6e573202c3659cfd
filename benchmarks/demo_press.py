"""`make demo-press`: kvpress's pipeline with and without TurboQuantPress, for real, on SmolLM2; and a plot of memory.

One text, three questions. The table shows what the cache holds after the context, the highest sum of live tensors, and
the answers; docs/press-memory.svg shows resident bytes against context length.
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

from benchmarks.press_caches import (
    NO_EXACT,
    bf16_arithmetic,
    fill,
    float32_products,
    fp_cache,
    load_smollm2,
    text_tokens,
    turboquant,
)  # fmt: skip
from benchmarks.press_memory import LiveBytes
from tq_offload.kv_cache import resident_bytes

QUESTIONS = (
    "In which year was the mill built?",
    "Where does the mill stand?",
    "How often do people grind flour in the mill now?",
)
LENGTHS = (256, 512, 1024, 2048, 4096)
PLOT = Path(__file__).resolve().parent.parent / "docs" / "press-memory.svg"
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


@torch.no_grad()
def curves(model: Any, ids: torch.Tensor) -> dict[str, list[int]]:
    """Resident bytes at each of LENGTHS: the K and V of one prefill, given to each cache in bf16.

    The prefill runs in float32, which is several times faster on CPUs without bf16 arithmetic.
    """
    prefilled = fp_cache(model.config)
    model.model(ids[:, : LENGTHS[-1]], past_key_values=prefilled)
    made = {
        "full precision (bf16)": fp_cache,
        "4 bits, 128 tokens exact (default)": turboquant(),
        "4 bits": turboquant(**NO_EXACT),
        "3 bits": turboquant("turboquant_3bit_nc", **NO_EXACT),
    }
    taken: dict[str, list[int]] = {name: [] for name in made}
    for length in LENGTHS:
        part = fill(fp_cache(model.config), prefilled, dtype=torch.bfloat16)
        for layer in part.layers:
            layer.keys, layer.values = layer.keys[:, :, :length].clone(), layer.values[:, :, :length].clone()
        for name, make in made.items():
            taken[name].append(resident_bytes(fill(make(model.config), part)))
    return taken


def plot(taken: dict[str, list[int]], path: Path) -> None:
    """Resident bytes against context length, as SVG that is the same for the same figures."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    matplotlib.rcParams.update({"svg.hashsalt": "tq-offload", "svg.fonttype": "none", "font.size": 9})
    figure, axes = pyplot.subplots(figsize=(6, 3.4), layout="constrained")
    for name, bytes_ in taken.items():
        last = f"{bytes_[-1] / MB:.1f} MB at {LENGTHS[-1]:,}"
        axes.plot(LENGTHS, [b / MB for b in bytes_], marker="o", markersize=3, label=f"{name}: {last}")
    axes.set(xlabel="context length, tokens", ylabel="resident KV cache, MB", ylim=(0, None), xlim=(0, None))
    axes.set_title("SmolLM2-135M: what the cache holds after prefill", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


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
    parser.add_argument("--plot", type=Path, default=PLOT, help="where the plot goes (%(default)s)")
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
    with console.status("memory against context length"):
        ids = torch.cat([text_tokens(tokenizer), text_tokens(tokenizer, "../prompt.txt")], dim=1)
        taken = curves(load_smollm2(torch.float32)[0], ids)
    plot(taken, options.plot)
    console.print(f"plot: {options.plot}")
    if options.json:
        options.json.write_text(json.dumps({"runs": results, "lengths": LENGTHS, "resident": taken}, indent=2) + "\n")
    return int(results["no press"]["resident"] < 3 * results["TurboQuantPress()"]["resident"])


if __name__ == "__main__":
    sys.exit(main())
