"""Arithmetic of bench_model: bytes a token, seconds to load a prefix, and the link at which packing breaks even."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.transfer import chunks
from tq_offload.codec import TurboQuantCodec
from tq_offload.layout import ChunkLayout, GroupLayout
from tq_offload.spec import CodecSpec

__all__ = ["CHUNK_TOKENS", "LINKS", "MODELS", "SMOLLM2", "CodecRate", "Model", "break_even", "load_seconds", "scaled"]

CHUNK_TOKENS = 256
_GBIT = 1e9 / 8

LINKS: Mapping[str, float] = {
    "100 Mbit/s": 0.1 * _GBIT, "1 Gbit/s": _GBIT, "10 Gbit/s": 10 * _GBIT, "25 Gbit/s": 25 * _GBIT,
    "100 Gbit/s": 100 * _GBIT, "NVMe 3 GB/s": 3e9, "NVMe 7 GB/s": 7e9,
}  # fmt: skip
"""Bytes a second; protocol overhead is left out."""


@dataclass(frozen=True)
class Model:
    """What the KV cache of a model is, in bf16.

    Args:
        name: Name.
        layers: Layers with a KV cache.
        kv_heads: KV heads; 1 with a latent.
        head_dim: Elements of a head, or of the latent.
        latent: MLA: one vector for K and V together.
    """

    name: str
    layers: int
    kv_heads: int
    head_dim: int
    latent: bool = False

    @property
    def raw_bytes(self) -> int:
        """Bytes a token as they are."""
        return self.layers * (1 if self.latent else 2) * self.kv_heads * self.head_dim * 2

    def layout(self, layers: int | None = None, tokens: int = CHUNK_TOKENS) -> ChunkLayout:
        """A chunk as LMCache hands it over; of some of the layers, to measure with."""
        count, channels = layers or self.layers, self.kv_heads * self.head_dim
        kind, shape = (
            ("latent", (count, tokens, channels)) if self.latent else ("kv_first", (2, count, tokens, channels))
        )
        return ChunkLayout((GroupLayout(kind, shape, "bfloat16", self.head_dim),))

    def frame_bytes(self, spec: CodecSpec | None = None) -> float:
        """Bytes a token in our frames of whole chunks, headers included."""
        return TurboQuantCodec(spec).frame_size(self.layout()) / CHUNK_TOKENS


MODELS: Sequence[Model] = (
    Model("Llama-3.1-8B", 32, 8, 128),
    Model("Qwen3-8B", 36, 8, 128),
    Model("Qwen3-32B", 64, 8, 128),
    Model("Llama-3.3-70B", 80, 8, 128),
    Model("DeepSeek-V3", 61, 1, 576, latent=True),
)

SMOLLM2 = Model(chunks.SMOLLM2.model, chunks.SMOLLM2.layers, chunks.SMOLLM2.heads, chunks.SMOLLM2.head_dim)
"""What bench_ttft serves."""


@dataclass(frozen=True)
class CodecRate:
    """What decoding does, in bytes of uncompressed KV a second.

    Args:
        by_threads: Measured rates by number of threads; with that of one.
        source: Where they come from.
    """

    by_threads: Mapping[int, float]
    source: str

    def rate(self, threads: int) -> float:
        """The measured rate, or that of the most threads measured, scaled linearly."""
        if threads in self.by_threads:
            return self.by_threads[threads]
        most = max(count for count in self.by_threads if count < threads)
        return scaled(self.by_threads[most], most, threads)

    def measured(self, threads: int) -> bool:
        """Whether `rate` was measured with so many threads."""
        return threads in self.by_threads


def scaled(rate: float, threads: int, wanted: int) -> float:
    """A rate of some threads taken to other ones, in proportion: every chunk is decoded by a thread of its own."""
    return rate * wanted / threads


def load_seconds(raw: float, stored: float, link: float, decode: float | None = None) -> float:
    """Seconds to load a prefix: its stored bytes over the link, then decoded, one after the other.

    Args:
        raw: Uncompressed bytes.
        stored: Bytes that are read.
        link: Bytes a second.
        decode: Uncompressed bytes a second; None: nothing to decode.
    """
    return stored / link + (raw / decode if decode else 0.0)


def break_even(raw: float, stored: float, decode: float) -> float:
    """The link, in bytes a second, at which decoding takes as long as the saved bytes: raw/l = stored/l + raw/decode.

    A slower link gains. With reading and decoding at once it would be `decode` itself.
    """
    return decode * (1 - stored / raw)
