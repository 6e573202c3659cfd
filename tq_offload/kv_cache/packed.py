"""`PackedTokens`: K or V of a run of tokens of one layer, as codes, scales and means. The arithmetic is the codec's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from tq_offload.bitpack import packed_size
from tq_offload.errors import LayoutError
from tq_offload.kernels import Backend, Chunks, Sections, Stream, VectorParams
from tq_offload.layout import CODED_DTYPES, MAX_HEAD_DIM, dtype_name
from tq_offload.spec import OUTLIER_BITS, CodecSpec

__all__ = ["Array", "PackedTokens", "flat_span", "vector_params"]

Array = np.ndarray[Any, Any]

_PARTS = (
    "codes", "scales", "means", "sketch_scales", "sketch", "outlier_channels", "outlier_ranges", "outlier_codes",
)  # fmt: skip
_BITS = {1: (torch.uint8, np.uint8), 2: (torch.int16, np.uint16), 4: (torch.float32, np.float32)}


def vector_params(spec: CodecSpec, side: str, dtype: torch.dtype, tokens: int, dim: int) -> VectorParams:
    """How the vectors of `dim` elements of a chunk of that many tokens are coded; `side` is `K` or `V`."""
    coding = spec.side(side, tokens)
    return VectorParams(
        dtype=dtype_name(dtype),
        bits=coding.bits,
        seed=spec.seed,
        rule=coding.rule,
        mean=coding.mean,
        fit_range=spec.fit_range,
        qjl=coding.qjl,
        outliers=coding.outliers_of(dim),
    )


def flat_span(x: torch.Tensor) -> Array:
    """1-D bits of the memory from the first to the last element of a CPU tensor, without a copy.

    Element (i, j, ...) of `x` is at `i*x.stride(0) + j*x.stride(1) + ...`.
    """
    span = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    bits, kind = _BITS[x.element_size()]
    array: Array = x.detach().as_strided((span,), (1,)).view(bits).numpy()
    return array.view(kind)


@dataclass(frozen=True)
class PackedTokens:
    """B rows of `length` tokens with H heads of D elements, in P chunks of c tokens; P*c - length < c are unused.

    codes u8 [B, P, c, H, ceil(D*bits/8)]; scales bf16 bits as i16 [B, P, c, H]; means bf16 bits as i16 [B, P, H, D] or
    None; sketch u8 [B, P, c, H, ceil(D/8)] and sketch_scales i16 [B, P, c, H] with QJL; outlier_channels i16
    [B, P, H, k], outlier_ranges f32 [B, P, H, k, 2] and outlier_codes u8 [B, P, c, H, ceil(k/2)] with k outlier
    channels. All in CPU memory.
    """

    params: VectorParams
    dim: int
    length: int
    codes: torch.Tensor
    scales: torch.Tensor
    means: torch.Tensor | None
    sketch_scales: torch.Tensor | None = None
    sketch: torch.Tensor | None = None
    outlier_channels: torch.Tensor | None = None
    outlier_ranges: torch.Tensor | None = None
    outlier_codes: torch.Tensor | None = None

    @classmethod
    def empty(cls, params: VectorParams, rows: int, chunks: int, tokens: int, heads: int, dim: int) -> PackedTokens:
        """Room for `chunks` chunks of `tokens` tokens; the contents are undefined."""
        grid = (rows, chunks, tokens, heads)
        sketched, k = params.qjl, params.outliers
        return cls(
            params,
            dim,
            chunks * tokens,
            torch.empty((*grid, packed_size(dim, params.bits)), dtype=torch.uint8),
            torch.empty(grid, dtype=torch.int16),
            torch.empty((rows, chunks, heads, dim), dtype=torch.int16) if params.mean else None,
            torch.empty(grid, dtype=torch.int16) if sketched else None,
            torch.empty((*grid, packed_size(dim, 1)), dtype=torch.uint8) if sketched else None,
            torch.empty((rows, chunks, heads, k), dtype=torch.int16) if k else None,
            torch.empty((rows, chunks, heads, k, 2), dtype=torch.float32) if k else None,
            torch.empty((*grid, packed_size(k, OUTLIER_BITS)), dtype=torch.uint8) if k else None,
        )

    @classmethod
    def encode(cls, backend: Backend, x: torch.Tensor, params: VectorParams, chunk: int) -> PackedTokens:
        """Pack vectors.

        Args:
            backend: Kernels.
            x: [B, H, n, D]; n is at most `chunk`, or a multiple of it. Read in place where D is contiguous.
            params: How they are coded.
            chunk: Tokens of a chunk.

        Raises:
            NonFiniteError: NaN or Inf.
            LayoutError: A dtype or a D that cannot be coded.
        """
        rows, heads, n, dim = x.shape
        if not 1 <= dim <= MAX_HEAD_DIM:
            raise LayoutError(f"vectors of {dim} elements cannot be packed: head_dim is at most {MAX_HEAD_DIM}")
        if dtype_name(x.dtype) not in CODED_DTYPES:
            raise LayoutError(
                f"vectors of {dim} elements of {x.dtype} cannot be packed; "
                "load the model in bfloat16, float16 or float32"
            )
        tokens = min(n, chunk)
        x = x.detach().cpu()
        if x.stride(3) != 1 or min(x.stride()) < 0:
            x = x.contiguous()
        out = cls.empty(params, rows, n // tokens, tokens, heads, dim)
        flat, (s_row, s_head, s_token, _) = flat_span(x), x.stride()
        for row in range(rows):
            stream = Stream(n // tokens, tokens, heads, dim, row * s_row, tokens * s_token, s_token, s_head)
            backend.encode(flat, stream, params, out.sections(row))
        return out

    def sections(self, row: int, planes: slice = slice(None), tokens: int | None = None) -> Sections:
        """Sections of some chunks of a row, as views; with `tokens`, of their first tokens (one chunk only)."""

        def view(part: torch.Tensor | None, kind: Any, *, cut: bool = True) -> Any:
            if part is None:
                return None
            chosen = part[row, planes] if tokens is None or not cut else part[row, planes, :tokens]
            return chosen.numpy().view(kind)

        return Sections(
            means=view(self.means, np.uint16, cut=False),
            scales=view(self.scales, np.uint16),
            codes=view(self.codes, np.uint8),
            sketch_scales=view(self.sketch_scales, np.uint16),
            sketch=view(self.sketch, np.uint8),
            outlier_channels=view(self.outlier_channels, np.uint16, cut=False),
            outlier_ranges=view(self.outlier_ranges, np.float32, cut=False),
            outlier_codes=view(self.outlier_codes, np.uint8),
        )

    def chunks(self, start: int) -> Iterator[Chunks]:
        """The tokens in use as chunks to decode, when the first one is token `start` of the sequence."""
        rows, _, c, heads = self.scales.shape
        whole, rest = divmod(self.length, c)
        for row in range(rows):
            if whole:
                yield Chunks(row, start, whole, c, heads, self.params, self.sections(row, slice(whole)))
            if rest:
                cut = self.sections(row, slice(whole, whole + 1), rest)
                yield Chunks(row, start + whole * c, 1, rest, heads, self.params, cut)

    def crop(self, length: int) -> PackedTokens:
        """The first tokens; chunks that are left whole without use are let go."""
        chunks, c = self.scales.shape[1], self.scales.shape[2]
        keep = -(-length // c)
        cropped = self if keep == chunks else self.map(lambda part: part[:, :keep].clone())
        return replace(cropped, length=length)

    def can_take(self, other: PackedTokens) -> bool:
        """True if `other` can be appended as further chunks of this run."""
        c = self.scales.shape[2]
        return self.params == other.params and self.length == self.scales.shape[1] * c and other.scales.shape[2] == c

    def append(self, other: PackedTokens) -> PackedTokens:
        """Both, one after the other. See `can_take`."""
        parts: dict[str, Any] = {}
        for name in _PARTS:
            mine = getattr(self, name)
            parts[name] = None if mine is None else torch.cat([mine, getattr(other, name)], dim=1)
        return replace(self, length=self.length + other.length, **parts)

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> PackedTokens:
        """The same with every part changed; dimension 0 is the batch, 1 the chunks."""
        parts: dict[str, Any] = {name: change(part) for name in _PARTS if (part := getattr(self, name)) is not None}
        return replace(self, **parts)

    def __deepcopy__(self, _memo: dict[int, Any]) -> PackedTokens:
        return self  # packed tokens never change

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(part.nbytes for name in _PARTS if (part := getattr(self, name)) is not None)
