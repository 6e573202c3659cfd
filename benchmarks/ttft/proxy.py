"""A forwarder to a server on this machine that keeps to a rate each way, which may change at any time."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

__all__ = ["Proxy"]

_BUFFER = 1 << 20
_SLICE_S = 0.004  # of the rate: the most that is sent at once
_DEBT_S = 0.02  # what a late wake-up may catch up


class _Bucket:
    """Bytes a second, shared by all connections of one direction; None: as fast as it goes."""

    def __init__(self) -> None:
        self.rate: float | None = None
        self._free_at = 0.0
        self._lock = threading.Lock()

    def most(self) -> int:
        """Bytes to ask for at once."""
        rate = self.rate
        return _BUFFER if rate is None else max(1500, min(_BUFFER, int(rate * _SLICE_S)))

    def spend(self, nbytes: int) -> None:
        """Return when so many more bytes may go."""
        rate = self.rate
        if rate is None:
            return
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now - _DEBT_S) + nbytes / rate
            pause = self._free_at - now
        if pause > 0:
            time.sleep(pause)


class Proxy:
    """Threads of this process: two for each connection.

    Args:
        target_port: Where it forwards to, on this machine.
        why: Why it is used, if it is to be said.
    """

    host = "127.0.0.1"

    def __init__(self, target_port: int, why: str = "") -> None:
        self.how = "forwarder of this process (token bucket)" + (f"; {why}" if why else "")
        self._target = target_port
        self._there, self._back = _Bucket(), _Bucket()
        self._listener = socket.create_server((self.host, 0), backlog=128)
        self.port = int(self._listener.getsockname()[1])
        self._open: set[socket.socket] = set()
        self._accepting = threading.Thread(target=self._accept, name="link", daemon=True)

    def __enter__(self) -> Proxy:
        self._accepting.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
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

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
                server = socket.create_connection((self.host, self._target))
            except OSError:
                if self._listener.fileno() < 0:
                    return
                continue
            self._open |= {client, server}
            for one in (client, server):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for ends in ((client, server, self._there), (server, client, self._back)):
                threading.Thread(target=self._forward, args=ends, daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket, bucket: _Bucket) -> None:
        buffer = memoryview(bytearray(_BUFFER))
        with contextlib.suppress(OSError):
            while count := source.recv_into(buffer, bucket.most()):
                bucket.spend(count)
                target.sendall(buffer[:count])
        for one in (source, target):
            _end(one)
            self._open.discard(one)


def _end(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
