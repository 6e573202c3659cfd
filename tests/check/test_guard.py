"""`check_model` on tiny random models."""

from __future__ import annotations

import json

import pytest
import torch
from packed_support import ids, packed, small_llama, text, word_tokenizer
from support import one_torch_thread as one_torch_thread

from tq_offload.check.guard import check_model
from tq_offload.check.memory import project
from tq_offload.check.profile import findings, profile
from tq_offload.check.report import Bounds, Report
from tq_offload.check.sample import Sample
from tq_offload.check.scoring import Window
from tq_offload.errors import CheckError, ConfigError
from tq_offload.spec import PRESETS, CodecSpec

SAMPLE = Sample(prefix=128, tokens=300)
LOOSE = Bounds(kl=1e6, perplexity=1e6)


@pytest.fixture(scope="module")
def report() -> Report:
    return check_model(small_llama(), text=ids(600), bounds=LOOSE, sample=SAMPLE, chunk_tokens=64)


def test_every_preset_cheapest_first(report: Report) -> None:
    assert {r.name for r in report.presets} == set(PRESETS)
    bits = [r.bits for r in report.presets]
    assert bits == sorted(bits)
    assert report.windows == 2
    assert report.shapes == [(2, 64)] * 3
    for r in report.presets:
        assert r.spec == PRESETS[r.name]
        assert r.kl > 0
        assert r.kl_error > 0
        assert [e.layer for e in r.layers] == [0, 1, 2]
        assert r.fits
    assert report.recommended == report.presets[0].name
    assert report.best == min(report.presets, key=lambda r: r.kl).name


def test_more_bits_mean_less_error() -> None:
    specs = {str(b): CodecSpec(b, b) for b in (2, 4, 8)}
    report = check_model(small_llama(), text=ids(600), presets=specs, bounds=LOOSE, sample=SAMPLE)
    kl = [r.kl for r in report.presets]
    assert kl[0] > 3 * kl[1] > 9 * kl[2] > 0
    attention = [r.layers[1].attention for r in report.presets]
    assert attention[0] > 2 * attention[1] > 4 * attention[2] > 0


def test_bounds_choose_the_cheapest_that_fits_and_none_where_none_does() -> None:
    specs = {"eight": CodecSpec(8, 8), "four": CodecSpec(), "six": CodecSpec(6, 6)}

    def run(kl: float) -> Report:
        bounds = Bounds(kl, 1e6)
        return check_model(small_llama(), text=ids(600), presets=specs, bounds=bounds, sample=SAMPLE)

    first = run(1e6)
    assert [r.name for r in first.presets] == ["four", "six", "eight"]
    assert first.recommended == "four"
    four, six, eight = (r.kl for r in first.presets)
    assert run((four + six) / 2).recommended == "six"
    none = run(eight / 2)
    assert none.recommended is None
    assert none.best == "eight"
    assert none.memory[0].stored == pytest.approx(2 * 3 * 2 * 64 * 1024 * none.result("eight").bits / 8, abs=1)


def test_the_perplexity_counts_in_both_directions() -> None:
    bounds = Bounds(1e6, 1e-9)
    report = check_model(small_llama(), text=ids(600), presets=["turboquant"], bounds=bounds, sample=SAMPLE)
    assert report.recommended is None
    assert abs(report.presets[0].perplexity) > 1e-9


def test_a_text_and_its_tokens_are_the_same(report: Report) -> None:
    words = text(600)
    again = check_model(
        small_llama(), word_tokenizer(), words, ["turboquant"], bounds=LOOSE, sample=SAMPLE, chunk_tokens=64
    )
    assert again.presets[0].kl == pytest.approx(report.result("turboquant").kl)


def test_json_holds_everything(report: Report) -> None:
    found = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert found["presets"][0]["spec"]["key_bits"] in range(1, 9)
    assert len(found["profile"]) == len(found["presets"][0]["layers"]) == 3
    assert found["recommended"] == report.recommended


@pytest.mark.parametrize(
    ("settings", "error", "match"),
    [
        ({"presets": ["turboquant", "x"]}, ConfigError, "--preset='x' is not understood"),
        ({"presets": []}, CheckError, "no preset"),
        ({"text": ids(100)}, CheckError, "give a longer text"),
        ({"text": "w3 w4"}, CheckError, "a tokenizer is needed"),
        ({"chunk_tokens": 0}, CheckError, "--chunk-tokens 0"),
        ({"sample": Sample(8192, 300)}, CheckError, "lower --prefix"),
    ],
)
def test_what_cannot_be_checked(settings: dict[str, object], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        check_model(small_llama(), **{"text": ids(600), "sample": SAMPLE, **settings})  # type: ignore[arg-type]


@pytest.mark.parametrize("bounds", [(0.0, 1.0), (1.0, -1.0), (float("nan"), 1.0)])
def test_bounds_are_positive(bounds: tuple[float, float]) -> None:
    with pytest.raises(CheckError, match="a number above 0"):
        Bounds(*bounds)


def test_a_constant_bias_and_one_that_turns_are_named_and_told_apart() -> None:
    model = small_llama()
    window = Window(model, ids(300), 256)
    assert findings(profile(window)) == []
    constant, turning = window.keys[0].clone(), window.keys[1].clone()
    constant[..., :4] += 500
    turning[..., :4] += 500 * torch.sin(torch.arange(256.0))[:, None]
    window.keys = [constant, turning, window.keys[2]]
    lines = findings(profile(window))
    assert len(lines) == 2
    (steady,) = (line for line in lines if line.startswith("layer 0: "))
    (moving,) = (line for line in lines if line.startswith("layer 1: "))
    assert "of key energy lies in 4 of 64 channels" in steady
    assert "constant over a chunk" in steady
    assert "change from token to token" in moving
    keys = profile(window)[0].keys
    assert keys.mean_norm == pytest.approx(1000, rel=0.05)
    assert keys.norm == pytest.approx(1000, rel=0.05)


def test_projected_bytes_are_those_of_the_packed_cache() -> None:
    from transformers import DynamicCache

    from tq_offload.kv_cache import TurboQuantCache, resident_bytes

    model = small_llama(dtype=torch.bfloat16)
    sizes = {}
    for cache in (DynamicCache(config=model.config), TurboQuantCache(config=model.config)):
        with torch.no_grad():
            model(ids(2048), past_key_values=cache, use_cache=True, logits_to_keep=1)
        sizes[type(cache).__name__] = resident_bytes(packed(cache))
    report = check_model(model.float(), text=ids(600), presets=["turboquant"], sample=Sample(256, 16))
    (row,) = project(report.shapes, report.presets[0].bits, 256, [2048])
    assert row.bf16 == sizes["DynamicCache"]
    assert row.packed == pytest.approx(sizes["TurboQuantCache"], rel=0.04)
    assert row.stored == pytest.approx(row.bf16 * report.presets[0].bits / 16, abs=1)
    assert [r.stored for r in project([(2, 64)], 4.0, 256, [255, 256, 511])] == [0, 32768, 32768]
