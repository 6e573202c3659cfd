"""What `bench_codec` measures beside ours: LMCache's fp8, other packages, zstd, memcpy. Pairs of calls on one chunk.

Other packages are those of benchmarks/quality/peers.txt, in `.cache/peers`; one that is missing raises
`NotInstalledError`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.quality.peers import NotInstalledError, use_peers

__all__ = ["Pair", "Tensor", "fp8", "fp8_serde", "memcpy", "quanto", "turbo_quant_serde", "zstd"]

Pair = tuple[Callable[[], Any], Callable[[], Any]]
"""Encode and decode."""


class Tensor:
    """What LMCache's fp8 serde asks of a MemoryObj."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def fp8_serde() -> tuple[str, Callable[[Any, Any], Any], Callable[[Any, Any], Any]]:
    """Where it comes from, serialize(src, dst), deserialize(src, dst)."""
    try:
        from lmcache.v1.distributed.serde.fp8 import Fp8QuantizationDeserializer, Fp8QuantizationSerializer
    except ImportError:

        def serialize(src: Tensor, dst: Tensor) -> None:
            dst.tensor.copy_(src.tensor.to(torch.float8_e4m3fn).view(torch.uint8).flatten())

        def deserialize(src: Tensor, dst: Tensor) -> None:
            dst.tensor.copy_(src.tensor.view(torch.float8_e4m3fn).reshape(dst.tensor.shape).to(dst.tensor.dtype))

        return "torch casts (lmcache is not installed)", serialize, deserialize
    to_bytes, from_bytes = Fp8QuantizationSerializer(), Fp8QuantizationDeserializer()
    return (
        "lmcache",
        lambda src, dst: to_bytes.serialize(src, dst, None),
        lambda src, dst: from_bytes.deserialize(src, dst, None),
    )


def fp8(chunk: torch.Tensor, back: torch.Tensor, _head_dim: int) -> Pair:
    """LMCache's fp8 serde."""
    _, serialize, deserialize = fp8_serde()
    source, packed, target = Tensor(chunk), Tensor(torch.empty(chunk.numel(), dtype=torch.uint8)), Tensor(back)
    return lambda: serialize(source, packed), lambda: deserialize(packed, target)


def _kv(chunk: torch.Tensor, head_dim: int) -> torch.Tensor:
    """A packed chunk [L, T, H*2D] as K and V [2, L, H, T, D], contiguous."""
    layers, tokens, channels = chunk.shape
    heads = channels // (2 * head_dim)
    return chunk.view(layers, tokens, heads, 2, head_dim).permute(3, 0, 2, 1, 4).contiguous()


def _peer(module: str) -> Any:
    use_peers()
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise NotInstalledError(f"{module} is not installed: {error}") from error


def turbo_quant_serde(chunk: torch.Tensor, _back: torch.Tensor, head_dim: int) -> Pair:
    """The PyPI package lmcache-turbo-quant-serde, 4 bits: its bytes by its own classes."""
    package = _peer("lmcache_turbo_quant_serde")
    kv = _kv(chunk, head_dim)
    encoder, decoder = package.TurboQuantSerializer(bits=4), package.TurboQuantDeserializer()
    stored: list[bytes] = [b""]

    def encode() -> None:
        stored[0] = encoder.to_bytes(kv)

    return encode, lambda: decoder.from_bytes(stored[0])


def quanto(chunk: torch.Tensor, _back: torch.Tensor, head_dim: int) -> Pair:
    """The quantiser of transformers' QuantizedCache with optimum-quanto, 4 bits, groups of 64, layer by layer."""
    _peer("optimum.quanto")
    from transformers import cache_utils

    layer = cache_utils.QuantoQuantizedLayer(nbits=4)
    parts = [x[None] for side in _kv(chunk, head_dim) for x in side]
    packed: list[Any] = []

    def encode() -> None:
        packed[:] = [layer._quantize(x, layer.axis_key) for x in parts]

    return encode, lambda: [layer._dequantize(x) for x in packed]


def zstd(chunk: torch.Tensor, back: torch.Tensor, _head_dim: int) -> Pair:
    """Zstandard, level 1, on the raw bytes."""
    package = _peer("zstandard")
    source, target = memoryview(chunk.view(torch.uint8).numpy().reshape(-1)), back.view(torch.uint8).numpy().reshape(-1)
    compressor, decompressor, stored = package.ZstdCompressor(level=1), package.ZstdDecompressor(), [b""]

    def encode() -> None:
        stored[0] = compressor.compress(source)

    def decode() -> None:
        target.data[:] = decompressor.decompress(stored[0])

    return encode, decode


def memcpy(chunk: torch.Tensor, back: torch.Tensor, _head_dim: int) -> Pair:
    """A plain copy, both ways."""
    return lambda: back.copy_(chunk), lambda: chunk.copy_(back)
