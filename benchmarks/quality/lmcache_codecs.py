"""LMCache's own serdes: fp8, driven as it is, and turboquant, whose two Triton kernels are ported to torch.

The configuration, the rotation, the codebook and the stored sizes are LMCache's (0.5.6), by import; what is written
here is the arithmetic of `store_kernel.py` and `decode_kernel.py`, which need CUDA.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.bench_codec import Tensor, fp8_serde
from benchmarks.quality.codecs import Decoded

__all__ = ["fp8", "lmcache_bytes", "turboquant"]

BLOCK = 16
"""Tokens of a block of LMCache's layout; the last block of a chunk is stored whole."""


def fp8(k: torch.Tensor, v: torch.Tensor) -> Decoded:
    """LMCache's fp8 serde: one cast, no scale. What is larger than 448 comes back as NaN."""
    _, serialize, deserialize = fp8_serde()
    kv = torch.stack((k, v))
    stored, back = torch.empty(kv.numel(), dtype=torch.uint8), torch.empty_like(kv)
    serialize(Tensor(kv), Tensor(stored))
    deserialize(Tensor(stored), Tensor(back))
    return back[0], back[1], stored.nbytes


def _config(preset: str, head_dim: int, raw_layers: int) -> tuple[Any, Any]:
    from lmcache.v1.distributed.serde.turboquant import turboquant as package

    config = package.TurboQuantSerdeConfig(
        preset=preset, head_dim=head_dim, block_size=BLOCK, skip_first_layers=raw_layers, skip_last_layers=raw_layers
    )
    return package, config


def lmcache_bytes(preset: str, shape: tuple[int, ...], raw_layers: int) -> int:
    """What the serde says it stores for K and V, bf16 [L, H, P, D] each."""
    layers, heads, tokens, dim = shape
    package, config = _config(preset, dim, raw_layers)
    whole = torch.Size((2, layers, tokens, heads * dim))
    return int(package._serialized_nbytes_for_shape(whole, torch.bfloat16, config))


def turboquant(preset: str, raw_layers: int = 0) -> Callable[[torch.Tensor, torch.Tensor], Decoded]:
    """A preset of LMCache's turboquant serde; `raw_layers` first and as many last layers stay as they are."""

    def run(k: torch.Tensor, v: torch.Tensor) -> Decoded:
        package, config = _config(preset, k.shape[-1], raw_layers)
        keys, values = k.clone(), v.clone()
        for layer in range(*package._layer_ranges(k.shape[0], config)):
            tables = package._make_tq_tensors_for_layer(config, layer, torch.device("cpu"))
            keys[layer] = _keys(k[layer], config, *tables).to(k.dtype)
            values[layer] = _values(v[layer].float(), config.value_quant_bits).to(v.dtype)
        return keys, values, lmcache_bytes(preset, tuple(k.shape), raw_layers)

    return run


def _keys(
    x: torch.Tensor, config: Any, turn: torch.Tensor, midpoints: torch.Tensor, table: torch.Tensor
) -> torch.Tensor:
    if config.key_fp8:
        return x.to(torch.float8_e4m3fn).half()
    x = x.float()
    norm = x.norm(dim=-1, keepdim=True)
    codes = torch.bucketize((x / (norm + 1e-8)) @ turn, midpoints, right=True)
    unit = table[codes]
    if config.norm_correction:
        unit = unit / (unit.square().sum(dim=-1, keepdim=True) + 1e-16).sqrt()
    return ((norm.half().float() * unit).half().float() @ turn.T).half()


def _values(x: torch.Tensor, bits: int) -> torch.Tensor:
    top = 2**bits - 1
    low, high = x.amin(dim=-1, keepdim=True), x.amax(dim=-1, keepdim=True)
    step = ((high - low) / top).clamp_min(1e-8)
    codes = ((x - low) / step + 0.5).to(torch.int32).clamp(0, top)
    return (codes * step.half().float() + low.half().float()).half()
