"""The two deployments of `benchmarks.tiers`: LMCache inside the engine, and `lmcache server`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack

from benchmarks.client import tier_samples
from benchmarks.deployment import CHUNK_TOKENS, LMCacheServer, VLLMEngine, fs_adapter
from benchmarks.in_process import InProcessEngine, tier_environment
from benchmarks.process import Progress
from benchmarks.steps import Steps
from benchmarks.tier_runs import CODECS, TIERS, Plan, TierDeployment, TierRun

__all__ = ["MODES", "run"]

_NAMES = ("CPU RAM", "disk", "redis")
_STORES = 16
_PLUGIN = {"type": "plugin", "module_path": "tq_offload_connectors.multi_process"}


def run(mode: str, codec: str, plan: Plan, steps: Steps) -> TierRun:
    """Run one codec in one mode. Raises DeploymentError; nothing is left running."""
    with ExitStack() as running:
        deployment = MODES[mode](codec, plan, steps, running)
        return deployment.naive() if codec == "naive" else deployment.turboquant()


class InProcess(TierDeployment):
    """LMCacheConnectorV1; turboquant differs from naive in one environment variable."""

    mode = "in-process"
    start_up_lines: Mapping[str, str] = {
        tier: f"TQ-Offload: tier {name} (" for tier, name in zip(TIERS, _NAMES, strict=True)
    }
    engine: InProcessEngine

    def start(self, running: ExitStack, progress: Progress) -> None:
        tiers = tier_environment(ram_gb=self.plan.ram_gb, disk=self.disk, redis=self.redis.url)
        self.engine = InProcessEngine(self.folder, self.plan.model, tiers, env=CODECS[self.codec], progress=progress)
        self.holder = self.engine
        running.enter_context(self.engine)

    def samples(self) -> Mapping[tuple[str, str], float]:
        return self.engine.metrics_of_lmcache()

    def pool(self, samples: Mapping[tuple[str, str], float]) -> int:
        return int(samples.get(("lmcache:local_cache_usage", ""), 0))

    def grow(self, chunks: int, there: int, before: int) -> float:
        """The same over more chunks, stored by LMCache's own API without computing them.

        The largest mean over half of them, in a row: a process takes memory that it freed before first.
        """
        tokens, seen = chunks * CHUNK_TOKENS, []
        with self.step(f"{_STORES} times as many chunks stored") as progress:
            for number in range(_STORES):
                self.engine.store(number * tokens, tokens)
                self.settled(there + (number + 1) * chunks, progress, still_s=0.6)
                seen.append(self.engine.anonymous_bytes())
        return max(after - before for before, after in zip(seen, seen[_STORES // 2 :], strict=False)) / (_STORES // 2)

    def naive(self) -> TierRun:
        prompt = self.plan.prompt
        with ExitStack() as running:
            self.begin(running, "starting")
            cold, held = self.cold()
            hits = {}
            with self.step("the prompt again, from each tier"):
                hits["ram"] = self.hit(prompt)
                self.engine.clear("LocalCPUBackend")
                hits["disk"] = self.hit(prompt)
                self.engine.clear("LocalCPUBackend")
                self.engine.bypass("LocalDiskBackend", True)
                hits["redis"] = self.hit(prompt)
                self.engine.bypass("LocalDiskBackend", False)
            chunks = cold.prompt_tokens // CHUNK_TOKENS
            growth, memory = self.grow(chunks, chunks, 0), self.engine.anonymous_bytes()
        with ExitStack() as running:
            self.begin(running, "starting again")
            after = {}
            with self.step("the prompt again, from Redis; a fifth of it from disk"):
                self.engine.bypass("RemoteBackend", True)
                after["disk"] = self.hit(prompt[: len(prompt) // 5])
                self.engine.bypass("RemoteBackend", False)
                after["redis"] = self.hit(prompt)
        pool = held["ram"].bytes
        return TierRun(self.codec, cold, held, hits, after, growth, memory, pool, {}, self.engine.started_in_s)


class MultiProcess(TierDeployment):
    """`lmcache server`: L1 in RAM, uncompressed; L2 adapters: LMCache's own for disk and Redis, or our three."""

    mode = "multi-process"
    start_up_lines: Mapping[str, str] = {tier: f"compressed; L2 {tier} (" for tier in TIERS}
    engine: VLLMEngine
    holder: LMCacheServer

    def start(self, running: ExitStack, progress: Progress) -> None:
        env = CODECS[self.codec]
        self.holder = LMCacheServer(self.folder, self._adapters(), env=env, progress=progress)
        running.enter_context(self.holder)
        self.engine = VLLMEngine(self.folder, self.plan.model, self.holder, env=env, progress=progress)
        running.enter_context(self.engine)

    def samples(self) -> Mapping[tuple[str, str], float]:
        return tier_samples(f"{self.holder.http_url}/metrics")

    def pool(self, samples: Mapping[tuple[str, str], float]) -> int:
        return int(samples.get(("lmcache_mp_l1_memory_usage_bytes", ""), 0))

    def before_hit(self) -> None:
        self.holder.clear_l1()

    def naive(self) -> TierRun:
        prompt = self.plan.prompt
        with ExitStack() as running:
            before = self.begin(running, "starting")
            cold, held = self.cold()
            memory = self.holder.anonymous_bytes()
            hits, after = {}, {}
            with self.step("the prompt again, from each tier"):
                hits["ram"] = self.hit(prompt, from_tier=False)
        with ExitStack() as running:
            self.begin(running, "starting again")
            with self.step("the prompt again, from disk; without files, from Redis"):
                after["disk"] = self.hit(prompt)
                for path in self.disk.rglob("*.data"):
                    path.unlink()
                after["redis"] = self.hit(prompt)
        pool = held["ram"].bytes
        return TierRun(self.codec, cold, held, hits, after, memory - before, memory, pool, {}, self.engine.started_in_s)

    def _adapters(self) -> list[Mapping[str, object]]:
        if self.codec == "naive":
            return [fs_adapter(self.disk), {"type": "resp", "host": "127.0.0.1", "port": self.redis.port}]
        return [
            _PLUGIN | {"class_name": "MemoryL2Adapter", "adapter_params": {"capacity_gb": self.plan.ram_gb}},
            _PLUGIN | {"class_name": "DiskL2Adapter", "adapter_params": {"folder": str(self.disk), "capacity_gb": 5}},
            _PLUGIN | {"class_name": "RedisL2Adapter", "adapter_params": {"url": self.redis.url}},
        ]


MODES: Mapping[str, type[TierDeployment]] = {one.mode: one for one in (InProcess, MultiProcess)}
