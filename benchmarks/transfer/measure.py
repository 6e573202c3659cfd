"""Rounds: every way goes to every place once a round, so that a busy machine slows all of them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from benchmarks.run_delay import run_delay
from benchmarks.samples import Quantiles
from benchmarks.transfer.places import Counters, Place
from benchmarks.transfer.ways import StoreWay, Way, relative_error

__all__ = ["Leg", "Row", "Sample", "measure", "summarise"]

MAX_ERROR = {"naive": 0.0, "LMCache naive": 0.0, "LMCache fp8": 0.01, "TQ-Offload": 0.01}


@dataclass(frozen=True)
class Leg:
    """Puts, or gets, of all chunks.

    Args:
        seconds: Wall time.
        cpu_s: CPU seconds of this process.
        waited_s: Seconds that its threads could have run and had no core (Linux's run delay), summed over them.
        server: What the server counted.
    """

    seconds: float
    cpu_s: float
    waited_s: float
    server: Counters

    @property
    def alone(self) -> float:
        """Of one worker: wall time without the wait for a core that others had; the CPU time at least."""
        return max(self.seconds - self.waited_s, self.cpu_s)


@dataclass(frozen=True)
class Sample:
    """One way at one place in one round, and the bytes that then lay there."""

    put: Leg
    get: Leg
    held: int


@dataclass(frozen=True)
class Row:
    """One way at one place over all rounds. Rates are GB/s of uncompressed KV, CPU is seconds a GB of it.

    Args:
        put_ratio, get_ratio: Times the rate of naive with as many workers, median of the rounds.
        held: Bytes as stored.
        sent, received: Bytes that the server received in puts and sent in gets; 0 without a server.
        put_alone, get_alone: The same of the times without the wait for a core; 0 with more workers or a server.
        put_cpu, get_cpu: Of this process; put_server_cpu, get_server_cpu: of the server.
    """

    place: str
    way: str
    workers: int
    raw: int
    held: int
    sent: int
    received: int
    put: Quantiles
    get: Quantiles
    put_ratio: Quantiles
    get_ratio: Quantiles
    put_alone: float
    get_alone: float
    put_cpu: float
    get_cpu: float
    put_server_cpu: float
    get_server_cpu: float


Samples = dict[tuple[str, str], list[Sample]]


def measure(
    places: Sequence[Place],
    ways: Sequence[Way],
    chunks: Sequence[torch.Tensor],
    rounds: int,
    say: Callable[[str], None],
) -> Samples:
    """The samples by place and label of the way. The first round warms up, and what came back is compared.

    Raises:
        SystemExit: It is not what was stored.
    """
    found: Samples = {}
    for number in range(rounds + 1):
        say("warm-up" if not number else f"round {number} of {rounds}")
        for place in places:
            turn = number % len(ways)
            for way in [*ways[turn:], *ways[:turn]]:
                if not way.goes_to(place):
                    continue
                sample = _once(place, way)
                if number:
                    found.setdefault((place.name, way.label), []).append(sample)
                elif (error := relative_error(way.targets, chunks)) > MAX_ERROR[way.name]:
                    raise SystemExit(
                        f"{place.name}, {way.label}: what came back has a relative squared error of {error}"
                    )
    return found


def _once(place: Place, way: Way) -> Sample:
    for target in way.targets:
        target.zero_()
    put = _timed(place, way.put_all)
    place.before_gets()
    held = place.held()
    get = _timed(place, way.get_all)
    place.empty()
    return Sample(put, get, held)


def _timed(place: Place, work: Callable[[Place], None]) -> Leg:
    counters, waited, cpu, start = place.counters(), run_delay(), time.process_time(), time.perf_counter()
    work(place)
    seconds, spent = time.perf_counter() - start, time.process_time() - cpu
    return Leg(seconds, spent, run_delay() - waited, place.counters().since(counters))


def summarise(found: Samples, ways: Sequence[Way], raw: int) -> list[Row]:
    """A row for each place and way; ``raw``: uncompressed bytes of all chunks."""
    by_label = {way.label: way for way in ways}
    rows = []
    places = list(dict.fromkeys(place for place, _ in found))
    order = sorted(found, key=lambda one: (places.index(one[0]), [*by_label].index(one[1])))
    for place, label in order:
        samples = found[place, label]
        way = by_label[label]
        base = found.get((place, f"naive ×{way.workers}")) or found[place, "naive ×1"]
        last = samples[-1]
        rows.append(
            Row(
                place, way.name, way.workers, raw, last.held, last.put.server.received, last.get.server.sent,
                Quantiles.of(raw / 1e9 / s.put.seconds for s in samples),
                Quantiles.of(raw / 1e9 / s.get.seconds for s in samples),
                Quantiles.of(b.put.seconds / s.put.seconds for s, b in zip(samples, base, strict=True)),
                Quantiles.of(b.get.seconds / s.get.seconds for s, b in zip(samples, base, strict=True)),
                _alone(samples, base, way, lambda s: s.put),
                _alone(samples, base, way, lambda s: s.get),
                *(
                    statistics.median(cost(s) for s in samples) / (raw / 1e9)
                    for cost in (
                        lambda s: s.put.cpu_s,
                        lambda s: s.get.cpu_s,
                        lambda s: s.put.server.cpu_s,
                        lambda s: s.get.server.cpu_s,
                    )
                ),
            )
        )  # fmt: skip
    return rows


def _alone(samples: Sequence[Sample], base: Sequence[Sample], way: Way, leg: Callable[[Sample], Leg]) -> float:
    """Times naive's rate, without the wait for a core; the median. 0 where several wait, whose waits overlap."""
    if not isinstance(way, StoreWay) or way.workers > 1 or any(leg(s).server.received for s in samples):
        return 0.0
    return statistics.median(leg(b).alone / leg(s).alone for s, b in zip(samples, base, strict=True))
