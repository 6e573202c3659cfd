"""Values as files of a folder: one a value, published whole, within a budget."""

from tq_offload_connectors.disk.store import FSYNC, DiskStore

__all__ = ["FSYNC", "DiskStore"]
