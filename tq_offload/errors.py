"""The error tree. Everything this package raises on purpose is a `TQOffloadError`.

TQOffloadError
├── ConfigError (ValueError)            a setting that is not understood
├── LayoutError (ValueError)            a tensor or layout that cannot be coded as asked
├── BackendError (RuntimeError)         a kernel backend that was asked for and cannot run here
├── IncompatibleError (RuntimeError)    an installed package of a version that is not supported
├── CacheTypeError (TypeError)          a model, cache or press that a packed cache cannot work with
├── PressOrderError (ValueError)        presses in an order in which they cannot work
├── CheckError (ValueError)             a model, text or file that `tq-offload check` cannot work with
├── EncodeError                         a chunk that must not be stored
│   └── NonFiniteError                  NaN or Inf in the input
├── FrameError (ValueError)             bytes that must not be served
│   ├── BadMagicError
│   ├── UnsupportedVersionError
│   ├── FrameLengthError                truncated or extended
│   ├── FrameHeaderError
│   ├── ChecksumError
│   ├── FrameContentError               a right checksum over something that no encoder writes
│   └── FrameMismatchError              a sound frame of another key, model, shape or dtype
└── StoreError                          a store that could not do what it was asked
    ├── StoreFullError                  no room: its budget, the device, the server's memory
    ├── EntryTooLargeError              an entry that the store can never take
    ├── StoreUnavailableError           no connection, or waiting to reconnect
    ├── StoreTimeoutError               no answer in time
    ├── StoreAuthError                  the server refuses the user or password
    ├── StoreIOError                    the device or the server answers with an error
    └── StoreClosedError                used after close

The `reason` of a FrameError, EncodeError or StoreError is a short slug, used as the label of counters.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = [
    "BackendError",
    "BadMagicError",
    "CacheTypeError",
    "CheckError",
    "ChecksumError",
    "ConfigError",
    "EncodeError",
    "EntryTooLargeError",
    "FrameContentError",
    "FrameError",
    "FrameHeaderError",
    "FrameLengthError",
    "FrameMismatchError",
    "IncompatibleError",
    "LayoutError",
    "NonFiniteError",
    "PressOrderError",
    "StoreAuthError",
    "StoreClosedError",
    "StoreError",
    "StoreFullError",
    "StoreIOError",
    "StoreTimeoutError",
    "StoreUnavailableError",
    "TQOffloadError",
    "UnsupportedVersionError",
]


class TQOffloadError(Exception):
    """Base of every error of this package."""


class ConfigError(TQOffloadError, ValueError):
    """A setting that is not understood.

    Args:
        setting: Name of the setting as the user wrote it, for example `TQ_OFFLOAD_BITS`.
        value: The value that was given.
        allowed: The values that would have been accepted, or a sentence that describes them.
    """

    def __init__(self, setting: str, value: object, allowed: Iterable[object] | str) -> None:
        self.setting = setting
        self.value = value
        self.allowed = allowed if isinstance(allowed, str) else ", ".join(str(a) for a in allowed)
        super().__init__(f"{setting}={value!r} is not understood; allowed: {self.allowed}")


class LayoutError(TQOffloadError, ValueError):
    """A tensor or layout that cannot be coded as asked."""


class BackendError(TQOffloadError, RuntimeError):
    """A kernel backend that was asked for by name and cannot run here."""


class IncompatibleError(TQOffloadError, RuntimeError):
    """An installed package of a version that is not supported."""


class CacheTypeError(TQOffloadError, TypeError):
    """A model, cache or press that a packed cache cannot work with. The message names what to use instead."""


class PressOrderError(TQOffloadError, ValueError):
    """Presses in an order in which they cannot work. The message names one that does."""


class CheckError(TQOffloadError, ValueError):
    """A model, a text or a file that cannot be checked. The message, one line, names the remedy."""


class EncodeError(TQOffloadError):
    """A chunk that must not be stored."""

    reason = "encode"


class NonFiniteError(EncodeError):
    """NaN or Inf in the input: the chunk is refused, never written as something finite."""

    reason = "non_finite"


class FrameError(TQOffloadError, ValueError):
    """Bytes that must not be served: a cache miss."""

    reason = "frame"


class BadMagicError(FrameError):
    """Not a frame at all."""

    reason = "magic"


class UnsupportedVersionError(FrameError):
    """A frame of a version or with flags that this release does not read."""

    reason = "version"


class FrameLengthError(FrameError):
    """Truncated or extended: the buffer, the header and the layout disagree about the length."""

    reason = "length"


class FrameHeaderError(FrameError):
    """A header that breaks the format or its caps."""

    reason = "header"


class ChecksumError(FrameError):
    """The checksum does not match."""

    reason = "checksum"


class FrameContentError(FrameError):
    """A right checksum over something that no encoder writes: a scale or a mean that is not finite."""

    reason = "content"


class FrameMismatchError(FrameError):
    """A sound frame, but of another key, model, shape or dtype.

    Args:
        what: `key`, `model`, `shape`, `dtype` or `kind`; becomes the reason `mismatch_<what>`.
    """

    def __init__(self, what: str, expected: object, found: object) -> None:
        self.reason = f"mismatch_{what}"
        super().__init__(f"frame holds {what} {found!r}, expected {expected!r}")


class StoreError(TQOffloadError):
    """A store that could not do what it was asked; nothing of the entry is visible under its key."""

    reason = "store"


class StoreFullError(StoreError):
    """No room: the store's budget with everything else pinned, a full device, a server out of memory."""

    reason = "full"


class EntryTooLargeError(StoreError):
    """An entry that the store can never take: over its whole budget or the server's limit for a value."""

    reason = "too_large"


class StoreUnavailableError(StoreError):
    """No connection to the server, or the store waits before it tries again."""

    reason = "unavailable"


class StoreTimeoutError(StoreError):
    """The server did not answer in time."""

    reason = "timeout"


class StoreAuthError(StoreError):
    """The server refuses the user or password."""

    reason = "auth"


class StoreIOError(StoreError):
    """The device or the server answered with an error."""

    reason = "io"


class StoreClosedError(StoreError):
    """The store was used after `close`."""

    reason = "closed"
