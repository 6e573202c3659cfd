"""One Redis server: its connections, one exchange with it, and retries."""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Sequence
from typing import Any

from tq_offload.errors import StoreClosedError, StoreError, StoreTimeoutError, StoreUnavailableError
from tq_offload_connectors.byte_store import Allocate, no_memory
from tq_offload_connectors.redis.breaker import Breaker
from tq_offload_connectors.redis.errors import mapped, store_error
from tq_offload_connectors.redis.protocol import (
    READ_RECORD,
    Command,
    NoBufferError,
    Reply,
    ReplyReader,
    code_of,
    join_record,
    pack,
)
from tq_offload_connectors.redis.settings import Address, RedisSettings

__all__ = ["SMALL_VALUE", "Node", "make_pool"]

DEFAULT_VALUE_LIMIT = 512 << 20
SMALL_VALUE = 1 << 20
"""Values that every server takes: `proto-max-bulk-len` cannot be set lower."""

_UNBOUNDED = 1 << 31
_NO_SERVICE = ("NOAUTH", "LOADING", "ERR max number of clients reached")  # whatever the command is


class Node:
    """Runs commands on one server.

    A connection on which anything went wrong, an exception of another thread's making included, is closed: an answer
    that comes late never meets a later question.

    Args:
        settings: Timeouts, retries and pauses.
        pool: A pool of redis-py without a limit of its own that matters.
        name: For messages.
        closed: Set when the store was closed.
        owned: `close` also closes the pool.
    """

    def __init__(
        self, settings: RedisSettings, pool: Any, name: str, closed: threading.Event, *, owned: bool = True
    ) -> None:
        self._settings, self._pool, self.name, self._closed, self._owned = settings, pool, name, closed, owned
        lease_s = settings.connect_timeout_s + settings.socket_timeout_s * (settings.retries + 1)
        self._breaker = Breaker(settings.backoff_base_s, settings.backoff_cap_s, lease_s)
        self._limit = min(settings.max_connections, pool.max_connections)
        self._free = threading.BoundedSemaphore(self._limit)
        self._value_limit: tuple[int, int] | None = None  # epoch, bytes
        command_name = inspect.signature(pool.get_connection).parameters.get("command_name")
        wanted = command_name is not None and command_name.default is inspect.Parameter.empty  # redis-py < 5.3
        self._connection_args = ("_",) if wanted else ()

    def run(self, commands: Sequence[Command], allocate: Allocate | None = None) -> list[Reply]:
        """Send the commands in one pipeline and read every reply, bulk strings into buffers of `allocate`.

        Raises:
            StoreError: The connection failed, or still waits after an earlier failure; or, which is no failure of the
                connection, there is no buffer for a reply.
        """
        self._check_open()
        self._breaker.check()
        if not self._free.acquire(timeout=self._settings.socket_timeout_s):
            raise StoreTimeoutError(f"{self.name}: all {self._limit} connections are busy")
        try:
            self._check_open()
            epoch = self._breaker.enter()
            try:
                replies = self._attempts(commands, allocate)
            except StoreClosedError:
                raise
            except NoBufferError as refusal:
                self._breaker.succeed(epoch)
                raise refusal.error from refusal.error.__cause__
            except MemoryError as error:
                self._breaker.succeed(epoch)
                raise no_memory(f"for what is asked of {self.name}") from error
            except StoreError as error:
                self._breaker.fail(epoch, error)
                raise
            self._breaker.succeed(epoch)
            return replies
        finally:
            self._free.release()

    def value_limit(self) -> int:
        """Most bytes that the server takes as one value, asked once per epoch; the default where it does not tell."""
        known = self._value_limit
        if known is None or known[0] != self._breaker.epoch:
            reply = self.run([(b"CONFIG", b"GET", b"proto-max-bulk-len")])[0]
            pair = [part for item in reply.items() for part in item] if isinstance(reply, dict) else reply  # RESP3
            told = isinstance(pair, list) and len(pair) == 2
            known = self._value_limit = (self._breaker.epoch, int(pair[1]) if told else DEFAULT_VALUE_LIMIT)
        return known[1]

    def close(self) -> None:
        """Close the connections, those in use too."""
        if self._owned:
            with mapped():
                self._pool.disconnect()

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise StoreClosedError("the store was closed")

    def _attempts(self, commands: Sequence[Command], allocate: Allocate | None) -> list[Reply]:
        end = time.monotonic() + self._settings.socket_timeout_s * (self._settings.retries + 1)
        for left in range(self._settings.retries, -1, -1):
            try:
                with mapped():
                    return self._exchange(commands, allocate)
            except StoreError as error:
                self._check_open()
                retry = isinstance(error, StoreUnavailableError) and left and time.monotonic() < end
                if not retry:
                    raise type(error)(f"{self.name}: {error}") from error.__cause__
        raise AssertionError("unreachable")

    def _exchange(self, commands: Sequence[Command], allocate: Allocate | None) -> list[Reply]:
        connection = self._connection()
        try:
            connection.send_packed_command(pack(commands))
            replies, clean = self._replies(connection, commands, allocate)
            if not clean or self._closed.is_set() or any(code_of(reply) == "READONLY" for reply in replies):
                connection.disconnect()  # READONLY: a master that became a replica; its name is to be resolved anew
        except BaseException:
            connection.disconnect()  # before `release`, and not in `finally`: interrupted here, it is never used again
            self._pool.release(connection)
            raise
        self._pool.release(connection)
        return replies

    def _replies(
        self, connection: Any, commands: Sequence[Command], allocate: Allocate | None
    ) -> tuple[list[Reply], bool]:
        if not self._owned:  # whatever protocol and parser the caller's client has
            return [_read(connection, command) for command in commands], True
        reader = ReplyReader(connection._sock, self._settings.socket_timeout_s, allocate)
        replies = [reader.read_record() if command[0] == READ_RECORD else reader.read() for command in commands]
        for reply in replies:
            if isinstance(reply, Exception) and str(reply).startswith(_NO_SERVICE):
                raise store_error(reply)
        return replies, reader.clean

    def _connection(self) -> Any:
        from redis.exceptions import RedisError

        try:
            return self._pool.get_connection(*self._connection_args)
        except (RedisError, OSError):
            raise
        except BaseException:  # interrupted in a handshake, redis-py may have kept the connection with a reply to come
            self._pool.disconnect(inuse_connections=False)
            raise


def _read(connection: Any, command: Command) -> Reply:
    from redis.exceptions import ResponseError

    try:
        reply = connection.read_response()
    except ResponseError as error:
        return error
    return join_record(reply) if command[0] == READ_RECORD else reply


def make_pool(settings: RedisSettings, address: Address | None, *, auth: bool = True) -> Any:
    """A pool of redis-py for one server that never retries by itself; `Node` limits and retries.

    Args:
        settings: How to connect.
        address: Host and port; None: the unix socket of the settings.
        auth: Log in and select the database; False for a Sentinel.
    """
    import redis
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    options: dict[str, Any] = {
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,  # with 3, redis-py subscribes to push messages and then skips its check for unread replies
        "decode_responses": False,
        "max_connections": _UNBOUNDED,
        "socket_timeout": settings.socket_timeout_s,
    }
    if auth:
        options |= {"username": settings.username, "password": settings.password, "db": settings.db}
    if address is None:
        return redis.ConnectionPool(connection_class=redis.UnixDomainSocketConnection, path=settings.path, **options)
    options |= {
        "host": address[0],
        "port": address[1],
        "socket_connect_timeout": settings.connect_timeout_s,
        "socket_keepalive": True,
    }
    if settings.tls:
        options |= {
            "connection_class": redis.SSLConnection,
            "ssl_ca_certs": settings.tls_ca_certs,
            "ssl_certfile": settings.tls_cert,
            "ssl_keyfile": settings.tls_key,
            "ssl_cert_reqs": "required" if settings.tls_verify else "none",
            "ssl_check_hostname": settings.tls_verify,
        }
    return redis.ConnectionPool(**options)
