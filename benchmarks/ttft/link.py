"""redis-server at the other end of a link whose rate can be changed while it is in use.

Where network namespaces and tc are allowed, Redis runs in a namespace of its own and a token bucket of the kernel
shapes both ends of the pair of interfaces. Elsewhere a forwarder of ours in this process does it (`shaped_link`).
"""

from __future__ import annotations

import ipaddress
import os
import shutil
import socket
import statistics
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Protocol

import redis

from benchmarks.process import DeploymentError, ServerProcess, free_ports
from benchmarks.shaped_link import BURST_S, Forwarder

__all__ = ["LINKS", "Link", "LinkedRedis", "Rate", "open_redis"]

Rate = float | None
"""Mbit/s; None: not shaped."""

_PORT, _PREFIX_BITS = 6379, 30
_NETWORK, _SUBNETS = ipaddress.ip_address("198.18.0.0"), 1 << 15  # what RFC 2544 keeps for benchmarks
_BURST_BYTES, _QUEUE = 64 << 10, 4 << 20  # the least burst of tc; a late timer catches up by one
_LOOPBACK_MTU, _ETHERNET_MTU = 65535, 1500
_PROBE_BYTES, _PROBE_KEY = 16 << 20, "tq-ttft-probe"


class Link(Protocol):
    """What lies between the engine and Redis."""

    how: str
    """How it is shaped, in words."""
    host: str
    port: int

    def shape(self, mbit: Rate) -> None:
        """Keep to a rate each way, from now on."""
        ...


class _Redis(ServerProcess):
    """redis-server without persistence, started by a command in front of it; its log is ``folder``/redis.log."""

    def __init__(self, folder: Path, prefix: list[str], bind: str, port: int) -> None:
        program = shutil.which("redis-server")
        if program is None:
            raise DeploymentError("redis-server is not installed", "install it, for example: apt install redis-server")
        self.bind, self.port = bind, port
        options = ["--bind", bind, "--port", str(port), "--protected-mode", "no", "--save", "", "--appendonly", "no"]
        super().__init__(
            "redis-server",
            [*prefix, program, *options],
            dict(os.environ),
            folder / "redis.log",
            f"redis://{bind}:{port}",
            start_timeout_s=30,
            advice="the message below names the cause",
        )

    def _healthy(self) -> bool:
        try:
            with redis.Redis(self.bind, self.port, socket_timeout=2) as client:
                return bool(client.ping())
        except redis.RedisError:
            return False


class _Namespace:
    """Redis in a network namespace; `tc` shapes what leaves either interface."""

    how = "network namespace and tc (tbf)"
    port = _PORT

    def __init__(self) -> None:
        self.name = f"tqttft{os.getpid()}"
        self.here, self.there = f"tqa{os.getpid()}", f"tqb{os.getpid()}"
        self.enter = ["ip", "netns", "exec", self.name]
        subnet = _NETWORK + 4 * (os.getpid() % _SUBNETS)
        self.near, self.host = str(subnet + 1), str(subnet + 2)

    def open(self) -> None:
        """Make it. Raises OSError or CalledProcessError where that is not allowed; nothing is left behind."""
        try:
            _run("ip", "netns", "add", self.name)
            _run("ip", "link", "add", self.here, "type", "veth", "peer", "name", self.there)
            _run("ip", "link", "set", self.there, "netns", self.name)
            for prefix, device, address in (([], self.here, self.near), (self.enter, self.there, self.host)):
                _run(*prefix, "ip", "addr", "add", f"{address}/{_PREFIX_BITS}", "dev", device)
                _run(*prefix, "ip", "link", "set", device, "up")
            self.shape(100)
            self.shape(None)
        except BaseException:
            self.close()
            raise

    def shape(self, mbit: Rate) -> None:
        """See `Link`."""
        for prefix, device in (([], self.here), (self.enter, self.there)):
            _run(*prefix, "ip", "link", "set", device, "mtu", str(_LOOPBACK_MTU if mbit is None else _ETHERNET_MTU))
            if mbit is None:
                _run(*prefix, "tc", "qdisc", "del", "dev", device, "root", check=False)
            else:
                burst = max(_BURST_BYTES, int(mbit * 1e6 / 8 * BURST_S))
                bucket = ["rate", f"{mbit:g}mbit", "burst", str(burst), "limit", str(_QUEUE)]
                _run(*prefix, "tc", "qdisc", "replace", "dev", device, "root", "tbf", *bucket)

    def close(self) -> None:
        """Remove what `open` made."""
        for what in (("ip", "link", "del", self.here), ("ip", "netns", "del", self.name)):
            try:
                _run(*what, check=False)
            except OSError:
                return


class LinkedRedis:
    """The server behind the link, and what is asked of it."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.host, self.port = link.host, link.port
        self.url = f"redis://{link.host}:{link.port}"
        self.client = redis.Redis(link.host, link.port)

    def keys(self) -> int:
        """How many there are."""
        return int(self.client.dbsize())

    def sent_bytes(self) -> int:
        """Bytes that the server has sent to its clients since it started."""
        return int(self.client.info("stats")["total_net_output_bytes"])

    def received_bytes(self) -> int:
        """Bytes that the server has received."""
        return int(self.client.info("stats")["total_net_input_bytes"])

    def empty(self) -> None:
        """Delete every key."""
        self.client.flushall()

    def measured_mbit(self, mbit: Rate, times: int = 3) -> float:
        """Shape the link; what a GET of 16 MiB reaches through it, the median, in Mbit/s."""
        self.link.shape(None)
        self.client.set(_PROBE_KEY, os.urandom(_PROBE_BYTES))
        self.link.shape(mbit)
        seen = [_seconds_of_a_get(self.host, self.port) for _ in range(times)]
        self.client.delete(_PROBE_KEY)
        return _PROBE_BYTES * 8 / statistics.median(seen) / 1e6


def _seconds_of_a_get(host: str, port: int) -> float:
    """One GET of the probe over a plain socket, connected before the clock starts."""
    head = b"$%d\r\n" % _PROBE_BYTES
    wanted = len(head) + _PROBE_BYTES + 2
    buffer = memoryview(bytearray(wanted))
    with socket.create_connection((host, port), timeout=120) as link:
        began, count = time.perf_counter(), 0
        link.sendall(b"GET %s\r\n" % _PROBE_KEY.encode())
        while count < wanted:
            got = link.recv_into(buffer[count:])
            if not got:
                break
            count += got
        took = time.perf_counter() - began
    if count < wanted or buffer[: len(head)] != head:
        raise DeploymentError("Redis did not send the value that measures the link", "see redis.log")
    return took


LINKS = ("auto", "namespace", "proxy")


@contextmanager
def open_redis(folder: Path, kind: str = "auto") -> Iterator[LinkedRedis]:
    """Start redis-server behind a link, not shaped at first.

    Args:
        folder: Where its log goes.
        kind: One of LINKS; `auto`: a namespace where that is allowed.
    """
    with ExitStack() as running:
        link: Link | None = None
        why = ""
        if kind != "proxy":
            space = _Namespace()
            try:
                space.open()
                running.callback(space.close)
                running.enter_context(_Redis(folder, space.enter, space.host, _PORT))
                link = space
            except (OSError, subprocess.SubprocessError, DeploymentError) as error:
                why = f"no network namespace: {str(getattr(error, 'stderr', None) or error).strip()}"
                if kind == "namespace":
                    raise DeploymentError(why, "be root, and install iproute2; or use the proxy") from error
        if link is None:
            (port,) = free_ports(1)
            server = running.enter_context(_Redis(folder, [], "127.0.0.1", port))
            link = running.enter_context(Forwarder(server.port, why))
        yield LinkedRedis(link)


def _run(*argv: str, check: bool = True) -> None:
    subprocess.run(argv, check=check, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30)
