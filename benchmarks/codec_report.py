"""What bench_codec says: bounds, tables; from its files plot, section of docs/benchmarks.md and README's table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table

from benchmarks.doc_sections import markdown_table, paragraph
from benchmarks.samples import axes, cores, host_line, rich_table

__all__ = ["bounds", "missed", "plots", "readme", "section", "tables"]

MIB = 1 << 20
OTHERS = ("fp8", "lmcache-turbo-quant-serde", "turboquant")
WAYS = ("encode", "decode")
_MEMORY = ("turboquant", "fp8")
_RANGE, _TICKS = (0.01, 20), (0.01, 0.03, 0.1, 0.3, 1, 3, 10)
_OURS, _AVX2, _OTHER = "#0b6e4f", "#1f6fb2", "#5b6770"

Results = Mapping[str, Any]
Bound = tuple[str, float, str, float]


def bounds(rows: Sequence[Mapping[str, Any]], extra: Mapping[str, int], scaling: Mapping[str, float]) -> list[Bound]:
    """What is measured, and the bound that it has to meet."""
    from tq_offload.kernels.simd.config import host_lanes

    wide = host_lanes() == 16
    found: list[Bound] = []
    for row in rows:
        times, way = row["times"], row["method"].split()[-1]
        if row["method"] == f"turboquant {way}":
            bound = {"decode": 9.0 if wide else 4.0, "encode": 0.8 if wide else 0.3}[way]
            found.append((f"{way}: times fp8", times["fp8"], ">=", bound))
            if "lmcache-turbo-quant-serde" in times:
                found.append(
                    (f"{way}: times lmcache-turbo-quant-serde", times["lmcache-turbo-quant-serde"], ">=", 20.0)
                )
        if row["method"] == "AVX2 only, turboquant decode":
            found.append(("AVX2 only, decode: times fp8", times["fp8"], ">=", 4.0))
        if row["method"].startswith("turboquant, 2 threads"):
            found.append((f"{way}: 2 threads on one chunk, by 1", times["turboquant"], ">=", 1.8))
    found += [(f"{way}: 2 threads on a prefix of chunks, by 1", ratio, ">=", 1.8) for way, ratio in scaling.items()]
    return found + [(f"{name}: extra MiB", n / MIB, "<=", 2.0) for name, n in extra.items() if "turboquant" in name]


def missed(bound: Bound | Sequence[Any]) -> bool:
    """Whether it is not met."""
    _, value, relation, limit = bound
    return bool(value < limit if relation == ">=" else value > limit)


def _title(results: Results) -> str:
    s = results["settings"]
    return f"[{s['layers']}, {s['tokens']}, {s['heads']}*2*{s['head_dim']}] bf16, {s['bits']} bits"


def _rate(row: Mapping[str, Any]) -> str:
    return f"{row['median']:.3g} ({row['p20']:.3g}–{row['p80']:.3g})"


def _named(name: str) -> str:
    return name.replace("turboquant", "TQ-Offload") if "serde" not in name else name


def tables(results: Results) -> Iterator[Table]:
    """For a terminal."""
    rows = [
        (row["method"], _rate(row), *(f"{row['times'][o]:.2f}" if o in row["times"] else "" for o in OTHERS))
        for row in results["rows"]
    ]
    heads = ("method", "GB/s (p20–p80)", *(f"times {other}" for other in OTHERS))
    yield rich_table(f"{_title(results)}, GB/s of bf16 KV", heads, rows)
    yield rich_table("Sizes", *sizes([results]), texts=0)


def sizes(files: Sequence[Results]) -> tuple[Sequence[str], list[list[str]]]:
    """Bytes of a frame, and MiB of memory that a call takes beyond source and destination: a row each head_dim."""
    heads = ("head_dim", "chunk, bytes", "frame", "fewer", "MiB beyond, encode / decode", "fp8: MiB beyond")
    rows = []
    for results in files:
        extra = results["extra_bytes"]
        rows.append([
            str(results["settings"]["head_dim"]), f"{results['chunk_bytes']:,}", f"{results['frame_bytes']:,}",
            f"{results['chunk_bytes'] / results['frame_bytes']:.2f}×",
            *(" / ".join(f"{extra[f'{who} {way}'] / MIB:.2f}" for way in WAYS if extra) for who in _MEMORY),
        ])  # fmt: skip
    return heads, rows


def scaling(results: Results) -> str:
    """What several threads with chunks of their own do, in a sentence; empty where that was not measured."""
    found = ", ".join(f"{way} {ratio:.2f}×" for way, ratio in results["scaling"].items())
    return f"{results['settings']['threads']} threads with chunks of their own, by one: {found}." if found else ""


def _by_method(results: Results) -> dict[str, dict[str, Mapping[str, Any]]]:
    """Rows by method without the direction, then by direction."""
    found: dict[str, dict[str, Mapping[str, Any]]] = {}
    for row in results["rows"]:
        method, _, way = row["method"].rpartition(" ")
        found.setdefault(method, {})[way] = row
    return found


def _cells(results: Results) -> list[list[str]]:
    cells = []
    for method, ways in _by_method(results).items():
        times = [
            " / ".join(f"{ways[way]['times'][other]:.2f}×" if other in ways[way]["times"] else "–" for way in WAYS)
            for other in OTHERS[:2]
        ]
        dim = str(results["settings"]["head_dim"])
        cells.append([_named(method), dim, *(_rate(ways[way]) for way in WAYS), *times])
    return cells


def section(files: Mapping[str, Results]) -> str:
    """The section of docs/benchmarks.md."""
    all_settings = [results["settings"] for results in files.values()]
    shapes = ", ".join(f"{s['heads']} of {s['head_dim']}" for s in all_settings)
    s = all_settings[0]
    heads = (
        "method", "head_dim", "encode GB/s", "decode GB/s", "times LMCache fp8, encode / decode",
        "times lmcache-turbo-quant-serde",
    )  # fmt: skip
    lines = [
        "## Speed of the codec: `make bench-codec`", "",
        paragraph(
            f"Chunks of {s['tokens']} tokens, {s['layers']} layers, K and V heads: {shapes}; {s['bits']} bits. GB/s of",
            "uncompressed bf16 KV, median (20th to 80th percentile) of the rounds; whole frames, header and checksum",
            "included, one thread where no number is named. Every round takes every method once, and times are within",
            "a round; methods that take more than 0.4 s stop after three rounds. Plain loops: our kernels without",
            "SIMD. AVX2 only: a process for which numba compiles as for a CPU without AVX-512, against fp8 there.",
            "Beyond: memory at the peak of a call besides source and destination.",
        ), "",
        *markdown_table(heads, [cell for results in files.values() for cell in _cells(results)]), "",
        "![Rates by method](codec-rates.svg)", "",
        *markdown_table(*sizes(list(files.values()))), "",
        *([scaling(files["codec"]), ""] if files["codec"]["scaling"] else []),
        "Bounds, for head_dim 128:", "",
    ]  # fmt: skip
    for bound in files["codec"]["bounds"]:
        what, value, relation, limit = bound
        lines.append(f"* {'MISSED' if missed(bound) else 'met'}: {what}: {value:.2f} {relation} {limit:g}")
    return "\n".join([*lines, "", host_line(files["codec"])])


def readme(files: Mapping[str, Results]) -> dict[str, str]:
    """The table of README.md: ours at every head_dim, and with code for AVX2."""
    cells, memcpy = [], _by_method(files["codec"])["memcpy"]["encode"]["median"]
    for results in files.values():
        found = _by_method(results)
        for method, note in (("turboquant", ""), ("AVX2 only, turboquant", ", code for AVX2 only")):
            if method in found:
                rates = (found[method][way] for way in WAYS)
                cells.append([
                    f"{results['settings']['head_dim']}{note}",
                    *(f"{row['median']:.2f} ({row['times']['fp8']:.2f}×)" for row in rates),
                ])  # fmt: skip
    place = f"{files['codec']['host']['cpu']}, {cores(files['codec'])}"
    text = [
        paragraph(
            "Whole frames on one thread, checksum included, in GB/s of uncompressed bf16, 4 bits; in brackets: times",
            f"LMCache's fp8 serde in the same run (`make bench-codec`; {place}; memcpy {memcpy:.1f}):",
        ), "",
        *markdown_table(("head_dim", "encode", "decode"), cells),
    ]  # fmt: skip
    return {"codec": "\n".join(text)}


def plots(files: Mapping[str, Results]) -> dict[str, Any]:
    """Bars by method, log scale; ours at the other head_dims too."""
    bars = [(method, ways) for method, ways in _by_method(files["codec"]).items()]
    for results in list(files.values())[1:]:
        bars.append((f"turboquant, head_dim {results['settings']['head_dim']}", _by_method(results)["turboquant"]))
    figure, panels = axes(10, 0.3 * len(bars) + 1.2, columns=2)
    for panel, way in zip(panels, WAYS, strict=True):
        rows = [ways[way] for _, ways in bars]
        rates = [row["median"] for row in rows]
        spread = [[row["median"] - row["p20"] for row in rows], [row["p80"] - row["median"] for row in rows]]
        colours = [_colour(method) for method, _ in bars]
        panel.barh(range(len(bars)), rates, 0.7, color=colours, xerr=spread, error_kw={"linewidth": 0.7})
        for number, row in enumerate(rows):
            at = (row["p80"], number)
            panel.annotate(f"{row['median']:.2g}", at, xytext=(4, -3), textcoords="offset points", fontsize=7)
        panel.set_yticks(range(len(bars)), [_named(method) if way == "encode" else "" for method, _ in bars])
        panel.invert_yaxis()
        panel.set(xscale="log", xlim=_RANGE, xlabel=f"{way}, GB/s of uncompressed bf16 KV")
        panel.set_xticks(_TICKS, [f"{tick:g}" for tick in _TICKS])
        panel.minorticks_off()
        panel.grid(axis="x", alpha=0.25)
    return {"codec-rates": figure}


def _colour(method: str) -> str:
    if "serde" in method or "turboquant" not in method:
        return _OTHER
    return _AVX2 if method.startswith("AVX2") else _OURS
