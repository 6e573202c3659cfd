"""Reference, numba and another process with another torch seed write identical frames over the whole table.

The other process overwrites memory when it is freed: a kernel that works in memory that it no longer holds differs.
"""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from identity_table import BITS, DTYPES, HEAD_DIMS, TOKENS, digests

from benchmarks.bench_codec import without_avx512

TESTS = Path(__file__).parents[1]


def other_process(*args: str, **env: str) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    return subprocess.Popen(
        [sys.executable, str(TESTS / "identity_table.py"), "numba", "12345", *args],
        env={**os.environ, "PYTHONPATH": path, "NUMBA_NUM_THREADS": "1", "MALLOC_PERTURB_": "255", **env},
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_same_input_same_bytes() -> None:
    other = other_process()
    torch.manual_seed(1)
    here = digests("reference")
    printed, _ = other.communicate(timeout=500)
    there = json.loads(printed)
    assert len(here) == len(HEAD_DIMS) * len(BITS) * len(DTYPES) * len(TOKENS)
    differing = [cell for cell in here if here[cell] != there[cell]]
    assert differing == []


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names the features of x86-64 CPUs")
def test_same_bytes_from_code_without_avx512() -> None:
    other = other_process("small", **without_avx512())
    printed, _ = other.communicate(timeout=300)
    assert json.loads(printed) == digests("reference", small=True)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names the features of x86-64 CPUs")
def test_without_avx512_registers_have_eight_lanes() -> None:
    code = "from tq_offload.kernels.simd.config import host_lanes; print(host_lanes())"
    out = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **without_avx512()}, capture_output=True, text=True, check=True
    )
    assert out.stdout.strip() == "8"
