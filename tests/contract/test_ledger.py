"""What is counted as stored: what the tier reports, over the real fs adapter and by the interface."""

from __future__ import annotations

from typing import Any

import pytest


def test_a_store_of_what_is_there_is_not_counted_as_stored(tier: Any, model: str, tools: Any, counted: Any) -> None:
    keys = tools.make_keys(model, 3)
    objects = tier.objects(keys)
    tools.fill(objects)
    assert tier.store(keys[:2], objects[:2])
    once = {name: counted(name) for name in ("raw_bytes", "stored_bytes")}
    assert tier.store(keys, objects)
    assert counted("stored_chunks") == 3
    assert counted("already_stored") == 2
    assert {name: counted(name) for name in once} == {name: value * 3 / 2 for name, value in once.items()}
    assert counted("store_failures") == 0


def test_of_a_batch_that_fails_half_way_what_was_written_is_counted(
    tier: Any, model: str, tools: Any, counted: Any
) -> None:
    keys = tools.make_keys(model, 4)
    objects = tier.objects(keys)
    tools.fill(objects)
    assert tier.store(keys, objects)
    blocked = tier.file_of(keys[2])
    for path in tier.files():
        path.unlink()
    blocked.with_suffix(".tmp").mkdir()  # where fs writes before it renames
    assert not tier.store(keys, objects)
    written = len(tier.files())
    assert 0 < written < 4
    assert counted("stored_chunks") == 4 + written
    assert counted("raw_bytes") == (4 + written) * objects[0].get_size()
    assert counted("store_failures", "tier") == 4 - written
    assert counted("already_stored") == 0


@pytest.mark.parametrize("report", ["before", "after", "never"])
def test_a_tier_may_report_before_or_after_it_completes_or_never(report: str, counted: Any) -> None:
    from lmcache.v1.distributed.internal_api import L2StoreResult

    from tq_offload.integrations.lmcache.ledger import StoreLedger
    from tq_offload.integrations.lmcache.processor import Outcome

    ledger, keys = StoreLedger(), ["a", "b", "c"]
    task = ledger.begin({key: Outcome("", 100, 30) for key in keys})
    if report == "before":
        ledger.on_l2_keys_stored([*keys[:2], "not ours"], [30, 30, 30])
    ledger.settle(task, L2StoreResult(True, 60))
    if report == "after":
        ledger.on_l2_keys_stored(keys[:2], [30, 30])
    assert (counted("stored_chunks"), counted("raw_bytes"), counted("stored_bytes")) == (2, 200, 60)
    assert counted("already_stored") == 1


def test_a_key_that_is_reported_with_no_bytes_was_there(counted: Any) -> None:
    from lmcache.v1.distributed.internal_api import L2StoreResult

    from tq_offload.integrations.lmcache.ledger import StoreLedger
    from tq_offload.integrations.lmcache.processor import Outcome

    ledger = StoreLedger()
    task = ledger.begin({"a": Outcome("", 100, 30)})
    ledger.on_l2_keys_stored(["a"], [0])
    ledger.settle(task, L2StoreResult(True, 0))
    assert (counted("stored_chunks"), counted("already_stored")) == (0, 1)
