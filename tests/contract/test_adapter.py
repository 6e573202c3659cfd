"""TurboQuantL2Adapter over the real fs adapter: round trip, a miss for single keys, repair, mixed shapes, full L1."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

FOUR_BIT_MSE = 0.0096  # E of relative MSE at 4 bits: 0.009497 (docs/wire-format.md)


def test_values_come_back_and_the_file_is_the_frame(tier: Any, model: str, tools: Any, counted: Any) -> None:
    keys = tools.make_keys(model, 5)
    objects = tier.objects(keys)
    wanted = tools.fill(objects)
    assert tier.store(keys, objects)
    size = tier.processor.estimate_serialized_size(_desc(tools.SHAPE))
    assert {p.stat().st_size for p in tier.files()} == {size}
    assert len(tier.files()) == 5
    targets = tier.objects(keys)
    assert tier.load(keys, targets) == [True] * 5
    for obj, (copy,) in zip(targets, wanted, strict=True):
        assert 0.003 < tools.relative_mse(obj.get_tensor(0), copy) < FOUR_BIT_MSE * 1.1
    raw = objects[0].get_size()
    assert counted("stored_chunks") == 5
    assert counted("raw_bytes") == 5 * raw
    assert counted("stored_bytes") == 5 * size < 5 * raw / 3
    assert counted("loaded_chunks") == 5
    assert counted("misses") == 0


def test_head_dim_comes_from_the_config_of_the_key_s_model(tier: Any, model: str, tools: Any) -> None:
    from tq_offload.codec import TurboQuantCodec

    keys = tools.make_keys(model, 1)
    objects = tier.objects(keys)
    tools.fill(objects)
    assert tier.store(keys, objects)
    (group,) = TurboQuantCodec.inspect(tier.files()[0].read_bytes()).layout.groups
    assert (group.kind, group.head_dim) == ("packed", tools.D)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        ("flip", "checksum"),
        ("truncate", "not_loaded"),
        ("foreign", "magic"),
        ("absent", "not_loaded"),
        ("version", "version"),
        ("other_key", "mismatch_key"),
    ],
)
def test_one_bad_entry_is_a_miss_for_itself_and_repaired(
    damage: str, reason: str, tier: Any, model: str, tools: Any, counted: Any
) -> None:
    keys = tools.make_keys(model, 4)
    objects = tier.objects(keys)
    wanted = tools.fill(objects)
    assert tier.store(keys, objects)
    path = tier.file_of(keys[2])
    _damage(path, damage, tier.file_of(keys[0]).read_bytes())

    targets = tier.objects(keys)
    assert tier.load(keys, targets) == [True, True, False, True]
    assert not targets[2].get_tensor(0).any(), "the destination of a miss must be untouched"
    assert tools.relative_mse(targets[3].get_tensor(0), wanted[3][0]) < 0.011
    assert counted("misses", reason) == counted("misses") == 1

    tools.wait_for(lambda: not path.exists() and counted("repairs") == 1)
    assert tier.store([keys[2]], [objects[2]])
    assert tier.load(keys, targets) == [True] * 4
    assert counted("misses") == 1


def test_a_corrupt_entry_is_gone_before_its_miss_is_reported(
    tier: Any, model: str, tools: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow_delete(keys: list[Any]) -> None:
        time.sleep(0.4)
        tier.inner.delete(keys)

    monkeypatch.setattr(tier.adapter._tq_repairer, "_delete", slow_delete)
    keys = tools.make_keys(model, 2)
    objects = tier.objects(keys)
    tools.fill(objects)
    assert tier.store(keys, objects)
    path = tier.file_of(keys[1])
    _damage(path, "flip", b"")
    assert tier.load(keys[1:], tier.objects(keys[1:])) == [False]
    assert not path.exists()


def test_a_refused_chunk_does_not_take_its_batch_along(tier: Any, model: str, tools: Any, counted: Any) -> None:
    keys = tools.make_keys(model, 4)
    objects = tier.objects(keys)
    tools.fill(objects)
    objects[1].get_tensor(0)[0, 1, 2, 3] = float("nan")
    assert not tier.store(keys, objects), "a batch of which one object is missing is not a success"
    assert len(tier.files()) == 3
    assert tier.load(keys, tier.objects(keys)) == [True, False, True, True]
    assert counted("refused", "non_finite") == 1
    assert counted("stored_chunks") == 3
    assert counted("dropped_batch_mates") == 0


def test_a_batch_of_refused_chunks_fails(tier: Any, model: str, tools: Any, counted: Any) -> None:
    keys = tools.make_keys(model, 2)
    objects = tier.objects(keys)
    for obj in objects:
        obj.get_tensor(0).fill_(float("inf"))
    assert not tier.store(keys, objects)
    assert tier.files() == []
    assert counted("refused", "non_finite") == 2


def test_a_batch_may_hold_several_shapes(tier: Any, model: str, tools: Any, counted: Any) -> None:
    """LMCache submits the object groups of a hybrid model together (`--separate-object-groups`)."""
    first = tools.make_keys(model, 2, object_group_id=0)
    second = tools.make_keys(model, 2, object_group_id=1)
    keys = [first[0], second[0], first[1], second[1]]
    big, small = tier.objects(first), tier.objects(second, shapes=[(1, 1, 64, 128)])
    objects = [big[0], small[0], big[1], small[1]]
    wanted = tools.fill(objects)
    assert tier.store(keys, objects)
    assert len(tier.files()) == 4
    assert len({p.stat().st_size for p in tier.files()}) == 2
    targets = [
        obj for pair in zip(tier.objects(first), tier.objects(second, [(1, 1, 64, 128)]), strict=True) for obj in pair
    ]
    tier.file_of(second[0]).write_bytes(b"x" * 10)
    assert tier.load(keys, targets) == [True, False, True, True]
    for i in (0, 2, 3):
        assert tools.relative_mse(targets[i].get_tensor(0), wanted[i][0]) < 0.012
    assert counted("misses", "not_loaded") == 1


def test_several_groups_in_one_object(tier: Any, model: str, tools: Any) -> None:
    shapes, dtypes = [tools.SHAPE, (1, 2, 64, 256), (1, 1, 64, 24)], [torch.bfloat16, torch.float16, torch.uint8]
    keys = tools.make_keys(model, 2)
    objects = tier.objects(keys, shapes, dtypes)
    wanted = tools.fill(objects)
    assert tier.store(keys, objects)
    targets = tier.objects(keys, shapes, dtypes)
    assert tier.load(keys, targets) == [True, True]
    for obj, copies in zip(targets, wanted, strict=True):
        assert tools.relative_mse(obj.get_tensor(0), copies[0]) < 0.011
        assert tools.relative_mse(obj.get_tensor(1), copies[1]) < 0.011
        assert torch.equal(obj.get_tensor(2), copies[2]), "unknown uint8 must come back bit-exact"


def test_a_full_l1_is_a_miss_and_repairs_nothing(make_tier: Any, model: str, tools: Any, counted: Any) -> None:
    tier = make_tier(l1_gb=0.00390625)  # 4 MiB
    keys = tools.make_keys(model, 1)
    objects = tier.objects(keys)
    tools.fill(objects)
    assert tier.store(keys, objects)
    targets = tier.objects(keys)
    while True:  # take what is left
        try:
            tier.objects(keys)
        except AssertionError:
            break
    assert tier.load(keys * 30, targets * 30) == [False] * 30
    assert counted("misses", "no_buffer") == 30
    assert counted("repairs") == 0
    assert len(tier.files()) == 1


def test_another_spec_reads_what_is_there_if_the_size_is_the_same(make_tier: Any, model: str, tools: Any) -> None:
    writer, keys = make_tier(seed=7), tools.make_keys(model, 1)
    objects = writer.objects(keys)
    wanted = tools.fill(objects)
    assert writer.store(keys, objects)
    reader = make_tier(folder=writer.folder)
    targets = reader.objects(keys)
    assert reader.load(keys, targets) == [True]
    assert tools.relative_mse(targets[0].get_tensor(0), wanted[0][0]) < 0.011


def test_temporary_buffers_are_given_back(tier: Any, model: str, tools: Any) -> None:
    keys = tools.make_keys(model, 3)
    objects = tier.objects(keys)
    tools.fill(objects)
    used = tier.l1.get_memory_usage()[0]
    targets_size = 3 * objects[0].get_physical_size()
    assert tier.store(keys, objects)
    tier.file_of(keys[1]).write_bytes(b"")
    tier.load(keys, tier.objects(keys))
    tools.wait_for(lambda: tier.l1.get_memory_usage()[0] <= used + targets_size)


def test_the_wrapper_hands_on_what_controllers_ask(tier: Any, model: str, tools: Any) -> None:
    assert tier.adapter.inner_adapter is tier.inner
    status = tier.adapter.report_status()
    assert status["serde_wrapped"] is True
    assert status["tq_offload"].startswith("K4V4")
    assert tier.adapter.supports_global_eviction == tier.inner.supports_global_eviction
    keys = tools.make_keys(model, 1)
    objects = tier.objects(keys)
    tools.fill(objects)
    assert tier.store(keys, objects)
    tier.adapter.delete(keys)
    assert tier.files() == []


def _desc(shape: Any) -> Any:
    from lmcache.v1.distributed.api import MemoryLayoutDesc

    return MemoryLayoutDesc([torch.Size(shape)], [torch.bfloat16])


def _damage(path: Any, how: str, other: bytes) -> None:
    data = bytearray(path.read_bytes())
    if how == "absent":
        path.unlink()
        return
    if how == "flip":
        data[len(data) // 2] ^= 0x10
    elif how == "truncate":
        del data[-100:]
    elif how == "foreign":
        data = bytearray(b"\x00\x3f" * len(data))
    elif how == "version":
        data[8] = 99
    elif how == "other_key":
        data = bytearray(other)
    path.write_bytes(data)
