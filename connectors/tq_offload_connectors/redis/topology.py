"""Which server has a key: one server, the master that Sentinels name, or the nodes of a cluster."""

from __future__ import annotations

import abc
import threading
import time
from collections.abc import Sequence
from typing import Any

from tq_offload.errors import ConfigError, StoreClosedError, StoreError, StoreTimeoutError, StoreUnavailableError
from tq_offload_connectors.byte_store import Allocate
from tq_offload_connectors.redis.errors import store_error
from tq_offload_connectors.redis.node import Node, make_pool
from tq_offload_connectors.redis.protocol import Command, Reply, code_of
from tq_offload_connectors.redis.settings import MODES, Address, RedisSettings

__all__ = ["Cluster", "Sentinels", "Single", "Topology", "make_topology"]

MAX_ROUNDS = 5  # of redirections by a cluster that moves slots


class Topology(abc.ABC):
    """Runs commands where their keys are."""

    @abc.abstractmethod
    def run(self, commands: Sequence[Command], allocate: Allocate | None = None) -> list[Reply]:
        """Run the commands, in one pipeline for each server. Raises a StoreError if one cannot be reached."""

    @abc.abstractmethod
    def primaries(self) -> list[Node]:
        """Every server that has keys."""

    @abc.abstractmethod
    def node_of(self, key: bytes) -> Node:
        """The server that has a key."""

    @abc.abstractmethod
    def close(self) -> None:
        """Close every connection."""


class Single(Topology):
    """One server."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def run(self, commands: Sequence[Command], allocate: Allocate | None = None) -> list[Reply]:
        """Run the commands in one pipeline."""
        return self._node.run(commands, allocate)

    def primaries(self) -> list[Node]:
        """The server."""
        return [self._node]

    def node_of(self, key: bytes) -> Node:
        """The server."""
        return self._node

    def close(self) -> None:
        """Close its connections."""
        self._node.close()


class _Discovered(Topology):
    """Servers that others name: asked at first use and after a failure, at most once per first pause."""

    def __init__(self, settings: RedisSettings, closed: threading.Event, *, auth: bool) -> None:
        self._settings, self._closed = settings, closed
        self._lock = threading.Lock()
        self._nodes: dict[Address, Node] = {}
        self._seeds = [self._make(address, auth=auth) for address in settings.addresses]
        self._known, self._next_load = False, 0.0
        self.stale = True

    @abc.abstractmethod
    def _load(self, seed: Node) -> None:
        """Learn from one seed which servers there are."""

    def fresh(self) -> None:
        """Ask the seeds if nothing is known yet, or what is known may be outdated.

        Raises:
            StoreError: No seed answers, and nothing is known.
        """
        if not self.stale or (self._known and time.monotonic() < self._next_load):
            return
        if not self._lock.acquire(blocking=not self._known):
            return
        try:
            if self.stale and not (self._known and time.monotonic() < self._next_load):
                self._ask()
        finally:
            self._lock.release()

    def close(self) -> None:
        """Close every connection."""
        for node in (*self._seeds, *list(self._nodes.values())):
            node.close()

    def at(self, address: Address) -> Node:
        """The server at an address."""
        return self._nodes.get(address) or self._nodes.setdefault(address, self._make(address, auth=True))

    def _sources(self) -> list[Node]:
        return self._seeds

    def _make(self, address: Address, *, auth: bool) -> Node:
        pool = make_pool(self._settings, address, auth=auth)
        return Node(self._settings, pool, f"{address[0]}:{address[1]}", self._closed)

    def _ask(self) -> None:
        failure: StoreError = StoreUnavailableError("no address to ask")
        for seed in self._sources():
            try:
                self._load(seed)
            except StoreClosedError:
                raise
            except StoreError as error:
                failure = error
                continue
            self._known, self.stale = True, False
            self._next_load = time.monotonic() + self._settings.backoff_base_s
            return
        self._next_load = time.monotonic() + self._settings.backoff_base_s
        if not self._known:
            raise failure

    def _watch(self, node: Node, commands: Sequence[Command], allocate: Allocate | None) -> list[Reply]:
        try:
            replies = node.run(commands, allocate)
        except (StoreUnavailableError, StoreTimeoutError):
            self.stale = True
            raise
        self.stale = self.stale or any(code_of(reply) == "READONLY" for reply in replies)
        return replies


class Sentinels(_Discovered):
    """The master of a service. Sentinels are asked without a password."""

    def __init__(self, settings: RedisSettings, closed: threading.Event) -> None:
        super().__init__(settings, closed, auth=False)
        self._master: Node | None = None

    def run(self, commands: Sequence[Command], allocate: Allocate | None = None) -> list[Reply]:
        """Run the commands in one pipeline on the master."""
        return self._watch(self.node_of(b""), commands, allocate)

    def primaries(self) -> list[Node]:
        """The master."""
        return [self.node_of(b"")]

    def node_of(self, key: bytes) -> Node:
        """The master."""
        self.fresh()
        if self._master is None:
            raise StoreUnavailableError("the Sentinels have not named a master")
        return self._master

    def _load(self, seed: Node) -> None:
        service = (self._settings.service or "").encode()
        reply = seed.run([(b"SENTINEL", b"GET-MASTER-ADDR-BY-NAME", service)])[0]
        if isinstance(reply, Exception):
            raise store_error(reply) from reply
        if not reply:
            raise StoreUnavailableError(f"{seed.name}: no service {self._settings.service!r}")
        self._master = self.at((reply[0].decode(), int(reply[1])))


class Cluster(_Discovered):
    """The primaries of a cluster; replicas are not read."""

    def __init__(self, settings: RedisSettings, closed: threading.Event) -> None:
        super().__init__(settings, closed, auth=True)
        self._slots: list[tuple[int, int, Node]] = []

    def run(self, commands: Sequence[Command], allocate: Allocate | None = None) -> list[Reply]:
        """Run the commands in one pipeline for each primary that has keys of them; follow redirections.

        What a node fails to answer has its StoreError as its reply.
        """
        replies: list[Reply] = [None] * len(commands)
        where: dict[int, tuple[Node, bool]] = {i: (self.node_of(_key_of(c)), False) for i, c in enumerate(commands)}
        for _ in range(MAX_ROUNDS):
            for node, asking in dict.fromkeys(where.values()):
                mine = [i for i, place in where.items() if place == (node, asking)]
                prefix: list[Command] = [(b"ASKING",)] if asking else []
                sent = [command for i in mine for command in (*prefix, commands[i])]
                for i, reply in zip(
                    mine, self._answers(node, sent, allocate)[len(prefix) :: len(prefix) + 1], strict=True
                ):
                    replies[i] = reply
            redirections = {i: _redirection(replies[i]) for i in where}
            where = {i: (self.at(to[0]), to[1]) for i, to in redirections.items() if to is not None}
            if not where:
                break
            self.stale = self.stale or not all(asking for _, asking in where.values())
        return replies

    def primaries(self) -> list[Node]:
        """Every server that has slots."""
        self.fresh()
        return list(dict.fromkeys(node for _, _, node in self._slots))

    def node_of(self, key: bytes) -> Node:
        """The server that has a key.

        Raises:
            StoreUnavailableError: No server has its slot.
        """
        from redis.crc import key_slot

        self.fresh()
        slot = key_slot(key)
        for first, last, node in self._slots:
            if first <= slot <= last:
                return node
        raise StoreUnavailableError(f"no node of the cluster has slot {slot}")

    def _sources(self) -> list[Node]:
        return [*self._seeds, *list(self._nodes.values())]

    def _answers(self, node: Node, commands: Sequence[Command], allocate: Allocate | None) -> list[Reply]:
        try:
            return self._watch(node, commands, allocate)
        except StoreError as error:
            return [error] * len(commands)

    def _load(self, seed: Node) -> None:
        reply = seed.run([(b"CLUSTER", b"SLOTS")])[0]
        if isinstance(reply, Exception):
            raise store_error(reply) from reply
        own_host = seed.name.rpartition(":")[0]
        slots = []
        for first, last, primary, *_ in reply:
            host = primary[0].decode() if primary[0] else own_host
            slots.append((int(first), int(last), self.at((host, int(primary[1])))))
        self._slots = slots
        gone = [address for address, node in self._nodes.items() if all(node is not used for *_, used in slots)]
        for address in gone:
            self._nodes.pop(address).close()


def _key_of(command: Command) -> bytes:
    return bytes(command[2 if command[0] == b"MEMORY" else 1])


def _redirection(reply: Reply) -> tuple[Address, bool] | None:
    """Where an answer sends the command, and whether it must say ASKING there."""
    if code_of(reply) not in ("MOVED", "ASK"):
        return None
    host, _, port = str(reply).rsplit(" ", 1)[-1].rpartition(":")
    return (host, int(port)), code_of(reply) == "ASK"


def make_topology(settings: RedisSettings, closed: threading.Event, client: Any = None) -> Topology:
    """The topology of the settings, or of a client of redis-py, whose pool is used and not closed."""
    if client is not None:
        return Single(Node(settings, client.connection_pool, "redis", closed, owned=False))
    if settings.mode == "single":
        address = None if settings.path is not None else settings.addresses[0]
        name = settings.path if address is None else f"{address[0]}:{address[1]}"
        return Single(Node(settings, make_pool(settings, address), name or "", closed))
    if settings.mode == "sentinel":
        return Sentinels(settings, closed)
    if settings.mode == "cluster":
        return Cluster(settings, closed)
    raise ConfigError("mode", settings.mode, MODES)
