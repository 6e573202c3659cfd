"""LMCache's multi-process mode: L2 adapters that compress by themselves, for `--l2-adapter '{"type": "plugin", …}'`."""

from tq_offload_connectors.multi_process.adapters import DiskL2Adapter, MemoryL2Adapter, RedisL2Adapter

__all__ = ["DiskL2Adapter", "MemoryL2Adapter", "RedisL2Adapter"]
