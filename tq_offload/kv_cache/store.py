"""`LayerStore`: K and V of one layer, the old tokens packed, the sinks and the recent ones exact. No transformers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tq_offload.errors import NonFiniteError
from tq_offload.kernels import Chunks, Decoder, get_backend
from tq_offload.kv_cache.options import CacheOptions
from tq_offload.kv_cache.packed import PackedTokens, flat_span, vector_params
from tq_offload.kv_cache.runs import SIDES, ExactRun, PackedRun, Run, Sinks, find_sinks

__all__ = ["LayerStore"]


class LayerStore:
    """K and V of one layer in order of their tokens: runs, packed or exact for good, and an exact tail that grows.

    Tokens come in at the tail. `pack` packs those that have left the window, in whole chunks; with `everything` it ends
    the context: the rest before the window is packed as well, and the window stays exact for good, so that whatever is
    generated from this context and cropped again leaves it as it was. Nothing is ever packed twice.
    """

    def __init__(self, options: CacheOptions, name: str = "a layer") -> None:
        self.options = options
        self.name = name
        self.clear()

    def clear(self) -> None:
        """Forget all tokens."""
        self.runs: list[Run] = []
        self.tail: ExactRun | None = None
        self.sinks: Sinks | None = None
        self.starts: tuple[int, ...] | None = None  # padding before the context, of every row
        self._plans: dict[str, _Plan] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_plans": {}}

    @property
    def length(self) -> int:
        """Tokens held."""
        return sum(run.length for run in self.runs) + (self.tail.length if self.tail else 0)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        parts: list[Any] = [*self.runs, self.tail, self.sinks]
        return sum(part.nbytes for part in parts if part is not None)

    def shape(self, side: str) -> tuple[int, int, int, int]:
        """B, H, T, D of K or V. There must be tokens."""
        part = (self.tail or self.runs[0]).of(side)
        if isinstance(part, PackedTokens):
            rows, _, _, heads = part.scales.shape
            return rows, heads, self.length, part.dim
        rows, heads, _, dim = part.shape
        return rows, heads, self.length, dim

    def dtype(self, side: str) -> torch.dtype:
        """Dtype of K or V. There must be tokens."""
        part = (self.tail or self.runs[0]).of(side)
        return getattr(torch, part.params.dtype) if isinstance(part, PackedTokens) else part.dtype

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Take new tokens: K [B, H, n, D], V [B, H, n, D']. The first ones are kept as views until they are packed."""
        new = ExactRun(keys.detach(), values.detach())
        if self.tail is not None:
            new = ExactRun(*(torch.cat([self.tail.of(s), new.of(s)], dim=2) for s in SIDES))
        elif self.runs:
            new = ExactRun(new.keys.clone(), new.values.clone())
        self.tail = new if new.length else self.tail

    def load(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Replace everything by these tokens."""
        self.clear()
        self.append(keys, values)

    def pack(self, *, everything: bool = False) -> None:
        """Pack tokens of the tail. See the class.

        Raises:
            NonFiniteError: NaN or Inf; it names the layer, and nothing has changed.
        """
        if self.tail is None:
            return
        if not everything and self.tail.length < self.options.window + self.options.chunk_tokens:
            return  # as after most tokens
        options, starts = self.options, self.starts or (0,) * self.tail.keys.shape[0]
        runs, tail = self._reopened() if everything else (list(self.runs), self.tail)
        ready = max(tail.length - options.window, 0)
        if not runs and tail.length <= max(starts) + options.sink_tokens:
            ready = 0
        taken = ready if everything else ready // options.chunk_tokens * options.chunk_tokens
        self._pack_into(runs, tail.cut(0, taken))
        sinks, front = self.sinks, self.runs[0] if len(self.runs) > 1 else tail
        if options.sink_tokens and isinstance(front, ExactRun) and isinstance((runs or [tail])[0], PackedRun):
            sinks = sinks or find_sinks(front, starts, options.sink_tokens)
        rest = tail.cut(taken, tail.length).owned() if taken < tail.length else None
        if everything and rest is not None:
            runs.append(rest)
            rest = None
        self._plans = {}  # they keep the runs before alive
        self.runs, self.tail, self.sinks = runs, rest, sinks

    def _reopened(self) -> tuple[list[Run], ExactRun]:
        """Runs and tail for a context that goes on: the exact end of the one before is no end any more."""
        assert self.tail is not None
        before, tail = list(self.runs), self.tail
        if before and isinstance(last := before[-1], ExactRun):
            tail = ExactRun(*(torch.cat([last.of(s), tail.of(s)], dim=2) for s in SIDES))
            before.pop()
        runs: list[Run] = []
        for run in before:
            if isinstance(run, ExactRun):
                self._pack_into(runs, run)
            else:
                runs.append(run)
        return runs, tail

    def _pack_into(self, runs: list[Run], run: ExactRun) -> None:
        """Pack a run behind the others: whole chunks, then the rest."""
        whole = run.length // self.options.chunk_tokens * self.options.chunk_tokens
        for start, stop in ((0, whole), (whole, run.length)):
            if start < stop:
                _add(runs, self._packed(run.cut(start, stop)))

    def _packed(self, run: ExactRun) -> PackedRun:
        parts, backend = [], get_backend()
        chunk = min(run.length, self.options.chunk_tokens)
        for side, label in zip(SIDES, ("keys", "values"), strict=True):
            x = run.of(side)
            params = vector_params(self.options.spec, side, x.dtype, chunk, x.shape[3])
            try:
                parts.append(PackedTokens.encode(backend, x, params, chunk))
            except NonFiniteError as error:
                raise NonFiniteError(f"NaN or Inf in the {label} of {self.name}: its KV cache is not packed") from error
        return PackedRun(*parts)

    def unpack_into(self, side: str, out: torch.Tensor) -> None:
        """Write K or V of all tokens to a CPU tensor [B, H, T, D] with contiguous D.

        In the calling thread: on two cores, handing a layer of 1 to 16 MiB to another thread took longer than it saved.
        """
        plan = self._plans.get(side)
        if plan is None or plan.runs is not self.runs:
            plan = self._plans[side] = _make_plan(self.runs, side)
        if plan.decode is not None:
            plan.decode(flat_span(out), (out.stride(0), out.stride(1), out.stride(2)))
        for start, x in plan.exact:
            out.narrow(2, start, x.shape[2]).copy_(x)
        if self.tail is not None:
            out.narrow(2, plan.length, self.tail.length).copy_(self.tail.of(side))
        if self.sinks is not None:
            self.sinks.write(side, out)

    def unpack(self, side: str) -> torch.Tensor:
        """K or V of all tokens in a new CPU tensor [B, H, T, D]."""
        out = torch.empty(self.shape(side), dtype=self.dtype(side))
        self.unpack_into(side, out)
        return out

    def crop(self, length: int) -> None:
        """Keep the first tokens."""
        if length <= 0:
            self.clear()
            return
        self._plans = {}
        at, runs = 0, [*self.runs, *([self.tail] if self.tail else ())]
        kept: list[Run] = []
        for run in runs:
            take = min(run.length, length - at)
            if take > 0:
                kept.append(run if take == run.length else run.crop(take))
            at += run.length
        in_tail = self.tail is not None and len(kept) == len(runs)
        last = kept.pop() if in_tail else None
        self.tail = last if isinstance(last, ExactRun) else None
        self.runs = kept
        if self.sinks is not None:
            self.sinks = self.sinks.crop(length)

    def select(self, rows: torch.Tensor) -> None:
        """Replace the batch by these rows of it: indices i64 [B']."""
        index = rows.to("cpu", torch.int64)

        def change(x: torch.Tensor) -> torch.Tensor:
            return x.index_select(0, index.to(x.device))

        self._plans = {}
        self.runs = [run.map(change) for run in self.runs]
        if self.tail is not None:
            self.tail = self.tail.map(change)
        numbers: list[int] = index.tolist()
        if self.sinks is not None:
            self.sinks = self.sinks.select(numbers, change)
        if self.starts is not None:
            self.starts = tuple(self.starts[r] for r in numbers)


def _add(runs: list[Run], run: PackedRun) -> None:
    """Append a run, to the last one where it can take further chunks."""
    last = runs[-1] if runs else None
    if isinstance(last, PackedRun) and last.keys.can_take(run.keys) and last.values.can_take(run.values):
        runs[-1] = PackedRun(last.keys.append(run.keys), last.values.append(run.values))
    else:
        runs.append(run)


@dataclass(frozen=True)
class _Plan:
    """How the runs of a store are unpacked, for K or V."""

    runs: list[Run]
    length: int
    decode: Decoder | None
    exact: tuple[tuple[int, torch.Tensor], ...]


def _make_plan(runs: list[Run], side: str) -> _Plan:
    chunks: list[Chunks] = []
    exact: list[tuple[int, torch.Tensor]] = []
    at, dim = 0, 0
    for run in runs:
        if isinstance(run, PackedRun):
            packed = run.of(side)
            chunks += packed.chunks(at)
            dim = packed.dim
        else:
            exact.append((at, run.of(side)))
        at += run.length
    return _Plan(runs, at, get_backend().decoder(dim, chunks) if chunks else None, tuple(exact))
