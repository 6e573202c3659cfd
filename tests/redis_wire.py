"""What a Redis server sends, without one."""

from __future__ import annotations

import random


class Wire:
    """A socket that hands out bytes in pieces of random sizes, then has been closed."""

    def __init__(self, data: bytes, seed: int = 0) -> None:
        self._data, self._random = memoryview(data), random.Random(seed)

    def recv_into(self, buffer: memoryview, nbytes: int = 0, flags: int = 0) -> int:
        count = min(len(buffer), len(self._data), self._random.choice((1, 2, 7, 100, 5_000, 1 << 20)))
        buffer[:count] = self._data[:count]
        self._data = self._data[count:]
        return count


def encode(reply: object) -> bytes:
    if reply is None:
        return b"$-1\r\n"
    if isinstance(reply, int):
        return b":%d\r\n" % reply
    if isinstance(reply, bytes):
        return b"$%d\r\n%b\r\n" % (len(reply), reply)
    assert isinstance(reply, list)
    return b"*%d\r\n" % len(reply) + b"".join(map(encode, reply))
