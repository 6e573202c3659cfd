"""RESP2, the protocol of Redis: long arguments are sent and long replies received without a copy."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

from tq_offload.errors import StoreError, StoreIOError, StoreTimeoutError, StoreUnavailableError
from tq_offload_connectors.byte_store import Allocate, lend

__all__ = [
    "MAX_DIGITS", "READ_RECORD", "Command", "NoBufferError", "Reply", "ReplyReader", "ServerError", "code_of",
    "join_record", "length_of", "pack",
]  # fmt: skip

Command = Sequence["bytes | memoryview"]
"""Name and arguments."""

Reply = Any
"""A bulk string as a memoryview, one in an array as bytes; int, bytes, None, a list; an exception: an error reply."""

MAX_STRING = 1 << 40
MAX_ITEMS = 1 << 24
MIN_RATE = 16 << 20  # bytes/s below which a reply is given up

MAX_DIGITS = 12
"""Of the length of a record; a longer one is none."""

READ_RECORD = b"HMGET"
"""The command whose reply is read as one record; see `records`."""

_MAX_FIELDS = 16  # of a record
_JOIN_BELOW = 4096  # arguments that are copied into one buffer with what is before and after them
_READ_SIZE = 1 << 16
_CODES = {"MovedError": "MOVED", "AskError": "ASK", "ReadOnlyError": "READONLY"}  # redis-py cuts the code off


class ServerError(Exception):
    """An error that the server answered, with its text."""


class NoBufferError(Exception):
    """There is no buffer for a value: no failure of the connection, although the rest of the reply is not read.

    Args:
        error: What the caller of the store is to get.
    """

    def __init__(self, error: StoreError) -> None:
        self.error = error
        super().__init__(str(error))


class Receiver(Protocol):
    """A socket."""

    def recv_into(self, buffer: memoryview, nbytes: int = ..., flags: int = ..., /) -> int:
        """Receive into a buffer; 0: the other side has closed."""


def code_of(reply: Reply) -> str:
    """The first word of an error that the server answered, as `MOVED`; empty for any other reply."""
    if not isinstance(reply, Exception):
        return ""
    return _CODES.get(type(reply).__name__) or str(reply).split(" ", 1)[0]


def pack(commands: Sequence[Command]) -> list[bytes | memoryview]:
    """The commands as they are sent, without a copy of long arguments."""
    parts: list[bytes | memoryview] = []
    buffer = bytearray()
    for command in commands:
        buffer += b"*%d\r\n" % len(command)
        for argument in command:
            buffer += b"$%d\r\n" % len(argument)
            if len(argument) < _JOIN_BELOW:
                buffer += argument
            else:
                parts += [bytes(buffer), argument]
                buffer.clear()
            buffer += b"\r\n"
    return [*parts, bytes(buffer)]


def length_of(field: Reply) -> int:
    """The length that a record states; -1: it states none."""
    return int(field) if isinstance(field, bytes) and len(field) <= MAX_DIGITS and field.isdigit() else -1


def join_record(reply: Reply) -> Reply:
    """What `ReplyReader.read_record` gives, from a reply that another parser has read."""
    if not isinstance(reply, list) or not 2 <= len(reply) <= _MAX_FIELDS:
        return reply
    if any(not isinstance(field, (bytes, type(None))) for field in reply):
        raise StoreIOError(f"not a record: {str(reply)[:80]}")
    if all(field is None for field in reply):
        return None
    parts = [part or b"" for part in reply[1:]]
    total = sum(map(len, parts))
    whole = total == length_of(reply[0]) and total <= len(parts) * len(parts[0])
    return memoryview(b"".join(parts) if whole else b"")


class ReplyReader:
    """Reads the replies of one exchange; made anew for each.

    Args:
        sock: Socket with a timeout.
        timeout_s: Time for each reply, and again as much for each `MIN_RATE` * `timeout_s` bytes of it.
        allocate: Lends buffers for bulk strings; None: new ones.
    """

    def __init__(self, sock: Receiver, timeout_s: float, allocate: Allocate | None = None) -> None:
        self._sock, self._timeout_s = sock, timeout_s
        self._allocate = allocate
        self._received = bytearray(_READ_SIZE)
        self._buffer = memoryview(self._received)
        self._start = self._end = 0
        self._deadline = 0.0

    @property
    def clean(self) -> bool:
        """True if nothing was received that no reply has used."""
        return self._start == self._end

    def read(self) -> Reply:
        """The next reply.

        Raises:
            StoreIOError: It is no RESP2. StoreTimeoutError, StoreUnavailableError, OSError: it does not come.
            NoBufferError: There is no buffer for it.
        """
        self._deadline = time.monotonic() + self._timeout_s
        return self._read(nested=False)

    def read_record(self) -> Reply:
        """The next reply, of an HMGET whose first string is the length of what the others make up together.

        The length is believed only as far as the first of them, which is the longest, bears it out.

        Returns:
            Their bytes in one buffer: empty if they do not make up the length, None if there are no strings.
        """
        self._deadline = time.monotonic() + self._timeout_s
        line = self._line()
        count = _number(line[1:]) if line[:1] == b"*" else None
        if count is None or not 2 <= count <= _MAX_FIELDS:
            return self._parse(line, nested=False)
        total, found = self._record_length()
        value, at = memoryview(b""), 0
        for index in range(count - 1):
            nbytes = self._string_header()
            found = found or nbytes >= 0
            if index == 0 and 0 < total <= (count - 1) * nbytes:
                value = self._lend(total)
            if 0 < nbytes <= len(value) - at:
                self._fill(value[at : at + nbytes])
            elif nbytes >= 0:
                self._skip(nbytes)
            at += max(0, nbytes)
        if not found:
            return None
        return value.toreadonly() if at == total else memoryview(b"")

    def _record_length(self) -> tuple[int, bool]:
        """The length that a record states, as `length_of`, and whether there is a string for it."""
        nbytes = self._string_header()
        if nbytes <= MAX_DIGITS:
            return length_of(self._string(nbytes, nested=True) if nbytes >= 0 else None), nbytes >= 0
        self._skip(nbytes)
        return -1, True

    def _string_header(self) -> int:
        """Size in bytes of the string that comes next; -1: there is none."""
        line = self._line()
        nbytes = _number(line[1:])
        if line[:1] != b"$" or nbytes is None or nbytes > MAX_STRING:
            raise StoreIOError(f"not a part of a record: {line[:80]!r}")
        return max(-1, nbytes)

    def _read(self, *, nested: bool) -> Reply:
        return self._parse(self._line(), nested=nested)

    def _parse(self, line: bytes, *, nested: bool) -> Reply:
        kind, rest = line[:1], line[1:]
        if kind == b"+":
            return rest
        if kind == b"-":
            return ServerError(rest.decode("utf-8", "replace"))
        number = _number(rest)
        if kind not in (b":", b"$", b"*") or number is None:
            raise StoreIOError(f"not a reply of Redis: {line[:80]!r}")
        if kind == b":":
            return number
        if number < 0:
            return None
        if number > (MAX_STRING if kind == b"$" else MAX_ITEMS):
            raise StoreIOError(f"not a reply of Redis: {line[:80]!r}")
        if kind == b"*":
            return [self._read(nested=True) for _ in range(number)]
        return self._string(number, nested=nested)

    def _string(self, nbytes: int, *, nested: bool) -> bytes | memoryview:
        value = memoryview(bytearray(nbytes)) if nested else self._lend(nbytes)
        self._fill(value)
        return bytes(value) if nested else value.toreadonly()

    def _lend(self, nbytes: int) -> memoryview:
        try:
            return lend(self._allocate, nbytes)
        except StoreError as error:
            raise NoBufferError(error) from error

    def _fill(self, value: memoryview) -> None:
        """Receive the bytes of a string, and the end of its line."""
        nbytes = len(value)
        self._deadline += nbytes / MIN_RATE
        done = min(nbytes, self._end - self._start)
        value[:done] = self._buffer[self._start : self._start + done]
        self._start += done
        while done < nbytes:
            done += self._receive(value[done:])
        self._end_string()

    def _skip(self, nbytes: int) -> None:
        """Receive a string, and drop it."""
        self._deadline += nbytes / MIN_RATE
        while nbytes:
            if self._start == self._end:
                self._start, self._end = 0, self._receive(self._buffer)
            used = min(nbytes, self._end - self._start)
            self._start += used
            nbytes -= used
        self._end_string()

    def _end_string(self) -> None:
        if self._line():
            raise StoreIOError("not a reply of Redis: a string that is longer than it says")

    def _line(self) -> bytes:
        while True:
            end = self._received.find(b"\r\n", self._start, self._end)
            if end >= 0:
                line, self._start = bytes(self._buffer[self._start : end]), end + 2
                return line
            rest = bytes(self._buffer[self._start : self._end])
            if len(rest) == _READ_SIZE:
                raise StoreIOError(f"not a reply of Redis: {rest[:80]!r}")
            self._buffer[: len(rest)] = rest
            self._start, self._end = 0, len(rest)
            self._end += self._receive(self._buffer[self._end :])

    def _receive(self, into: memoryview) -> int:
        if time.monotonic() > self._deadline:
            raise StoreTimeoutError("the reply comes too slowly")
        received = self._sock.recv_into(into)
        if not received:
            raise StoreUnavailableError("the server closed the connection")
        return received


def _number(text: bytes) -> int | None:
    """An integer of 64 bits; None: it is none."""
    return int(text) if len(text) <= 20 and text.removeprefix(b"-").isdigit() else None
