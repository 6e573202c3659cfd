"""Stands between LMCache's wrapper and the inner L2 adapter: sees what is delivered, leaves out what was refused."""

from __future__ import annotations

from typing import Any, Protocol

from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters import L2AdapterInterface
from lmcache.v1.memory_management import MemoryObj

from tq_offload.integrations.lmcache.metrics import METRICS
from tq_offload.integrations.lmcache.processor import Outcome, TurboQuantProcessor

__all__ = ["DeliveryListener", "InnerObserver"]


class DeliveryListener(Protocol):
    """The adapter, as the observer sees it."""

    def forwarded(self) -> None:
        """The task of the calling thread reached the inner adapter."""

    def not_delivered(self, keys: list[ObjectKey], delivered: int) -> None:
        """The inner adapter did not deliver these keys of a load that delivered so many others."""


class InnerObserver:
    """Forwards everything to the inner adapter by its public methods.

    Args:
        inner: The adapter that stores.
        processor: Knows which objects of a batch were refused.
        listener: Told about loads.
    """

    def __init__(self, inner: L2AdapterInterface, processor: TurboQuantProcessor, listener: DeliveryListener) -> None:
        self._inner, self._processor, self._listener = inner, processor, listener
        self._loads: dict[int, list[ObjectKey]] = {}
        self._stores: dict[int, tuple[list[Outcome], int]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        """Store the frames of a batch that were encoded; those refused are left out."""
        outcomes = [self._processor.take_outcome(obj) or Outcome("not_encoded") for obj in objects]
        kept = [i for i, outcome in enumerate(outcomes) if not outcome.reason]
        task_id = int(self._inner.submit_store_task([keys[i] for i in kept], [objects[i] for i in kept]))
        self._stores[task_id] = ([outcomes[i] for i in kept], len(keys) - len(kept))
        return task_id

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        """Results of the inner adapter; a task of which an object was refused is reported as failed."""
        results: dict[int, L2StoreResult] = self._inner.pop_completed_store_tasks()
        for task_id, result in results.items():
            kept, refused = self._stores.pop(task_id, ([], 0))
            if result.is_successful():
                METRICS.add("stored_chunks", len(kept))
                METRICS.add("raw_bytes", sum(outcome.raw_bytes for outcome in kept))
                METRICS.add("stored_bytes", sum(outcome.frame_bytes for outcome in kept))
            else:
                METRICS.add("store_failures", len(kept), reason="tier")
            if refused:
                results[task_id] = L2StoreResult(False, 0)
        return results

    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        """Load frames."""
        task_id = int(self._inner.submit_load_task(keys, objects))
        self._loads[task_id] = list(keys)
        self._listener.forwarded()
        return task_id

    def query_load_result(self, task_id: int) -> Any:
        """Bitmap of the inner adapter, or None while the task runs."""
        bitmap = self._inner.query_load_result(task_id)
        if bitmap is not None:
            keys = self._loads.pop(task_id, [])
            missing = [key for i, key in enumerate(keys) if not bitmap.test(i)]
            if missing:
                self._listener.not_delivered(missing, len(keys) - len(missing))
        return bitmap
