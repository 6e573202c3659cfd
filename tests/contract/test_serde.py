"""Serializer and deserializer on real MemoryObjs: exact sizes, in place, bound to every field of the key."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import pytest
import torch


@pytest.fixture
def pair(tier: Any) -> tuple[Any, Any]:
    return tier.processor._serializer, tier.processor._deserializer


def _frame(tier: Any, keys: list[Any], objects: list[Any], tools: Any) -> list[Any]:
    """Byte buffers of L1 of exactly the estimated size."""
    from lmcache.v1.distributed.api import MemoryLayoutDesc

    desc = MemoryLayoutDesc(objects[0].get_shapes(), objects[0].get_dtypes())
    with tier.processor.layouts.for_key(keys[0]):
        size = tier.processor.estimate_serialized_size(desc)
    return tier.objects(keys, [(size,)], [torch.uint8])


@pytest.mark.parametrize(
    ("shapes", "dtypes"),
    [
        ([(1, 3, 64, 256)], [torch.bfloat16]),
        ([(3, 64, 256)], [torch.float16]),
        ([(2, 3, 64, 128)], [torch.float32]),
        ([(1, 3, 64, 576)], [torch.bfloat16]),
        ([(1, 3, 7, 256)], [torch.float8_e4m3fn]),
        ([(1, 1, 1, 256), (1, 2, 16, 40), (5, 16)], [torch.bfloat16, torch.bfloat16, torch.uint8]),
    ],
)
def test_the_estimate_is_what_is_written(
    shapes: Any, dtypes: Any, tier: Any, pair: Any, model: str, tools: Any
) -> None:
    keys = tools.make_keys(model, 1)
    (src,) = tier.objects(keys, shapes, dtypes)
    wanted = tools.fill([src])[0]
    (buffer,) = _frame(tier, keys, [src], tools)
    assert pair[0].serialize(src, buffer, keys[0]) == buffer.get_size()
    (dst,) = tier.objects(keys, shapes, dtypes)
    pair[1].deserialize(buffer, dst, keys[0])
    for i, copy in enumerate(wanted):
        if copy.dtype == torch.uint8:
            assert torch.equal(dst.get_tensor(i), copy)
        else:
            assert tools.relative_mse(dst.get_tensor(i).float(), copy.float()) < 0.015


def test_every_field_of_the_key_is_bound(tier: Any, pair: Any, model: str, tools: Any) -> None:
    from tq_offload.errors import FrameMismatchError

    (key,) = tools.make_keys(model, 1, cache_salt="tenant")
    (src,) = tier.objects([key])
    tools.fill([src])
    (buffer,) = _frame(tier, [key], [src], tools)
    pair[0].serialize(src, buffer, key)
    (dst,) = tier.objects([key])
    changes = {
        "chunk_hash": key.chunk_hash[:-1] + b"\x00\x01",
        "model_name": key.model_name + "x",
        "kv_rank": key.kv_rank + 1,
        "object_group_id": 1,
        "cache_salt": "other",
    }
    assert {f.name for f in dataclasses.fields(key)} == set(changes), "LMCache's key has other fields now"
    for name, value in changes.items():
        with pytest.raises(FrameMismatchError):
            pair[1].deserialize(buffer, dst, dataclasses.replace(key, **{name: value}))
    assert not dst.get_tensor(0).any()
    pair[1].deserialize(buffer, dst, key)
    assert dst.get_tensor(0).any()


def test_key_fields_do_not_run_into_each_other() -> None:
    from lmcache.v1.distributed.api import ObjectKey

    from tq_offload.integrations.lmcache.serde import key_digest

    one = ObjectKey(b"ab", "cd", 1, 0, "")
    assert key_digest(one) != key_digest(ObjectKey(b"abc", "d", 1, 0, ""))
    assert key_digest(one) != key_digest(ObjectKey(b"ab", "cd", 10, 0, ""))
    assert key_digest(one) == key_digest(ObjectKey(b"ab", "cd", 1, 0, ""))


def test_a_buffer_of_another_size_is_refused(tier: Any, pair: Any, model: str, tools: Any) -> None:
    from tq_offload.errors import EncodeError

    keys = tools.make_keys(model, 1)
    (src,) = tier.objects(keys)
    tools.fill([src])
    (buffer,) = _frame(tier, keys, [src], tools)
    (longer,) = tier.objects(keys, [(buffer.get_size() + 64,)], [torch.uint8])
    with pytest.raises(EncodeError) as error:
        pair[0].serialize(src, longer, keys[0])
    assert error.value.reason == "buffer_size"


def test_another_shape_or_dtype_is_a_mismatch(tier: Any, pair: Any, model: str, tools: Any) -> None:
    from tq_offload.errors import FrameMismatchError

    keys = tools.make_keys(model, 1)
    (src,) = tier.objects(keys)
    tools.fill([src])
    (buffer,) = _frame(tier, keys, [src], tools)
    pair[0].serialize(src, buffer, keys[0])
    for shape, dtype, reason in (
        ((1, 3, 32, 512), torch.bfloat16, "mismatch_shape"),
        (tools.SHAPE, torch.float16, "mismatch_dtype"),
    ):
        (dst,) = tier.objects(keys, [shape], [dtype])
        with pytest.raises(FrameMismatchError) as error:
            pair[1].deserialize(buffer, dst, keys[0])
        assert error.value.reason == reason
        assert not dst.get_tensor(0).any()


def test_threads_do_not_disturb_each_other(tier: Any, pair: Any, model: str, tools: Any) -> None:
    keys = tools.make_keys(model, 8)
    sources = tier.objects(keys)
    tools.fill(sources)
    expected = _frame(tier, keys, sources, tools)
    for src, dst, key in zip(sources, expected, keys, strict=True):
        pair[0].serialize(src, dst, key)
    found = _frame(tier, keys, sources, tools)
    threads = [threading.Thread(target=pair[0].serialize, args=args) for args in zip(sources, found, keys, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one.raw_tensor[: one.get_size()], other.raw_tensor[: other.get_size()])


def test_uint8_that_holds_fp8_is_coded(make_tier: Any, model: str, tools: Any) -> None:
    tier = make_tier(uint8_as="float8_e4m3fn")
    keys = tools.make_keys(model, 2)
    objects = tier.objects(keys, [tools.SHAPE], [torch.uint8])
    values = [torch.randn(tools.SHAPE).to(torch.float8_e4m3fn) for _ in objects]
    for obj, value in zip(objects, values, strict=True):
        obj.get_tensor(0).copy_(value.view(torch.uint8))
    assert tier.store(keys, objects)
    assert tier.files()[0].stat().st_size < objects[0].get_size() * 0.6
    targets = tier.objects(keys, [tools.SHAPE], [torch.uint8])
    assert tier.load(keys, targets) == [True, True]
    found = targets[0].get_tensor(0).view(torch.float8_e4m3fn)
    assert tools.relative_mse(found.float(), values[0].float()) < 0.015
