"""Where chunks go: memory, disk (page cache, device), Redis on loopback and behind a slower link."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.deployment import RedisServer
from benchmarks.shaped_link import ShapedLink
from tq_offload_connectors.byte_store import ByteStore
from tq_offload_connectors.disk import DiskStore
from tq_offload_connectors.memory import MemoryStore
from tq_offload_connectors.redis import RedisSettings, RedisStore

__all__ = ["PLACES", "Counters", "Place", "open_places", "redis_version"]

PLACES = ("memory", "disk, page cache", "disk, device", "redis, loopback", "redis, 1 Gbit/s")
LINK_MBIT = 1000


@dataclass(frozen=True)
class Counters:
    """Of the server of a place since its start; zeros where there is none."""

    received: int = 0
    sent: int = 0
    cpu_s: float = 0.0

    def since(self, before: Counters) -> Counters:
        """What was added."""
        return Counters(self.received - before.received, self.sent - before.sent, self.cpu_s - before.cpu_s)


@dataclass(frozen=True)
class Place:
    """A store and what can be asked of what is behind it.

    Args:
        name: One of PLACES.
        store: The store.
        held: Bytes of everything that lies there, as stored.
        empty: Remove all of it.
        counters: Of its server.
        before_gets: Called, untimed, between puts and gets.
        address: Folder or URL, for those who come without the store.
    """

    name: str
    store: ByteStore
    held: Callable[[], int]
    empty: Callable[[], Any]
    counters: Callable[[], Counters] = Counters
    before_gets: Callable[[], None] = lambda: None
    address: str = ""

    @property
    def slow(self) -> bool:
        """Whether the link is what takes the time."""
        return self.name == "redis, 1 Gbit/s"


@contextmanager
def open_places(names: list[str], folder: Path, capacity: int) -> Iterator[list[Place]]:
    """The places of those names; their servers and files are gone at the end."""
    with ExitStack() as open_now:
        redis = link = None
        found = []
        for name in names:
            if name.startswith("redis") and redis is None:
                redis = open_now.enter_context(RedisServer(folder))
            if name == "memory":
                found.append(_memory(open_now, capacity))
            elif name.startswith("disk"):
                found.append(_disk(name, open_now, folder / name.replace(", ", "-").replace(" ", "-")))
            elif name == "redis, loopback":
                found.append(_redis(name, open_now, redis, redis.url))
            else:
                link = link or open_now.enter_context(ShapedLink(folder, redis.port, LINK_MBIT))
                found.append(_redis(name, open_now, redis, link.url))
        yield found


def _memory(open_now: ExitStack, capacity: int) -> Place:
    store = open_now.enter_context(MemoryStore(capacity))
    return Place("memory", store, lambda: store.usage().nbytes, store.clear)


def _disk(name: str, open_now: ExitStack, folder: Path) -> Place:
    device = name == "disk, device"
    store = open_now.enter_context(DiskStore(folder, fsync="data" if device else "none"))
    open_now.callback(shutil.rmtree, folder, ignore_errors=True)

    def files() -> list[Path]:
        return [path for path in folder.rglob("*") if path.is_file()]

    def empty() -> None:
        store.clear()
        for path in files():
            path.unlink()

    def drop_pages() -> None:
        for path in files():
            fd = os.open(path, os.O_RDONLY)
            os.fdatasync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)

    return Place(
        name,
        store,
        lambda: sum(path.stat().st_blocks * 512 for path in files()),
        empty,
        before_gets=drop_pages if device else lambda: None,
        address=str(folder),
    )


def _redis(name: str, open_now: ExitStack, server: RedisServer, url: str) -> Place:
    import redis

    store = open_now.enter_context(RedisStore(RedisSettings.from_url(url, socket_timeout_s=30.0)))
    client = open_now.enter_context(redis.Redis(port=server.port))

    def counters() -> Counters:
        net, cpu = client.info("stats"), client.info("cpu")
        spent = cpu["used_cpu_user"] + cpu["used_cpu_sys"]
        return Counters(net["total_net_input_bytes"], net["total_net_output_bytes"], spent)

    return Place(
        name, store, lambda: server.usage()[0], lambda: client.flushdb(asynchronous=False), counters, address=url
    )


def redis_version() -> str:
    """Of the redis-server that is installed."""
    program = shutil.which("redis-server")
    if program is None:
        return "none"
    text = subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout
    return next((word[2:] for word in text.split() if word.startswith("v=")), "unknown")
