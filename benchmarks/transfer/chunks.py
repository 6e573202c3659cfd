"""The chunks that are moved: K and V of 256 tokens of a model, bf16, [2, L, T, H*D]."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tq_offload.layout import ChunkLayout, GroupLayout

__all__ = ["LLAMA_3B", "SMOLLM2", "Shape", "make_chunk"]


@dataclass(frozen=True)
class Shape:
    """What a chunk is."""

    model: str
    layers: int
    heads: int
    head_dim: int
    tokens: int = 256

    @property
    def layout(self) -> ChunkLayout:
        """As LMCache hands it over."""
        shape = (2, self.layers, self.tokens, self.heads * self.head_dim)
        return ChunkLayout((GroupLayout("kv_first", shape, "bfloat16", self.head_dim),))

    @property
    def nbytes(self) -> int:
        """Uncompressed bytes of a chunk."""
        return self.layout.nbytes


LLAMA_3B = Shape("Llama-3.2-3B", 28, 8, 128)
SMOLLM2 = Shape("SmolLM2-135M", 30, 3, 64)


def make_chunk(shape: Shape, seed: int) -> torch.Tensor:
    """Normal values with a mean for every channel."""
    generator = torch.Generator().manual_seed(seed)
    size = shape.layout.groups[0].shape
    x = torch.randn(size, generator=generator)
    return x.add_(torch.randn(size[-1], generator=generator)).to(torch.bfloat16)
