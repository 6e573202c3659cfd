"""TurboQuantProcessor behind LMCache's interface, with LMCache's own wrapper and alone."""

from __future__ import annotations

import select
import threading
from typing import Any

import pytest
import torch


@pytest.fixture
def alone(tier: Any) -> Any:
    """A processor to which no adapter of ours is attached."""
    from tq_offload.integrations.lmcache.processor import create_processor

    processor = create_processor({"workers": 4})
    yield processor
    processor.close()


def _batch(tier: Any, processor: Any, model: str, tools: Any, count: int) -> tuple[Any, Any, Any]:
    from lmcache.v1.distributed.api import MemoryLayoutDesc

    keys = tools.make_keys(model, count)
    sources = tier.objects(keys)
    tools.fill(sources)
    size = processor.estimate_serialized_size(MemoryLayoutDesc([torch.Size(tools.SHAPE)], [torch.bfloat16]))
    return sources, tier.objects(keys, [(size,)], [torch.uint8]), keys


def _result(fd: int, query: Any, task: int) -> bool:
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    while True:
        assert poller.poll(30_000), "the event was not signalled"
        from lmcache.v1.platform import consume_fd

        consume_fd(fd)
        result = query(task)
        if result is not None:
            assert query(task) is None, "a result is given once"
            return bool(result)


def test_round_trip_and_events(tier: Any, alone: Any, model: str, tools: Any) -> None:
    sources, frames, keys = _batch(tier, alone, model, tools, 3)
    assert alone.get_serialize_event_fd() != alone.get_deserialize_event_fd()
    task = alone.submit_serialize(sources, frames, keys)
    assert _result(alone.get_serialize_event_fd(), alone.query_serialize_result, task)
    targets = tier.objects(keys)
    task = alone.submit_deserialize(frames, targets, keys)
    assert _result(alone.get_deserialize_event_fd(), alone.query_deserialize_result, task)
    assert tools.relative_mse(targets[2].get_tensor(0), sources[2].get_tensor(0)) < 0.012


def test_alone_a_bad_frame_fails_the_batch(tier: Any, alone: Any, model: str, tools: Any, counted: Any) -> None:
    """LMCache's own wrapper would serve every key of a batch that succeeds: it must not."""
    sources, frames, keys = _batch(tier, alone, model, tools, 3)
    task = alone.submit_serialize(sources, frames, keys)
    assert _result(alone.get_serialize_event_fd(), alone.query_serialize_result, task)
    frames[1].raw_tensor[3000] ^= 1
    task = alone.submit_deserialize(frames, tier.objects(keys), keys)
    assert not _result(alone.get_deserialize_event_fd(), alone.query_deserialize_result, task)
    assert counted("misses", "checksum") == 1


def test_alone_a_refused_object_fails_the_batch_and_its_mates_are_counted(
    tier: Any, alone: Any, model: str, tools: Any, counted: Any
) -> None:
    sources, frames, keys = _batch(tier, alone, model, tools, 4)
    sources[0].get_tensor(0).fill_(float("nan"))
    task = alone.submit_serialize(sources, frames, keys)
    assert not _result(alone.get_serialize_event_fd(), alone.query_serialize_result, task)
    assert counted("refused", "non_finite") == 1
    assert counted("dropped_batch_mates") == 3


def test_the_objects_of_one_task_are_worked_on_at_the_same_time(
    tier: Any, alone: Any, model: str, tools: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources, frames, keys = _batch(tier, alone, model, tools, 4)
    together = threading.Barrier(4, timeout=30)
    original = alone._serializer.serialize

    def serialize(src: Any, dst: Any, key: Any) -> int:
        together.wait()  # breaks unless all four are here
        return int(original(src, dst, key))

    monkeypatch.setattr(alone._serializer, "serialize", serialize)
    task = alone.submit_serialize(sources, frames, keys)
    assert _result(alone.get_serialize_event_fd(), alone.query_serialize_result, task)


def test_an_error_that_nobody_expected_is_a_failure_not_an_exception(
    tier: Any, alone: Any, model: str, tools: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources, frames, keys = _batch(tier, alone, model, tools, 2)

    def broken(*args: Any) -> int:
        raise KeyError("surprise")

    monkeypatch.setattr(alone._serializer, "serialize", broken)
    task = alone.submit_serialize(sources, frames, keys)
    assert not _result(alone.get_serialize_event_fd(), alone.query_serialize_result, task)


def test_an_empty_batch_and_a_closed_processor(tier: Any, model: str, tools: Any) -> None:
    from tq_offload.integrations.lmcache.processor import create_processor

    processor = create_processor({})
    task = processor.submit_serialize([], [], [])
    assert _result(processor.get_serialize_event_fd(), processor.query_serialize_result, task)
    sources, frames, keys = _batch(tier, processor, model, tools, 2)
    processor._pool.shutdown()
    task = processor.submit_serialize(sources, frames, keys)
    assert processor.query_serialize_result(task) is False
    processor.close()


def test_no_outcome_is_left_behind(tier: Any, model: str, tools: Any) -> None:
    keys = tools.make_keys(model, 3)
    objects = tier.objects(keys)
    tools.fill(objects)
    assert tier.store(keys, objects)
    tier.file_of(keys[0]).write_bytes(tier.file_of(keys[1]).read_bytes())
    tier.load(keys, tier.objects(keys))
    for obj in objects:
        obj.get_tensor(0).fill_(float("nan"))
    assert not tier.store(tools.make_keys(model, 3), objects)
    assert tier.processor._outcomes == {}
    assert tier.adapter._tq_loads == {}


def test_misses_are_logged_with_reason_and_number_at_a_limited_rate(caplog: pytest.LogCaptureFixture) -> None:
    from tq_offload.integrations.lmcache.log import RateLimitedLog

    now = [0.0]
    log = RateLimitedLog(burst=2, interval=10, clock=lambda: now[0])
    with caplog.at_level("WARNING", logger="tq_offload.lmcache"):
        _propagate(caplog)
        for number in range(5):
            log.warning("miss checksum", f"number {number}")
        log.warning("miss magic", "another subject")
        now[0] = 11
        log.warning("miss checksum", "number 5")
        for number in range(6, 9):
            log.warning("miss checksum", f"number {number}")
        log.flush()
    assert [r.getMessage() for r in caplog.records] == [
        "TQ-Offload: number 0",
        "TQ-Offload: number 1",
        "TQ-Offload: another subject",
        "TQ-Offload: number 5 (3 more lines about 'miss checksum' left out)",
        "TQ-Offload: number 6",
        "TQ-Offload: 2 more lines about 'miss checksum' left out",
    ]


def _propagate(caplog: pytest.LogCaptureFixture) -> None:
    """LMCache turns propagation off for its loggers; listen at the logger itself."""
    from tq_offload.integrations.lmcache.log import logger

    if not logger().propagate and caplog.handler not in logger().handlers:
        logger().addHandler(caplog.handler)
