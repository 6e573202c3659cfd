"""The sizes that are measured: one of tokens, layers, heads, head_dim or threads grows, the others stay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.transfer.chunks import Shape

__all__ = ["FITTED", "SWEEPS", "Case", "cases", "thread_counts"]

_BASE = Shape("", layers=8, heads=8, head_dim=128)
_SIZES = {
    "tokens": (_BASE, (64, 128, 256, 512, 1024, 2048, 4096)),
    "layers": (_BASE, (1, 2, 4, 8, 16, 32, 48, 64, 80)),
    "heads": (replace(_BASE, layers=32), (1, 2, 4, 8, 12, 16)),
    "head_dim": (replace(_BASE, heads=4), (64, 96, 128, 256, 576)),
}
_THREADED = replace(_BASE, layers=16)
_MOST_THREADS = 64  # each with a chunk of its own: what that takes stays below 2 GiB

SWEEPS = (*_SIZES, "threads, one chunk", "threads, a chunk each")
FITTED = ("tokens", "layers", "heads")
"""Sweeps in which the work is in proportion to the size. head_dim is not: other sizes take other kernels."""


@dataclass(frozen=True)
class Case:
    """One size of a sweep.

    Args:
        sweep: One of SWEEPS.
        size: What grows.
        shape: Of a chunk.
        threads: Of the codec.
        chunks: Chunks at once, each by a thread of its own.
    """

    sweep: str
    size: int
    shape: Shape
    threads: int = 1
    chunks: int = 1

    @property
    def nbytes(self) -> int:
        """Uncompressed bytes of a call, of all chunks together."""
        return self.chunks * self.shape.nbytes


def cases(cores: int, *, short: bool = False) -> list[Case]:
    """All of them; ``short``: the smallest size of each sweep and the three largest."""
    found = [
        Case(name, size, replace(base, **{name: size}))
        for name, (base, sizes) in _SIZES.items()
        for size in (_thinned(sizes) if short else sizes)
    ]
    one, each = SWEEPS[-2:]
    counts = thread_counts(cores)
    found += [Case(one, count, _THREADED, threads=count) for count in counts]
    return found + [Case(each, count, _THREADED, chunks=count) for count in counts]


def thread_counts(cores: int) -> list[int]:
    """1, 2, 4 and so on below the number of cores, that number, and one more; 64 at most."""
    wanted = {1, 2, cores, cores + 1} | {1 << bits for bits in range(cores.bit_length())}
    return sorted({min(count, _MOST_THREADS) for count in wanted})


def _thinned(sizes: Sequence[int]) -> list[int]:
    return [sizes[0], *sizes[-3:]]
