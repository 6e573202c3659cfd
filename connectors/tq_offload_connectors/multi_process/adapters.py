"""L2 adapters of LMCache's multi-process mode that keep frames in memory, on disk or in Redis.

    --l2-adapter '{"type": "plugin", "module_path": "tq_offload_connectors.multi_process",
                   "class_name": "MemoryL2Adapter", "adapter_params": {"capacity_gb": 1}}'

They compress by themselves: no `"serde"`, no temporary buffers in L1, and frames of any length. Keys of
`adapter_params` beside those of each class: the settings of the serde `tq_offload`, `queue_gb` (uncompressed chunks
that may wait to be encoded, in GiB of L1; default: a quarter of it), `write_queue_gb` (frames that may wait to be
written) and `write_threads`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tq_offload.errors import ConfigError
from tq_offload.integrations.lmcache.log import logger
from tq_offload_connectors.disk import DiskStore
from tq_offload_connectors.memory import MemoryStore
from tq_offload_connectors.multi_process.base import FrameL2Adapter
from tq_offload_connectors.multi_process.params import GIB, PARAMS_PREFIX, AdapterParams, parse_params, starting
from tq_offload_connectors.redis import RedisStore
from tq_offload_connectors.redis.settings import OPTIONS, RedisSettings

__all__ = ["DiskL2Adapter", "MemoryL2Adapter", "RedisL2Adapter"]


class MemoryL2Adapter(FrameL2Adapter):
    """Frames in this process's memory, the least recently used ones evicted.

    Args:
        params: `capacity_gb`, and the keys above. Frames are written at once: the write queue is not used.
        l1_memory_desc: LMCache's description of its L1 memory.
    """

    def __init__(self, params: Mapping[str, Any], l1_memory_desc: Any = None) -> None:
        with starting(type(self).__name__):
            parsed = self.parse(params)
            capacity = parsed.capacity() or 0
            place = f"ram ({capacity / GIB:.4g} GiB)"
            store = MemoryStore(capacity)
            super().__init__(parsed, "ram", store, place=place, capacity=capacity, l1_memory_desc=l1_memory_desc)

    @classmethod
    def parse(cls, params: Mapping[str, Any]) -> AdapterParams:
        """Check `adapter_params`. Raises ConfigError."""
        parsed = parse_params(params, ("capacity_gb",))
        if parsed.capacity() is None:
            raise ConfigError("adapter_params.capacity_gb", None, "a size in GiB, more than 0")
        return parsed


class DiskL2Adapter(FrameL2Adapter):
    """Frames in files of a folder; what an earlier server stored there is found.

    Args:
        params: `folder`, `capacity_gb` (none: no budget), `fsync` (`none`, `data`, `full`), and the keys above.
        l1_memory_desc: LMCache's description of its L1 memory.
    """

    def __init__(self, params: Mapping[str, Any], l1_memory_desc: Any = None) -> None:
        with starting(type(self).__name__):
            parsed = self.parse(params)
            folder, capacity = str(parsed.own["folder"]), parsed.capacity()
            store = DiskStore(folder, capacity, parsed.tier.disk_fsync)
            if store.problem:
                logger().warning("TQ-Offload: L2 disk: nothing will be stored: %s", store.problem)
            budget = "no budget" if capacity is None else f"{capacity / GIB:.4g} GiB"
            super().__init__(
                parsed, "disk", store, place=f"disk ({folder}, {budget})", capacity=capacity or 0,
                writers=parsed.tier.write_threads, l1_memory_desc=l1_memory_desc,
            )  # fmt: skip

    @classmethod
    def parse(cls, params: Mapping[str, Any]) -> AdapterParams:
        """Check `adapter_params`. Raises ConfigError."""
        parsed = parse_params(params, ("folder", "capacity_gb"), {"fsync": "disk_fsync"})
        parsed.capacity()
        folder = parsed.own.get("folder")
        if not isinstance(folder, str) or not folder:
            raise ConfigError("adapter_params.folder", folder, "the path of a folder")
        return parsed


class RedisL2Adapter(FrameL2Adapter):
    """Frames in Redis, which several servers may share and which evicts by its own settings.

    Args:
        params: `url` and the options of `RedisSettings`, and the keys above.
        l1_memory_desc: LMCache's description of its L1 memory.
    """

    def __init__(self, params: Mapping[str, Any], l1_memory_desc: Any = None) -> None:
        with starting(type(self).__name__):
            parsed = self.parse(params)
            store = RedisStore(_redis(parsed))
            super().__init__(
                parsed, "redis", store, place=store.describe().replace("redis, ", "redis (", 1) + ")", remote=True,
                writers=parsed.tier.write_threads, l1_memory_desc=l1_memory_desc,
            )  # fmt: skip

    @classmethod
    def parse(cls, params: Mapping[str, Any]) -> AdapterParams:
        """Check `adapter_params`. Raises ConfigError."""
        parsed = parse_params(params, ("url", *OPTIONS))
        _redis(parsed)
        return parsed


def _redis(parsed: AdapterParams) -> RedisSettings:
    options = {**parsed.tier.redis, **parsed.own}
    names = {**parsed.tier.redis_names, **{name: PARAMS_PREFIX + name for name in parsed.own}}
    return RedisSettings.from_mapping(options, shown=lambda name: names.get(name, PARAMS_PREFIX + name))
