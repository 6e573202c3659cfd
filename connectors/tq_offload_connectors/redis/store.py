"""`RedisStore`: values in Redis or Valkey, a key for each; one server, Sentinel or cluster."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from tq_offload.errors import ConfigError, EntryTooLargeError, StoreClosedError, StoreError, StoreIOError
from tq_offload_connectors.byte_store import Allocate, ByteStore, Usage, as_bytes, check_key
from tq_offload_connectors.redis.errors import require_redis, store_error
from tq_offload_connectors.redis.node import SMALL_VALUE, Node
from tq_offload_connectors.redis.protocol import Command, Reply, length_of
from tq_offload_connectors.redis.records import LENGTH_FIELD, part_sizes, read_command, write_command
from tq_offload_connectors.redis.settings import RedisSettings
from tq_offload_connectors.redis.topology import Topology, make_topology

__all__ = ["RedisSettings", "RedisStore"]

SCAN_COUNT = 1000
BATCH = 1000
"""Keys in one pipeline of HGET, UNLINK or MEMORY USAGE."""


class RedisStore(ByteStore):
    """Values in Redis: a value is a hash of a few parts under the prefix and the key, written by one HSET (`records`).

    The server evicts and expires by its own rules. A call fails at once while the store waits after a failure, and
    otherwise within `connect_timeout_s` and `socket_timeout_s` times the number of tries, and a second for every 16 MiB
    that are read. A value that there is no buffer for is not read: its connection is closed, and the next call does not
    wait. A put that ends in StoreTimeoutError or StoreUnavailableError may have stored the new value, or still store
    it.

    A key of another type, and a hash whose parts do not make up its length, read as an empty value, which the reader
    refuses; `put` and `delete` replace and remove any type. A key of another type or without a length is not contained.
    A `put` without `ttl_s` ends the time that a key had.

    After a fork the child opens connections of its own.

    Args:
        settings: Where, and how long to wait. With a `client`, its address, user and TLS are not used.
        client: A `redis.Redis` of the caller, which stays open; its own retries come on top of ours.

    Raises:
        ConfigError: redis-py is not installed, or the client decodes responses or is not one for a single server.
    """

    kind = "redis"

    def __init__(self, settings: RedisSettings, client: Any = None) -> None:
        require_redis()
        if client is not None:
            _check_client(client)
        self._settings, self._client = settings, client
        self._prefix = settings.key_prefix.encode("utf-8", "surrogatepass")
        self._closed = threading.Event()
        self._start()

    def _start(self) -> None:
        self._pid = os.getpid()
        self._no_unlink = False
        self._topology: Topology = make_topology(self._settings, self._closed, self._client)

    def put(self, key: str, value: memoryview, *, owned: bool = False) -> None:
        """Store a value by HSET; a value with a part over the server's limit is not sent."""
        errors = self.put_many([(key, value)])
        if errors[0] is not None:
            raise errors[0]

    def get(self, key: str, allocate: Allocate | None = None) -> memoryview | None:
        """Read a value by HMGET, its parts into one buffer."""
        return _bytes(self._run([read_command(self._full(key))], allocate)[0])

    def get_many(self, keys: Sequence[str]) -> list[memoryview | None]:
        """Read several values in one pipeline."""
        return [_bytes(reply) for reply in self._run([read_command(self._full(key)) for key in keys])]

    def contains(self, key: str) -> bool:
        """True if the key has a value."""
        return self.contains_prefix([key]) == 1

    def contains_many(self, keys: Sequence[str]) -> list[bool]:
        """Which of the keys have a value: one round trip for all."""
        return [_contained(reply) for reply in self._lookups(keys)]

    def contains_prefix(self, keys: Sequence[str]) -> int:
        """How many of the keys, from the first on without a gap, have a value: one round trip for all."""
        for count, reply in enumerate(self._lookups(keys)):
            if not _contained(reply):
                return count
        return len(keys)

    def delete(self, key: str) -> bool:
        """Remove a value of any type. Returns whether there was one."""
        return self._unlink([self._full(key)]) == 1

    def put_many(self, items: Sequence[tuple[str, memoryview]]) -> list[StoreError | None]:
        """Store several values, in pipelines of about `pipeline_bytes`; for each its error, or None."""
        errors: list[StoreError | None] = [None] * len(items)
        batch: dict[int, list[Command]] = {}
        size = 0
        for index, (key, value) in enumerate(items):
            try:
                commands = self._set(key, value)
            except StoreError as error:
                errors[index] = error
                continue
            if batch and size + value.nbytes > self._settings.pipeline_bytes:
                self._put_batch(batch, errors)
                batch, size = {}, 0
            batch[index] = commands
            size += value.nbytes
        self._put_batch(batch, errors)
        return errors

    def keys(self) -> Iterator[str]:
        """The keys by SCAN, in no order; keys with the prefix that are not UTF-8 are left out."""
        found = []
        for _, names in self._scan():
            for name in names:
                try:
                    found.append(name[len(self._prefix) :].decode("utf-8", "surrogatepass"))
                except UnicodeDecodeError:
                    continue
        return iter(found)

    def clear(self) -> int:
        """Remove every key with the prefix, and no other. Returns how many."""
        return sum(self._unlink(names[i : i + BATCH]) for _, names in self._scan() for i in range(0, len(names), BATCH))

    def usage(self) -> Usage:
        """Number and bytes of the values under the prefix, without the server's overhead (`memory_usage` has it).

        Costs a SCAN of the whole database and an HGET per key: one to three seconds per 100,000 keys.
        """
        entries = nbytes = 0
        for _, names in self._scan():
            entries += len(names)
            for reply in self._batched([(b"HGET", name, LENGTH_FIELD) for name in names]):
                nbytes += max(0, length_of(bytes(reply))) if isinstance(reply, (bytes, memoryview)) else 0
        return Usage(entries, nbytes, None)

    def memory_usage(self, keys: Sequence[str]) -> list[int | None]:
        """Bytes of the server's memory that each key takes, overhead included; None: there is none."""
        commands = [(b"MEMORY", b"USAGE", self._full(key), b"SAMPLES", b"0") for key in keys]
        return [_value(reply) for reply in self._batched(commands)]

    def close(self) -> None:
        """Close the connections; a call that waits on one ends with StoreClosedError. A caller's client stays open."""
        if not self._closed.is_set():
            self._closed.set()
            if self._pid == os.getpid():
                self._topology.close()

    def describe(self) -> str:
        """Address and prefix, without user and password."""
        return f"redis, {self._settings.describe() if self._client is None else 'a client of the caller'}"

    def _run(self, commands: Sequence[Command], allocate: Allocate | None = None) -> list[Reply]:
        return self._current().run(commands, allocate) if commands else []

    def _lookups(self, keys: Sequence[str]) -> list[Reply]:
        return self._run([(b"HEXISTS", self._full(key), LENGTH_FIELD) for key in keys])

    def _current(self) -> Topology:
        if self._closed.is_set():
            raise StoreClosedError("the store was closed")
        if self._pid != os.getpid():
            self._start()
        return self._topology

    def _full(self, key: str) -> bytes:
        return self._prefix + check_key(key).encode("utf-8", "surrogatepass")

    def _set(self, key: str, value: memoryview) -> list[Command]:
        full, data = self._full(key), as_bytes(value)
        largest = max(part_sizes(data.nbytes), default=0)
        if largest > SMALL_VALUE:
            limit = self._current().node_of(full).value_limit()
            if largest > limit:
                raise EntryTooLargeError(f"a part of {largest} bytes is over the server's limit of {limit}")
        ttl_s = self._settings.ttl_s
        expire = (b"PERSIST", full) if ttl_s is None else (b"PEXPIRE", full, b"%d" % max(1, round(ttl_s * 1000)))
        return [write_command(full, data), expire]  # HSET leaves the time that the key had

    def _put_batch(self, batch: dict[int, list[Command]], errors: list[StoreError | None]) -> None:
        try:
            other_type = self._send_batch(batch, errors)
            if other_type:
                self._run([(b"DEL", commands[0][1]) for commands in other_type.values()])
                self._send_batch(other_type, errors)
        except StoreError as error:
            for index in batch:
                errors[index] = error

    def _send_batch(self, batch: dict[int, list[Command]], errors: list[StoreError | None]) -> dict[int, list[Command]]:
        """Note the first error of each value. Returns those whose key has another type."""
        replies = iter(self._run([command for commands in batch.values() for command in commands]))
        other_type = {}
        for index, commands in batch.items():
            failed = [reply for reply in islice(replies, len(commands)) if isinstance(reply, Exception)]
            errors[index] = store_error(failed[0]) if failed else None
            if failed and _has_other_type(failed[0]):
                other_type[index] = commands
        return other_type

    def _batched(self, commands: Sequence[Command]) -> Iterator[Reply]:
        for start in range(0, len(commands), BATCH):
            yield from self._run(commands[start : start + BATCH])

    def _scan(self) -> Iterator[tuple[Node, list[bytes]]]:
        """The full keys of each server, after its scan has ended."""
        pattern = b"".join(b"\\" + bytes([c]) if c in b"*?[]^\\-" else bytes([c]) for c in self._prefix) + b"*"
        for node in self._current().primaries():
            found: dict[bytes, None] = {}
            cursor = b"0"
            while True:
                command = (b"SCAN", cursor, b"MATCH", pattern, b"COUNT", b"%d" % SCAN_COUNT)
                cursor, names = _value(node.run([command])[0])
                found |= dict.fromkeys(names)
                if cursor == b"0":
                    break
            yield node, list(found)

    def _unlink(self, names: Sequence[bytes]) -> int:
        if not self._no_unlink:
            replies = self._run([(b"UNLINK", name) for name in names])
            if not any("unknown command" in str(reply) for reply in replies if isinstance(reply, Exception)):
                return sum(_value(reply) for reply in replies)
            self._no_unlink = True  # before Redis 4
        return sum(_value(reply) for reply in self._run([(b"DEL", name) for name in names]))


def _value(reply: Reply) -> Any:
    if isinstance(reply, Exception):
        raise store_error(reply) from reply
    return reply


def _has_other_type(reply: Reply) -> bool:
    return isinstance(reply, Exception) and str(reply).startswith("WRONGTYPE")


def _contained(reply: Reply) -> bool:
    return not _has_other_type(reply) and bool(_value(reply))


def _bytes(reply: Reply) -> memoryview | None:
    if _has_other_type(reply):
        return memoryview(b"")
    if isinstance(reply, Exception):
        raise store_error(reply) from reply
    if reply is not None and not isinstance(reply, (bytes, memoryview)):
        raise StoreIOError(f"redis answers HMGET with {type(reply).__name__}")
    return None if reply is None else memoryview(reply)


def _check_client(client: Any) -> None:
    import redis

    if not isinstance(client, redis.Redis):
        raise ConfigError("client", type(client).__name__, "a redis.Redis; a cluster by its address and cluster=True")
    options = client.connection_pool.connection_kwargs
    if options.get("decode_responses"):
        raise ConfigError("decode_responses", True, "False: values are bytes; create the client without it")
