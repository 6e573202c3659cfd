"""Shared helpers: portable data, so that golden files and identities do not depend on a library's generator."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tq_offload.layout import ChunkLayout, GroupLayout


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    """Small tensors: more threads only get in each other's way. For the module or folder that imports it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def portable_normal(count: int, seed: int = 0) -> np.ndarray:
    """About N(0, 1), f64 [count]: sums of twelve 5-bit uniforms from raw PCG64 words, exact arithmetic."""
    words = np.random.PCG64(seed).random_raw(count)
    parts = [(words >> np.uint64(5 * i)) & np.uint64(31) for i in range(12)]
    return (sum(p.astype(np.float64) for p in parts) + 6 - 192) / 32.0


def make_tensor(shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    """KV-like data: normal, a mean for every channel, a few large channels; the same bits everywhere."""
    count = int(np.prod(shape))
    x = portable_normal(count, seed).reshape(shape)
    if count:
        channels = portable_normal(shape[-1], seed + 1)
        x = x + 2 * channels * (np.abs(channels) > 1)
    return torch.from_numpy(np.ascontiguousarray(x, dtype=np.float32)).to(dtype)


def layout_of(*tensors: torch.Tensor, **known: object) -> ChunkLayout:
    """The layout of tensors that share what is known about them (head_dim, latent, kind)."""
    return ChunkLayout(tuple(GroupLayout.infer(t.shape, t.dtype, **known) for t in tensors))  # type: ignore[arg-type]


def relative_mse(decoded: torch.Tensor, original: torch.Tensor) -> float:
    """Squared error over energy, in f64."""
    a, b = decoded.double(), original.double()
    return float(((a - b) ** 2).sum() / (b**2).sum())
