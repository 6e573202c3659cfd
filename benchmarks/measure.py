"""One serde on a real deployment: the prompt cold, stored, and hit from disk; and what that measured."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from benchmarks.client import Completion, StoredFiles, wait_until_stored
from benchmarks.deployment import CHUNK_TOKENS, LMCacheServer, VLLMEngine, fs_adapter
from benchmarks.faults import Faults, run_faults
from benchmarks.steps import Steps

__all__ = ["SERDES", "STEPS", "STEPS_OF_A_RESTART", "STEPS_OF_FAULTS", "Plan", "Run", "Serde", "measure"]

STEPS, STEPS_OF_A_RESTART, STEPS_OF_FAULTS = 6, 3, 1
"""How many steps `measure` shows, and how many more with a restart of both processes, and with damaged files."""

_WARM_UP = "Good morning. The weather at the coast today is"


@dataclass(frozen=True)
class Serde:
    """A way of storing chunks: what goes into the adapter's configuration, and into both processes' environment."""

    name: str
    adapter_serde: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    faults: bool = False
    """Also damage files and ask again: for the serde that has a checksum."""


SERDES = {
    "naive": Serde("naive"),
    "fp8": Serde("fp8", adapter_serde="fp8"),
    "turboquant": Serde("turboquant", env={"LMCACHE_SERDE": "turboquant"}, faults=True),
}


@dataclass(frozen=True)
class Plan:
    """What is run for each serde."""

    model: Path
    prompt: str
    folder: Path
    hits: int = 3
    restart: bool = False
    max_tokens: int = 24


@dataclass(frozen=True)
class Run:
    """What one serde did. Times are seconds to the first token."""

    serde: str
    stored: StoredFiles
    cold: Completion
    hits: list[Completion]
    hit_tokens: list[int]
    start_s: float
    faults: Faults | None = None

    @property
    def ttft_hit(self) -> float:
        """The median over the hits."""
        return median(hit.ttft_s for hit in self.hits)

    @property
    def ttft_hit_range(self) -> tuple[float, float]:
        """The fastest and the slowest hit."""
        times = [hit.ttft_s for hit in self.hits]
        return min(times), max(times)


def measure(serde: Serde, plan: Plan, steps: Steps) -> Run:
    """Run the prompt cold and from disk with ``serde``. Raises DeploymentError; nothing is left running."""
    folder = plan.folder / serde.name
    disk = folder / "l2"
    with ExitStack() as running:
        server, engine = _start(serde, plan, running, steps)
        started = server.started_in_s + engine.started_in_s
        with steps.step(f"{serde.name}: the prompt, cold"):
            cold = engine.complete(plan.prompt, max_tokens=plan.max_tokens, timeout_s=600)
        with steps.step(f"{serde.name}: chunks to disk") as progress:
            stored = wait_until_stored(disk, cold.prompt_tokens // CHUNK_TOKENS, progress=progress)
        if plan.restart:
            running.close()
            server, engine = _start(serde, plan, running, steps)
        with steps.step(f"{serde.name}: the prompt again, from disk, {plan.hits}x"):
            found = [_hit(server, engine, plan) for _ in range(plan.hits)]
        faults = None
        if serde.faults:
            with steps.step(f"{serde.name}: the prompt again, three files damaged"):
                faults = run_faults(server, engine, disk, plan.prompt, plan.max_tokens)
    shutil.rmtree(disk, ignore_errors=True)
    return Run(serde.name, stored, cold, [one for one, _ in found], [tokens for _, tokens in found], started, faults)


def _start(serde: Serde, plan: Plan, running: ExitStack, steps: Steps) -> tuple[LMCacheServer, VLLMEngine]:
    """Start both processes (the engine is stopped first) and send a short prompt, so that no first request is timed."""
    folder = plan.folder / serde.name
    with steps.step(f"{serde.name}: starting the LMCache server") as progress:
        adapter = fs_adapter(folder / "l2", serde.adapter_serde)
        server = LMCacheServer(folder, [adapter], env=serde.env, progress=progress)
        running.enter_context(server)
    with steps.step(f"{serde.name}: starting vLLM") as progress:
        engine = VLLMEngine(folder, plan.model, server, env=serde.env, progress=progress)
        running.enter_context(engine)
    with steps.step(f"{serde.name}: warm-up"):
        engine.complete(_WARM_UP, max_tokens=4)
    return server, engine


def _hit(server: LMCacheServer, engine: VLLMEngine, plan: Plan) -> tuple[Completion, int]:
    """Ask for the prompt with L1 empty; return the answer and how many of its tokens came from disk."""
    server.clear_l1()
    before = engine.hit_tokens()
    answer = engine.complete(plan.prompt, max_tokens=plan.max_tokens, timeout_s=600)
    server.check_alive()
    return answer, engine.hit_tokens() - before
