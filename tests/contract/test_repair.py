"""When an entry that cannot be served is deleted, when not, and what is counted, over the real fs adapter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """LMCache turns propagation off for its loggers; listen at the logger itself."""
    from tq_offload.integrations.lmcache.log import logger

    logger().addHandler(caplog.handler)
    yield caplog
    logger().removeHandler(caplog.handler)


def test_repair_can_be_turned_off(make_tier: Any, model: str, tools: Any, counted: Any) -> None:
    tier = make_tier(repair=False)
    keys = tools.make_keys(model, 2)
    objects = tier.objects(keys)
    tools.fill(objects)
    assert tier.store(keys, objects)
    tools.flip(tier.file_of(keys[1]))
    assert tier.load(keys, tier.objects(keys)) == [True, False]
    assert tier.load(keys, tier.objects(keys)) == [True, False]
    assert counted("repairs") == 0
    assert tier.file_of(keys[1]).exists()


def test_an_outage_does_not_empty_the_tier(tier: Any, model: str, tools: Any, counted: Any) -> None:
    keys = tools.make_keys(model, 3)
    objects = tier.objects(keys)
    tools.fill(objects)
    assert tier.store(keys, objects)
    for path in tier.files():
        path.rename(path.with_suffix(".away"))
    for _ in range(3):  # nothing is delivered, as with a network that is down
        assert tier.load(keys, tier.objects(keys)) == [False] * 3
    for path in tier.folder.glob("*.away"):
        path.rename(path.with_suffix(".data"))
    assert tier.load(keys, tier.objects(keys)) == [True] * 3
    assert counted("repairs") == 0


def test_a_load_of_one_bad_entry_is_repaired_once_the_tier_is_seen_to_work(
    tier: Any, model: str, tools: Any, counted: Any
) -> None:
    bad, good = tools.make_keys(model, 2)
    objects = tier.objects([bad, good])
    tools.fill(objects)
    assert tier.store([bad, good], objects)
    path = tier.file_of(bad)
    path.write_bytes(path.read_bytes()[:-100])
    targets = tier.objects([bad])
    assert tier.load([bad], targets) == [False]
    assert tier.load([bad], targets) == [False]
    assert path.exists(), "nothing was delivered: it may be an outage"
    assert tier.load([good], targets) == [True]
    assert tier.load([bad], targets) == [False]
    tools.wait_for(lambda: not path.exists() and counted("repairs", "not_loaded") == 1)
    assert tier.store([bad], objects[:1])
    assert tier.load([bad], targets) == [True]


def test_a_store_cancels_a_queued_delete(model: str, tools: Any) -> None:
    import threading

    from tq_offload.integrations.lmcache.repair import Repairer

    first, second = tools.make_keys(model, 2)
    deleted, release, started = [], threading.Event(), threading.Event()

    def slow_delete(keys: list[Any]) -> None:
        started.set()
        release.wait(10)
        deleted.extend(keys)

    repairer = Repairer(slow_delete, gone=lambda key: True)
    done = repairer.submit(first, "checksum")
    cancelled = repairer.submit(second, "checksum")
    assert started.wait(10)
    repairer.cancel([second])
    assert cancelled.is_set()
    release.set()
    assert done.wait(10)
    repairer.close()
    assert deleted == [first]


def test_a_delete_that_fails_without_a_word_is_no_repair(
    tier: Any, model: str, tools: Any, counted: Any, said: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fs logs the error and returns, for example on a folder that is mounted read-only."""
    import aiofiles.os

    keys = tools.make_keys(model, 1)
    objects = tier.objects(keys)
    tools.fill(objects)
    assert tier.store(keys, objects)
    path = tier.file_of(keys[0])
    tools.flip(path)

    async def read_only(*args: Any) -> None:
        raise OSError(30, "Read-only file system")

    with monkeypatch.context() as patched:
        patched.setattr(aiofiles.os, "unlink", read_only)
        assert tier.load(keys, tier.objects(keys)) == [False]
    assert path.exists()
    assert (counted("repairs"), counted("repair_failures", "checksum")) == (0, 1)
    assert "cannot delete an entry that cannot be served" in said.text

    assert tier.load(keys, tier.objects(keys)) == [False]
    assert (counted("repairs", "checksum"), counted("repair_failures")) == (1, 1)


def test_a_delete_that_the_tier_does_not_report_is_a_repair_if_the_entry_is_gone(
    tier: Any, model: str, tools: Any, counted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LMCache's native adapters report only keys that they stored in this process."""
    keys = tools.make_keys(model, 1)
    objects = tier.objects(keys)
    tools.fill(objects)
    assert tier.store(keys, objects)
    tier.file_of(keys[0]).write_bytes(b"\x01" * tier.file_of(keys[0]).stat().st_size)
    monkeypatch.setattr(tier.inner, "_notify_keys_deleted", lambda keys, sizes: None)
    assert tier.load(keys, tier.objects(keys)) == [False]
    assert tier.files() == []
    assert (counted("repairs", "magic"), counted("repair_failures")) == (1, 0)
