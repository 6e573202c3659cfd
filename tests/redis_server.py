"""Real Redis servers for tests: on free ports, in temporary folders, gone when the block is left.

    with RedisServer("--maxmemory", "8mb") as server:
        store = RedisStore(RedisSettings.from_url(server.url))
        server.kill()       # kill -9
        server.start()      # the same ports and folder again

Without redis-server or redis-py the test is skipped; it fails instead where CI or TQ_REQUIRE_SERVERS=1 is set.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

__all__ = ["Certificates", "RedisServer", "free_port", "make_certificates", "redis_cluster", "unavailable"]

START_TIMEOUT_S = 10.0
TRIES = 5
SLOTS = 16384


def unavailable(reason: str) -> None:
    """Skip the test that runs; let it fail where servers are required."""
    import pytest

    if os.environ.get("TQ_REQUIRE_SERVERS") == "1" or os.environ.get("CI"):
        pytest.fail(f"{reason}, and this run requires it (CI or TQ_REQUIRE_SERVERS is set)", pytrace=False)
    pytest.skip(f"{reason}; set TQ_REQUIRE_SERVERS=1 to make this a failure")


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True)
class Certificates:
    """Files in PEM: of an authority, and of a server at localhost and 127.0.0.1 that it signed."""

    ca: Path
    cert: Path
    key: Path


def make_certificates(folder: Path) -> Certificates:
    """A new authority and server certificate, valid for a day."""
    if shutil.which("openssl") is None:
        unavailable("openssl is not installed")
    files = Certificates(folder / "ca.crt", folder / "server.crt", folder / "server.key")
    ca_key, request, names = folder / "ca.key", folder / "server.csr", folder / "names"
    names.write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\nauthorityKeyIdentifier=keyid\n")
    _openssl("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=tq-offload test authority",
             "-addext", "keyUsage=critical,keyCertSign", "-keyout", ca_key, "-out", files.ca)  # fmt: skip
    _openssl("req", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost", "-keyout", files.key, "-out", request)
    _openssl("x509", "-req", "-in", request, "-CA", files.ca, "-CAkey", ca_key, "-CAcreateserial", "-days", "1",
             "-extfile", names, "-out", files.cert)  # fmt: skip
    return files


def _openssl(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


class RedisServer:
    """One redis-server. Its data is lost with it unless the arguments say otherwise (`--appendonly yes`).

    Args:
        arguments: More of redis-server's arguments, for example `"--maxmemory", "8mb"`.
        tls: Also listens on `tls_port`, with these certificates; clients need none.
        port: Fixed port; None: a free one.
        binary: Program to run, for example `valkey-server`; None: `TQ_REDIS_SERVER` or `redis-server`.
        config: A configuration file of Sentinel: run it as that.
    """

    def __init__(
        self,
        *arguments: str,
        tls: Certificates | None = None,
        port: int | None = None,
        binary: str | None = None,
        config: Path | None = None,
    ) -> None:
        self._arguments, self._tls, self._fixed_port, self._config = arguments, tls, port, config
        self._binary = binary or os.environ.get("TQ_REDIS_SERVER", "redis-server")
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self.port, self.tls_port = port or 0, 0

    def __enter__(self) -> RedisServer:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """Address without TLS."""
        return f"redis://127.0.0.1:{self.port}"

    @property
    def tls_url(self) -> str:
        """Address with TLS."""
        return f"rediss://127.0.0.1:{self.tls_port}"

    @property
    def socket_path(self) -> Path:
        """The unix socket that it also listens on."""
        return self.folder / "redis.sock"

    @property
    def folder(self) -> Path:
        """Its folder, with its log in `log`; gone after `stop`."""
        assert self._folder is not None, "the server was not started"
        return Path(self._folder.name)

    def start(self, *, wait: bool = True) -> None:
        """Start and wait until it serves; after `kill` on the same ports and with the same folder."""
        self._require()
        assert self._process is None, "the server runs already"
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="tq-redis-")
        for last in (*[False] * (TRIES - 1), True):
            self.port = self.port or free_port()
            self.tls_port = self.tls_port or (free_port() if self._tls else 0)
            self._process = self._spawn()
            if not wait or self._wait_until_ready():
                return
            self.kill()
            if last or self._fixed_port:
                break
            self.port = self.tls_port = 0
        log = (self.folder / "log").read_text()
        self.stop()
        raise RuntimeError(f"{self._binary} does not start:\n{log}")

    def stop(self) -> None:
        """End it and remove its folder."""
        self.kill()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def kill(self) -> None:
        """Kill -9."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        """Let it neither answer nor end, until `thaw`."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def command(self, *arguments: object, password: str | None = None, username: str | None = None) -> Any:
        """Run a command over a connection of its own; text is returned as bytes."""
        import redis

        with contextlib.closing(
            redis.Redis(port=self.port, password=password, username=username, socket_timeout=START_TIMEOUT_S)
        ) as client:
            return client.execute_command(*arguments)  # type: ignore[no-untyped-call]

    def _require(self) -> None:
        if importlib.util.find_spec("redis") is None:
            unavailable("redis-py is not installed")
        if shutil.which(self._binary) is None:
            unavailable(f"{self._binary} is not installed")

    def _spawn(self) -> subprocess.Popen[bytes]:
        argv = [self._binary, "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder)]
        if self._config is not None:
            argv = [self._binary, str(self._config), "--sentinel", *argv[1:]]
        else:
            argv += ["--save", ""]
        argv += ["--unixsocket", str(self.socket_path), "--enable-debug-command", "local"]
        if self._tls is not None:
            argv += ["--tls-port", str(self.tls_port), "--tls-ca-cert-file", str(self._tls.ca)]
            argv += ["--tls-cert-file", str(self._tls.cert), "--tls-key-file", str(self._tls.key)]
            argv += ["--tls-auth-clients", "no"]
        with (self.folder / "log").open("wb") as log:
            return subprocess.Popen([*argv, *self._arguments], stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def _wait_until_ready(self) -> bool:
        assert self._process is not None
        end = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < end and self._process.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1) as probe:
                probe.sendall(b"PING\r\n")
                if probe.recv(64).startswith((b"+PONG", b"-NOAUTH")):
                    return self._process.poll() is None
            time.sleep(0.01)
        return False


@contextlib.contextmanager
def redis_cluster(primaries: int = 3, *arguments: str) -> Iterator[list[RedisServer]]:
    """A Redis cluster without replicas that has every slot, about a third of them on each of three primaries."""
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(
                RedisServer("--cluster-enabled", "yes", "--cluster-port", str(free_port()),
                            "--cluster-node-timeout", "2000", *arguments)
            )
            for _ in range(primaries)
        ]  # fmt: skip
        edges = [SLOTS * i // primaries for i in range(primaries + 1)]
        for index, server in enumerate(servers):
            server.command("CLUSTER", "ADDSLOTSRANGE", edges[index], edges[index + 1] - 1)
            server.command("CLUSTER", "SET-CONFIG-EPOCH", index + 1)
        for server in servers[1:]:
            bus = server._arguments[server._arguments.index("--cluster-port") + 1]
            servers[0].command("CLUSTER", "MEET", "127.0.0.1", server.port, bus)
        _wait_until_joined(servers)
        yield servers


def _wait_until_joined(servers: list[RedisServer]) -> None:
    end = time.monotonic() + 2 * START_TIMEOUT_S
    wanted = f"cluster_known_nodes:{len(servers)}"
    for server in servers:
        while True:
            info = server.command("CLUSTER", "INFO")
            text = "\n".join(f"{k}:{v}" for k, v in info.items()) if isinstance(info, dict) else info.decode()
            if "cluster_state:ok" in text and wanted in text:
                break
            assert time.monotonic() < end, f"the cluster does not form:\n{text}"
            time.sleep(0.05)
