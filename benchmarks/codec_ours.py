"""What `bench_codec` measures of ours: the chunk, the codec on it, the memory that a call takes."""

from __future__ import annotations

import argparse

import torch

from benchmarks import codec_peers
from benchmarks.peak_memory import extra_bytes
from tq_offload.codec import TurboQuantCodec
from tq_offload.layout import ChunkLayout, GroupLayout
from tq_offload.spec import CodecSpec

__all__ = ["extra_memory", "layout_of", "make_chunk", "ours"]


def make_chunk(args: argparse.Namespace, seed: int = 0) -> torch.Tensor:
    """A packed chunk [L, T, H*2D] in bf16 with a mean for every channel."""
    generator = torch.Generator().manual_seed(seed)
    shape = (args.layers, args.tokens, args.heads * 2 * args.head_dim)
    x = torch.randn(shape, generator=generator) + torch.randn(shape[-1], generator=generator)
    return x.to(torch.bfloat16)


def layout_of(chunk: torch.Tensor, head_dim: int) -> ChunkLayout:
    """The layout of a packed chunk."""
    return ChunkLayout((GroupLayout("packed", tuple(chunk.shape), "bfloat16", head_dim),))


def ours(codec: TurboQuantCodec, chunk: torch.Tensor, back: torch.Tensor, head_dim: int) -> codec_peers.Pair:
    """A codec on a chunk, into a buffer that is there."""
    layout = layout_of(chunk, head_dim)
    frame = bytearray(codec.frame_size(layout))
    return lambda: codec.encode_into([chunk], layout, frame), lambda: codec.decode_into(frame, [back])


def extra_memory(args: argparse.Namespace) -> dict[str, int]:
    """Bytes of resident memory at the peak of a call beyond those before it; nothing where that cannot be told."""
    chunk, spec = make_chunk(args), CodecSpec(args.bits, args.bits)
    back, found = torch.zeros_like(chunk), {}
    for name, make in (("turboquant", lambda *a: ours(TurboQuantCodec(spec), *a)), ("fp8", codec_peers.fp8)):
        for way, call in zip(("encode", "decode"), make(chunk, back, args.head_dim), strict=True):
            call()
            extra = extra_bytes(call)
            if extra is not None:
                found[f"{name} {way}"] = extra
    return found
