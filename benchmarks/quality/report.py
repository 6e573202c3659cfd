"""The tables: for a terminal, and as Markdown for docs/benchmarks.md."""

from __future__ import annotations

import math
from typing import Any

from rich.table import Table

from benchmarks.doc_sections import markdown_table
from benchmarks.quality.checks import Check
from benchmarks.quality.gaussian import COLUMNS
from benchmarks.quality.measure import BiasedModel, Score

__all__ = ["bias_table", "markdown", "quality_table"]

HEADS = (
    "codec", "bits", "KL", "± s.e.", "KL, unseen texts", "perplexity", "top-1", "attention error", "centred K error",
    "V error", "pass key: as fp", "found",
)  # fmt: skip


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


def _rich(title: str, heads: list[str] | tuple[str, ...], rows: list[list[str]]) -> Table:
    table = Table(title=title, title_justify="left")
    for number, head in enumerate(heads):
        table.add_column(head, justify="right" if number else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def quality_table(scores: list[Score]) -> Table:
    """The main table."""
    return _rich("Packed prefix against the unquantised model", HEADS, quality_rows(scores))


def bias_table(models: list[BiasedModel]) -> Table:
    """The table of the biased models."""
    return _rich("Biased keys: KL (change of perplexity)", *bias_rows(models))


def markdown(
    settings: dict[str, Any],
    gaussian: list[list[str]],
    scores: list[Score],
    models: list[BiasedModel],
    needle: dict[str, Any],
    held: list[Check],
) -> str:
    """The section between the markers."""
    sizes, host = settings["sizes"], settings["host"]
    texts = ", ".join(f"{w['text']} from token {w['start']}" for w in settings["windows"])
    lines = [
        "## Quality (`make bench-quality`)",
        "",
        f"SmolLM2-135M-Instruct, 30 layers, 3 KV heads of 64, weights float32. {sizes['windows']} windows ({texts}):",
        f"a prefix of {sizes['prefix']:,} tokens is coded in chunks of {settings['chunk_tokens']} and decoded, and",
        f"{sizes['scored']} tokens after it are scored. K and V are rounded to bf16 before and after every codec, as",
        "in an engine (row bf16: that alone). Bits an element are what is stored, with scales, means, headers, padding",
        "and raw layers; KL is to the unquantised model, nats a token, with its standard error over the tokens. Unseen",
        "texts: those on which no setting of ours was chosen. Attention error: norm of the error of the attention",
        "output over its norm, mean over layers, first window of each text; centred K error: error energy over energy",
        f"of K minus its mean over the tokens. Pass key: share of {len(needle['cases'])} prompts (see the",
        "JSON) in which the greedy answer is that of the unquantised cache, and in which it contains the key;",
        f"unquantised {needle['fp_found']:.0%}.",
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
            "Biased keys. Constant biases of k_proj on two RoPE pairs of every KV head (low: pairs that turn little;",
            "turning: the others) or on every channel (all), in rms of the keys; heavy: two pairs of k_proj times 20.",
            "KL and change of perplexity against the same model unquantised,",
            f"{settings['biased_sizes']['windows']} windows of {settings['biased_sizes']['scored']} scored tokens (one",
            "where beta is not 20).",
            "",
            *markdown_table(*bias_rows(models)),
            "",
        ]
    lines += ["Gaussian vectors, d = 128, relative MSE:", "", *markdown_table(COLUMNS, gaussian), ""]
    lines += ["Checks:", "", *(f"* ({c.number}) {'met' if c.met else 'MISSED'}: {c.what}" for c in held), ""]
    versions = ", ".join(f"{name} {version}" for name, version in host["versions"].items())
    lines += [f"{host['cpu']}, {settings['threads']} threads, {settings['seconds']:.0f} s. {versions}."]
    return "\n".join(lines)
