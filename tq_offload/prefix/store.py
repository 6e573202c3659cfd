"""Where prefixes are stored."""

from __future__ import annotations

from typing import Protocol

__all__ = ["Store"]


class Store(Protocol):
    """Bytes under keys: every `tq_offload_connectors.byte_store.ByteStore`. Methods raise a `StoreError` only."""

    def put(self, key: str, value: memoryview, *, owned: bool = False) -> None:
        """Store a value; one that is there is replaced. `owned`: the caller will not touch the buffer again."""

    def get(self, key: str) -> memoryview | None:
        """Read a value; None if there is none."""
