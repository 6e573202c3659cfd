"""What bench_press says: tables for a terminal, section of docs/benchmarks.md, tables of README.md, plot."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table

from benchmarks.doc_sections import markdown_table, paragraph
from benchmarks.samples import axes, check_lines, host_line, rich_table, within_rounds

__all__ = ["plots", "readme", "section", "tables"]

MB = 1e6
_EXACT = ", no exact tokens"
_MEMORY_HEADS = (
    "cache", "resident, MB", "smaller", "prefill peak", "decoding peak", "above resident, layers",
    "process: prefill", "process: decoding",
)  # fmt: skip
_QUALITY_HEADS = ("cache", "perplexity", "KL", "± s.e.", "top-1", "prefix smaller than bf16")
_README_CASES = {
    "fp": "bf16",
    "4-bit": "4 bits, nothing exact",
    "4-bit-exact-128": "4 bits, 4 sinks and last 124 tokens exact (default)",
    "snapkv-4-bit": "SnapKV 0.5, then 4 bits, nothing exact",
    "quanto": "Hugging Face QuantizedCache, quanto 4 bits",
}
_COLOURS = ("#5b6770", "#0b6e4f", "#1f6fb2", "#c2571a")

Results = Mapping[str, Any]
Cells = tuple[Sequence[str], list[list[str]]]


def _part(results: Results, part: str) -> list[dict[str, Any]]:
    return [row for row in results["rows"] if row["part"] == part]


def memory(results: Results) -> Cells:
    """Resident bytes and peaks in MB of 10^6 bytes; peaks are of live tensors, or as the kernel sees the process."""
    rows = _part(results, "memory")
    fp = next(row for row in rows if row["cache"] == "fp")
    cells = []
    for of in rows:
        peaks = [of["prefill_peak"], of["decode_peak"]]
        process = [of["process"][name] for name in ("prefill_peak", "decode_peak")]
        cells.append([
            of["cache"], f"{of['resident'] / MB:.1f}", f"{fp['resident'] / of['resident']:.2f}×",
            *(f"{peak / MB:.1f}" for peak in peaks), f"{of['layers_above']:.2f}", *(f"{p / MB:.1f}" for p in process),
        ])  # fmt: skip
    return _MEMORY_HEADS, cells


def quality(results: Results) -> Cells:
    """Perplexity, KL, top-1 and bytes of every row."""
    cells = [
        [
            row["cache"], f"{row['perplexity']:+.2%}", f"{row['kl']:.4f}", f"{row['error']:.4f}", f"{row['top1']:.1%}",
            f"{row['ratio']:.2f}×",
        ]
        for row in _part(results, "quality")
    ]  # fmt: skip
    return _QUALITY_HEADS, cells


def speed(results: Results, group: str) -> Cells:
    """Tokens a second of a group of caches that were measured side by side; shares are within a round."""
    rows = [row for row in _part(results, "speed") if row["group"] == group]
    shares_of = _shares(results)
    bases = [base for base in ("fp", "quanto 4-bit") if any(row["cache"] == base for row in rows)]
    cells = []
    for row in rows:
        q = row["tokens_per_s"]
        shares = [*(shares_of[group, row["cache"], base] for base in bases), row["cpu_share"]["fp"]]
        rate = f"{q['p50']:.1f} ({q['p20']:.1f}–{q['p80']:.1f})"
        cells.append([row["cache"], rate, *(f"{share:.2f}×" for share in shares)])
    return ["cache", "tokens/s", *(f"of {base}" for base in bases), "of fp by CPU time"], cells


def _shares(results: Results) -> dict[tuple[str, str, str], float]:
    """Of every group and cache, the rate by that of each cache of the group, within the rounds."""
    rounds = {(row["group"], row["cache"]): row["rounds"] for row in _part(results, "speed")}
    return {
        (group, cache, base): within_rounds(values, others)
        for (group, cache), values in rounds.items()
        for (other, base), others in rounds.items()
        if other == group
    }


def _groups(results: Results) -> list[str]:
    return list(dict.fromkeys(row["group"] for row in _part(results, "speed")))


def _group_title(results: Results, group: str) -> str:
    s = results["settings"]
    rounds = next(len(row["rounds"]) for row in _part(results, "speed") if row["group"] == group)
    what = "Every preset, SmolLM2-135M in float32" if group == "presets" else f"SmolLM2-135M in {group}"
    threads = f"{s['threads']} thread{'s' if s['threads'] != 1 else ''}"
    return f"{what}, context of {s['context']:,}, {threads}, {rounds} rounds of {s['decode']} tokens"


def _memory_title(results: Results) -> str:
    return f"16 layers, 4 KV heads of 128, bf16, {results['settings']['tokens']:,} tokens"


def _quality_title(results: Results) -> str:
    s = results["settings"]
    windows = len(s["starts"])
    return f"SmolLM2-135M, prefix of {s['prefix']:,} tokens, {s['scored']} tokens scored, {windows} windows"


def tables(results: Results) -> Iterator[Table]:
    """What was measured, for a terminal."""
    if _part(results, "memory"):
        yield rich_table(f"Memory: {_memory_title(results)} (MB = 10^6 bytes)", *memory(results))
    if _part(results, "quality"):
        yield rich_table(f"Predictions: {_quality_title(results)}", *quality(results))
    for group in _groups(results):
        yield rich_table(f"Decoding: {_group_title(results, group)}", *speed(results, group))


def section(files: Mapping[str, Results]) -> str:
    """The section of docs/benchmarks.md."""
    results = files["press"]
    lines = [
        "## The resident cache: `make bench-press`", "",
        paragraph(
            f"Memory: {_memory_title(results)}, each case in a process of its own, MB of 10^6 bytes. Resident:",
            "the sum of all storages that can be reached from the cache. Peaks: live tensors, those of the model left",
            "out; then the anonymous memory of the process, above that before, in samples. Layers: of full precision.",
        ), "",
        *markdown_table(*memory(results)), "",
        "![Resident bytes against the length of the context](press-memory.svg)", "",
        paragraph(
            f"Predictions: {_quality_title(results)}, weights and K, V in float32; against the unquantised cache, KL",
            "in nats a token.",
        ), "",
        *markdown_table(*quality(results)), "",
        paragraph(
            "Decoding, tokens a second, median (20th to 80th percentile) of the rounds, all caches of a table in turn",
            "in every round; shares are medians within the rounds.",
        ), "",
    ]  # fmt: skip
    for group in _groups(results):
        lines += [f"{_group_title(results, group)}:", "", *markdown_table(*speed(results, group)), ""]
    lines += [*check_lines(results["checks"]), "", f"{results['seconds']:.0f} s. {host_line(results)}"]
    return "\n".join(lines)


def readme(files: Mapping[str, Results]) -> dict[str, str]:
    """The tables of README.md."""
    results = files["press"]
    by_case = {row[0]: row for row in memory(results)[1]}
    cells = []
    for case, title in _README_CASES.items():
        _, resident, smaller, *peaks = by_case[case][:5]
        cells.append([title, f"{resident} MB", smaller if case != "fp" else "", *(f"{peak} MB" for peak in peaks)])
    memory_lines = [
        paragraph(
            "Resident bytes are the sum of all storages that can be reached from the cache (`make bench-press`). Llama",
            f"shapes of {_memory_title(results)}:",
        ), "",
        *markdown_table(("cache", "resident", "smaller", "prefill peak", "decoding peak"), cells),
    ]  # fmt: skip
    return {"press-memory": "\n".join(memory_lines), "press-presets": "\n".join(_presets(results))}


def _presets(results: Results) -> list[str]:
    s, rows = results["settings"], {row["cache"]: row for row in _part(results, "quality")}
    shares = {(group, cache): share for (group, cache, base), share in _shares(results).items() if base == "fp"}
    names = [name for name in rows if f"{name}{_EXACT}" in rows and "chunk_tokens" not in name]
    cells = []
    for name in names:
        exact, all_packed = rows[name], rows[f"{name}{_EXACT}"]
        cells.append([
            f"`{name}`{' (default)' if name == 'turboquant' else ''}",
            f"{exact['ratio']:.2f}× ({all_packed['ratio']:.2f}×)",
            f"{exact['perplexity']:+.2%} ({all_packed['perplexity']:+.2%})",
            f"{exact['kl']:.4f} ({all_packed['kl']:.4f})", f"{shares['presets', name]:.2f}×",
        ])  # fmt: skip
    quanto = rows["quanto 4-bit"]
    cells.append([
        "quanto 4 bits", f"{quanto['ratio']:.2f}×", f"{quanto['perplexity']:+.2%}", f"{quanto['kl']:.4f}",
        f"{shares['float32', 'quanto 4-bit']:.2f}×",
    ])  # fmt: skip
    threads = f"{s['threads']} thread{'s' if s['threads'] != 1 else ''}"
    side = "; ".join(
        f"{group} {shares[group, 'TurboQuantPress']:.2f}× (press), {shares[group, 'TurboQuantCache']:.2f}× (cache), "
        f"quanto {shares[group, 'quanto 4-bit']:.2f}×"
        for group in _groups(results) if group != "presets"
    )  # fmt: skip
    return [
        paragraph(
            f"Quality on SmolLM2-135M (head_dim 64), prefix of {s['prefix']:,} tokens of English, {s['scored']}",
            f"scored, {len(s['starts'])} windows; KL to the unquantised model in nats a token. In brackets: nothing",
            "exact (`sink_tokens=0, window=0`). Speed: tokens a second by the unpacked cache's in the same run, fp32,",
            f"{s['context']:,} tokens, {threads}.",
        ), "",
        *markdown_table(("preset", "smaller", "perplexity", "KL", "speed"), cells), "",
        paragraph(f"Speed, all caches side by side: {side}."),
    ]  # fmt: skip


def plots(files: Mapping[str, Results]) -> dict[str, Any]:
    """Resident bytes against the length of the context."""
    rows = _part(files["press"], "curve")
    figure, (left,) = axes(6, 3.4)
    for colour, name in zip(_COLOURS, dict.fromkeys(row["cache"] for row in rows), strict=True):
        points = [(row["tokens"], row["resident"] / MB) for row in rows if row["cache"] == name]
        label = f"{name}: {points[-1][1]:.1f} MB at {points[-1][0]:,}"
        left.plot(*zip(*points, strict=True), "o-", markersize=3, color=colour, label=label)
    left.set(xlabel="context length, tokens", ylabel="resident KV cache, MB", ylim=(0, None), xlim=(0, None))
    left.set_title("SmolLM2-135M: what the cache holds after prefill", fontsize=10)
    left.grid(alpha=0.3)
    left.legend(frameon=False)
    return {"press-memory": figure}
