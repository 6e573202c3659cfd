"""The guard on SmolLM2-135M, as it is and with biased keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from check.biased import add_key_bias
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.model import prepare_model
from tq_offload.check.guard import check_model
from tq_offload.check.report import Report
from tq_offload.check.sample import Sample, default_text
from tq_offload.spec import PRESETS

FOUR_BITS = [name for name, spec in PRESETS.items() if spec.key_bits == spec.value_bits == 4]
SAMPLE = Sample(prefix=512, tokens=128)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def load() -> tuple[Any, Any]:
    folder = prepare_model()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(folder)


def check(kind: Any = None) -> Report:
    model, tokenizer = load()
    if kind is not None:
        ids = tokenizer(default_text(), return_tensors="pt").input_ids
        add_key_bias(model, ids[:, -256:], 20, kind)
    return check_model(model, tokenizer, presets=FOUR_BITS, sample=SAMPLE)


def test_plain_keys_need_no_outlier_channels() -> None:
    report = check()
    assert report.recommended is not None
    result = report.result(report.recommended)
    assert result.spec.key_outliers == 0
    assert 0.001 < result.kl < 0.004
    assert report.findings == []
    assert 20 < report.perplexity < 45


def test_biases_that_turn_need_them() -> None:
    report = check("any")
    assert report.recommended is not None
    assert report.result(report.recommended).spec.key_outliers > 0
    assert all(r.kl > 0.1 for r in report.presets if r.spec.key_outliers == 0)
    assert len(report.findings) == 30
    assert any("change from token to token" in line for line in report.findings)
    assert 20 < report.perplexity < 100


def test_constant_biases_are_found_and_outlier_channels_pay() -> None:
    report = check("low")
    assert len(report.findings) == 30
    assert all("constant over a chunk" in line for line in report.findings)
    plain = [r.kl for r in report.presets if r.spec.key_outliers == 0]
    robust = [r.kl for r in report.presets if r.spec.key_outliers > 0]
    assert max(robust) < 0.5 * min(plain)
    assert report.recommended is not None
    assert report.result(report.recommended).spec.key_outliers > 0
