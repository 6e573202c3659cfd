"""A real deployment on this machine's CPU, `lmcache server` and vLLM: for the demo, integration tests and benchmarks.

    folder = Path(tempfile.mkdtemp())
    with LMCacheServer(folder, [fs_adapter(folder / "l2")]) as server, VLLMEngine(folder, model, server) as engine:
        engine.complete("The capital of France is").text

Start the server first and stop it last: an engine does not survive its server.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.client import Completion, complete, post_json, scrape
from benchmarks.process import DeploymentError, Progress, ServerProcess, free_ports, redis_answers, silent

__all__ = ["CHUNK_TOKENS", "VLLM", "LMCacheServer", "RedisServer", "VLLMEngine", "fs_adapter", "server_environment"]

CHUNK_TOKENS = 256
"""Tokens in one LMCache chunk; a multiple of the engine's block size."""

_SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "LMCACHE_DISABLE_BANNER": "1",
    "LMCACHE_TRACK_USAGE": "false",
    "PYTHONHASHSEED": "0",
    "PYTHONUNBUFFERED": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # lets the engine core run the model itself: one process less to start
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
}


def server_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of both processes: the caller's without its LMCACHE_* settings, ours, then ``extra``."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("LMCACHE_")}
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # compiling vLLM and torch at every start takes half of it
    env |= _SETTINGS
    env.setdefault("OMP_NUM_THREADS", "1")  # two spinning threads on two shared cores make a decode step 20x slower
    return env | dict(extra or {})


def fs_adapter(folder: Path, serde: str | None = None) -> dict[str, object]:
    """Return the configuration of an L2 adapter: one file a chunk in ``folder``, with LMCache's ``serde`` or none."""
    folder.mkdir(parents=True, exist_ok=True)
    adapter: dict[str, object] = {"type": "fs", "base_path": str(folder)}
    return adapter | ({"serde": {"type": serde}} if serde else {})


class LMCacheServer(ServerProcess):
    """`lmcache server` (multi-process mode) with the given L2 adapters; its log is ``folder``/server.log."""

    def __init__(
        self,
        folder: Path,
        l2_adapters: Sequence[Mapping[str, object]],
        *,
        env: Mapping[str, str] | None = None,
        chunk_tokens: int = CHUNK_TOKENS,
        l1_gb: int = 1,
        extra_args: Sequence[str] = (),
        python: str = sys.executable,
        start_timeout_s: float = 120.0,
        progress: Progress = silent,
    ) -> None:
        self.port, http_port = free_ports(2)
        self.http_url = f"http://127.0.0.1:{http_port}"
        argv = [str(Path(python).parent / "lmcache"), "server"]
        argv += ["--host", "127.0.0.1", "--port", str(self.port)]
        argv += ["--http-host", "127.0.0.1", "--http-port", str(http_port)]
        argv += ["--l1-size-gb", str(l1_gb), "--l1-init-size-gb", str(l1_gb), "--eviction-policy", "LRU"]
        argv += ["--chunk-size", str(chunk_tokens), "--supported-transfer-mode", "auto"]
        for adapter in l2_adapters:
            argv += ["--l2-adapter", json.dumps(adapter)]
        super().__init__(
            "the LMCache server",
            [*argv, *extra_args],
            server_environment(env),
            folder / "server.log",
            f"{self.http_url}/healthcheck",
            start_timeout_s=start_timeout_s,
            advice=f"the message below names the cause; the server needs {l1_gb} GB of memory and space in {folder}",
            progress=progress,
        )

    def clear_l1(self) -> None:
        """Empty L1 (memory), so that what is asked for next comes from L2."""
        post_json(f"{self.http_url}/cache/clear", {"tier": "l1"})

    def metrics(self) -> dict[str, float]:
        """Return the server's counters, summed over labels."""
        return scrape(f"{self.http_url}/metrics")


class RedisServer(ServerProcess):
    """redis-server on this machine without persistence; its log is ``folder``/redis.log."""

    def __init__(self, folder: Path, *, progress: Progress = silent) -> None:
        (self.port,) = free_ports(1)
        self.url = f"redis://127.0.0.1:{self.port}"
        program = shutil.which("redis-server")
        if program is None:
            raise DeploymentError("redis-server is not installed", "install it, for example: apt install redis-server")
        argv = [program, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        super().__init__(
            "redis-server",
            argv,
            dict(os.environ),
            folder / "redis.log",
            self.url,
            start_timeout_s=30,
            advice="the message below names the cause",
            progress=progress,
        )

    def usage(self) -> tuple[int, int]:
        """Return what the keys take, the sum of MEMORY USAGE key SAMPLES 0, in bytes, and how many there are."""
        import redis

        with redis.Redis(port=self.port) as client:
            keys = list(client.scan_iter(count=1000))
            return sum(client.memory_usage(key, samples=0) or 0 for key in keys), len(keys)

    def usage_of_a_value(self, nbytes: int) -> int:
        """Return what one key with a value of so many bytes takes, in bytes."""
        import redis

        with redis.Redis(port=self.port) as client:
            client.set("usage", bytes(nbytes))
            usage = int(client.memory_usage("usage", samples=0) or 0)
            client.delete("usage")
            return usage

    def _healthy(self) -> bool:
        return redis_answers(self.port)


class VLLM(ServerProcess):
    """vLLM's OpenAI server on CPU with a KV connector; its log is ``folder``/engine.log.

    Args:
        folder: Where its log goes.
        model: Folder of the model.
        kv_transfer: What `--kv-transfer-config` says.
    """

    model_name = "demo"

    def __init__(
        self,
        folder: Path,
        model: Path,
        kv_transfer: Mapping[str, object],
        *,
        env: Mapping[str, str] | None = None,
        dtype: str = "bfloat16",
        block_tokens: int = 128,
        max_model_len: int = 4096,
        extra_args: Sequence[str] = (),
        python: str = sys.executable,
        start_timeout_s: float = 300.0,
        progress: Progress = silent,
    ) -> None:
        (port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{port}"
        # Not `vllm serve`: its command line asks for the version of a distribution "vllm", and this one is vllm-cpu.
        argv = [python, "-m", "vllm.entrypoints.openai.api_server"]
        argv += ["--model", str(model), "--served-model-name", self.model_name]
        argv += ["--host", "127.0.0.1", "--port", str(port), "--dtype", dtype, "--enforce-eager"]
        argv += ["--max-model-len", str(max_model_len), "--max-num-batched-tokens", str(max_model_len)]
        argv += ["--max-num-seqs", "4", "--no-enable-prefix-caching", "--block-size", str(block_tokens)]
        argv += ["--distributed-executor-backend", "uni"]
        argv += ["--kv-transfer-config", json.dumps(kv_transfer)]
        super().__init__(
            "vLLM",
            [*argv, *extra_args],
            server_environment(env),
            folder / "engine.log",
            f"{self.url}/health",
            start_timeout_s=start_timeout_s,
            advice="the message below names the cause; vLLM needs about 4 GB of free memory",
            progress=progress,
        )

    def complete(self, prompt: str, *, max_tokens: int = 24, timeout_s: float = 180.0) -> Completion:
        """Complete ``prompt`` greedily and time its first token. Raises DeploymentError."""
        self.check_alive()
        return complete(self.url, prompt, model=self.model_name, max_tokens=max_tokens, timeout_s=timeout_s)

    def metrics(self) -> dict[str, float]:
        """Return the engine's counters, summed over labels."""
        return scrape(f"{self.url}/metrics")

    def hit_tokens(self) -> int:
        """Return how many prompt tokens came from LMCache since the engine started."""
        return int(self.metrics().get("vllm:external_prefix_cache_hits_total", 0))


class VLLMEngine(VLLM):
    """vLLM connected to ``server``, an `lmcache server` (multi-process mode); ``options`` are those of VLLM."""

    def __init__(self, folder: Path, model: Path, server: LMCacheServer, **options: Any) -> None:
        super().__init__(folder, model, _connector(server.port), **options)


def _connector(port: int) -> dict[str, object]:
    return {
        "kv_connector": "LMCacheMPConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "lmcache.mp.host": "tcp://127.0.0.1",
            "lmcache.mp.port": port,
            "lmcache.mp.mp_transfer_mode": "lmcache_driven",
        },
    }
