"""The cache of compiled kernels: several processes at once, code of something else, files that cannot be read."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KERNEL = """
from tq_offload.kernels.simd.jit import kernel

@kernel
def tiny(_config, x):
    return x + 1
"""
FILL = """
import sys, time
from tiny import tiny
from tq_offload.kernels.simd.config import KernelConfig
assert tiny(KernelConfig(dim=1), 1) == 2  # everything is imported and warm
print("ready", flush=True)
sys.stdin.readline()
for i in range(40):
    assert tiny(KernelConfig(dim=1000 * int(sys.argv[1]) + i), 1) == 2
"""
AUDIT = """
import numba
from tiny import tiny
from tq_offload.kernels.simd.config import KernelConfig
wrong, missing = [], []
for dim in [1000 * number + i for number in (1, 2) for i in range(40)]:
    kinds = tuple(numba.typeof(x) for x in (KernelConfig(dim=dim), 1))
    found = tiny.dispatcher._cache.load_overload(kinds, tiny.dispatcher.targetctx)
    if found is None:
        missing.append(dim)
    elif tuple(found.signature.args) != kinds:
        wrong.append(dim)
print(wrong, missing)
"""
SWAPPED = """
import logging, numba
from tiny import tiny
from tq_offload.kernels.simd.config import KernelConfig
logging.basicConfig()
first, second = (tuple(numba.typeof(x) for x in (KernelConfig(dim=dim), 1)) for dim in (16, 64))
cache = tiny.dispatcher._cache
if cache.load_overload(first, tiny.dispatcher.targetctx) is None:
    tiny(KernelConfig(dim=16), 1), tiny(KernelConfig(dim=64), 1)
    index = cache._cache_file._load_index()
    keys = [next(key for key in index if key[0] == kinds) for kinds in (first, second)]
    index[keys[0]], index[keys[1]] = index[keys[1]], index[keys[0]]
    cache._cache_file._save_index(index)
else:
    print(tiny(KernelConfig(dim=16), 1), tiny.dispatcher.signatures == [first])
"""


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "tiny.py").write_text(KERNEL)
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    return {**os.environ, "PYTHONPATH": path, "NUMBA_CACHE_DIR": str(tmp_path / "cache")}


def run(code: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)


def test_processes_that_fill_a_cache_at_once_do_not_mix_their_code_up(env: dict[str, str]) -> None:
    fillers = [
        subprocess.Popen(
            [sys.executable, "-c", FILL, str(number)],
            env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for number in (1, 2)
    ]  # fmt: skip
    for filler in fillers:
        assert filler.stdout is not None
        assert filler.stdout.readline() == "ready\n"
    for filler in fillers:
        assert filler.stdin is not None
        filler.stdin.write("\n")
        filler.stdin.flush()
    for filler in fillers:
        filler.communicate(timeout=120)
    assert [filler.returncode for filler in fillers] == [0, 0]
    assert run(AUDIT, env).stdout.strip() == "[] []"


def test_code_for_other_arguments_is_not_run(env: dict[str, str]) -> None:
    run(SWAPPED, env)
    done = run(SWAPPED, env)
    assert done.stdout.strip() == "2 True"
    assert "numba's cache of tiny is not used" in done.stderr


HELD = """
import logging
from tq_offload.kernels.simd import jit
from tiny import tiny
from tq_offload.kernels.simd.config import KernelConfig
logging.basicConfig()
jit.LOCK_TIMEOUT_S = 0.2
print(tiny(KernelConfig(dim=3), 1))
"""


def test_a_process_that_has_stopped_does_not_stop_the_others(env: dict[str, str]) -> None:
    run(CALL, env)
    (path,) = Path(env["NUMBA_CACHE_DIR"]).rglob("tiny.lock")
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        done = run(HELD, env)
    assert done.stdout == "2\n"
    assert "the lock of numba's cache of tiny is held" in done.stderr
    assert run(HELD, env).stderr == ""


CALL = """
import logging
from tiny import tiny
from tq_offload.kernels.simd.config import KernelConfig
logging.basicConfig()
print(tiny(KernelConfig(), 1))
"""


@pytest.mark.parametrize("suffix", [".nbi", ".nbc"])
@pytest.mark.parametrize("damage", ["empty", "protocol", "module", "zeros", "half"])
def test_files_that_cannot_be_read_are_given_up(env: dict[str, str], suffix: str, damage: str) -> None:
    run(CALL, env)
    files = list(Path(env["NUMBA_CACHE_DIR"]).rglob(f"tiny*{suffix}"))
    assert files
    for file in files:
        data = file.read_bytes()
        spoilt = {
            "empty": b"", "protocol": data[:1] + b"\xc8" + data[2:], "module": b"cnowhere\nnothing\n.",
            "zeros": bytes(len(data)), "half": data[: len(data) // 2],
        }  # fmt: skip
        file.write_bytes(spoilt[damage])
    assert run(CALL, env).stdout == "2\n"
