"""The parts of a layer's K and V: runs of tokens that are exact or packed, and exact copies of the sinks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch

from tq_offload.kv_cache.packed import PackedTokens

__all__ = ["SIDES", "ExactRun", "PackedRun", "Run", "Sinks", "find_sinks"]

SIDES = ("K", "V")
Change = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class ExactRun:
    """Tokens as they came: K [B, H, n, D] and V [B, H, n, D']."""

    keys: torch.Tensor
    values: torch.Tensor

    @property
    def length(self) -> int:
        """Tokens."""
        return self.keys.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes held: of the whole storage, should the tensors be views."""
        return self.keys.untyped_storage().nbytes() + self.values.untyped_storage().nbytes()

    def of(self, side: str) -> torch.Tensor:
        """K or V."""
        return self.keys if side == "K" else self.values

    def cut(self, start: int, stop: int) -> ExactRun:
        """Tokens `start` to `stop`, as views."""
        return ExactRun(self.keys[:, :, start:stop], self.values[:, :, start:stop])

    def crop(self, length: int) -> ExactRun:
        """The first tokens, in storage of their own."""
        return self.cut(0, length).owned()

    def owned(self) -> ExactRun:
        """The same, without keeping a larger storage alive."""
        return ExactRun(
            *(x if x.untyped_storage().nbytes() == x.nbytes else x.clone() for x in (self.keys, self.values))
        )

    def map(self, change: Change) -> ExactRun:
        """The same with a change of the batch dimension."""
        return ExactRun(change(self.keys), change(self.values))


@dataclass(frozen=True)
class PackedRun:
    """Tokens packed."""

    keys: PackedTokens
    values: PackedTokens

    @property
    def length(self) -> int:
        """Tokens."""
        return self.keys.length

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.keys.nbytes + self.values.nbytes

    def of(self, side: str) -> PackedTokens:
        """K or V."""
        return self.keys if side == "K" else self.values

    def crop(self, length: int) -> PackedRun:
        """The first tokens; their codes stay as they are."""
        return PackedRun(self.keys.crop(length), self.values.crop(length))

    def map(self, change: Change) -> PackedRun:
        """The same with a change of the batch dimension."""
        return PackedRun(self.keys.map(change), self.values.map(change))


Run = ExactRun | PackedRun


@dataclass(frozen=True)
class Sinks:
    """Exact copies of the first tokens: of row b, `counts[b]` of them from slot `starts[b]` (its left padding) on."""

    exact: ExactRun
    starts: tuple[int, ...]
    counts: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.exact.nbytes

    def crop(self, length: int) -> Sinks:
        """Only those before slot `length`."""
        counts = (min(n, max(length - start, 0)) for start, n in zip(self.starts, self.counts, strict=True))
        return replace(self, counts=tuple(counts))

    def select(self, rows: Iterable[int], change: Change) -> Sinks:
        """A change of the batch dimension, which takes these rows."""
        rows = list(rows)
        return Sinks(self.exact.map(change), tuple(self.starts[r] for r in rows), tuple(self.counts[r] for r in rows))

    def write(self, side: str, out: torch.Tensor) -> None:
        """Put them where they belong in K or V, [B, H, T, D]."""
        exact, rows = self.exact.of(side), set(zip(self.starts, self.counts, strict=True))
        if len(rows) == 1:
            ((start, count),) = rows
            out[:, :, start : start + count] = exact[:, :, :count]
            return
        for row, (start, count) in enumerate(zip(self.starts, self.counts, strict=True)):
            out[row, :, start : start + count] = exact[row, :, :count]


def find_sinks(tokens: ExactRun, starts: tuple[int, ...], count: int) -> Sinks:
    """Copies of `count` tokens of every row from its start on, of fewer where there are fewer."""

    def pick(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x[row, :, start : start + count] for row, start in enumerate(starts)])

    count = max(min(count, tokens.length - max(starts)), 0)
    return Sinks(tokens.map(pick), starts, (count,) * len(starts))
