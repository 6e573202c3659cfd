"""K and V of a prefix through frames, chunk by chunk, as the serde of LMCache stores them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tq_offload.codec import TurboQuantCodec
from tq_offload.errors import CacheTypeError
from tq_offload.layout import ChunkLayout, GroupLayout, dtype_name

__all__ = ["through_frames"]


def through_frames(
    codec: TurboQuantCodec,
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    chunk_tokens: int = 256,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[list[torch.Tensor], list[torch.Tensor], int]:
    """Encode a prefix and decode it again.

    Args:
        codec: Its spec says how.
        keys: K of every layer, each [1, H, P, D].
        values: V of every layer, of the shape of K.
        chunk_tokens: Tokens of a chunk; the last one holds what is left.
        dtype: What an engine's cache holds; K and V are rounded to it before they are encoded.

    Returns:
        K and V, of the shapes, dtypes and devices that came in, and the bytes of all frames. A frame has one group
        `kv_first` [2, L, T, H*D] for the layers of each shape [H, D].

    Raises:
        NonFiniteError: NaN or Inf in K or V, also where rounding to `dtype` makes it.
        CacheTypeError: A layer whose K and V are of different shapes (MLA as transformers keeps it).
    """
    keys_out, values_out = [torch.empty_like(k) for k in keys], [torch.empty_like(v) for v in values]
    shapes = _layers_by_shape(keys, values)
    stored = 0
    for start in range(0, keys[0].shape[2], chunk_tokens):
        part = slice(start, start + chunk_tokens)
        chunk = [_group([[side[i] for i in of] for side in (keys, values)], part, dtype) for of in shapes.values()]
        frame = codec.encode(chunk, _layout(chunk, [dim for _, dim in shapes]))
        stored += len(frame)
        for decoded, layers in zip(codec.decode(frame), shapes.values(), strict=True):
            for at, layer in enumerate(layers):
                for side, out in enumerate((keys_out, values_out)):
                    target = out[layer][0, :, part]  # [H, T, D]
                    heads, tokens, dim = target.shape
                    target.copy_(decoded[side, at].reshape(tokens, heads, dim).transpose(0, 1))
    return keys_out, values_out, stored


def _layers_by_shape(keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> dict[tuple[int, int], list[int]]:
    """Places of the layers of each shape (H, D)."""
    shapes: dict[tuple[int, int], list[int]] = {}
    for at, (k, v) in enumerate(zip(keys, values, strict=True)):
        if k.shape != v.shape:
            raise CacheTypeError(
                f"K {tuple(k.shape)} and V {tuple(v.shape)} of cached layer {at} differ (MLA?): engines store such a "
                "model in another form than transformers, so it cannot be checked; measure it in the engine"
            )
        shapes.setdefault((k.shape[1], k.shape[3]), []).append(at)
    return shapes


def _layout(chunk: Sequence[torch.Tensor], dims: Sequence[int]) -> ChunkLayout:
    return ChunkLayout(
        tuple(
            GroupLayout("kv_first", tuple(x.shape), dtype_name(x.dtype), dim)
            for x, dim in zip(chunk, dims, strict=True)
        )
    )


def _group(sides: list[list[torch.Tensor]], part: slice, dtype: torch.dtype) -> torch.Tensor:
    """Tokens of K and V of some layers, [2, L, T, H*D] in CPU memory."""
    rows = [torch.stack([x[0, :, part].transpose(0, 1).flatten(1).to("cpu", dtype) for x in side]) for side in sides]
    return torch.stack(rows)
