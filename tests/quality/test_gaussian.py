"""Distortion on Gaussian data against theory (TurboQuant, arXiv 2504.19874, theorem 1; Lloyd-Max for N(0, 1))."""

import math

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from support import relative_mse

from tq_offload.codebook import RELATIVE_MSE, levels, thresholds
from tq_offload.codec import TurboQuantCodec
from tq_offload.layout import ChunkLayout, GroupLayout
from tq_offload.spec import CodecSpec

D = 128


def gaussian() -> torch.Tensor:
    values = np.random.Generator(np.random.PCG64(1)).standard_normal((2, 4, 1024, D))
    return torch.from_numpy(values.astype(np.float32))


def measured(spec: CodecSpec) -> float:
    x = gaussian()
    layout = ChunkLayout((GroupLayout.infer(x.shape, x.dtype, head_dim=D),))
    codec = TurboQuantCodec(spec)
    (y,) = codec.decode(codec.encode([x], layout))
    return relative_mse(y, x)


def theory_on_the_sphere(bits: int) -> float:
    """Least-squares distortion of our levels for a coordinate of a random point on the sphere of radius sqrt(D).

    The density of a coordinate is Beta-like, `(1 - x^2/D)^((D-3)/2)`: the paper's lemma 1 before the Gaussian limit.
    """
    table, edges = levels(bits).astype(float), [-math.sqrt(D), *thresholds(bits).astype(float), math.sqrt(D)]
    total = quad(lambda x: (1 - x * x / D) ** ((D - 3) / 2), -math.sqrt(D), math.sqrt(D), limit=200)[0]
    xc = cc = 0.0
    for level, low, high in zip(table, edges[:-1], edges[1:], strict=True):
        xc += level * quad(lambda x: x * (1 - x * x / D) ** ((D - 3) / 2), low, high)[0] / total
        cc += level**2 * quad(lambda x: (1 - x * x / D) ** ((D - 3) / 2), low, high)[0] / total
    return 1 - xc**2 / cc


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5])
def test_plain_quantiser_is_within_2_percent_of_theory(bits: int) -> None:
    plain = CodecSpec(bits, bits, mean=False, fit_range=False)
    assert measured(plain) == pytest.approx(theory_on_the_sphere(bits), rel=0.02)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5])
def test_default_is_never_above_the_gaussian_limit(bits: int) -> None:
    limit = RELATIVE_MSE[bits]
    assert measured(CodecSpec(bits, bits)) < 1.02 * limit


def test_range_fit_pays_at_4_bits() -> None:
    fitted, plain = (measured(CodecSpec(mean=False, fit_range=f)) for f in (True, False))
    assert fitted < 0.94 * plain
