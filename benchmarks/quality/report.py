"""The tables: for a terminal, and as Markdown for docs/benchmarks.md."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from rich.table import Table

from benchmarks.doc_sections import markdown_table, paragraph
from benchmarks.quality.biased import CHECKED_BETA
from benchmarks.quality.checks import ROBUST, Check
from benchmarks.quality.gaussian import COLUMNS
from benchmarks.quality.measure import BiasedModel, Score
from benchmarks.quality.methods import LMCACHE_4BIT, PLAIN_4
from benchmarks.quality.plots import plot_attention, plot_kl
from benchmarks.samples import host_line, rich_table
from tq_offload.codec import TurboQuantCodec
from tq_offload.layout import ChunkLayout, GroupLayout
from tq_offload.spec import PRESETS

__all__ = ["bias_table", "plots", "quality_table", "readme", "section"]

HEADS = (
    "codec", "bits", "KL", "± s.e.", "KL, unseen texts", "perplexity", "top-1", "attention error", "centred K error",
    "V error", "pass key: as fp", "found",
)  # fmt: skip

_QUANTO, _FP8 = "HF QuantizedCache, quanto 4 bits", "LMCache fp8"
_README_OTHERS = (PLAIN_4, LMCACHE_4BIT, "lmcache-turbo-quant-serde, 4 bits", _QUANTO, _FP8)
_README_BIASED = (PLAIN_4, LMCACHE_4BIT, _QUANTO, _FP8, "turboquant", ROBUST, "turboquant_3bit")
_README_HEADS = ("codec", "bits", "smaller", "KL", "perplexity", "attention error", "at head_dim 128")
_README_NOTES = {"turboquant": " (default)", ROBUST: ": for models with biased keys"}


def _number(value: float, form: str) -> str:
    return "NaN" if math.isnan(value) else f"{value:{form}}"


def quality_rows(scores: list[Score]) -> list[list[str]]:
    """One row a codec, sorted within a family by the bits it stores."""
    rows = []
    for score in sorted(scores, key=lambda s: (("ours", "TurboQuant", "other").index(s.family), s.bits)):
        if score.missing:
            rows.append([f"{score.name}: {score.missing}", *[""] * (len(HEADS) - 1)])
            continue
        figures = [(score.bits, ".3f"), (score.kl, ".5f"), (score.error, ".5f"), (score.unseen, ".5f")]
        figures += [(score.perplexity, "+.2%"), (score.top1, ".1%"), (score.attention_mean, ".4f")]
        figures += [(score.key, ".5f"), (score.value, ".5f"), (score.same_answer, ".0%"), (score.key_found, ".0%")]
        rows.append([score.name, *(_number(*f) for f in figures)])
    return rows


def bias_rows(models: list[BiasedModel]) -> tuple[list[str], list[list[str]]]:
    """Heads, and one row a codec: KL and change of perplexity on every changed model."""
    heads = ["codec", "bits", *(m.variant for m in models)]
    rows = [["perplexity, unquantised", "", *(f"{m.perplexity:.2f}" for m in models)]]
    for index, score in enumerate(models[0].scores if models else []):
        cells = []
        for model in models:
            s = model.scores[index]
            cells.append(s.missing or f"{_number(s.kl, '.4f')} ({_number(s.perplexity, '+.1%')})")
        rows.append([score.name, _number(score.bits, ".3f"), *cells])
    return heads, rows


def quality_table(scores: list[Score]) -> Table:
    """The main table."""
    return rich_table("Packed prefix against the unquantised model", HEADS, quality_rows(scores))


def bias_table(models: list[BiasedModel]) -> Table:
    """The table of the biased models."""
    return rich_table("Biased keys: KL (change of perplexity)", *bias_rows(models))


def _scores(rows: Sequence[Mapping[str, Any]]) -> list[Score]:
    return [Score(**{field.name: row[field.name] for field in fields(Score)}) for row in rows]


def plots(files: Mapping[str, Any]) -> dict[str, Any]:
    """KL against bits, and the error of the attention output by layer."""
    scores = _scores(files["quality"]["rows"])
    return {"quality-kl": plot_kl(scores), "quality-attention": plot_attention(scores)}


def section(files: Mapping[str, Any]) -> str:
    """The section of docs/benchmarks.md."""
    results = files["quality"]
    settings, needle, scores = results["settings"], results["pass_keys"], _scores(results["rows"])
    models = [BiasedModel(m["variant"], m["perplexity"], _scores(m["scores"])) for m in results["biased"]]
    held = [Check(**one) for one in results["checks"]]
    sizes = settings["sizes"]
    texts = ", ".join(f"{w['text']} from token {w['start']}" for w in settings["windows"])
    lines = [
        "## Quality (`make bench-quality`)",
        "",
        paragraph(
            f"SmolLM2-135M-Instruct, 30 layers, 3 KV heads of 64, weights float32. {sizes['windows']} windows",
            f"({texts}): a prefix of {sizes['prefix']:,} tokens is coded in chunks of {settings['chunk_tokens']} and",
            f"decoded, and {sizes['scored']} tokens after it are scored. K and V are rounded to bf16 before and after",
            "every codec, as in an engine (row bf16: that alone). Bits an element are what is stored, with scales,",
            "means, headers, padding and raw layers; KL is to the unquantised model, nats a token, with its standard",
            "error over the tokens. Unseen texts: those on which no setting of ours was chosen. Attention error: norm",
            "of the error of the attention output over its norm, mean over layers, first window of each text; centred",
            "K error: error energy over energy of K minus its mean over the tokens. Pass key: share of",
            f"{len(needle['cases'])} prompts (see the JSON) in which the greedy answer is that of the unquantised",
            f"cache, and in which it contains the key; unquantised {needle['fp_found']:.0%}.",
        ),
        "",
        *markdown_table(HEADS, quality_rows(scores)),
        "",
        "![KL against stored bits](quality-kl.svg)",
        "",
        "![Attention error by layer](quality-attention.svg)",
        "",
    ]
    notes = [f"* {s.name}: {s.note}" for s in scores if s.note]
    lines += ["What the rows are:", "", *notes, ""]
    if models:
        lines += [
            paragraph(
                "Biased keys. Constant biases of k_proj on two RoPE pairs of every KV head (low: pairs that turn",
                "little; turning: the others) or on every channel (all), in rms of the keys; heavy: two pairs of",
                "k_proj times 20. KL and change of perplexity against the same model unquantised,",
                f"{settings['biased_sizes']['windows']} windows of {settings['biased_sizes']['scored']} scored tokens",
                "(one where beta is not 20).",
            ),
            "",
            *markdown_table(*bias_rows(models)),
            "",
        ]
    lines += ["Gaussian vectors, d = 128, relative MSE:", "", *markdown_table(COLUMNS, results["gaussian"]), ""]
    lines += ["Checks:", "", *(f"* ({c.number}) {'met' if c.met else 'MISSED'}: {c.what}" for c in held), ""]
    lines += [f"{settings['threads']} threads, {settings['seconds']:.0f} s. {host_line(results)}"]
    return "\n".join(lines)


def readme(files: Mapping[str, Any]) -> dict[str, str]:
    """The tables of README.md: our presets and what is beside them; biased keys."""
    results = files["quality"]
    s, sizes = results["settings"], results["settings"]["sizes"]
    by_name = {score.name: score for score in _scores(results["rows"])}
    names = [*PRESETS, *_README_OTHERS]
    rows = [_readme_row(by_name[name]) for name in names if not by_name[name].missing]
    texts = len({window["text"] for window in s["windows"]})
    text = [
        paragraph(
            f"SmolLM2-135M (head_dim 64), prefixes of {sizes['prefix']:,} tokens coded in chunks of",
            f"{s['chunk_tokens']} through frames, {sizes['scored']} scored, {sizes['windows']} windows of {texts}",
            "texts (`make bench-quality`; KL to the unquantised model in nats a token; bits an element as stored,",
            "frame included; the last column is computed for 32 layers of 8 heads of 128):",
        ), "",
        *markdown_table(_README_HEADS, rows),
    ]  # fmt: skip
    return {"quality": "\n".join(text), "quality-biased": "\n".join(_readme_biased(results))}


def _readme_row(score: Score) -> list[str]:
    wide = ""
    if score.name in PRESETS:
        layout = ChunkLayout((GroupLayout("kv_first", (2, 32, 256, 8 * 128), "bfloat16", 128),))
        wide = f"{layout.nbytes / TurboQuantCodec(PRESETS[score.name]).frame_size(layout):.2f}×"
    figures = [f"{score.bits:.2f}", f"{16 / score.bits:.2f}×", f"{score.kl:.4f}", f"{score.perplexity:+.1%}"]
    name = f"`{score.name}`" if score.name in PRESETS else f"*{score.name}*"
    return [name + _README_NOTES.get(score.name, ""), *figures, f"{score.attention_mean:.3f}", wide]


def _readme_biased(results: Mapping[str, Any]) -> list[str]:
    models = {m["variant"]: {one.name: one for one in _scores(m["scores"])} for m in results["biased"]}
    chosen = [f"{kind}, {CHECKED_BETA:g}x" for kind in ("low", "turning")]
    rows = []
    for name in _README_BIASED:
        cells = [f"{models[variant][name].kl:.4f} ({models[variant][name].perplexity:+.1%})" for variant in chosen]
        rows.append([f"`{name}`" if name in PRESETS else f"*{name}*", *cells])
    return [
        paragraph(
            f"KL (change of perplexity) with constant biases of {CHECKED_BETA:g} times the rms of the keys on two RoPE",
            "pairs of every head:",
        ), "",
        *markdown_table(("codec", "slow pairs", "pairs that turn"), rows),
    ]  # fmt: skip
