"""The explicit, official way, without `LMCACHE_SERDE`: an L2 adapter of LMCache's type `plugin`.

    {"type": "plugin", "module_path": "tq_offload.integrations.lmcache.plugin", "class_name": "InnerAdapter",
     "adapter_params": {"type": "fs", "base_path": "..."}, "serde": {"type": "tq_offload", "bits": 4}}

LMCache imports this module before it creates the serde. That registers the serde type `tq_offload`, and lets the
storage manager use our adapter for it.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from lmcache.v1.distributed.l2_adapters import L2AdapterInterface, create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config

from tq_offload.errors import ConfigError
from tq_offload.integrations.lmcache.activation import STORAGE_MANAGER, install_wrapper, register_serde
from tq_offload.integrations.lmcache.import_hook import after_import
from tq_offload.integrations.lmcache.versions import check_lmcache

__all__ = ["InnerAdapter"]

_OUTER_KEYS = ("serde", "eviction", "affinity_tag", "shared")

check_lmcache()
register_serde()
after_import(STORAGE_MANAGER, install_wrapper)


class InnerAdapter(L2AdapterInterface):
    """Builds the adapter that `adapter_params` describe, as LMCache would, and stands for it.

    The call returns that adapter itself: there is nothing left to forward.

    Args:
        params: Spec of the inner adapter, with its `type`; `serde`, `eviction`, `affinity_tag` and `shared` belong to
            the outer spec.
        l1_memory_desc: LMCache's description of its L1 memory.

    Raises:
        ConfigError: A key that belongs to the outer spec, or no `type`.
        ValueError: LMCache does not understand the spec.
    """

    def __new__(cls, params: dict[str, Any], l1_memory_desc: Any = None) -> Any:
        """The inner adapter."""
        for name in _OUTER_KEYS:
            if name in params:
                raise ConfigError(f"adapter_params.{name}", params[name], "only outside adapter_params")
        if not isinstance(params.get("type"), str) or params["type"] == "plugin":
            raise ConfigError("adapter_params.type", params.get("type"), "an L2 adapter type of LMCache but plugin")
        config = parse_args_to_l2_adapters_config(argparse.Namespace(l2_adapter=[json.dumps(params)])).adapters[0]
        return create_l2_adapter(config, l1_memory_desc)
