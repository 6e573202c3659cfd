"""LMCache inside the engine (`LMCacheConnectorV1`, in-process mode) on this machine's CPU, its tiers set as users do.

with InProcessEngine(folder, model, tier_environment(ram_gb=1, disk=folder / "disk")) as engine:
    engine.complete("The capital of France is").text
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.client import tier_samples
from benchmarks.deployment import CHUNK_TOKENS, VLLM
from benchmarks.process import DeploymentError, free_ports, local_http
from benchmarks.samples import ROOT

__all__ = ["InProcessEngine", "tier_environment"]

_WORKER = 1  # LMCache's internal API: the scheduler listens on the first port, the first worker on the one after


def tier_environment(
    *,
    ram: bool = True,
    ram_gb: float = 1.0,
    disk: Path | None = None,
    disk_gb: float = 5.0,
    redis: str | None = None,
    chunk_tokens: int = CHUNK_TOKENS,
) -> dict[str, str]:
    """Return LMCache's settings for the tiers: RAM as a cache (else as staging memory only), a folder, a Redis URL."""
    env = {
        "LMCACHE_CHUNK_SIZE": str(chunk_tokens),
        "LMCACHE_LOCAL_CPU": str(ram),
        "LMCACHE_MAX_LOCAL_CPU_SIZE": str(ram_gb),
    }
    if disk:
        disk.mkdir(parents=True, exist_ok=True)
        env |= {"LMCACHE_LOCAL_DISK": f"file://{disk}/", "LMCACHE_MAX_LOCAL_DISK_SIZE": str(disk_gb)}
    if redis:
        env |= {"LMCACHE_REMOTE_URL": redis, "LMCACHE_REMOTE_SERDE": "naive"}
    return env


class InProcessEngine(VLLM):
    """vLLM with LMCacheConnectorV1 and LMCache's own connector for CPU replaced by ours; see lmcache_on_cpu.py."""

    def __init__(
        self,
        folder: Path,
        model: Path,
        tiers: Mapping[str, str],
        *,
        env: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        scheduler, worker = _two_ports_in_a_row()
        self.api_url = f"http://127.0.0.1:{worker}"
        super().__init__(
            folder,
            model,
            {
                "kv_connector": "LMCacheConnectorV1",
                "kv_connector_module_path": "benchmarks.lmcache_on_cpu",
                "kv_role": "kv_both",
            },
            env={
                "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
                "LMCACHE_INTERNAL_API_SERVER_ENABLED": "True",
                "LMCACHE_INTERNAL_API_SERVER_PORT_START": str(scheduler),
                **tiers,
                **(env or {}),
            },
            **options,
        )

    def metrics_of_lmcache(self) -> dict[tuple[str, str], float]:
        """Return LMCache's and our own samples by name and label `tier` ("" without one), summed over other labels.

        They are in the process that runs the model, not in the one that answers requests: other ones than `metrics`.
        """
        return tier_samples(f"{self.api_url}/metrics")

    def store(self, first_token: int, tokens: int) -> None:
        """Store chunks of the token ids from ``first_token`` on, with what lies in the paged cache for their KV."""
        self._call("POST", f"/cache/store?tokens_mock={first_token},{first_token + tokens}")

    def clear(self, backend: str) -> None:
        """Empty one of LMCache's storage backends."""
        self._call("DELETE", f"/cache/clear?{urllib.parse.urlencode({'locations': backend})}")

    def bypass(self, backend: str, on: bool) -> None:
        """Have LMCache ask or not ask one of its storage backends, from now on."""
        verb = "add" if on else "remove"
        self._call("PUT", f"/bypass/{verb}?{urllib.parse.urlencode({'backend_name': backend})}")

    def _call(self, method: str, path: str) -> dict[str, object]:
        request = urllib.request.Request(f"{self.api_url}{path}", method=method)
        try:
            with local_http.open(request, timeout=30) as reply:
                answer: dict[str, object] = json.load(reply)
                return answer
        except OSError as error:
            raise DeploymentError(f"{method} {request.full_url} failed: {error}", self.advice, self.log) from error


def _two_ports_in_a_row() -> tuple[int, int]:
    for _ in range(50):
        (first,) = free_ports(1)
        with contextlib.suppress(OSError), socket.socket() as second:
            second.bind(("127.0.0.1", first + _WORKER))
            return first, first + _WORKER
    raise DeploymentError("no two free ports in a row", "close programs that listen on many ports")
