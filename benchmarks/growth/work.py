"""The calls of a case. All cases share three buffers, so that memory is bounded by the largest of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import torch

from benchmarks.cores import pinned_pool
from benchmarks.growth.cases import Case
from tq_offload.codec import TurboQuantCodec
from tq_offload.layout import ChunkLayout

__all__ = ["Calls", "Work"]

_PIECE = 1 << 22
_MEANS = 64  # divides the channels of every case: each channel has a mean of its own
_MAX_ERROR = 0.01

Calls = tuple[Callable[[], object], Callable[[], object]]
"""Encode and decode, of whole frames, into buffers that are there."""


class Work:
    """Buffers of the largest case, touched, and the calls on the front of them."""

    def __init__(self, cases: Iterable[Case]) -> None:
        wanted = list(cases)
        numbers = max(case.shape.nbytes for case in wanted) // 2
        generator = torch.Generator().manual_seed(0)
        means = torch.randn(_MEANS, generator=generator)
        self._source = torch.empty(numbers, dtype=torch.bfloat16)
        for piece in self._source.split(_PIECE):
            values = torch.randn(len(piece), generator=generator)
            piece.copy_(values + means.repeat(-(-len(piece) // _MEANS))[: len(piece)])
        most = max(case.nbytes for case in wanted) // 2
        self._target = torch.zeros(max(numbers, most), dtype=torch.bfloat16)
        self._frames = np.zeros(max(self.frame_bytes(case) * case.chunks for case in wanted), np.uint8)
        self._pool = pinned_pool(max(case.chunks for case in wanted))

    @staticmethod
    def frame_bytes(case: Case) -> int:
        """Bytes of a frame."""
        return TurboQuantCodec().frame_size(case.shape.layout)

    def calls(self, case: Case) -> Calls:
        """The calls of a case; of several chunks at once they encode one source into frames of their own."""
        layout, codec = case.shape.layout, TurboQuantCodec(threads=case.threads)
        pairs = [self._chunk(codec, layout, number) for number in range(case.chunks)]
        if len(pairs) == 1:
            return pairs[0]
        encoders, decoders = zip(*pairs, strict=True)
        return lambda: self._at_once(encoders), lambda: self._at_once(decoders)

    def _chunk(self, codec: TurboQuantCodec, layout: ChunkLayout, number: int) -> Calls:
        shape, size = layout.groups[0].shape, codec.frame_size(layout)
        numbers = layout.nbytes // 2
        source = self._source[:numbers].view(shape)
        target = self._target[number * numbers : (number + 1) * numbers].view(shape)
        frame = self._frames[number * size : (number + 1) * size].data
        return lambda: codec.encode_into([source], layout, frame), lambda: codec.decode_into(frame, [target])

    def _at_once(self, calls: Iterable[Callable[[], object]]) -> None:
        for one in [self._pool.submit(call) for call in calls]:
            one.result()

    def check(self, case: Case) -> None:
        """Encode and decode once. Raises SystemExit when what came back is not what was encoded."""
        numbers = case.nbytes // 2
        self._target[:numbers] = 0
        for call in self.calls(case):
            call()
        step = case.shape.nbytes // 2
        for start in range(0, numbers, step):
            error = _error(self._target[start : start + step], self._source[:step])
            if not error <= _MAX_ERROR:
                raise SystemExit(f"{case.sweep} {case.size}: what came back has a relative squared error of {error}")

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()


def _error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Squared error over energy, of the last piece."""
    a, b = found[-_PIECE:].float(), wanted[-_PIECE:].float()
    return float((a - b).square().sum() / b.square().sum())
