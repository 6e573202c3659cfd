"""How a value lies in Redis: a hash of its length and four parts, whose sizes waste no memory of the server.

Redis allocates by size classes, four for each power of two (jemalloc). A string of 1.52 MiB takes 1.75 MiB; in parts
of 1.5 MiB and of the rest it takes what it has. One key, so that no part is evicted or expires alone, and one HSET of
every field, the empty ones too, so that a record changes as a whole and nothing stays of the one before.
"""

from __future__ import annotations

from tq_offload_connectors.redis.protocol import READ_RECORD, Command

__all__ = ["FIELDS", "LENGTH_FIELD", "part_sizes", "read_command", "write_command"]

LENGTH_FIELD = b"n"
FIELDS = (b"0", b"1", b"2", b"3")
OVERHEAD = 16  # header and terminator of a string in the server
SMALL = 4 << 10  # what is not worth another part


def part_sizes(nbytes: int) -> list[int]:
    """Sizes in bytes of the parts of a value, at most four; none for an empty one."""
    sizes: list[int] = []
    while nbytes > SMALL and len(sizes) < len(FIELDS) - 1:
        size = _size_class_below(nbytes + OVERHEAD) - OVERHEAD
        if size == nbytes:
            break
        sizes.append(size)
        nbytes -= size
    return [*sizes, nbytes] if nbytes else sizes


def write_command(key: bytes, value: memoryview) -> Command:
    """The HSET that stores a value."""
    command: list[bytes | memoryview] = [b"HSET", key, LENGTH_FIELD, b"%d" % value.nbytes]
    sizes, at = part_sizes(value.nbytes), 0
    for field, size in zip(FIELDS, sizes + [0] * (len(FIELDS) - len(sizes)), strict=True):
        command += [field, value[at : at + size]]
        at += size
    return command


def read_command(key: bytes) -> Command:
    """The HMGET that reads it, its length first."""
    return (READ_RECORD, key, LENGTH_FIELD, *FIELDS)


def _size_class_below(nbytes: int) -> int:
    """The largest size class that is not above `nbytes`, for 64 and more."""
    step = 1 << (nbytes.bit_length() - 3)
    return nbytes // step * step
