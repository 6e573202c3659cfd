"""A prefix saved by one process is the same in another, through every store."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from redis_server import RedisServer, unavailable

TESTS = Path(__file__).parents[1]


def run(task: str, *arguments: object) -> dict[str, Any]:
    paths = [str(TESTS.parent), str(TESTS.parent / "connectors"), str(TESTS)]
    done = subprocess.run(
        [sys.executable, TESTS / "prefix_worker.py", task, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def compare(saved: dict[str, Any], loaded: dict[str, Any], stores: set[str]) -> None:
    assert set(saved) == set(loaded) == stores
    for name in stores:
        digest, answers, ratio = saved[name]
        assert loaded[name] == [digest, answers]
        assert len({str(answer) for answer in answers}) == len(answers) == 3
        assert ratio < 1.02


@pytest.mark.slow
def test_memory_and_disk(tmp_path: Path) -> None:
    compare(run("save", tmp_path), run("load", tmp_path), {"memory", "disk"})


@pytest.mark.slow
@pytest.mark.integration
def test_redis(tmp_path: Path) -> None:
    if find_spec("redis") is None:
        unavailable("redis-py is not installed")
    with RedisServer() as server:
        compare(run("save", tmp_path, server.url), run("load", tmp_path, server.url), {"memory", "disk", "redis"})
