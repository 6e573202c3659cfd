"""The planner against deployments that were measured: the loads from Redis in the results of bench_ttft.

A prediction is arithmetic of what is known without the load itself: bytes of whole chunks over the measured speed of
the link, decoding as measured on its own, and what every hit pays that is not vLLM's own (`Delivery`), taken from other
hits of naive. Nothing is fitted to what is predicted.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.planner import CHUNK_TOKENS, SMOLLM2, CodecRate, load_seconds
from benchmarks.samples import Check
from benchmarks.ttft.measure import Hits, Run
from benchmarks.ttft.ways import Way
from tq_offload.integrations.lmcache.settings import SerdeSettings

__all__ = [
    "CHECKED",
    "DELIVERIES",
    "Gain",
    "Measured",
    "Prediction",
    "checks",
    "gains",
    "off",
    "predict",
    "read_runs",
]

TOLERANCE = 0.25
UNSHAPED = "unshaped"
NAIVE, OURS = "naive", "turboquant"
_MOST_BYTES_OFF = 0.01
_REDIS = "redis "
_FP8_BITS = 8
_WORKERS = {OURS: SerdeSettings.workers, "fp8": 1}  # LMCache's processor of a serde has one thread

DELIVERIES: Mapping[str, str] = {
    "none": "nothing more: the planner's own arithmetic",
    "ram": "naive's hit from CPU RAM, of as many tokens in the same mode",
    "unshaped": "naive's hit from Redis over the unshaped link, less its bytes at the speed of a GET",
}
"""What a hit pays beside link and decoding (lookup, copy into the engine's pages), by where it is taken from."""

CHECKED = "ram"
"""The one that the checks are for: there is no link in it."""


@dataclass(frozen=True)
class Measured:
    """What a run of bench_ttft left.

    Args:
        cpu, cores: Of its host.
        mbit: What a GET reached, by link.
        runs: By name of the way.
    """

    cpu: str
    cores: int
    mbit: Mapping[str, float]
    runs: Mapping[str, Sequence[Run]]

    def naive(self, mode: str, tokens: int) -> Run | None:
        """Naive in that mode, with a prompt of that length."""
        every = (run for found in self.runs.values() for run in found)
        return next((r for r in every if (r.way.serde, r.way.mode, r.tokens) == (NAIVE, mode, tokens)), None)


@dataclass(frozen=True)
class Prediction:
    """One load.

    Args:
        way, tokens, link: Which; tokens of the prompt.
        stored, sent: Bytes from Redis, predicted and measured.
        measured: Seconds of loading alone.
        seconds: Predicted, by name of the delivery; without those that are not known or taken from the load itself.
    """

    way: Way
    tokens: int
    link: str
    stored: float
    sent: int
    measured: float
    seconds: Mapping[str, float]

    def ratio(self, delivery: str) -> float:
        """Predicted over measured."""
        return self.seconds[delivery] / self.measured


@dataclass(frozen=True)
class Gain:
    """By how many times TQ-Offload loads sooner than naive in the same mode."""

    mode: str
    tokens: int
    link: str
    measured: float
    predicted: Mapping[str, float]


def read_runs(path: Path) -> Measured:
    """What bench_ttft wrote to its JSON.

    Raises:
        SystemExit: It is not that.
    """
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
        host, mbit = content["host"], content["link"]["measured_mbit"]
        runs = {name: [_run(one) for one in found] for name, found in content["runs"].items()}
        speeds = {link: float(value) for link, value in mbit.items()}
        if min(speeds.values(), default=1.0) <= 0:
            raise ValueError(f"links of {speeds} Mbit/s")
        return Measured(str(host["cpu"]), int(host["cores"]), speeds, runs)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SystemExit(f"{path}: not what bench_ttft writes: {type(error).__name__}: {error}") from error


def _run(content: Mapping[str, Any]) -> Run:
    hits = {place: Hits(**one) for place, one in content["hits"].items()}
    way, fixed, tokens = Way(**content["way"]), Hits(**content["fixed"]), int(content["tokens"])
    if tokens < CHUNK_TOKENS or any(not one.ttft_s or min(one.ttft_s) <= 0 for one in (fixed, *hits.values())):
        raise ValueError(f"a run of {tokens} tokens without a whole chunk, or hits without times")
    return Run(way, tokens, float(content["cold_s"]), fixed, hits)


def predict(measured: Measured, rates: Mapping[str, CodecRate]) -> list[Prediction]:
    """All loads from Redis. ``rates``: decoding by serde; a serde that is not there is left out, but naive."""
    found = []
    for run in (run for runs in measured.runs.values() for run in runs):
        serde = run.way.serde
        if serde != NAIVE and serde not in rates:
            continue
        for link, mbit in measured.mbit.items():
            if f"{_REDIS}{link}" in run.hits:
                found.append(_one(measured, run, link, mbit * 1e6 / 8, rates.get(serde)))
    return found


def _one(measured: Measured, run: Run, link: str, speed: float, rate: CodecRate | None) -> Prediction:
    tokens = run.tokens // CHUNK_TOKENS * CHUNK_TOKENS
    raw, stored = tokens * SMOLLM2.raw_bytes, tokens * _bytes_a_token(run.way.serde)
    threads = min(_WORKERS.get(run.way.serde, 1), measured.cores, tokens // CHUNK_TOKENS)
    base = load_seconds(raw, stored, speed, rate.rate(threads) if rate else None)
    delivery = _deliveries(measured, run, raw)
    if run.way.serde == NAIVE and link == UNSHAPED:
        delivery.pop("unshaped", None)
    hits = run.hits[f"{_REDIS}{link}"]
    seconds = {name: base + more for name, more in delivery.items()}
    return Prediction(run.way, run.tokens, link, stored, hits.sent, run.load_s(f"{_REDIS}{link}"), seconds)


def _bytes_a_token(serde: str) -> float:
    if serde == OURS:
        return SMOLLM2.frame_bytes()
    return SMOLLM2.raw_bytes * (_FP8_BITS / 16 if serde == "fp8" else 1)


def _deliveries(measured: Measured, run: Run, raw: float) -> dict[str, float]:
    """Seconds beside link and decoding, for `DELIVERIES`, as far as naive's hits tell."""
    out, naive = {"none": 0.0}, measured.naive(run.way.mode, run.tokens)
    if naive is None:
        return out
    if "ram" in naive.hits:
        out["ram"] = naive.load_s("ram")
    place = f"{_REDIS}{UNSHAPED}"
    if place in naive.hits and UNSHAPED in measured.mbit:
        out["unshaped"] = max(0.0, naive.load_s(place) - raw / (measured.mbit[UNSHAPED] * 1e6 / 8))
    return out


def gains(predictions: Iterable[Prediction]) -> list[Gain]:
    """Naive over TQ-Offload, where both were run in a mode."""
    by = {(p.way.serde, p.way.mode, p.tokens, p.link): p for p in predictions}
    out = []
    for (serde, mode, tokens, link), ours in by.items():
        naive = by.get((NAIVE, mode, tokens, link))
        if serde == OURS and naive is not None:
            both = [name for name in ours.seconds if name in naive.seconds]
            ratios = {name: naive.seconds[name] / ours.seconds[name] for name in both}
            out.append(Gain(mode, tokens, link, naive.measured / ours.measured, ratios))
    return out


def off(ratios: Iterable[float]) -> int:
    """How many predictions are further off than the tolerance, given predicted over measured."""
    return sum(abs(ratio - 1) > TOLERANCE for ratio in ratios)


def checks(predictions: Sequence[Prediction]) -> list[Check]:
    """Every load of naive and TQ-Offload over a shaped link, and the ratios of the two, within the tolerance."""
    out = []
    shaped = [p for p in predictions if p.link != UNSHAPED and CHECKED in p.seconds]
    for link in dict.fromkeys(p.link for p in shaped):
        for serde, label in ((NAIVE, "naive"), (OURS, "TQ-Offload")):
            seen = {_name(p): p.ratio(CHECKED) for p in shaped if (p.link, p.way.serde) == (link, serde)}
            out += _check(f"Redis at {link}, {label}: every load", seen)
        seen = {f"{g.mode}, {g.tokens:,}": g.predicted[CHECKED] / g.measured for g in gains(shaped) if g.link == link}
        out += _check(f"Redis at {link}: naive's load over TQ-Offload's", seen)
    if shaped:
        worst = max((replace(p, sent=max(1, p.sent)) for p in shaped), key=lambda p: abs(p.stored / p.sent - 1))
        part = worst.stored / worst.sent - 1
        name = f"bytes from Redis predicted within {_MOST_BYTES_OFF:.0%}"
        out.append(Check(name, abs(part) <= _MOST_BYTES_OFF, f"{part:+.2%} at most ({_name(worst)})"))
    return out


def _check(name: str, seen: Mapping[str, float]) -> list[Check]:
    if not seen:
        return []
    missed = [f"{where}: {ratio:.2f}" for where, ratio in seen.items() if off([ratio])]
    text = f"{min(seen.values()):.2f} to {max(seen.values()):.2f} of the measured, {len(seen)} compared"
    found = "; ".join([text, *missed])
    return [Check(f"{name} predicted within {TOLERANCE:.0%}", not missed, found)]


def _name(prediction: Prediction) -> str:
    return f"{prediction.way.label}, {prediction.tokens:,} tokens"
