"""A slower link to a server on this machine: a forwarder that keeps to a rate each way.

`Forwarder` runs in this process and its rate may change at any time; `ShapedLink` is one in a process of its own.

usage: python -m benchmarks.shaped_link LISTEN_PORT TARGET_PORT MBIT
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from pathlib import Path

from benchmarks.process import ServerProcess, free_ports, redis_answers
from tq_offload.integrations.lmcache.log import RateLimitedLog

__all__ = ["BURST_S", "Bucket", "Forwarder", "ShapedLink"]

BURST_S = 0.004
"""The burst, as tc's in `ttft.link`: so much of the rate passes at once, also after a pause. What a thread overslept is
made good besides: on a busy machine the link would be slower than its rate."""

_HOST, _BUFFER, _PACKET = "127.0.0.1", 1 << 20, 1500
_PAUSE_S = 0.05
"""After an accept that failed: without file descriptors every further one fails at once."""


class Bucket:
    """Bytes a second, shared by all connections of one direction; None: as fast as it goes."""

    def __init__(self, rate: float | None = None) -> None:
        self.rate = rate
        self._free_at = self._overslept = 0.0
        self._lock = threading.Lock()

    def most(self) -> int:
        """Bytes to ask for at once."""
        rate = self.rate
        return _BUFFER if rate is None else max(_PACKET, min(_BUFFER, int(rate * BURST_S)))

    def spend(self, nbytes: int) -> None:
        """Return when so many more bytes may have passed."""
        rate = self.rate
        if rate is None:
            return
        with self._lock:
            now = time.monotonic()
            self._free_at = until = max(self._free_at, now - BURST_S - self._overslept) + nbytes / rate
            if until > now:
                self._overslept = 0.0
        if until > now:
            time.sleep(until - now)
            with self._lock:
                self._overslept = max(self._overslept, time.monotonic() - until)


class Forwarder:
    """Threads of this process: two for each connection.

    Args:
        target_port: Where it forwards to, on this machine.
        why: Why it is used, if it is to be said.
        port: Where it listens; 0: at a free port.
    """

    host = _HOST

    def __init__(self, target_port: int, why: str = "", port: int = 0) -> None:
        self.how = "forwarder of this process (token bucket)" + (f"; {why}" if why else "")
        self._target = target_port
        self._there, self._back = Bucket(), Bucket()
        self._listener = socket.create_server((self.host, port), backlog=128)
        self.port = int(self._listener.getsockname()[1])
        self._open: set[socket.socket] = set()
        self._closing, self._log = threading.Event(), RateLimitedLog()
        self._accepting = threading.Thread(target=self._accept, name="link", daemon=True)

    def __enter__(self) -> Forwarder:
        self._accepting.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._closing.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for one in list(self._open):
            _end(one)
        self._accepting.join(5)

    def shape(self, mbit: float | None) -> None:
        """Keep to a rate each way, from now on; None: none."""
        for bucket in (self._there, self._back):
            bucket.rate = None if mbit is None else mbit * 1e6 / 8

    def wait(self) -> None:
        """Return when it has been closed."""
        self._accepting.join()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError as error:
                if not self._closing.is_set():
                    self._log.warning("accept", f"the link accepts no connection: {error}")
                    self._closing.wait(_PAUSE_S)
                continue
            try:
                server = socket.create_connection((self.host, self._target))
            except OSError as error:
                self._log.warning("connect", f"the link does not reach its server: {error}")
                client.close()
                continue
            self._open |= {client, server}
            for one in (client, server):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for ends in ((client, server, self._there), (server, client, self._back)):
                threading.Thread(target=self._forward, args=ends, daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket, bucket: Bucket) -> None:
        buffer = memoryview(bytearray(_BUFFER))
        with contextlib.suppress(OSError):
            while count := source.recv_into(buffer, bucket.most()):
                bucket.spend(count)
                target.sendall(buffer[:count])
        for one in (source, target):
            _end(one)
        self._open.discard(source)
        source.close()


def _end(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)


class ShapedLink(ServerProcess):
    """A forwarder to a Redis server, in a process of its own; its log is ``folder``/link.log."""

    def __init__(self, folder: Path, target_port: int, mbit: float) -> None:
        (self.port,) = free_ports(1)
        self.url = f"redis://{_HOST}:{self.port}"
        root = str(Path(__file__).resolve().parents[1])
        super().__init__(
            "the link",
            [sys.executable, "-m", "benchmarks.shaped_link", str(self.port), str(target_port), str(mbit)],
            {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))},
            folder / "link.log",
            self.url,
            start_timeout_s=30,
            advice="the message below names the cause",
        )

    def _healthy(self) -> bool:
        return redis_answers(self.port)


def serve(listen_port: int, target_port: int, mbit: float) -> None:
    """Forward every connection, until the process is stopped."""
    with Forwarder(target_port, port=listen_port) as link:
        link.shape(mbit)
        link.wait()


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
