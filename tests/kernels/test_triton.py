"""The Triton kernels: the cases of `triton_cases.py` under the interpreter and on a GPU, and what a GPU is given.

Each in a process of its own: triton reads TRITON_INTERPRET when it is imported, and others must not inherit it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tq_offload.errors import BackendError

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
INSTALLED = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not INSTALLED, reason="triton is not installed")


def run(*command: str, **env: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = os.pathsep.join([str(ROOT), str(HERE.parent)])
    return subprocess.run(
        [sys.executable, *command],
        env={**inherited, "PYTHONPATH": path, **env},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )


def run_cases(**env: str) -> None:
    done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "tests/kernels/triton_cases.py", **env)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]


@needs_triton
@pytest.mark.slow
def test_the_cases_under_the_interpreter() -> None:
    run_cases(TRITON_INTERPRET="1")


@needs_triton
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_cases_on_a_gpu() -> None:
    run_cases()


@needs_triton
@pytest.mark.slow
def test_kernels_compile_and_round_as_the_format_says(tmp_path: Path) -> None:
    """No multiply and add in one rounding, no subnormal flushed, nothing approximate, in what a GPU would run."""
    done = run(str(HERE / "triton_compile.py"), TRITON_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr[-5000:]
    kernels = json.loads(done.stdout)
    assert len(kernels) == 17
    for name, found in kernels.items():
        divides = name.endswith((" encode_kernel", "outlier_code_kernel")) or name == "blocks, sketch: decode_kernel"
        assert (found["divisions"] > 0) == divides, name
        assert {key: n for key, n in found.items() if key != "divisions" and n} == {}, name


CHOOSE = """
import sys
import tq_offload.kernels.device
from tq_offload.kernels.triton import TritonBackend
assert not any(m in sys.modules for m in ("triton", "numba"))
TritonBackend()
"""


@needs_triton
def test_importing_and_choosing_does_not_import_triton() -> None:
    done = run("-c", CHOOSE + "assert 'triton' not in sys.modules", TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_the_backend_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from tq_offload import codec
    from tq_offload.kernels.triton import TritonBackend
    from tq_offload.layout import ChunkLayout, GroupLayout

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(BackendError, match="no CUDA device" if INSTALLED else "not installed"):
        TritonBackend()
    layout = ChunkLayout((GroupLayout("kv_first", (2, 1, 4, 64), "bfloat16", 64),))
    monkeypatch.setattr(codec, "_on_gpu", lambda tensors: True)
    with pytest.raises(BackendError):
        codec.TurboQuantCodec().encode([torch.zeros(2, 1, 4, 64, dtype=torch.bfloat16)], layout)
