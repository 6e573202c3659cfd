"""One codec on a real deployment with CPU RAM, disk and Redis tiers: what each tier holds, and hits from each.

All three tiers are there at once, so one prompt fills them, and the bytes of each are measured where they lie. Which
tier a hit comes from is made certain: with naive LMCache by emptying or bypassing the tiers before it; with turboquant
by a restart, before which the prompt's files are deleted from disk (so it comes from Redis) and those of another prompt
are not (so that one comes from disk), and our counters of each tier agree. `tier_modes` has the two deployments.
"""

from __future__ import annotations

import abc
import time
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.client import Completion
from benchmarks.deployment import CHUNK_TOKENS, VLLM, RedisServer
from benchmarks.process import DeploymentError, Progress, ServerProcess
from benchmarks.steps import Steps

__all__ = ["CODECS", "STEPS", "TIERS", "Held", "Hit", "Plan", "TierDeployment", "TierRun"]

TIERS = ("ram", "disk", "redis")
CODECS: Mapping[str, Mapping[str, str]] = {"naive": {}, "turboquant": {"LMCACHE_SERDE": "turboquant"}}
STEPS = {"in-process": {"naive": 6, "turboquant": 7}, "multi-process": {"naive": 5, "turboquant": 6}}
"""How many steps a run shows for each mode and codec."""

_WARM_UP = "Good morning. The weather at the coast today is"


@dataclass(frozen=True)
class Plan:
    """What is run for each codec."""

    model: Path
    prompt: str
    folder: Path
    ram_gb: float = 1.0
    max_tokens: int = 24

    @property
    def other(self) -> str:
        """Another prompt of the same length, which shares no chunk with it."""
        return f"Second edition. {self.prompt}"


@dataclass(frozen=True)
class Held:
    """What a tier holds: bytes of memory, of disk blocks or of Redis; files or keys, if known; sizes of the files."""

    bytes: int
    entries: int | None
    apparent_bytes: int | None = None


@dataclass(frozen=True)
class Hit:
    """One repeated request: how many of its tokens the engine counted as found, how many chunks each tier served."""

    answer: Completion
    tokens: int
    served: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class TierRun:
    """What one codec did. `hits` and `after_restart` by the tier that was to serve them.

    Args:
        growth_per_prompt: Bytes by which the engine's memory grew for a prompt.
        memory: Bytes of the engine's memory at the end. LMCache commits all of its pool at the start.
        pool: Bytes of that pool that were in use then.
    """

    codec: str
    cold: Completion
    held: Mapping[str, Held]
    hits: Mapping[str, Hit]
    after_restart: Mapping[str, Hit]
    growth_per_prompt: float
    memory: int
    pool: int
    start_up_lines: Mapping[str, int]
    start_s: float

    @property
    def chunks(self) -> int:
        """How many whole chunks the prompt has."""
        return self.cold.prompt_tokens // CHUNK_TOKENS


class TierDeployment(abc.ABC):
    """The servers of one codec, their Redis and their folder on disk; a subclass for each mode."""

    mode: str
    start_up_lines: Mapping[str, str]
    """What the log says of each tier at the start."""
    engine: VLLM
    """The engine that runs."""
    holder: ServerProcess
    """The process that has the tiers."""

    def __init__(self, codec: str, plan: Plan, steps: Steps, running: ExitStack) -> None:
        self.codec, self.plan, self.steps = codec, plan, steps
        self.folder = plan.folder / f"{self.mode}-{codec}"
        self.disk = self.folder / "disk"
        self.redis = running.enter_context(RedisServer(self.folder))

    @abc.abstractmethod
    def start(self, running: ExitStack, progress: Progress) -> None:
        """Start everything but Redis."""

    @abc.abstractmethod
    def samples(self) -> Mapping[tuple[str, str], float]:
        """The metrics of the process that has the tiers, by name and label `tier`."""

    @abc.abstractmethod
    def pool(self, samples: Mapping[tuple[str, str], float]) -> int:
        """Bytes in use of LMCache's own CPU memory."""

    @abc.abstractmethod
    def naive(self) -> TierRun:
        """Run naive LMCache."""

    def grow(self, chunks: int, there: int, before: int) -> float:
        """Return by how many bytes the memory of the holder grows for a prompt of ``chunks``.

        ``there`` chunks are there, and its memory was ``before`` before the last prompt.
        """
        return self.holder.anonymous_bytes() - before

    def before_hit(self) -> None:  # noqa: B027
        """Have the next hit come from a tier, and not from memory that every tier is loaded into."""

    def turboquant(self) -> TierRun:
        """Run turboquant."""
        plan = self.plan
        with ExitStack() as running:
            self.begin(running, "starting")
            cold, held = self.cold()
            files = list(_files(self.disk))
            with self.step("the prompt again, from CPU RAM"):
                hits = {"ram": self.hit(plan.prompt)}
            chunks = cold.prompt_tokens // CHUNK_TOKENS
            with self.step("another prompt, cold") as progress:
                before = self.holder.anonymous_bytes()
                self.engine.complete(plan.other, max_tokens=plan.max_tokens, timeout_s=600)
                self.settled(2 * chunks, progress)
            growth = self.grow(chunks, 2 * chunks, before)
            memory, pool = self.holder.anonymous_bytes(), self._pool_empties()
            text = self.holder.log.read_text(errors="replace")
            lines = {tier: text.count(line) for tier, line in self.start_up_lines.items()}
        for path in files:  # of the first prompt
            path.unlink()
        with ExitStack() as running:
            self.begin(running, "starting again")
            with self.step("one prompt from disk, one from Redis"):
                after = {"disk": self.hit(plan.other), "redis": self.hit(plan.prompt)}
        return TierRun(self.codec, cold, held, hits, after, growth, memory, pool, lines, self.engine.started_in_s)

    def step(self, what: str) -> AbstractContextManager[Progress]:
        """One step shown."""
        return self.steps.step(f"{self.mode}, {self.codec}: {what}")

    def begin(self, running: ExitStack, what: str) -> int:
        """Start, and send a short prompt; return the memory of the process that has the tiers, in bytes."""
        with self.step(what) as progress:
            self.start(running, progress)
            self.engine.complete(_WARM_UP, max_tokens=4)
        return self.holder.anonymous_bytes()

    def cold(self) -> tuple[Completion, dict[str, Held]]:
        """Send the prompt and wait until every tier has it."""
        with self.step("the prompt, cold") as progress:
            cold = self.engine.complete(self.plan.prompt, max_tokens=self.plan.max_tokens, timeout_s=600)
            return cold, self.settled(cold.prompt_tokens // CHUNK_TOKENS, progress)

    def hit(self, prompt: str, *, from_tier: bool = True) -> Hit:
        """Send a prompt again; ``from_tier``: only after `before_hit`."""
        if from_tier:
            self.before_hit()
        tokens, served = self.engine.hit_tokens(), self._served()
        answer = self.engine.complete(prompt, max_tokens=self.plan.max_tokens, timeout_s=600)
        now = self._served()
        return Hit(answer, self.engine.hit_tokens() - tokens, {tier: now[tier] - served[tier] for tier in now})

    def settled(self, chunks: int, progress: Progress, timeout_s: float = 60, still_s: float = 1.5) -> dict[str, Held]:
        """Wait until every tier holds so many chunks and does not change any more; stores are asynchronous."""
        began = changed = time.monotonic()
        seen = self._held()
        while not all(_has(held, chunks) for held in seen.values()) or time.monotonic() - changed < still_s:
            elapsed = time.monotonic() - began
            progress(f"waiting for {chunks} chunks in each tier", elapsed)
            if elapsed > timeout_s:
                what = f"not every tier held {chunks} chunks after {elapsed:.0f} s: {seen}"
                raise DeploymentError(what, "look for a refused or dropped chunk in the log", self.holder.log)
            time.sleep(0.25)
            now = self._held()
            if now != seen:
                seen, changed = now, time.monotonic()
        return seen

    def _held(self) -> dict[str, Held]:
        found = self.samples()
        if self.codec == "naive":
            ram = Held(self.pool(found), None)
        else:
            ram = Held(*(int(found.get((f"tq_offload_tier_{what}", "ram"), 0)) for what in ("bytes", "entries")))
        stats = [path.stat() for path in _files(self.disk)]
        disk = Held(sum(s.st_blocks * 512 for s in stats), len(stats), sum(s.st_size for s in stats))
        return {"ram": ram, "disk": disk, "redis": Held(*self.redis.usage())}

    def _served(self) -> dict[str, int]:
        """Chunks served so far by each tier of ours; empty with naive LMCache."""
        found = self.samples()
        if self.codec == "naive":
            return {}
        return {tier: int(found.get(("tq_offload_tier_hits_total", tier), 0)) for tier in TIERS}

    def _pool_empties(self, seconds: float = 15) -> int:
        """Bytes in use of LMCache's own memory, once it was seen with none; LMCache samples it every 10 seconds."""
        end = time.monotonic() + seconds
        while (pool := self.pool(self.samples())) and time.monotonic() < end:
            time.sleep(0.5)
        return pool


def _has(held: Held, chunks: int) -> bool:
    return held.bytes > 0 if held.entries is None else held.entries >= chunks


def _files(folder: Path) -> Iterable[Path]:
    return (path for path in folder.rglob("*") if path.is_file())
