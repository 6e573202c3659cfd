"""Stands between LMCache's wrapper and the inner L2 adapter: sees what is delivered, leaves out what was refused."""

from __future__ import annotations

from typing import Any, Protocol

from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters import L2AdapterInterface
from lmcache.v1.memory_management import MemoryObj

from tq_offload.integrations.lmcache.ledger import StoreLedger, StoreTask
from tq_offload.integrations.lmcache.processor import Outcome, TurboQuantProcessor

__all__ = ["DeliveryListener", "InnerObserver"]


class DeliveryListener(Protocol):
    """The adapter, as the observer sees it."""

    def forwarded(self) -> None:
        """The task of the calling thread reached the inner adapter."""

    def loaded(self, missing: list[ObjectKey], delivered: int) -> None:
        """A load is complete: the inner adapter delivered so many keys, and not these."""


class InnerObserver:
    """Forwards everything to the inner adapter by its public methods.

    Args:
        inner: The adapter that stores.
        processor: Knows which objects of a batch were refused.
        listener: Told about loads.
        ledger: Registered with the inner adapter; counts what was stored.
    """

    def __init__(
        self,
        inner: L2AdapterInterface,
        processor: TurboQuantProcessor,
        listener: DeliveryListener,
        ledger: StoreLedger,
    ) -> None:
        self._inner, self._processor, self._listener, self._ledger = inner, processor, listener, ledger
        self._loads: dict[int, list[ObjectKey]] = {}
        self._stores: dict[int, tuple[StoreTask, int]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        """Store the frames of a batch that were encoded; those refused are left out."""
        outcomes = [self._processor.take_outcome(obj) or Outcome("not_encoded") for obj in objects]
        kept = [i for i, outcome in enumerate(outcomes) if not outcome.reason]
        store = self._ledger.begin({keys[i]: outcomes[i] for i in kept})
        try:
            task_id = int(self._inner.submit_store_task([keys[i] for i in kept], [objects[i] for i in kept]))
        except BaseException:
            self._ledger.abandon(store)
            raise
        self._stores[task_id] = (store, len(keys) - len(kept))
        return task_id

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        """Results of the inner adapter; a task of which an object was refused is reported as failed."""
        results: dict[int, L2StoreResult] = self._inner.pop_completed_store_tasks()
        for task_id, result in results.items():
            store, refused = self._stores.pop(task_id, (None, 0))
            if store is not None:
                self._ledger.settle(store, result)
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
            self._listener.loaded(missing, len(keys) - len(missing))
        return bitmap
