"""After a warm-up no real chunk waits for the compiler; kernels that are on disk are not compiled again."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROBE = """
import json, sys, torch
from numba.core import event
from tq_offload.codec import TurboQuantCodec
from tq_offload.layout import ChunkLayout, GroupLayout

codec, dim = TurboQuantCodec(backend="numba"), int(sys.argv[1])
with event.install_recorder("numba:compile") as warm:
    codec.warm_up(dim)
x = torch.randn(2, 3, 300, 4 * dim).to(torch.bfloat16)
x[0, 1, 5] = 0
layout = ChunkLayout((GroupLayout.infer(x.shape, x.dtype, head_dim=dim),))
with event.install_recorder("numba:compile") as real:
    codec.decode(codec.encode([x], layout))
print(json.dumps([len(warm.buffer), len(real.buffer)]))
"""


def probe(cache: Path, dim: int) -> tuple[int, int]:
    env = {**os.environ, "NUMBA_CACHE_DIR": str(cache)}
    out = subprocess.run([sys.executable, "-c", PROBE, str(dim)], env=env, capture_output=True, text=True, check=True)
    warm, real = json.loads(out.stdout)
    return warm, real


@pytest.mark.parametrize("dim", [128, 96])
def test_the_first_chunk_waits_for_no_compiler(tmp_path: Path, dim: int) -> None:
    warm, real = probe(tmp_path, dim)
    assert warm > 0
    assert real == 0
    assert probe(tmp_path, dim) == (0, 0)
