"""Codecs of other packages, driven as they are. A package that is missing is a row that says so.

`make bench-quality` installs them beside the environment, in `.cache/peers` (peers.txt), without their dependencies.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.quality.codecs import Decoded

__all__ = ["FOLDER", "NotInstalledError", "hqq", "quanto", "tqai", "use_peers"]

FOLDER = Path(__file__).resolve().parents[2] / ".cache" / "peers"


class NotInstalledError(Exception):
    """The package that a row needs is not there."""


def use_peers() -> None:
    """Let `import` find what is in `.cache/peers`, after everything else. Before transformers is imported."""
    if FOLDER.is_dir() and str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))


def _need(module: str, package: str) -> None:
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise NotInstalledError(f"{package} is not installed")


def _storages(*tensors: torch.Tensor) -> int:
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def _by_layer(backend: str, **settings: Any) -> Callable[[torch.Tensor, torch.Tensor, Callable[[Any], int]], Decoded]:
    """The quantiser of a layer of transformers' QuantizedCache over K and V of every layer, [1, H, P, D]."""

    def run(k: torch.Tensor, v: torch.Tensor, size: Callable[[Any], int]) -> Decoded:
        from transformers import cache_utils

        layer = getattr(cache_utils, backend)(nbits=4, **settings)
        sides, stored = [], 0
        for x, axis in ((k, layer.axis_key), (v, layer.axis_value)):
            out = []
            for one in x:
                layer.keys = one[None]  # where HQQ's layer reads device and dtype
                packed = layer._quantize(one[None].contiguous(), axis)
                stored += size(packed)
                out.append(layer._dequantize(packed)[0])
            sides.append(torch.stack(out))
        return sides[0], sides[1], stored

    return run


def _unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    return torch.cat([(packed >> low) & (2**bits - 1) for low in range(0, 8, bits)])


def quanto(k: torch.Tensor, v: torch.Tensor) -> Decoded:
    """transformers' QuantizedCache, quanto, its defaults: 4 bits, groups of 64. What prefill hands it is all packed."""
    _need("optimum.quanto", "optimum-quanto")
    from optimum.quanto.library.extensions import extension

    # One function of quanto is C++ that it compiles at the first use, for a minute or two. It undoes the packing: the
    # first half of the rows are the low four bits, the second half the high ones.
    extension.get_extension("quanto_cpp")._lib = SimpleNamespace(unpack=_unpack)

    def size(packed: Any) -> int:
        return _storages(packed._data._data, packed._scale, packed._shift)

    return _by_layer("QuantoQuantizedLayer")(k, v, size)


def hqq(k: torch.Tensor, v: torch.Tensor) -> Decoded:
    """transformers' QuantizedCache, HQQ, 4 bits, groups of 64 along axis 1."""
    _need("hqq", "hqq")

    def size(packed: Any) -> int:
        codes, meta = packed
        return _storages(codes, *(meta[name] for name in ("scale", "zero")))

    return _by_layer("HQQQuantizedLayer", axis_key=1, axis_value=1)(k, v, size)


def tqai(k: torch.Tensor, v: torch.Tensor) -> Decoded:
    """lmcache-turbo-quant-serde, 4 bits: its bytes by its own classes (its LMCache serde does not run on 0.5.6)."""
    _need("tqai", "tqai")
    _need("lmcache_turbo_quant_serde", "lmcache-turbo-quant-serde")
    from lmcache_turbo_quant_serde import TurboQuantDeserializer, TurboQuantSerializer

    stored = TurboQuantSerializer(bits=4).to_bytes(torch.stack((k, v)))
    back = TurboQuantDeserializer().from_bytes(stored)
    return back[0], back[1], len(stored)
