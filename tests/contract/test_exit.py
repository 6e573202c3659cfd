"""A process ends well whatever still runs in a store that nobody closed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tq_offload_connectors.disk import DiskStore

CODE = """
import os, sys
import torch
from tq_offload.codec import TurboQuantCodec
from tq_offload.layout import ChunkLayout, GroupLayout
from tq_offload_connectors.disk import DiskStore
from tq_offload_connectors.frame_store import FrameKey, FrameStore
from tq_offload_connectors.tier import Tier

folder, forked = sys.argv[1], sys.argv[2] == "True"
codec, x = TurboQuantCodec(), torch.randn(2, 2, 256, 256).to(torch.bfloat16)
codec.warm_up(64)
layout = ChunkLayout((GroupLayout("kv_first", tuple(x.shape), "bfloat16", 64),))
store = FrameStore(codec, [Tier("disk", DiskStore(folder), writers=1)])
assert all([store.put(FrameKey.of(str(i), "m"), [x], layout, release=lambda: None) for i in range(10)])
if forked and not os.fork():
    sys.exit(0)  # has none of the threads, and nothing to wait for
if forked:
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
"""


@pytest.mark.parametrize("forked", [False, True])
def test_a_store_that_nobody_closed_is_closed_at_exit(tmp_path: Path, forked: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(tmp_path), str(forked)], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
    with DiskStore(tmp_path) as store:
        assert len(list(store.keys())) == 10
