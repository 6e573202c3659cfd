"""The deployments that are compared: LMCache inside the engine, or `lmcache server`; each with its serde.

Every one has CPU RAM, a folder on disk and Redis, all of which hold every chunk. A hit is made to come from one of them
by emptying or bypassing those before it.
"""

from __future__ import annotations

import abc
import urllib.parse
import urllib.request
import uuid
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.client import post_json
from benchmarks.deployment import VLLM, LMCacheServer, VLLMEngine, fs_adapter
from benchmarks.in_process import InProcessEngine, tier_environment
from benchmarks.process import DeploymentError, Progress, local_http
from benchmarks.ttft.link import LinkedRedis

__all__ = ["WAYS", "Deployment", "Way"]

_RAM_GB, _RESP_WORKERS = 1, 8
_PREFIX_CACHING = ("--enable-prefix-caching",)
_ENGINE_ENV = {"VLLM_SERVER_DEV_MODE": "1"}  # for /reset_prefix_cache
_OURS = {"LMCACHE_SERDE": "turboquant"}


@dataclass(frozen=True)
class Way:
    """A mode of LMCache and what it stores chunks as; ``label`` for tables."""

    label: str
    mode: str
    serde: str
    keys_per_chunk: int = 1
    """Keys in Redis."""


WAYS = {
    "naive": Way("naive, in-process", "in-process", "naive", keys_per_chunk=2),
    "turboquant": Way("TQ-Offload, in-process", "in-process", "turboquant"),
    "mp-naive": Way("naive, multi-process", "multi-process", "naive"),
    "mp-fp8": Way("LMCache fp8, multi-process", "multi-process", "fp8"),
    "mp-turboquant": Way("TQ-Offload, multi-process", "multi-process", "turboquant"),
}


class Deployment(abc.ABC):
    """The servers of one way."""

    engine: VLLM

    def __init__(self, way: Way, folder: Path, redis: LinkedRedis) -> None:
        self.way, self.folder, self.redis = way, folder, redis
        self.disk = folder / "disk"
        self.disk.mkdir(parents=True)

    @staticmethod
    def of(way: Way, folder: Path, redis: LinkedRedis) -> Deployment:
        """The one for a way, not started."""
        if way.mode == "multi-process":
            return _MultiProcess(way, folder, redis)
        return (_InProcessOurs if way.serde == "turboquant" else _InProcess)(way, folder, redis)

    @abc.abstractmethod
    def start(self, model: Path, running: ExitStack, progress: Progress) -> None:
        """Start the servers; they end with ``running``."""

    @abc.abstractmethod
    def empty_ram(self) -> None:
        """Have the next hit not come from LMCache's CPU RAM."""

    @abc.abstractmethod
    def empty_disk(self) -> None:
        """Have no later hit come from disk."""

    def empty_engine(self) -> None:
        """Empty vLLM's own prefix cache. Raises DeploymentError when it is in use."""
        answer = post_json(f"{self.engine.url}/reset_prefix_cache", {})
        if answer != {"success": True}:
            raise DeploymentError(f"vLLM did not empty its prefix cache: {answer}", "see its log", self.engine.log)

    def files(self) -> int:
        """How many files the disk tier has."""
        return sum(path.is_file() and not path.name.endswith(".tmp") for path in self.disk.rglob("*"))


class _InProcess(Deployment):
    """LMCacheConnectorV1, with LMCache's own tiers."""

    engine: InProcessEngine

    def start(self, model: Path, running: ExitStack, progress: Progress) -> None:
        tiers = tier_environment(ram_gb=_RAM_GB, disk=self.disk, redis=self.redis.url)
        self.engine = InProcessEngine(
            self.folder, model, tiers, env=_ENGINE_ENV | self.env(), extra_args=_PREFIX_CACHING, progress=progress
        )
        running.enter_context(self.engine)

    def env(self) -> dict[str, str]:
        """What the engine's environment has beside the tiers."""
        return {}

    def empty_ram(self) -> None:
        self.engine.clear("LocalCPUBackend")

    def empty_disk(self) -> None:
        self.engine.bypass("LocalDiskBackend", True)


class _InProcessOurs(_InProcess):
    """The same with `LMCACHE_SERDE=turboquant`. Our tiers are one backend of LMCache: single ones are emptied by a
    script that LMCache's internal API runs in the engine."""

    def env(self) -> dict[str, str]:
        return {**_OURS, "LMCACHE_RUN_SCRIPT_API_ENABLED": "true"}

    def empty_ram(self) -> None:
        self._empty("ram")

    def empty_disk(self) -> None:
        self._empty("disk")

    def _empty(self, tier: str) -> None:
        answer = _run_script(self.engine.api_url, _EMPTY % tier)
        if not answer.isdigit():
            raise DeploymentError(f"tier {tier} was not emptied: {answer}", "see the engine's log", self.engine.log)


_EMPTY = """
manager = app.state.lmcache_adapter.lmcache_engine.storage_manager
tiers = manager.storage_backends["turboquant"].frames.tiers
(tier,) = [one for one in tiers if one.name == "%s"]
result = tier.store.clear()
"""


class _MultiProcess(Deployment):
    """`lmcache server`: L1 as it is; L2 by LMCache's own `fs` and `resp` adapters, with a serde."""

    def start(self, model: Path, running: ExitStack, progress: Progress) -> None:
        env = _OURS if self.way.serde == "turboquant" else {}
        serde = "fp8" if self.way.serde == "fp8" else None
        resp: dict[str, object] = {"type": "resp", "host": self.redis.host, "port": self.redis.port}
        resp |= {"num_workers": _RESP_WORKERS} | ({"serde": {"type": serde}} if serde else {})
        adapters = [fs_adapter(self.disk, serde), resp]
        self.server = LMCacheServer(self.folder, adapters, env=env, l1_gb=_RAM_GB, progress=progress)
        running.enter_context(self.server)
        self.engine = VLLMEngine(
            self.folder, model, self.server, env=_ENGINE_ENV | env, extra_args=_PREFIX_CACHING, progress=progress
        )
        running.enter_context(self.engine)

    def empty_ram(self) -> None:
        self.server.clear_l1()

    def empty_disk(self) -> None:
        for path in self.disk.rglob("*"):
            if path.is_file():
                path.unlink()


def _run_script(api_url: str, script: str) -> str:
    """What the script has as its `result`, in words."""
    mark = uuid.uuid4().hex
    head = f'--{mark}\r\nContent-Disposition: form-data; name="script"; filename="script.py"\r\n\r\n'
    body = f"{head}{script}\r\n--{mark}--\r\n".encode()
    kind = {"Content-Type": f"multipart/form-data; boundary={mark}"}
    request = urllib.request.Request(urllib.parse.urljoin(api_url, "/run_script"), body, kind)
    try:
        with local_http.open(request, timeout=30) as reply:
            return str(reply.read().decode())
    except OSError as error:
        raise DeploymentError(f"POST {request.full_url} failed: {error}", "see the engine's log") from error
