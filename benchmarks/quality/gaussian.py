"""Distortion against theory on Gaussian data: TurboQuant, arXiv 2504.19874, theorem 1, and Lloyd-Max for N(0, 1)."""

from __future__ import annotations

import math

import numpy as np
import torch
from rich.table import Table
from scipy.integrate import quad

from tq_offload.codebook import RELATIVE_MSE, levels, thresholds
from tq_offload.codec import TurboQuantCodec
from tq_offload.layout import ChunkLayout, GroupLayout
from tq_offload.spec import CodecSpec

__all__ = ["distortion", "gaussian_rows", "gaussian_table", "theory_on_the_sphere"]

DIM = 128
COLUMNS = ("bits", "theory, d = 128", "plain", "plain / theory", "limit d → ∞", "default", "default / limit")


def distortion(chunks: list[torch.Tensor], spec: CodecSpec, head_dim: int) -> tuple[float, float, float]:
    """Relative MSE of K and of V over chunks [2, L, T, H*D], and bits an element as stored, frame included."""
    codec = TurboQuantCodec(spec)
    error, energy = torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    stored = elements = 0
    for chunk in chunks:
        layout = ChunkLayout((GroupLayout.infer(chunk.shape, chunk.dtype, head_dim=head_dim),))
        frame = codec.encode([chunk], layout)
        (decoded,) = codec.decode(frame)
        a, b = chunk.double().flatten(1), decoded.double().flatten(1)
        error += ((a - b) ** 2).sum(dim=1)
        energy += (a**2).sum(dim=1)
        stored, elements = stored + len(frame), elements + chunk.numel()
    key, value = (error / energy).tolist()
    return key, value, 8 * stored / elements


def theory_on_the_sphere(bits: int, dim: int) -> float:
    """Least-squares distortion of our levels for a coordinate of a random point on the sphere of radius sqrt(dim).

    The density of a coordinate is Beta-like, `(1 - x^2/dim)^((dim-3)/2)`: lemma 1 of the paper, before the limit.
    """
    table, edges = levels(bits).astype(float), [-math.sqrt(dim), *thresholds(bits).astype(float), math.sqrt(dim)]
    total = quad(lambda x: (1 - x * x / dim) ** ((dim - 3) / 2), -math.sqrt(dim), math.sqrt(dim), limit=200)[0]
    xc = cc = 0.0
    for level, low, high in zip(table, edges[:-1], edges[1:], strict=True):
        xc += level * quad(lambda x: x * (1 - x * x / dim) ** ((dim - 3) / 2), low, high)[0] / total
        cc += level**2 * quad(lambda x: (1 - x * x / dim) ** ((dim - 3) / 2), low, high)[0] / total
    return 1 - xc**2 / cc


def gaussian_rows() -> list[list[str]]:
    """Gaussian vectors of 128 elements, 1 to 5 bits: plain quantiser and default against the Gaussian limit."""
    values = np.random.Generator(np.random.PCG64(1)).standard_normal((2, 4, 1024, DIM)).astype(np.float32)
    chunk, rows = [torch.from_numpy(values)], []
    for bits in range(1, 6):
        plain = distortion(chunk, CodecSpec(bits, bits, mean=False, fit_range=False), DIM)[0]
        default = distortion(chunk, CodecSpec(bits, bits), DIM)[0]
        limit, theory = RELATIVE_MSE[bits], theory_on_the_sphere(bits, DIM)
        row = (theory, plain, plain / theory, limit, default, default / limit)
        rows.append([str(bits), *(f"{v:.5f}" for v in row)])
    return rows


def gaussian_table(rows: list[list[str]]) -> Table:
    """The rows, for a terminal."""
    table = Table(title="Gaussian data, d = 128: relative MSE", title_justify="left")
    for head in COLUMNS:
        table.add_column(head, justify="right")
    for row in rows:
        table.add_row(*row)
    return table
