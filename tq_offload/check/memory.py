"""Bytes of the KV cache of a context, from its length: as it is, packed in memory, stored as frames."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["LENGTHS", "MemoryRow", "project"]

LENGTHS = tuple(1024 << i for i in range(8))
"""1,024 to 131,072 tokens."""


@dataclass(frozen=True)
class MemoryRow:
    """Bytes of a context of `tokens` tokens: `bf16` in memory, `packed` in memory by a `TurboQuantCache` with its
    default exact tokens, `stored` as frames of whole chunks."""

    tokens: int
    bf16: int
    packed: int
    stored: int


def project(
    shapes: Sequence[tuple[int, int]], bits: float, chunk_tokens: int, lengths: Sequence[int] = LENGTHS
) -> list[MemoryRow]:
    """Project the measured bits to other lengths.

    Args:
        shapes: KV heads H and head_dim D of every layer.
        bits: Bits an element as stored, frame included.
        chunk_tokens: Tokens of a chunk; what is left after whole chunks is not stored.
        lengths: Tokens of the contexts.
    """
    from tq_offload.kv_cache.options import CacheOptions  # imports transformers

    elements = 2 * sum(heads * dim for heads, dim in shapes)  # of a token
    defaults = CacheOptions()
    rows = []
    for tokens in lengths:
        exact = min(tokens, defaults.sink_tokens + defaults.window)
        packed = elements * (2 * exact + (tokens - exact) * bits / 8)
        stored = elements * (tokens // chunk_tokens * chunk_tokens) * bits / 8
        rows.append(MemoryRow(tokens, 2 * elements * tokens, round(packed), round(stored)))
    return rows
