"""What a kernel is compiled for, as a numba type.

A `KernelConfig` is passed as the first argument of every jitted function. Its numba type carries the settings, so the
intrinsics read them at compile time, and numba's on-disk cache keeps one compiled version for each. The type also
carries a fingerprint of the kernel sources and of the codebook: numba itself notices only changes of the file that
holds the jitted function, not of the intrinsics that it calls. (The CPU's name and features are part of numba's own
cache key.)
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numba.core import cgutils, types
from numba.extending import NativeValue, models, register_model, typeof_impl, unbox

from tq_offload import codebook

__all__ = ["FORMATS", "ConfigType", "Format", "KernelConfig", "fingerprint", "host_lanes"]


class Format(NamedTuple):
    """How the bits of one element type map to f32.

    With `m` the bits below the sign: the value is f32_from_bits(m << shift) * rescale, and m >= limit means NaN or
    Inf. `top` is the largest finite value, `min_normal` the least normal one; adding `rounder` to less than that rounds
    to a multiple of the least subnormal value. `kind` is the index in `FORMATS`.
    """

    itemsize: int
    shift: int
    rescale: np.float32
    limit: int
    top: np.float32
    min_normal: np.float32
    rounder: np.float32
    kind: int


def _format(kind: int, itemsize: int, exponent: int, mantissa: int, limit: int, top: int) -> Format:
    """Format from the exponent and mantissa widths; `top` is the bits of the largest finite value."""
    bias = (1 << (exponent - 1)) - 1
    shift = 23 - mantissa
    rescale = np.float32(2.0 ** (127 - bias))
    largest = np.array([top << shift], np.uint32).view(np.float32)[0] * rescale
    rounder = np.float32(2.0 ** (1 - bias + shift)) if bias < 127 else np.float32(0)
    return Format(itemsize, shift, rescale, limit, np.float32(largest), np.float32(2.0 ** (1 - bias)), rounder, kind)


FORMATS = {
    "bfloat16": _format(0, 2, 8, 7, 0x7F80, 0x7F7F),
    "float16": _format(1, 2, 5, 10, 0x7C00, 0x7BFF),
    "float32": _format(2, 4, 8, 23, 0x7F800000, 0x7F7FFFFF),
    "float8_e4m3fn": _format(3, 1, 4, 3, 0x7F, 0x7E),
    "float8_e5m2": _format(4, 1, 5, 2, 0x7C, 0x7B),
}


@dataclass(frozen=True)
class KernelConfig:
    """Compile-time settings; the defaults are those of the generic loops, which take everything at run time.

    Args:
        dim: D, or 0.
        bits: Bits of a code, or 0.
        staged: Elements are f32 in work space, converted apart; False: bfloat16 in place.
        lsq: Compute only the sums of the least-squares rule; False: those of every rule.
        permute: Use the CPU's table permute where it has one; False: always the portable select tree.
        lanes: 32-bit lanes of a register: 8, or 16 for dims from `least_wide_dim` on.
    """

    dim: int = 0
    bits: int = 0
    staged: bool = False
    lsq: bool = False
    permute: bool = True
    lanes: int = 8

    @property
    def format(self) -> Format:
        """Format of the elements that the kernel reads and writes."""
        return FORMATS["float32" if self.staged else "bfloat16"]


def least_wide_dim(bits: int, *, encoding: bool) -> int:
    """The least dim for registers of sixteen lanes: a pair of them to encode; to decode, whole bytes a lane."""
    return 32 if encoding else 64 if bits % 2 == 0 else 128


@cache
def host_lanes() -> int:
    """16 where numba compiles for a CPU with AVX-512, else 8."""
    from numba.core.registry import cpu_target

    return 16 if "+avx512f" in cpu_target.target_context.codegen().magic_tuple()[2].split(",") else 8


@cache
def fingerprint() -> str:
    """Digest of the kernel sources and of the codebook, 16 hex digits."""
    h = hashlib.blake2b(digest_size=8)
    here = Path(__file__).parent
    for path in sorted([*here.glob("*.py"), *here.parent.glob("*_loops.py")]):
        h.update(path.read_bytes())
    for bits in range(codebook.MIN_BITS, codebook.MAX_BITS + 1):
        h.update(codebook.levels(bits).tobytes() + codebook.thresholds(bits).tobytes())
    return h.hexdigest()


class ConfigType(types.Type):  # type: ignore[misc]
    """numba type of a `KernelConfig`; equal settings and sources make equal types, in every process."""

    def __init__(self, config: KernelConfig, digest: str) -> None:
        self.config = config
        super().__init__(name=f"{config!r}@{digest}")


@register_model(ConfigType)
class _ConfigModel(models.OpaqueModel):  # type: ignore[misc]
    """A config has no run-time value."""


@typeof_impl.register(KernelConfig)
def _typeof_config(value: KernelConfig, _context: Any) -> ConfigType:
    return _config_type(value)


@cache
def _config_type(value: KernelConfig) -> ConfigType:
    return ConfigType(value, fingerprint())


@unbox(ConfigType)
def _unbox_config(_typ: Any, _obj: Any, context: Any) -> Any:
    return NativeValue(cgutils.get_null_value(context.context.get_value_type(_typ)))
