"""What bench_model says of its predictions of measured deployments: tables, JSON, a part of its section."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from benchmarks.doc_sections import markdown_table, paragraph
from benchmarks.planner import SMOLLM2
from benchmarks.planner_ttft import (
    CHECKED,
    DELIVERIES,
    NAIVE,
    OURS,
    TOLERANCE,
    UNSHAPED,
    Measured,
    Prediction,
    gains,
    off,
)
from benchmarks.samples import Check, check_lines, rich_table, where
from benchmarks.ttft.ways import Way

__all__ = ["Against", "as_json", "markdown", "read", "tables"]

_LABELS = {
    "none": "link and decoding only",
    "ram": "+ naive's hit from CPU RAM",
    "unshaped": "+ naive's hit, unshaped link",
}
_SERDES = {NAIVE: "naive", OURS: "TQ-Offload", "fp8": "LMCache fp8"}

Cells = tuple[list[str], list[list[str]]]


@dataclass(frozen=True)
class Against:
    """Predictions and what they are compared with; ``decoding`` says in words what they were made with.

    ``cpu``: where decoding was measured; empty: on this machine.
    """

    source: str
    measured: Measured
    predictions: Sequence[Prediction]
    checks: Sequence[Check]
    decoding: str
    cpu: str = ""

    @property
    def other_host(self) -> str:
        """A sentence where the runs are of another machine than decoding; else nothing."""
        here = self.cpu or str(where()["host"]["cpu"])
        if here == self.measured.cpu:
            return ""
        return f"The runs are of another host ({self.measured.cpu}) than decoding ({here}): no one machine has both."


def _against(predicted: float, measured: float) -> str:
    return f"{predicted:.3f} / {measured:.3f} ({predicted / measured:.2f})"


def _loads(against: Against) -> Cells:
    links = list(against.measured.mbit)
    heads = ["way", "prompt tokens", *(f"Redis {link}" for link in links)]
    rows: dict[tuple[str, int], dict[str, str]] = {}
    for p in against.predictions:
        if CHECKED in p.seconds:
            cell = _against(p.seconds[CHECKED], p.measured)
            rows.setdefault((p.way.label, p.tokens), {})[p.link] = cell
    return heads, [
        [way, f"{tokens:,}", *(found.get(link, "") for link in links)] for (way, tokens), found in rows.items()
    ]


def _ratios(against: Against) -> Cells:
    links = list(against.measured.mbit)
    heads = ["mode", "prompt tokens", *(f"Redis {link}" for link in links)]
    rows: dict[tuple[str, int], dict[str, str]] = {}
    for gain in gains(against.predictions):
        if CHECKED in gain.predicted:
            seen = f"{gain.predicted[CHECKED]:.2f}× / {gain.measured:.2f}×"
            rows.setdefault((gain.mode, gain.tokens), {})[gain.link] = seen
    return heads, [
        [mode, f"{tokens:,}", *(found.get(link, "") for link in links)] for (mode, tokens), found in rows.items()
    ]


def _deliveries(against: Against) -> Cells:
    """Ranges of predicted over measured by what is added, and how many are further off than the tolerance."""
    links = _shaped(against)
    heads = ["predicted / measured", *(f"{label}, {link}" for link in links for label in _SERDES.values()), "beyond"]
    rows = []
    for delivery, label in _LABELS.items():
        row, every = [label], []
        for link in links:
            for serde in _SERDES:
                found = [p.ratio(delivery) for p in against.predictions if _is(p, link, serde, delivery)]
                every += found
                row.append(f"{min(found):.2f}–{max(found):.2f}" if found else "–")
        rows.append([*row, f"{off(every)} of {len(every)}"])
    return heads, rows


def _shaped(against: Against) -> list[str]:
    return [link for link in against.measured.mbit if link != UNSHAPED]


def _missed(against: Against) -> list[str]:
    """A line for each addition with which loads over shaped links are predicted too far off."""
    out = []
    for delivery, label in _LABELS.items():
        found = [p for p in against.predictions if p.link in _shaped(against) and delivery in p.seconds]
        far = [p for p in found if off([p.ratio(delivery)])]
        text = "; ".join(f"{p.way.label}, {p.tokens:,} tokens, {p.link}: {p.ratio(delivery):.2f}" for p in far)
        out += [f"* Beyond, {label}: {text}."] if far else []
    return [*out, ""] if out else []


def _is(prediction: Prediction, link: str, serde: str, delivery: str) -> bool:
    return (prediction.link, prediction.way.serde) == (link, serde) and delivery in prediction.seconds


def tables(against: Against) -> list[Table]:
    """For a terminal."""
    what = f"predicted / measured; {SMOLLM2.name}, {against.source}"
    added = f"What is added to link and decoding (beyond: further off than {TOLERANCE:.0%})"
    return [
        rich_table(f"Seconds of loading alone, {what}", *_loads(against), texts=2),
        rich_table(f"How many times sooner TQ-Offload loads than naive, {what}", *_ratios(against), texts=2),
        rich_table(added, *_deliveries(against)),
    ]


def as_json(against: Against) -> dict[str, Any]:
    """Everything that was predicted."""
    rows = [
        {
            "way": p.way.label, "mode": p.way.mode, "serde": p.way.serde, "prompt_tokens": p.tokens, "link": p.link,
            "predicted_bytes": round(p.stored), "redis_bytes": p.sent, "measured_s": p.measured,
            "predicted_s": dict(p.seconds), "ratio": {name: p.ratio(name) for name in p.seconds},
        }
        for p in against.predictions
    ]  # fmt: skip
    return {
        "source": against.source, "host_cpu": against.measured.cpu, "other_host": bool(against.other_host),
        "measured_mbit": dict(against.measured.mbit), "decoding": against.decoding,
        "added": dict(DELIVERIES), "checked": CHECKED, "loads": rows,
        "checks": [asdict(one) for one in against.checks],
        "times_sooner_than_naive": [asdict(gain) for gain in gains(against.predictions)],
    }  # fmt: skip


def read(results: Mapping[str, Any]) -> Against:
    """What a results file of bench_model has of `as_json`."""
    found = results["against_ttft"]
    predictions = [
        Prediction(
            Way(row["way"], row["mode"], row["serde"]), row["prompt_tokens"], row["link"], row["predicted_bytes"],
            row["redis_bytes"], row["measured_s"], row["predicted_s"],
        )
        for row in found["loads"]
    ]  # fmt: skip
    measured = Measured(found["host_cpu"], 0, found["measured_mbit"], {})
    held = [Check(**one) for one in found["checks"]]
    return Against(found["source"], measured, predictions, held, found["decoding"], results["host"]["cpu"])


def markdown(against: Against) -> list[str]:
    """Lines of the section."""
    return [
        "### Predicted and measured", "",
        paragraph(
            f"The same arithmetic for the loads from Redis that `make bench-ttft` measured ({against.source};",
            f"{SMOLLM2.name}, whole chunks). *Loading alone*: time to the first token less that of a hit in vLLM's",
            "prefix cache. Speed of the link: what a GET reached in that run. Decoding, GB/s (× threads):",
            f"{against.decoding}; by as many threads as those deployments decode with. {against.other_host}",
        ), "",
        paragraph(
            "A hit pays more than link and decoding: lookup, and the copy into the engine's pages. The tables above",
            "leave that out; here it is taken from hits of naive that are not predicted: from CPU RAM, where there is",
            "no link, in the same mode and of the same length. Nothing is fitted to what is predicted. Seconds,",
            "predicted / measured (predicted over measured):",
        ), "",
        *markdown_table(*_loads(against)), "",
        "The unshaped link is not checked: the speed of one GET is not that of several connections at once.", "",
        "By how many times TQ-Offload loads sooner than naive, predicted / measured:", "",
        *markdown_table(*_ratios(against)), "",
        paragraph(
            "What is added, and the other place to take it from: naive's hits from Redis over the unshaped link, less",
            "their bytes at the speed of a GET. All three were compared with runs of bench_ttft before the checks were",
            f"given to CPU RAM. Ranges of predicted over measured; beyond: more than {TOLERANCE:.0%} off.",
        ), "",
        *markdown_table(*_deliveries(against)), "",
        *_missed(against),
        *check_lines(asdict(one) for one in against.checks), "",
    ]  # fmt: skip
