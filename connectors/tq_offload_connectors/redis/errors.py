"""What redis-py raises and a Redis server answers, as a `StoreError`: the one boundary of the Redis store."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

from tq_offload.errors import (
    ConfigError,
    EntryTooLargeError,
    StoreAuthError,
    StoreError,
    StoreFullError,
    StoreIOError,
    StoreTimeoutError,
    StoreUnavailableError,
)

__all__ = ["mapped", "require_redis", "store_error"]

_BY_NAME: dict[str, type[StoreError]] = {  # of a class of redis.exceptions or one that it derives from, nearest first
    "AuthenticationError": StoreAuthError,
    "AuthenticationWrongNumberOfArgsError": StoreAuthError,
    "AuthorizationError": StoreAuthError,
    "ExternalAuthProviderError": StoreAuthError,
    "NoPermissionError": StoreAuthError,
    "OutOfMemoryError": StoreFullError,
    "TimeoutError": StoreTimeoutError,
    "ClusterError": StoreUnavailableError,
    "RedisClusterException": StoreUnavailableError,
    "TryAgainError": StoreUnavailableError,
    "ChildDeadlockedError": StoreUnavailableError,
    "ConnectionError": StoreUnavailableError,
    "OSError": StoreUnavailableError,
}
_BY_TEXT: dict[str, type[StoreError]] = {  # answers that some versions of redis-py have no class for
    "NOAUTH": StoreAuthError,
    "NOPERM": StoreAuthError,
    "WRONGPASS": StoreAuthError,
    "OOM ": StoreFullError,
    "CLUSTERDOWN": StoreUnavailableError,
    "LOADING": StoreUnavailableError,
    "max number of clients reached": StoreUnavailableError,
    "MASTERDOWN": StoreUnavailableError,
    "TRYAGAIN": StoreUnavailableError,
    "Protocol error: invalid bulk length": EntryTooLargeError,
    "string exceeds maximum allowed size": EntryTooLargeError,
}
# What redis-py lets through when an answer is garbage, or when another thread closes the connection under it.
_LET_THROUGH = (AttributeError, IndexError, TypeError, ValueError)


def store_error(error: Exception) -> StoreError:
    """The `StoreError` for an error of redis-py, of a socket, or in an answer; a StoreError itself."""
    if isinstance(error, StoreError):
        return error
    text = str(error).removeprefix("ERR ")
    message = f"redis: {text or type(error).__name__}"
    for prefix, found in _BY_TEXT.items():
        if text.startswith(prefix):
            return found(message)
    for base in type(error).__mro__:
        if base.__name__ in _BY_NAME:
            return _BY_NAME[base.__name__](message)
    return StoreIOError(message)


@contextmanager
def mapped() -> Iterator[None]:
    """Raise what redis-py and sockets raise as a `StoreError`.

    Other exceptions pass: interrupts, and what a thread was told to raise.
    """
    try:
        yield
    except StoreError:
        raise
    except _caught() as error:
        raise store_error(error) from error


@functools.cache
def _caught() -> tuple[type[Exception], ...]:
    import redis.exceptions as module

    names = ("RedisError", "RedisClusterException", "ChildDeadlockedError", "IncorrectPolicyType")
    known = [getattr(module, name) for name in names if hasattr(module, name)]
    return (*known, OSError, *_LET_THROUGH)


def require_redis() -> None:
    """Check that redis-py is installed.

    Raises:
        ConfigError: It is not.
    """
    try:
        import redis  # noqa: F401
    except ImportError as error:
        raise ConfigError("store", "redis", "redis with redis-py: pip install 'tq-offload[lmcache]'") from error
