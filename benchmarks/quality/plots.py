"""The plots beside docs/benchmarks.md."""

from __future__ import annotations

from typing import Any

from benchmarks.quality.checks import ROBUST
from benchmarks.quality.measure import Score
from benchmarks.quality.methods import LMCACHE_4BIT, PLAIN_4
from benchmarks.samples import axes

__all__ = ["plot_attention", "plot_kl"]

_WIDTH, _HEIGHT, _ROUNDS = 3.8, 8.5, 300
"""Points (1/72 inch) that a letter and a line of a label take, and how often labels are pushed apart."""

COLOURS = {"ours": "#0b6e4f", "TurboQuant": "#c2571a", "other": "#5b6770"}
_FAMILIES = {"ours": "TQ-Offload", "TurboQuant": "TurboQuant by others", "other": "other codecs"}
_SHORT = {
    "TurboQuant (paper)": "paper", "turboquant_": "", "LMCache ": "LMCache ", " (port)": "", "HF QuantizedCache, ": "",
    "lmcache-turbo-quant-serde": "turbo-quant-serde", "TurboQuant": "paper", "raw layers": "raw",
}  # fmt: skip


def _short(name: str) -> str:
    for long, short in _SHORT.items():
        name = name.replace(long, short)
    return name


def plot_kl(scores: list[Score]) -> Any:
    """KL, log scale, against stored bits; every point has its name."""
    figure, (panel,) = axes(9, 6)
    found = [s for s in scores if not s.missing and s.kl > 0 and s.bits < 10]
    for family, colour in COLOURS.items():
        points = [s for s in found if s.family == family]
        panel.errorbar(
            [s.bits for s in points], [s.kl for s in points], yerr=[s.error for s in points], fmt="o", color=colour,
            label=_FAMILIES[family], markersize=5,
        )  # fmt: skip
    panel.set_yscale("log")
    panel.set(xlabel="bits an element, as stored", ylabel="KL to the unquantised model, nats a token")
    panel.set_xlim(right=panel.get_xlim()[1] + 0.4)
    panel.legend(frameon=False, loc="upper right")
    _label(figure, panel, found)
    return figure


def _label(figure: Any, panel: Any, found: list[Score]) -> None:
    """Names beside the points, pushed apart where they would lie over each other, with a line to the point."""
    figure.draw_without_rendering()
    points = [panel.transData.transform((score.bits, score.kl)) * 72 / figure.dpi for score in found]
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
        panel.annotate(
            name, (score.bits, score.kl), xytext=(9, height - y - 2.5), textcoords="offset points", fontsize=7,
            color=COLOURS[score.family], arrowprops={"arrowstyle": "-", "linewidth": 0.4, "color": "#999999"},
        )  # fmt: skip


def plot_attention(scores: list[Score]) -> Any:
    """Relative error of the attention output by layer."""
    figure, (panel,) = axes(8, 4)
    names = ["turboquant", ROBUST, PLAIN_4, LMCACHE_4BIT, "HF QuantizedCache, quanto 4 bits", "LMCache fp8"]
    by_name = {s.name: s for s in scores}
    for name, style in zip(names, ("-", "--", "-", "--", "-", "--"), strict=True):
        score = by_name.get(name)
        if score is not None and score.attention:
            label = f"{name} ({score.bits:.2f} bits)"
            panel.plot(score.attention, style, color=COLOURS[score.family], label=label, linewidth=1.4)
    panel.set(xlabel="layer", ylabel="error of the attention output", ylim=(0, None))
    panel.legend(frameon=False, fontsize=8)
    return figure
