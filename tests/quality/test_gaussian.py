"""Distortion on Gaussian data against theory (TurboQuant, arXiv 2504.19874, theorem 1; Lloyd-Max for N(0, 1))."""

import numpy as np
import pytest
import torch
from support import relative_mse

from benchmarks.quality.gaussian import theory_on_the_sphere
from tq_offload.codebook import RELATIVE_MSE
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


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5])
def test_plain_quantiser_is_within_2_percent_of_theory(bits: int) -> None:
    plain = CodecSpec(bits, bits, mean=False, fit_range=False)
    assert measured(plain) == pytest.approx(theory_on_the_sphere(bits, D), rel=0.02)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5])
def test_default_is_never_above_the_gaussian_limit(bits: int) -> None:
    limit = RELATIVE_MSE[bits]
    assert measured(CodecSpec(bits, bits)) < 1.02 * limit


def test_range_fit_pays_at_4_bits() -> None:
    fitted, plain = (measured(CodecSpec(mean=False, fit_range=f)) for f in (True, False))
    assert fitted < 0.94 * plain
