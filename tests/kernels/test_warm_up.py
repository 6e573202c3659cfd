"""After a warm-up no real chunk waits for the compiler; kernels that are on disk are not compiled again."""

import json
import os
import subprocess
import sys
from pathlib import Path

PROBE = """
import json, torch
from numba.core import event
from tq_offload.codec import TurboQuantCodec
from tq_offload.layout import ChunkLayout, GroupLayout

codec = TurboQuantCodec(backend="numba")
with event.install_recorder("numba:compile") as warm:
    codec.warm_up(128)
x = torch.randn(2, 3, 300, 512).to(torch.bfloat16)
x[0, 1, 5] = 0
layout = ChunkLayout((GroupLayout.infer(x.shape, x.dtype, head_dim=128),))
with event.install_recorder("numba:compile") as real:
    codec.decode(codec.encode([x], layout))
print(json.dumps([len(warm.buffer), len(real.buffer)]))
"""


def probe(cache: Path) -> tuple[int, int]:
    env = {**os.environ, "NUMBA_CACHE_DIR": str(cache)}
    out = subprocess.run([sys.executable, "-c", PROBE], env=env, capture_output=True, text=True, check=True)
    warm, real = json.loads(out.stdout)
    return warm, real


def test_the_first_chunk_waits_for_no_compiler(tmp_path: Path) -> None:
    warm, real = probe(tmp_path)
    assert warm > 0
    assert real == 0
    assert probe(tmp_path) == (0, 0)
