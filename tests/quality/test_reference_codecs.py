"""The codecs that the quality benchmark compares with: each does what its source says."""

import math

import pytest
import torch

from benchmarks.quality import lmcache_codecs
from benchmarks.quality.codecs import Codec, int8, per_vector, plain, rotated, with_qjl
from benchmarks.quality.gaussian import theory_on_the_sphere
from benchmarks.quality.polar import angle_levels, from_polar, polar, to_polar

D = 64


def vectors(count: int = 4096, dim: int = D) -> torch.Tensor:
    return torch.randn(count, dim, generator=torch.Generator().manual_seed(3))


def error(decoded: torch.Tensor, x: torch.Tensor) -> float:
    return ((decoded - x).square().sum() / x.square().sum()).item()


def test_rotation_is_orthonormal() -> None:
    x = vectors()
    torch.testing.assert_close(rotated(x).norm(dim=-1), x.norm(dim=-1))
    torch.testing.assert_close(rotated(rotated(x), inverse=True), x)


@pytest.mark.parametrize(("bits", "stored"), [(3, 3.25), (4, 4.25)])
def test_plain_turboquant_reaches_its_theory(bits: int, stored: float) -> None:
    x = vectors()
    decoded, rate = plain(bits)(x)
    # Theory is for the best scale of each vector; the vector's norm as scale costs a little more.
    assert error(decoded, x) == pytest.approx(theory_on_the_sphere(bits, D), rel=0.06)
    assert rate == stored


def test_qjl_makes_inner_products_unbiased() -> None:
    x = vectors(20_000) + 1.0
    x = x / x.norm(dim=-1, keepdim=True)

    def slope(decoded: torch.Tensor) -> float:
        return ((decoded * x).sum(dim=-1)).mean().item()  # 1 if unbiased: the query is the key itself

    shrunk, _ = plain(2)(x)
    corrected, rate = with_qjl(3)(x)
    assert slope(shrunk) < 0.92
    assert slope(corrected) == pytest.approx(1.0, abs=0.02)
    assert rate == 3.5


def test_polar_coordinates_are_exact() -> None:
    x = vectors(512)
    radius, angles = to_polar(x, 4)
    assert radius.shape == (512, 4)
    assert [a.shape[-1] for a in angles] == [32, 16, 8, 4]
    assert all(a.min() >= 0 and a.max() <= (math.pi / 2 if level else 2 * math.pi) for level, a in enumerate(angles))
    torch.testing.assert_close(from_polar(radius, angles), x, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_angle_levels_ascend_and_are_symmetric(level: int) -> None:
    table = angle_levels(level, 3)
    end = math.pi / 2 if level else 2 * math.pi
    assert bool((table.diff() > 0).all())
    torch.testing.assert_close(table, end - table.flip(0), rtol=1e-3, atol=1e-3)


def test_polarquant_is_better_with_more_bits() -> None:
    x = vectors()
    settings = [(3, 1, 1, 1), (4, 2, 2, 2), (5, 3, 3, 3), (6, 4, 4, 4)]
    results = [polar(bits)(x) for bits in settings]
    errors = [error(decoded, x) for decoded, _ in results]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.1 * errors[1]
    assert results[1][1] == 3.875


def test_int8_error_is_that_of_a_uniform_quantiser() -> None:
    x = vectors()
    decoded, rate = int8(x)
    step = x.abs().amax(dim=-1) / 127
    assert (decoded - x).square().mean().item() == pytest.approx((step.square() / 12).mean().item(), rel=0.1)
    assert rate == 8.25


def test_bytes_of_a_codec_are_those_of_its_bits() -> None:
    x = vectors(2 * 3 * 256).view(2, 3, 256, D).bfloat16()
    keys, values, stored = Codec("", "other", per_vector(plain(4), plain(3))).run(x, x)
    assert keys.shape == values.shape == x.shape
    assert stored == x.numel() * (4.25 + 3.25) / 8


@pytest.mark.parametrize(
    ("preset", "bits"), [("turboquant_k8v4", 6.25), ("turboquant_4bit_nc", 4.375), ("turboquant_3bit_nc", 3.375)]
)
def test_port_of_lmcache_stores_what_lmcache_stores(preset: str, bits: float) -> None:
    pytest.importorskip("lmcache")
    x = vectors(8 * 3 * 256).view(8, 3, 256, D).bfloat16()
    keys, _, stored = lmcache_codecs.turboquant(preset)(x, x)
    assert 8 * stored / (2 * x.numel()) == bits
    assert error(keys.float(), x.float()) < 0.04
    kept, _, more = lmcache_codecs.turboquant(preset, 2)(x, x)
    assert torch.equal(kept[[0, 1, -2, -1]], x[[0, 1, -2, -1]])
    assert more == stored // 2 + x.numel() * 2  # half of the layers as bf16


def test_norm_correction_of_the_port_keeps_norms() -> None:
    pytest.importorskip("lmcache")
    x = vectors(6 * 2 * 64).view(6, 2, 64, D).bfloat16()
    keys, _, _ = lmcache_codecs.turboquant("turboquant_4bit_nc")(x, x)
    torch.testing.assert_close(keys.float().norm(dim=-1), x.float().norm(dim=-1), rtol=5e-3, atol=0)


def test_fp8_is_a_cast() -> None:
    x = vectors(8 * 16).view(1, 2, 64, D).bfloat16()
    keys, values, stored = lmcache_codecs.fp8(x, x * 2)
    assert torch.equal(keys, x.to(torch.float8_e4m3fn).bfloat16())
    assert torch.equal(values, (x * 2).to(torch.float8_e4m3fn).bfloat16())
    assert stored == 2 * x.numel()
