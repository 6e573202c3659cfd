"""Processes that write into a disk store, forked from one that has everything loaded: 200 starts in seconds.

usage: python tests/integration/disk_worker.py     (a JSON object a line on stdin: job, and its arguments)

It prints the id of every process it forks, and each of those a line `ready`, and what its job returns.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from store_table import is_sealed, sealed

from tq_offload.errors import StoreError
from tq_offload_connectors.disk import DiskStore


def say(**line: Any) -> None:
    os.write(1, json.dumps(line).encode() + b"\n")


def store_frames(folder: str, pool: str, seed: int, prefix: str, stop: str, fsync: str) -> None:
    """Put frames of the pool under their keys, again and again, until the file `stop` is there."""
    pick = random.Random(seed)
    frames = [(path.stem.split("@")[0], path.read_bytes()) for path in sorted(Path(pool).iterdir())]
    store = DiskStore(folder, fsync=fsync, resync_seconds=0.01)
    say(ready=True)
    count, errors = 0, []
    while not os.path.exists(stop):
        key, frame = pick.choice(frames)
        try:
            store.put(prefix + key, memoryview(frame))
            store.usage()
        except StoreError as error:
            errors.append(str(error))
        count += 1
    say(count=count, errors=errors)


def race(folder: str, turns: str, me: int, keys: int) -> None:
    """Put a value of one's own under the same key at the same moment as the other process, for every key."""
    store = DiskStore(folder)
    say(ready=True)
    wrong = 0
    with open(turns, "r+b") as file, mmap.mmap(file.fileno(), 0) as shared, memoryview(shared).cast("I") as turn:
        for i in range(keys):
            value = sealed(20_000 + i % 7 * 3000, 2 * i + me)
            turn[me] = i + 1
            while turn[1 - me] <= i:
                os.sched_yield()
            store.put(f"k{i}", memoryview(value))
            found = store.get(f"k{i}")
            wrong += found is None or not is_sealed(found)
    say(wrong=wrong)


def fill(folder: str, capacity: int, me: int, count: int) -> None:
    """Put values of 50,000 bytes under keys of one's own, at most 200 a second."""
    store = DiskStore(folder, capacity, resync_seconds=0.05)
    say(ready=True)
    for i in range(count):
        store.put(f"w{me}-{i}", memoryview(sealed(49_984, i)))
        time.sleep(0.005)
    say(usage=store.usage().nbytes)


JOBS: dict[str, Callable[..., None]] = {job.__name__: job for job in (store_frames, race, fill)}


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the children
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            try:
                JOBS[request.pop("job")](**request)
            except BaseException as error:
                say(failed=repr(error))
            finally:
                os._exit(0)
        say(pid=pid)


if __name__ == "__main__":
    main()
