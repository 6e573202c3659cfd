"""Digests of the frames of a whole table of chunks, for one backend: same input, same bytes.

usage: python tests/identity_table.py BACKEND TORCH_SEED [small]     (prints one JSON object)
"""

from __future__ import annotations

import hashlib
import json
import sys
from itertools import product

import torch
from support import make_tensor

from tq_offload.codec import TurboQuantCodec
from tq_offload.layout import ChunkLayout, GroupLayout
from tq_offload.spec import CodecSpec

HEAD_DIMS = (64, 80, 96, 112, 127, 128, 192, 256, 576)
BITS = tuple(range(1, 9))
DTYPES = ("bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2")
TOKENS = (1, 15, 17, 255, 256, 257)


def digests(backend: str, *, small: bool = False) -> dict[str, str]:
    """BLAKE2b of frame and decoded values for every cell of the table; small: of one that compiles in seconds."""
    torch.set_num_threads(1)  # many small tensors: more threads only get in each other's way
    found = {}
    table = ((96, 128), ("bfloat16",), (17, 256)) if small else (HEAD_DIMS, DTYPES, TOKENS)
    for dim, dtype, tokens in product(*table):
        x = make_tensor((2, 1, tokens, dim), getattr(torch, dtype), seed=dim + tokens)
        layout = ChunkLayout((GroupLayout.infer(x.shape, x.dtype, head_dim=dim),))
        for bits in (3, 4) if small else BITS:
            codec = TurboQuantCodec(CodecSpec(bits, bits), backend)
            frame = codec.encode([x], layout)
            (y,) = codec.decode(frame)
            state = hashlib.blake2b(frame, digest_size=8)
            state.update(y.reshape(-1).view(torch.uint8).numpy())
            found[f"{dim}/{bits}/{dtype}/{tokens}"] = state.hexdigest()
    return found


if __name__ == "__main__":
    torch.manual_seed(int(sys.argv[2]))
    torch.randn(7)
    print(json.dumps(digests(sys.argv[1], small=sys.argv[3:] == ["small"])))
