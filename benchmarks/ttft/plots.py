"""The two figures: hits from Redis over each link by prompt length, and every place for the longest prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.samples import axes
from benchmarks.ttft.measure import Run

__all__ = ["draw"]

_COLOURS = {"naive": "#888888", "fp8": "#d08a2e", "turboquant": "#1f6fb2"}
_LINES = {"in-process": "-", "multi-process": "--"}
_REDIS, _OWN = "redis ", "vLLM prefix cache"


def draw(runs: Mapping[str, Sequence[Run]]) -> dict[str, Any]:
    """The figures by name; those that the runs have data for."""
    places = [place for found in runs.values() for run in found for place in run.hits if place.startswith(_REDIS)]
    out = {"ttft-redis": _redis(runs, list(dict.fromkeys(places)))} if places else {}
    return {**out, "ttft-places": _places(runs)} if any(runs.values()) else out


def _redis(runs: Mapping[str, Sequence[Run]], places: Sequence[str]) -> Any:
    figure, panels = axes(3.2 * len(places) + 0.5, 3.4, len(places))
    for panel, place in zip(panels, places, strict=True):
        for found in runs.values():
            way = found[0].way
            style = {"color": _COLOURS[way.serde], "linestyle": _LINES[way.mode], "marker": "o", "markersize": 3}
            hits = [run.hits[place] for run in found]
            tokens = [run.tokens for run in found]
            panel.plot(tokens, [one.median_s for one in hits], label=way.label, **style)
            low, high = [min(one.ttft_s) for one in hits], [max(one.ttft_s) for one in hits]
            panel.fill_between(tokens, low, high, color=_COLOURS[way.serde], alpha=0.15, linewidth=0)
        panel.set(title=f"Redis, {place.removeprefix(_REDIS)}", xlabel="prompt tokens", yscale="log")
        panel.set_xlim(left=0)
        panel.grid(axis="y", which="both", alpha=0.2)
    _same_range(panels)
    panels[0].set_ylabel("time to first token, s")
    panels[-1].legend(fontsize=7, frameon=False)
    return figure


def _places(runs: Mapping[str, Sequence[Run]]) -> Any:
    longest = [max(found, key=lambda run: run.tokens) for found in runs.values()]
    near = ["disk", "ram"]
    places = [*(place for place in longest[0].hits if place not in near), *near]
    names = ["cold", *places, _OWN]
    figure, (panel,) = axes(7.5, 0.5 * len(names) + 1.2)
    for number, run in enumerate(longest):
        seconds = {"cold": [run.cold_s], _OWN: run.fixed.ttft_s} | {p: hits.ttft_s for p, hits in run.hits.items()}
        colour, shift = _COLOURS[run.way.serde], (number - (len(longest) - 1) / 2) * 0.14
        rows = [row + shift for row in range(len(names))]
        panel.hlines(rows, [min(seconds[n]) for n in names], [max(seconds[n]) for n in names], color=colour, alpha=0.4)
        face = colour if run.way.mode == "in-process" else "white"
        style = {"color": colour, "markerfacecolor": face, "linestyle": "", "marker": "o", "markersize": 5}
        panel.plot([median(seconds[name]) for name in names], rows, label=run.way.label, **style)
    panel.set_yticks(range(len(names)), [_title(name) for name in names])
    panel.invert_yaxis()
    panel.set(xscale="log", xlabel="time to first token, s", title=f"{longest[0].tokens:,} tokens")
    panel.grid(axis="x", alpha=0.25)
    panel.legend(fontsize=7, frameon=False, loc="lower right")
    return figure


def _title(place: str) -> str:
    return {"ram": "CPU RAM"}.get(place, place.replace("redis", "Redis"))


def _same_range(panels: Sequence[object]) -> None:
    ranges = [panel.get_ylim() for panel in panels]  # type: ignore[attr-defined]
    for panel in panels:
        panel.set_ylim(min(low for low, _ in ranges), max(high for _, high in ranges))  # type: ignore[attr-defined]
