"""The plots beside docs/benchmarks.md, as SVG without a date, so that the same figures make the same file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.quality.checks import ROBUST
from benchmarks.quality.measure import Score
from benchmarks.quality.methods import LMCACHE_4BIT, PLAIN_4

__all__ = ["plot_attention", "plot_kl"]

_WIDTH, _HEIGHT, _ROUNDS = 3.8, 8.5, 300
"""Points (1/72 inch) that a letter and a line of a label take, and how often labels are pushed apart."""

COLOURS = {"ours": "#0b6e4f", "TurboQuant": "#c2571a", "other": "#5b6770"}
_FAMILIES = {"ours": "TQ-Offload", "TurboQuant": "TurboQuant by others", "other": "other codecs"}
_SHORT = {
    "TurboQuant (paper)": "paper", "turboquant_": "", "LMCache ": "LMCache ", " (port)": "", "HF QuantizedCache, ": "",
    "lmcache-turbo-quant-serde": "turbo-quant-serde", "TurboQuant": "paper", "raw layers": "raw",
}  # fmt: skip


def _axes(width: float, height: float) -> Any:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    matplotlib.rcParams.update({"svg.hashsalt": "tq-offload", "svg.fonttype": "none", "font.size": 9})
    figure, axes = pyplot.subplots(figsize=(width, height), layout="constrained")
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _short(name: str) -> str:
    for long, short in _SHORT.items():
        name = name.replace(long, short)
    return name


def plot_kl(scores: list[Score], path: Path) -> None:
    """KL, log scale, against stored bits; every point has its name."""
    figure, axes = _axes(9, 6)
    found = [s for s in scores if not s.missing and s.kl > 0 and s.bits < 10]
    for family, colour in COLOURS.items():
        points = [s for s in found if s.family == family]
        axes.errorbar(
            [s.bits for s in points], [s.kl for s in points], yerr=[s.error for s in points], fmt="o", color=colour,
            label=_FAMILIES[family], markersize=5,
        )  # fmt: skip
    axes.set_yscale("log")
    axes.set(xlabel="bits an element, as stored", ylabel="KL to the unquantised model, nats a token")
    axes.set_xlim(right=axes.get_xlim()[1] + 0.4)
    axes.legend(frameon=False, loc="upper right")
    _label(figure, axes, found)
    figure.savefig(path, metadata={"Date": None})


def _label(figure: Any, axes: Any, found: list[Score]) -> None:
    """Names beside the points, pushed apart where they would lie over each other, with a line to the point."""
    figure.draw_without_rendering()
    points = [axes.transData.transform((score.bits, score.kl)) * 72 / figure.dpi for score in found]
    names, heights = [_short(score.name) for score in found], [y for _, y in points]
    for _ in range(_ROUNDS):
        for i, (x, _) in enumerate(points):
            for j in range(i):
                near = points[j][0] - _WIDTH * len(names[i]) < x < points[j][0] + _WIDTH * len(names[j])
                gap = heights[i] - heights[j]
                if near and abs(gap) < _HEIGHT:
                    push = (_HEIGHT - abs(gap)) / 2 * (1 if gap > 0 or (gap == 0 and i > j) else -1)
                    heights[i], heights[j] = heights[i] + push, heights[j] - push
    for score, name, (_, y), height in zip(found, names, points, heights, strict=True):
        axes.annotate(
            name, (score.bits, score.kl), xytext=(9, height - y - 2.5), textcoords="offset points", fontsize=7,
            color=COLOURS[score.family], arrowprops={"arrowstyle": "-", "linewidth": 0.4, "color": "#999999"},
        )  # fmt: skip


def plot_attention(scores: list[Score], path: Path) -> None:
    """Relative error of the attention output by layer."""
    figure, axes = _axes(8, 4)
    names = ["turboquant", ROBUST, PLAIN_4, LMCACHE_4BIT, "HF QuantizedCache, quanto 4 bits", "LMCache fp8"]
    by_name = {s.name: s for s in scores}
    for name, style in zip(names, ("-", "--", "-", "--", "-", "--"), strict=True):
        score = by_name.get(name)
        if score is not None and score.attention:
            label = f"{name} ({score.bits:.2f} bits)"
            axes.plot(score.attention, style, color=COLOURS[score.family], label=label, linewidth=1.4)
    axes.set(xlabel="layer", ylabel="error of the attention output", ylim=(0, None))
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, metadata={"Date": None})
