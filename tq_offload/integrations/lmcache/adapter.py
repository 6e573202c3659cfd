"""LMCache's serde wrapper with a miss for a single key where LMCache would fail the batch, and with repair."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters import L2AdapterInterface
from lmcache.v1.distributed.l2_adapters.serde_wrapper import SerdeL2AdapterWrapper
from lmcache.v1.memory_management import MemoryObj

from tq_offload.integrations.lmcache.ledger import StoreLedger
from tq_offload.integrations.lmcache.log import logger
from tq_offload.integrations.lmcache.metrics import METRICS
from tq_offload.integrations.lmcache.observer import InnerObserver
from tq_offload.integrations.lmcache.processor import TurboQuantProcessor, short_key
from tq_offload.integrations.lmcache.repair import CORRUPT_REASONS, Repairer, is_gone

__all__ = ["TurboQuantL2Adapter"]

_FIRST_JOINT_ID = 1 << 48  # ids of tasks that were split; far from the ids of the wrapper, which count from 0


@dataclass
class _Joint:
    """A task whose objects differ in shape, split into one task for each shape."""

    size: int
    parts: dict[int, list[int]]  # id of the part -> positions in the task
    stored: list[L2StoreResult] = field(default_factory=list)
    loaded: list[int] = field(default_factory=list)
    bitmap_type: Any = None


class TurboQuantL2Adapter(SerdeL2AdapterWrapper):
    """An L2 adapter whose objects are compressed.

    What it adds to LMCache's wrapper, by public methods only: the model is known when the size of a frame is asked
    for; a batch may hold objects of several shapes (hybrid models); a frame that cannot be decoded is a miss for its
    key alone; a refused object does not keep its batch mates from being stored; corrupt entries are deleted.

    Args:
        inner: The adapter that stores.
        serde: Our processor.
        l1_manager: LMCache's L1 manager, which lends the temporary buffers.
    """

    def __init__(self, inner: L2AdapterInterface, serde: TurboQuantProcessor, l1_manager: Any) -> None:
        self._tq_inner, self._tq_processor = inner, serde
        self._tq_lock = threading.Lock()
        self._tq_thread = threading.local()
        self._tq_loads: dict[int, list[MemoryObj]] = {}
        self._tq_joint_stores: dict[int, _Joint] = {}
        self._tq_joint_loads: dict[int, _Joint] = {}
        self._tq_part_of: dict[int, int] = {}
        self._tq_next_joint = _FIRST_JOINT_ID
        self._tq_suspects: dict[ObjectKey, int] = {}  # key -> deliveries of the tier when it first failed
        self._tq_delivered = 0
        can_delete = type(inner).delete is not L2AdapterInterface.delete
        repairs = serde.settings.repair and can_delete
        self._tq_repairer = Repairer(inner.delete, partial(is_gone, inner)) if repairs else None
        if serde.settings.repair and not can_delete:
            logger().warning("TQ-Offload: %s cannot delete: corrupt entries stay and miss", type(inner).__name__)
        serde.attach(self)
        ledger = StoreLedger(self._tq_repairer.deleted if self._tq_repairer is not None else None)
        inner.register_listener(ledger)
        super().__init__(InnerObserver(inner, serde, self, ledger), serde, l1_manager)

    @property
    def inner_adapter(self) -> L2AdapterInterface:
        """The adapter that stores."""
        return self._tq_inner

    def report_status(self) -> dict[str, Any]:
        """Status of the inner adapter, with the codec."""
        return {**super().report_status(), "tq_offload": self._tq_processor.settings.spec.describe()}

    def close(self) -> None:
        """Stop; no entry is deleted any more."""
        if self._tq_repairer is not None:
            self._tq_repairer.close()
        super().close()

    # Store

    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        """Encode and store a batch; the objects may differ in shape."""
        if self._tq_repairer is not None:
            self._tq_repairer.cancel(keys)
        shapes = _by_shape(keys, objects)
        if len(shapes) == 1:
            return self._tq_store(keys, objects)
        with self._tq_lock:  # held over the submits: no part may complete before it is known to be one
            joint_id, joint = self._tq_new_joint(len(keys))
            self._tq_joint_stores[joint_id] = joint
            for at in shapes:
                part = self._tq_store([keys[i] for i in at], [objects[i] for i in at])
                joint.parts[part] = at
                self._tq_part_of[part] = joint_id
        return joint_id

    def _tq_store(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        self._tq_thread.forwarded = False
        with self._tq_processor.layouts.for_key(keys[0]):
            return int(super().submit_store_task(keys, objects))

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        """Completed stores; a split task when all of its parts are."""
        results: dict[int, L2StoreResult] = {}
        with self._tq_lock:
            for task_id, result in super().pop_completed_store_tasks().items():
                joint_id = self._tq_part_of.pop(task_id, None)
                if joint_id is None:
                    results[task_id] = result
                    continue
                joint = self._tq_joint_stores[joint_id]
                joint.stored.append(result)
                if len(joint.stored) == len(joint.parts):
                    del self._tq_joint_stores[joint_id]
                    success = all(r.is_successful() for r in joint.stored)
                    results[joint_id] = L2StoreResult(success, sum(r.bytes_transferred() for r in joint.stored))
        return results

    # Load

    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        """Load and decode a batch; the objects may differ in shape."""
        shapes = _by_shape(keys, objects)
        if len(shapes) == 1:
            return self._tq_load(keys, objects)
        joint_id, joint = self._tq_new_joint(len(keys))
        for at in shapes:
            joint.parts[self._tq_load([keys[i] for i in at], [objects[i] for i in at])] = at
        with self._tq_lock:
            self._tq_joint_loads[joint_id] = joint
        return joint_id

    def _tq_load(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        self._tq_thread.forwarded = False
        with self._tq_processor.layouts.for_key(keys[0]):
            task_id = int(super().submit_load_task(keys, objects))
        if not self._tq_thread.forwarded:
            for key in keys:
                METRICS.miss("no_buffer", f"{short_key(key)}: LMCache's L1 has no room for the frame")
        with self._tq_lock:
            self._tq_loads[task_id] = list(objects)
        return task_id

    def query_load_result(self, task_id: int) -> Any:
        """Which keys of a load are there, decoded; None while it runs."""
        with self._tq_lock:
            joint = self._tq_joint_loads.get(task_id)
        if joint is None:
            return self._tq_result(task_id)
        for part, at in list(joint.parts.items()):
            bitmap = self._tq_result(part)
            if bitmap is not None:
                del joint.parts[part]
                joint.bitmap_type = type(bitmap)
                joint.loaded += [position for i, position in enumerate(at) if bitmap.test(i)]
        if joint.parts:
            return None
        with self._tq_lock:
            del self._tq_joint_loads[task_id]
        result = joint.bitmap_type(joint.size)
        for position in joint.loaded:
            result.set(position)
        return result

    def _tq_result(self, task_id: int) -> Any:
        bitmap = super().query_load_result(task_id)
        if bitmap is None:
            return None
        with self._tq_lock:
            objects = self._tq_loads.pop(task_id, [])
        for i, obj in enumerate(objects):
            if self._tq_processor.take_outcome(obj) is not None:
                bitmap.clear(i)
        return bitmap

    def _tq_new_joint(self, size: int) -> tuple[int, _Joint]:
        self._tq_next_joint += 1
        return self._tq_next_joint, _Joint(size, {})

    # What the processor and the observer report

    def forwarded(self) -> None:
        """The task of the calling thread reached the inner adapter."""
        self._tq_thread.forwarded = True

    def decode_failed(self, key: ObjectKey, reason: str) -> None:
        """Delete a corrupt entry before its miss is reported, so that the store that follows finds it gone."""
        if self._tq_repairer is not None and reason in CORRUPT_REASONS:
            self._tq_repairer.delete_now(key, reason)

    def loaded(self, missing: list[ObjectKey], delivered: int) -> None:
        """Count keys that the tier did not deliver although a lookup had found them: gone, or shorter than a frame.

        They are deleted only if the tier is known to work: it delivered something in the same load, or since the key
        failed first. An outage must not empty the tier.
        """
        self._tq_delivered += delivered
        for key in missing:
            METRICS.miss("not_loaded", f"{short_key(key)}: absent, or shorter than a frame")
            first = self._tq_suspects.get(key)
            if delivered or (first is not None and first < self._tq_delivered):
                self._tq_suspects.pop(key, None)
                if self._tq_repairer is not None:
                    self._tq_repairer.submit(key, "not_loaded")
            elif first is None:
                if len(self._tq_suspects) >= 4096:
                    self._tq_suspects.clear()
                self._tq_suspects[key] = self._tq_delivered


def _by_shape(keys: list[ObjectKey], objects: list[MemoryObj]) -> list[list[int]]:
    """Positions of the objects, grouped by model, rank, shapes and dtypes."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for i, (key, obj) in enumerate(zip(keys, objects, strict=True)):
        shapes = tuple(tuple(shape) for shape in obj.get_shapes())
        groups.setdefault((key.model_name, key.kv_rank, shapes, tuple(obj.get_dtypes())), []).append(i)
    return list(groups.values())
