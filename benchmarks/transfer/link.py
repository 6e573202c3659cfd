"""A slower link to a server on this machine: a forwarder, in a process of its own, that keeps to a rate each way.

usage: python -m benchmarks.transfer.link LISTEN_PORT TARGET_PORT MBIT
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from pathlib import Path

from benchmarks.process import ServerProcess, free_ports

__all__ = ["Rate", "ShapedLink"]

_PIECE = 64 << 10
_BURST_S = 0.002


class Rate:
    """Bytes a second, shared by all who wait on it."""

    def __init__(self, bytes_a_second: float) -> None:
        self._rate, self._next, self._lock = bytes_a_second, 0.0, threading.Lock()

    def wait(self, nbytes: int) -> None:
        """Return when so many more bytes may have passed; what a late wake-up lost is caught up, up to 2 ms."""
        with self._lock:
            now = time.monotonic()
            self._next = max(self._next, now - _BURST_S) + nbytes / self._rate
            pause = self._next - now
        if pause > 0:
            time.sleep(pause)


class ShapedLink(ServerProcess):
    """The forwarder as a context manager; its log is ``folder``/link.log."""

    def __init__(self, folder: Path, target_port: int, mbit: float) -> None:
        (self.port,) = free_ports(1)
        self.url = f"redis://127.0.0.1:{self.port}"
        root = str(Path(__file__).resolve().parents[2])
        super().__init__(
            "the link",
            [sys.executable, "-m", "benchmarks.transfer.link", str(self.port), str(target_port), str(mbit)],
            {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))},
            folder / "link.log",
            self.url,
            start_timeout_s=30,
            advice="the message below names the cause",
        )

    def _healthy(self) -> bool:
        import redis

        try:
            with redis.Redis(port=self.port, socket_timeout=2) as client:
                return bool(client.ping())
        except redis.RedisError:
            return False


def _forward(source: socket.socket, target: socket.socket, rate: Rate) -> None:
    buffer = memoryview(bytearray(_PIECE))
    try:
        while count := source.recv_into(buffer):
            rate.wait(count)
            target.sendall(buffer[:count])
    except OSError:
        pass
    finally:
        for one in (source, target):
            try:
                one.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue


def serve(listen_port: int, target_port: int, mbit: float) -> None:
    """Forward every connection, until the process is stopped."""
    there, back = Rate(mbit * 1e6 / 8), Rate(mbit * 1e6 / 8)
    with socket.create_server(("127.0.0.1", listen_port)) as listener:
        while True:
            client, _ = listener.accept()
            server = socket.create_connection(("127.0.0.1", target_port))
            for one in (client, server):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for ends in ((client, server, there), (server, client, back)):
                threading.Thread(target=_forward, args=ends, daemon=True).start()


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
