"""Reports, presets and frame headers as text for a terminal."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Group
from rich.table import Table

from tq_offload.check.report import PresetResult, Report
from tq_offload.frame import FrameHeader, make_plan
from tq_offload.layout import ChunkLayout, GroupLayout
from tq_offload.spec import CodecSpec

__all__ = ["header_table", "layer_table", "preset_table", "report_view", "stored_bits"]

_DEFAULT_TEXT = (
    "Text: English prose of the package. Code and tables lose up to twice as much: give --text a file of what you serve"
)
_SHOWN = 5  # findings and layers on the screen; JSON has all of them
_REFERENCE = (32, 256, 8)  # layers, tokens, KV heads of the chunk that `preset_table` computes bits for


def report_view(report: Report) -> Group:
    """The whole report, apart from the table of layers."""
    return Group(
        _head(report), "", _results(report), "", *_findings(report), "", *_verdict(report), "", _memory(report)
    )


def _head(report: Report) -> str:
    heads = sorted(set(report.shapes))
    shapes = ", ".join(f"{h} KV heads of {d}" for h, d in heads)
    return (
        f"{report.model}: {len(report.shapes)} layers of full attention, {shapes}\n"
        f"{report.tokens} tokens scored in {report.windows} windows, each after {report.prefix} tokens stored in "
        f"chunks of {report.chunk_tokens}; unquantised perplexity {report.perplexity:.2f}"
        + ("" if report.own_text else f"\n{_DEFAULT_TEXT}")
    )


def _results(report: Report) -> Table:
    table = Table(title="Presets, cheapest first", title_justify="left")
    table.add_column("preset", no_wrap=True)
    for head in ("bits", "smaller", "KL, nats a token", "perplexity", "top-1", "layers that suffer", "verdict"):
        table.add_column(head, justify="left" if head in ("layers that suffer", "verdict") else "right")
    for r in report.presets:
        table.add_row(
            r.name, f"{r.bits:.2f}", f"{16 / r.bits:.2f}x", f"{r.kl:.4f} ± {r.kl_error:.4f}",
            f"{100 * r.perplexity:+.2f} ± {100 * r.perplexity_error:.2f} %", f"{100 * r.top1:.1f} %",
            _layers(r), _word(r, report),
        )  # fmt: skip
    return table


def _layers(result: PresetResult) -> str:
    named = ", ".join(map(str, result.suffering[:_SHOWN])) or "none"
    return named + (", …" if len(result.suffering) > _SHOWN else "")


def _word(result: PresetResult, report: Report) -> str:
    near = " (near the bound)" if result.near else ""
    if result.fits:
        return "fits" + near
    over = [w for w, out in (("KL", result.kl > report.bounds.kl),
                             ("perplexity", abs(result.perplexity) > report.bounds.perplexity)) if out]  # fmt: skip
    return " and ".join(over) + " over" + near


def _findings(report: Report) -> list[str]:
    lines = [f"Keys: {line}" for line in report.findings[:_SHOWN]]
    if len(report.findings) > _SHOWN:
        lines.append(f"Keys: {len(report.findings) - _SHOWN} layers more like these (--layers or --json shows all)")
    return lines or ["Keys: no layer has its energy in a few channels"]


def _verdict(report: Report) -> list[str]:
    bounds = f"KL up to {report.bounds.kl:g}, perplexity within {100 * report.bounds.perplexity:g} %"
    if report.recommended is None:
        best = report.result(report.best)
        return [
            f"No preset fits ({bounds}).",
            f"Best: {best.name}, KL {best.kl:.4f}, perplexity {100 * best.perplexity:+.2f} %.",
            "Score more tokens if a preset is near the bound, raise --max-kl, or serve this model uncompressed.",
        ]
    r = report.result(report.recommended)
    return [
        f"Recommended: {r.name} ({r.spec.describe()}): the cheapest that fits ({bounds}).",
        *(["It is near a bound: score more tokens with --tokens, on your own text with --text."] if r.near else []),
        f"    export LMCACHE_SERDE=turboquant TQ_OFFLOAD_PRESET={r.name}",
    ]


def _memory(report: Report) -> Table:
    name = report.recommended or report.best
    table = Table(title=f"KV cache of one context with {name}, MiB (projected)", title_justify="left")
    for head in ("tokens", "resident, bf16", "resident, packed", "stored"):
        table.add_column(head, justify="right")
    for row in report.memory:
        table.add_row(f"{row.tokens:,}", *(f"{n / 2**20:,.1f}" for n in (row.bf16, row.packed, row.stored)))
    return table


def layer_table(report: Report) -> Table:
    """Norms and shares of K and V by layer, and the errors of the recommended preset, else of the best one."""
    result = report.result(report.recommended or report.best)
    table = Table(title=f"Layers, errors with {result.name}", title_justify="left")
    for head in ("layer", "K norm", "K mean", "K top", "K top, centred", "V norm", "V mean", "V top",
                 "K error", "V error", "attention error"):  # fmt: skip
        table.add_column(head, justify="right")
    for p, e in zip(report.profile, result.layers, strict=True):
        k, v = p.keys, p.values
        table.add_row(
            str(p.layer), f"{k.norm:.1f}", f"{k.mean_norm:.1f}", f"{100 * k.top_share:.0f} %",
            f"{100 * k.centred_top_share:.0f} %", f"{v.norm:.2f}", f"{v.mean_norm:.2f}", f"{100 * v.top_share:.0f} %",
            f"{e.key:.5f}", f"{e.value:.5f}", f"{e.attention:.4f}",
        )  # fmt: skip
    return table


def stored_bits(spec: CodecSpec, head_dim: int) -> float:
    """Bits an element of a frame of 256 tokens of 32 layers with 8 KV heads, header included."""
    layers, tokens, heads = _REFERENCE
    shape = (2, layers, tokens, heads * head_dim)
    layout = ChunkLayout((GroupLayout("kv_first", shape, "bfloat16", head_dim),))
    return 8 * make_plan(spec, layout).length / (layout.nbytes / 2)


def preset_table(presets: Mapping[str, CodecSpec]) -> Table:
    """Presets and their bits."""
    layers, tokens, heads = _REFERENCE
    title = f"Bits an element as stored: chunks of {tokens} tokens, {layers} layers, {heads} KV heads"
    table = Table(title=title, title_justify="left")
    table.add_column("preset", no_wrap=True)
    for dim in (64, 128):
        table.add_column(f"bits, head_dim {dim}", justify="right")
        table.add_column("smaller", justify="right")
    table.add_column("what it does")
    for name, spec in presets.items():
        bits = [stored_bits(spec, dim) for dim in (64, 128)]
        table.add_row(name, *(cell for b in bits for cell in (f"{b:.2f}", f"{16 / b:.2f}x")), spec.describe())
    return table


def header_table(header: FrameHeader) -> Table:
    """The header of a sound frame."""
    table = Table(show_header=False)
    raw = header.layout.nbytes
    table.add_row("version", str(header.version))
    table.add_row("spec", header.spec.describe())
    for i, group in enumerate(header.layout.groups):
        shape = ", ".join(map(str, group.shape))
        table.add_row(f"group {i}", f"{group.kind} [{shape}] {group.dtype}, head_dim {group.head_dim}")
    table.add_row("bytes", f"{header.length:,} for {raw:,} ({raw / header.length:.2f}x smaller)")
    table.add_row("checksum", f"{header.checksum:016x}")
    table.add_row("key", header.key.hex() if any(header.key) else "not bound")
    table.add_row("model", header.model.hex() if any(header.model) else "not bound")
    return table
