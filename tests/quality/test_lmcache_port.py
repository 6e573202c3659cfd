"""The port of LMCache's turboquant against its Triton kernels, which the interpreter of Triton runs without a GPU.

Not k8v4: the interpreter does not round to fp8 as a GPU does.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MISSING = [name for name in ("triton", "lmcache") if importlib.util.find_spec(name) is None]


@pytest.mark.slow
@pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")
@pytest.mark.parametrize("preset", ["turboquant_4bit_nc", "turboquant_3bit_nc"])
def test_port_gives_what_the_kernels_give(preset: str) -> None:
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    script = str(Path(__file__).with_name("lmcache_kernels.py"))
    done = subprocess.run([sys.executable, script, preset], env=env, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-5000:]
    assert f"{preset} agrees" in done.stdout
