"""One way: the prompts cold, then hits from vLLM's prefix cache, from CPU RAM, disk, and Redis over each link."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from benchmarks.process import DeploymentError, Progress, silent
from benchmarks.steps import Steps
from benchmarks.ttft.link import LinkedRedis, Rate
from benchmarks.ttft.prompts import Prompt
from benchmarks.ttft.ways import Deployment, Way

__all__ = ["STEPS", "Hits", "Plan", "Run", "measure", "rate_name"]

STEPS = 4
"""Steps that `measure` shows, without one for each rate."""

_STILL_S, _STORE_TIMEOUT_S = 0.8, 120.0
_FAST = 1000  # Mbit/s


@dataclass(frozen=True)
class Plan:
    """What is done for each way: the warm-up is not measured. ``slow_repeats`` counts below 1 Gbit/s."""

    model: Path
    warm_up: Prompt
    prompts: Sequence[Prompt]
    rates: Sequence[Rate]
    repeats: int
    slow_repeats: int
    folder: Path


@dataclass(frozen=True)
class Hits:
    """A prompt several times from one place: seconds to the first token, tokens found, what Redis sent for each."""

    ttft_s: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    redis_bytes: list[int] = field(default_factory=list)

    @property
    def median_s(self) -> float:
        """The median time to the first token."""
        return median(self.ttft_s)

    @property
    def sent(self) -> int:
        """The median of what Redis sent."""
        return int(median(self.redis_bytes))

    def add(self, seconds: float, tokens: int, redis_bytes: int) -> None:
        """One more."""
        self.ttft_s.append(seconds)
        self.tokens.append(tokens)
        self.redis_bytes.append(redis_bytes)


@dataclass(frozen=True)
class Run:
    """One way and prompt.

    Args:
        cold_s: Seconds to the first token, nothing being stored anywhere.
        fixed: Hits in vLLM's own prefix cache, each after one from CPU RAM: request, lookup, one pass over one token.
            Not after hits from elsewhere, since `lmcache server` loads at every lookup what its L1 lacks.
        hits: By place: `ram`, `disk`, `redis 100 Mbit/s` and so on.
    """

    way: Way
    tokens: int
    cold_s: float
    fixed: Hits
    hits: dict[str, Hits]

    def load_s(self, place: str) -> float:
        """What loading takes: the median time to the first token less that of `fixed`."""
        return self.hits[place].median_s - self.fixed.median_s


def rate_name(rate: Rate) -> str:
    """A rate in words."""
    if rate is None:
        return "unshaped"
    return f"{rate:g} Mbit/s" if rate < _FAST else f"{rate / 1000:g} Gbit/s"


def measure(way: Way, plan: Plan, redis: LinkedRedis, steps: Steps) -> list[Run]:
    """Run one way. Raises DeploymentError; nothing is left running."""
    redis.link.shape(None)
    redis.empty()
    folder = plan.folder / f"{way.mode}-{way.serde}"
    with ExitStack() as running:
        one = _Measuring(Deployment.of(way, folder, redis), plan)
        with steps.step(f"{way.label}: starting") as progress:
            one.deployment.start(plan.model, running, progress)
        with steps.step(f"{way.label}: warm-up"):
            one.warm_up()
        with steps.step(f"{way.label}: {len(plan.prompts)} prompts cold, stored") as progress:
            cold = [one.cold(prompt, progress) for prompt in plan.prompts]
        with steps.step(f"{way.label}: hits from vLLM's prefix cache, CPU RAM, disk"):
            near = [one.near(prompt, plan.repeats) for prompt in plan.prompts]
            runs = [
                Run(way, prompt.tokens, seconds, fixed, {"ram": ram, "disk": one.far(prompt, plan.repeats)})
                for prompt, seconds, (ram, fixed) in zip(plan.prompts, cold, near, strict=True)
            ]
        one.deployment.empty_disk()
        for rate in plan.rates:
            with steps.step(f"{way.label}: hits from Redis, {rate_name(rate)}"):
                redis.link.shape(rate)
                repeats = plan.repeats if rate is None or rate >= _FAST else plan.slow_repeats
                for run, prompt in zip(runs, plan.prompts, strict=True):
                    run.hits[f"redis {rate_name(rate)}"] = one.far(prompt, repeats)
        redis.link.shape(None)
    return runs


class _Measuring:
    """One deployment that runs, and how many chunks its tiers should have."""

    def __init__(self, deployment: Deployment, plan: Plan) -> None:
        self.deployment, self.plan = deployment, plan
        self._chunks = 0

    def warm_up(self) -> None:
        """Every path once: kernels are compiled, pages committed, connections opened."""
        self.cold(self.plan.warm_up, silent)
        self.near(self.plan.warm_up, 2)
        self.far(self.plan.warm_up, 2)

    def cold(self, prompt: Prompt, progress: Progress) -> float:
        """Send a prompt that nobody has seen, and wait until disk and Redis have all of it."""
        answer = self.deployment.engine.complete(prompt.text, max_tokens=1, timeout_s=600)
        if answer.prompt_tokens != prompt.tokens:
            what = f"the prompt has {answer.prompt_tokens} tokens; {prompt.tokens} were expected"
            raise DeploymentError(what, "the engine's tokenizer is not the model's", self.deployment.engine.log)
        self._chunks += prompt.chunks
        self._settle(progress)
        return answer.ttft_s

    def near(self, prompt: Prompt, repeats: int) -> tuple[Hits, Hits]:
        """From CPU RAM, and from vLLM's prefix cache, twice after each of those."""
        ram, fixed = Hits(), Hits()
        for _ in range(repeats):
            self.deployment.empty_engine()
            seconds, tokens, _, sent = self._ask(prompt)
            ram.add(seconds, tokens, sent)
            for _ in range(2):
                seconds, _, tokens, sent = self._ask(prompt)
                fixed.add(seconds, tokens, sent)
        return ram, fixed

    def far(self, prompt: Prompt, repeats: int) -> Hits:
        """From disk, or from Redis once the disk is empty."""
        out = Hits()
        for _ in range(repeats):
            self.deployment.empty_engine()
            self.deployment.empty_ram()
            seconds, tokens, _, sent = self._ask(prompt)
            out.add(seconds, tokens, sent)
        return out

    def _ask(self, prompt: Prompt) -> tuple[float, int, int, int]:
        """Seconds to first token, tokens found by LMCache and by vLLM, bytes that Redis sent."""
        engine, redis = self.deployment.engine, self.deployment.redis
        sent, counted = redis.sent_bytes(), _found(engine.metrics())
        answer = engine.complete(prompt.text, max_tokens=1, timeout_s=600)
        now = _found(engine.metrics())
        return answer.ttft_s, now[0] - counted[0], now[1] - counted[1], redis.sent_bytes() - sent

    def _settle(self, progress: Progress) -> None:
        """Wait until disk and Redis have every chunk and nothing moves any more; stores are asynchronous."""
        deployment = self.deployment
        keys = self._chunks * deployment.way.keys_per_chunk
        began = changed = time.monotonic()
        seen: tuple[int, int] = (-1, -1)
        while min(seen[0] - keys, seen[1] - self._chunks) < 0 or time.monotonic() - changed < _STILL_S:
            now = (deployment.redis.keys(), deployment.files())
            if now != seen:
                seen, changed = now, time.monotonic()
            elapsed = time.monotonic() - began
            progress(f"waiting for {keys} keys ({seen[0]}) and {self._chunks} files ({seen[1]})", elapsed)
            if elapsed > _STORE_TIMEOUT_S:
                what = (
                    f"after {elapsed:.0f} s Redis had {seen[0]} of {keys} keys, disk {seen[1]} of {self._chunks} files"
                )
                raise DeploymentError(what, "look for a refused or dropped chunk in the log", deployment.engine.log)
            time.sleep(0.1)


def _found(metrics: dict[str, float]) -> tuple[int, int]:
    """Prompt tokens found so far by LMCache, and by vLLM's own prefix cache."""
    external, own = (f"vllm:{which}prefix_cache_hits_total" for which in ("external_", ""))
    return int(metrics.get(external, 0)), int(metrics.get(own, 0))
