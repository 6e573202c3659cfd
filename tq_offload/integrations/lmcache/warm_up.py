"""Kernels that are ready before the first chunk."""

from __future__ import annotations

from tq_offload.codec import TurboQuantCodec
from tq_offload.integrations.lmcache.log import logger

__all__ = ["warm_up"]

_COMMON_HEAD_DIMS = (128, 64)


def warm_up(codec: TurboQuantCodec, head_dim: int | None) -> None:
    """Compile or load the kernels for a head_dim, or for the common ones. Never raises; may take many seconds."""
    for dim in (head_dim,) if head_dim else _COMMON_HEAD_DIMS:
        try:
            codec.warm_up(dim)
        except Exception as error:  # whatever it is, the first chunk will report it
            logger().warning("TQ-Offload: cannot warm up kernels for head_dim %d: %s", dim, error)
