"""Distortion on real KV cache: SmolLM2-135M, chunks of 256 tokens, head_dim 64."""

import pytest
import torch

from benchmarks.quality.gaussian import distortion
from benchmarks.real_kv import kv_chunks
from tq_offload.spec import CodecSpec


@pytest.fixture(scope="module")
def chunks() -> list[torch.Tensor]:
    found = kv_chunks()
    assert [tuple(c.shape) for c in found] == [(2, 30, 256, 192)] * 4
    return found


@pytest.mark.timeout(600)
def test_default_on_real_kv(chunks: list[torch.Tensor]) -> None:
    key, value, bits = distortion(chunks, CodecSpec(), 64)
    assert key <= 0.0035
    assert value <= 0.0065
    assert 16 / bits >= 3.7


@pytest.mark.timeout(600)
def test_means_and_range_fit_pay(chunks: list[torch.Tensor]) -> None:
    default = distortion(chunks, CodecSpec(), 64)
    no_means = distortion(chunks, CodecSpec(mean=False), 64)
    no_fit = distortion(chunks, CodecSpec(fit_range=False), 64)
    assert default[0] < 0.5 * no_means[0]
    assert default[1] < 0.9 * no_means[1]
    assert all(default[side] < 0.9 * no_fit[side] for side in (0, 1))
