"""Stores for encoded KV cache, and what carries them into LMCache. The paths of these modules are public API."""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["status"]


def status() -> list[dict[str, Any]]:
    """What every open FrameStore of this process holds, waits for and has counted; see docs/in-process.md."""
    module = sys.modules.get("tq_offload_connectors.frame_store")
    return [] if module is None else [store.status() for store in list(module.open_stores)]
