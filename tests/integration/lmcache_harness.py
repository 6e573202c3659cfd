"""A real `lmcache server` process, and a client made of the classes with which vLLM's connector talks to it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
BLOCK, CHUNK = 16, 64  # tokens of an engine block and of an LMCache chunk
LAYERS, HEADS, HEAD_DIM = 4, 2, 64

ENTRY_POINTS = """\
[lmcache.device_plugins]
tq_offload = tq_offload.integrations.lmcache.device_plugin:TurboQuantActivation

[vllm.general_plugins]
tq_offload = tq_offload.integrations.lmcache.vllm_plugin:register
"""


def installed_here(folder: Path) -> dict[str, str]:
    """Environment in which this checkout is installed, entry points included, whether or not it really is."""
    info = folder / "site" / "tq_offload-0.dist-info"
    if not info.exists():
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tq-offload\nVersion: 0\n")
        (info / "entry_points.txt").write_text(ENTRY_POINTS)
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("TQ_OFFLOAD_") and k != "LMCACHE_SERDE"}
    path = [os.environ.get("TQ_TEST_LMCACHE", ""), str(info.parent), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        **inherited,
        "PYTHONPATH": os.pathsep.join(p for p in path if p),
        "LMCACHE_TRACK_USAGE": "false",
        "HF_HUB_OFFLINE": "1",
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("lmcache", reason="needs the extra [lmcache]")
    return tmp_path_factory.mktemp("lmcache")


@pytest.fixture(scope="module")
def model(folder: Path) -> str:
    """A folder with the config.json of a model; it and `folder` are for the module that imports them."""
    path = folder / "model"
    path.mkdir()
    config = {"hidden_size": 256, "num_attention_heads": 256 // HEAD_DIM, "num_key_value_heads": HEADS}
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class Server:
    """`lmcache server` with its log in a file."""

    def __init__(
        self,
        folder: Path,
        adapters: list[dict[str, Any]],
        env: dict[str, str] | None = None,
        module: str = "lmcache.cli.main",
    ) -> None:
        self.port, self.http = free_port(), free_port()
        self.log_path = folder / f"server-{self.port}.log"
        command = [sys.executable, "-m", module, "server", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--http-host", "127.0.0.1", "--http-port", str(self.http), "--l1-size-gb", "0.25"]
        command += ["--no-l1-use-lazy", "--chunk-size", str(CHUNK), "--eviction-policy", "LRU"]
        command += ["--supported-transfer-mode", "auto"]
        for adapter in adapters:
            command += ["--l2-adapter", json.dumps(adapter)]
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                command, env={**installed_here(folder), **(env or {})}, stdout=log, stderr=subprocess.STDOUT, cwd=folder
            )

    def wait_ready(self, seconds: float = 120) -> Server:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise AssertionError(f"the server ended with {self.process.returncode}:\n{self.log()}")
            try:
                self.request("/healthcheck")
                return self
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.2)
        raise AssertionError(f"the server is not ready after {seconds} s:\n{self.log()}")

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def tracebacks(self) -> list[str]:
        """Every traceback in the log but that of a race of LMCache's own.

        It ends a session in a thread of a pool; an engine that goes away at once may be unregistered before that.
        """
        found = [
            part.split("\n[", 1)[0].split("\nINFO", 1)[0] for part in self.log().split("Traceback (most recent")[1:]
        ]
        return [one for one in found if not ("in end_session" in one and "descriptor registered for model" in one)]

    def request(self, path: str, body: dict[str, Any] | None = None, method: str = "GET") -> str:
        data = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.http}{path}",
            data=data,
            method=method,
            headers={"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=30) as response:
            return str(response.read().decode())

    def clear_l1(self) -> None:
        self.request("/cache/clear", {}, "POST")

    def metrics(self) -> dict[str, float]:
        """Our counters, `name` or `name{reason}`, without the prefix and `_total`."""
        found = {}
        for line in self.request("/metrics").splitlines():
            if line.startswith("tq_offload_") and "_created" not in line:
                name, value = line.rsplit(" ", 1)
                name = name.removeprefix("tq_offload_").replace("_total", "").replace('reason="', "").replace('"', "")
                found[name] = float(value)
        return found

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(20)


class Engine:
    """What vLLM is for LMCache: paged KV caches of a few layers, and LMCache's own worker and scheduler adapters.

    The caches are `[blocks, block, heads, 2*head_dim]`, K and V packed, as with vLLM 0.26 and later.
    """

    def __init__(self, server: Server, model: str, blocks: int = 128) -> None:
        import zmq
        from lmcache.integration.vllm.vllm_multi_process_adapter import (
            LMCacheMPSchedulerAdapter,
            LMCacheMPWorkerAdapter,
            ParallelStrategy,
        )

        url, context = f"tcp://127.0.0.1:{server.port}", zmq.Context.instance()
        one = ParallelStrategy(mla_only=False, vllm_world_size=1, vllm_worker_id=0, tp_size=1, pp_size=1, n_servers=1)
        extra = {"lmcache.mp.mp_transfer_mode": "engine_driven"}
        self.worker = LMCacheMPWorkerAdapter(url, context, model, BLOCK, one, extra_config=extra)
        self.scheduler = LMCacheMPSchedulerAdapter([url], context, model, BLOCK, one, extra_config=extra)
        self.caches = {
            f"model.layers.{i}.self_attn.attn": torch.zeros(blocks, BLOCK, HEADS, 2 * HEAD_DIM, dtype=torch.bfloat16)
            for i in range(LAYERS)
        }
        self.worker.register_kv_caches(self.caches, layout_hints={"kv_layout": "NHD"})
        self._requests = 0

    def close(self) -> None:
        self.worker.shutdown()
        self.scheduler.shutdown()

    def values(self, blocks: list[int]) -> torch.Tensor:
        """[layers, tokens, heads, 2*head_dim] of these blocks."""
        return torch.stack([c[blocks].flatten(0, 1) for c in self.caches.values()])

    def fill(self, blocks: list[int], seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        for cache in self.caches.values():
            shape = (len(blocks), *cache.shape[1:])
            cache[blocks] = torch.randn(shape, generator=generator).to(cache.dtype)
        return self.values(blocks)

    def store(self, tokens: list[int], blocks: list[int]) -> None:
        request = self._new_request()
        self.worker.submit_store_request(request, self._operation(tokens, blocks, len(tokens)), None)
        self._finish(request, "store")

    def lookup(self, tokens: list[int], seconds: float = 60) -> tuple[str, int]:
        """Id of the request, and how many of its tokens are there (loaded into L1 by the server)."""
        request = self._new_request()
        self.scheduler.maybe_submit_lookup_request(request, tokens)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            found = self.scheduler.check_lookup_result(request)
            if found is not None:
                return request, int(found)
            time.sleep(0.01)
        raise AssertionError("no answer to the lookup")

    def retrieve(self, request: str, tokens: list[int], blocks: list[int], count: int) -> torch.Tensor:
        self.worker.submit_retrieve_request(request, self._operation(tokens, blocks, count), None)
        self._finish(request, "retrieve")
        return self.values(blocks[: count // BLOCK])

    def done(self, request: str) -> None:
        self.scheduler.cleanup_lookup_result(request)
        self.scheduler.end_session(request)

    def hit(self, tokens: list[int], blocks: list[int]) -> tuple[int, torch.Tensor]:
        """Look up, retrieve what is there into `blocks`, and end the request."""
        request, count = self.lookup(tokens)
        values = self.retrieve(request, tokens, blocks, count) if count else self.values([])
        self.done(request)
        return count, values

    def _new_request(self) -> str:
        self._requests += 1
        return f"request-{id(self)}-{self._requests}"

    def _operation(self, tokens: list[int], blocks: list[int], count: int) -> Any:
        from lmcache.integration.vllm.vllm_multi_process_adapter import LoadStoreOp

        return LoadStoreOp(token_ids=tokens, block_ids=[blocks[: count // BLOCK]], start=0, end=count)

    def _finish(self, request: str, what: str, seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            stored, loaded = self.worker.get_finished({request} if what == "store" else set())
            if request in ((stored or set()) if what == "store" else (loaded or set())):
                assert not self.worker.get_block_ids_with_load_errors()
                return
            time.sleep(0.01)
        raise AssertionError(f"the {what} did not finish")
