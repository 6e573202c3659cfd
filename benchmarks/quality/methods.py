"""The rows of the tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch

from benchmarks.quality import lmcache_codecs, peers
from benchmarks.quality.codecs import Codec, Decoded, int8, per_vector, plain, with_qjl
from benchmarks.quality.polar import polar
from tq_offload.check.frames import through_frames
from tq_offload.codec import TurboQuantCodec
from tq_offload.spec import PRESETS, CodecSpec

__all__ = ["CHUNK_TOKENS", "LMCACHE_4BIT", "PLAIN_3", "PLAIN_4", "codecs", "frames", "under_bias"]

CHUNK_TOKENS = 256
PLAIN_4, PLAIN_3 = "TurboQuant (paper), 4 bits", "TurboQuant (paper), 3 bits"
LMCACHE_4BIT = "LMCache turboquant_4bit_nc (port)"


def frames(spec: CodecSpec) -> Callable[[torch.Tensor, torch.Tensor], Decoded]:
    """Ours: real frames of 256 tokens, as the serde writes them."""
    codec = TurboQuantCodec(spec)

    def run(k: torch.Tensor, v: torch.Tensor) -> Decoded:
        keys, values, stored = through_frames(codec, list(k[:, None]), list(v[:, None]), CHUNK_TOKENS, k.dtype)
        return torch.cat(keys), torch.cat(values), stored

    return run


def _rounding(k: torch.Tensor, v: torch.Tensor) -> Decoded:
    return k, v, k.nbytes + v.nbytes


def codecs() -> Iterator[Codec]:
    """All rows, ours first."""
    for name, spec in PRESETS.items():
        yield Codec(name, "ours", frames(spec), spec.describe())
    yield Codec(PLAIN_4, "TurboQuant", per_vector(plain(4)), "norm as scale, fp16")
    yield Codec(PLAIN_3, "TurboQuant", per_vector(plain(3)))
    nc = CodecSpec(mean=False, fit_range=False, key_rule="norm", value_rule="norm")
    yield Codec("TurboQuant, 4 bits, norm corrected", "TurboQuant", frames(nc), "our frames: no means, no range fit")
    yield Codec("TurboQuant + QJL on K, 4 bits", "TurboQuant", per_vector(with_qjl(4), plain(4)), "K 3 + 1 bits")
    yield Codec("TurboQuant + QJL on K, 3 bits", "TurboQuant", per_vector(with_qjl(3), plain(3)), "K 2 + 1 bits")
    for preset in ("4bit_nc", "k8v4", "3bit_nc"):
        for raw in (0, 2) if preset == "4bit_nc" else (0,):
            name = f"LMCache turboquant_{preset} (port)" + (", 2 + 2 raw layers" if raw else "")
            run = lmcache_codecs.turboquant(f"turboquant_{preset}", raw)
            yield Codec(name, "TurboQuant", run, "its default" if raw else "torch port of its Triton kernels")
    yield Codec("lmcache-turbo-quant-serde, 4 bits", "TurboQuant", peers.tqai, "its own bytes")
    yield Codec("PolarQuant (paper)", "other", per_vector(polar()), "angles of 4, 2, 2, 2 bits")
    yield Codec("PolarQuant, 5 bits first", "other", per_vector(polar((5, 2, 2, 2))), "angles of 5, 2, 2, 2 bits")
    yield Codec("HF QuantizedCache, quanto 4 bits", "other", peers.quanto)
    yield Codec("HF QuantizedCache, HQQ 4 bits", "other", peers.hqq)
    yield Codec("LMCache fp8", "other", lmcache_codecs.fp8, "the real serde")
    yield Codec("int8 per vector", "other", per_vector(int8))
    yield Codec("bf16", "other", _rounding, "rounding alone, in every row")


def under_bias(every: list[Codec]) -> list[Codec]:
    """What is run on the biased models: the default, our presets with outlier channels, and the main peers."""
    others = {PLAIN_4, LMCACHE_4BIT, "LMCache fp8", "int8 per vector", "HF QuantizedCache, quanto 4 bits"}
    ours = {n for n, spec in PRESETS.items() if spec.key_outliers or n == "turboquant"}
    return [codec for codec in every if codec.name in others | ours]


def bits(stored: int, k: torch.Tensor, v: torch.Tensor) -> float:
    """Bits an element."""
    return 8 * stored / math.fsum((k.numel(), v.numel()))
