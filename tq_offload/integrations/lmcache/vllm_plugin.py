"""Entry point of the group `vllm.general_plugins`. Imports neither vllm nor lmcache."""

from __future__ import annotations

from tq_offload.integrations.lmcache.activation import activate_or_exit

__all__ = ["register"]


def register() -> None:
    """Called by vLLM in each of its processes, before lmcache is imported."""
    activate_or_exit()
