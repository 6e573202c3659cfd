"""Reference, numba and another process with another torch seed write identical frames over the whole table.

The other process overwrites memory when it is freed: a kernel that works in memory that it no longer holds differs.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from identity_table import BITS, DTYPES, HEAD_DIMS, TOKENS, digests

TESTS = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_same_input_same_bytes() -> None:
    path = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    other = subprocess.Popen(
        [sys.executable, str(TESTS / "identity_table.py"), "numba", "12345"],
        env={**os.environ, "PYTHONPATH": path, "NUMBA_NUM_THREADS": "1", "MALLOC_PERTURB_": "255"},
        stdout=subprocess.PIPE,
        text=True,
    )
    torch.manual_seed(1)
    here = digests("reference")
    printed, _ = other.communicate(timeout=500)
    there = json.loads(printed)
    assert len(here) == len(HEAD_DIMS) * len(BITS) * len(DTYPES) * len(TOKENS)
    differing = [cell for cell in here if here[cell] != there[cell]]
    assert differing == []
