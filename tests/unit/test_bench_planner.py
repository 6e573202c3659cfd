"""The planner's arithmetic: bytes a token, load times, break-even, rates by threads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.bench_model import read_rates
from benchmarks.planner import CHUNK_TOKENS, LINKS, MODELS, CodecRate, Model, break_even, load_seconds, scaled
from benchmarks.planner_report import Plan
from tq_offload.spec import CodecSpec


@pytest.mark.parametrize(
    ("name", "nbytes"),
    [
        ("Llama-3.1-8B", 131072),
        ("Qwen3-8B", 147456),
        ("Qwen3-32B", 262144),
        ("Llama-3.3-70B", 327680),
        ("DeepSeek-V3", 70272),
    ],
)
def test_bytes_a_token_as_they_are(name: str, nbytes: int) -> None:
    model = next(one for one in MODELS if one.name == name)
    assert model.raw_bytes == nbytes
    assert model.layout().nbytes == nbytes * CHUNK_TOKENS
    assert 3.7 < nbytes / model.frame_bytes() < 4
    assert model.frame_bytes(CodecSpec(8, 8)) > 1.9 * model.frame_bytes()


def test_a_load_is_the_bytes_over_the_link_and_then_the_decoding() -> None:
    assert load_seconds(400.0, 400.0, 100.0) == 4.0
    assert load_seconds(400.0, 100.0, 100.0, 200.0) == 1.0 + 2.0


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_at_the_break_even_both_take_as_long_and_below_it_packed_is_sooner(model: Model) -> None:
    raw, stored, decode = model.raw_bytes, model.frame_bytes(), 2e9
    link = break_even(raw, stored, decode)
    assert load_seconds(raw, stored, link, decode) == pytest.approx(load_seconds(raw, raw, link))
    assert load_seconds(raw, stored, link / 2, decode) < load_seconds(raw, raw, link / 2)
    assert load_seconds(raw, stored, link * 2, decode) > load_seconds(raw, raw, link * 2)


def test_rates_are_those_measured_and_more_threads_scale_from_the_most_measured() -> None:
    rate = CodecRate({1: 3.0, 2: 5.0}, "measured")
    assert [rate.rate(n) for n in (1, 2, 4)] == [3.0, 5.0, scaled(5.0, 2, 4)] == [3.0, 5.0, 10.0]
    assert rate.measured(2)
    assert not rate.measured(4)


def test_links_are_bytes_a_second() -> None:
    assert LINKS["100 Mbit/s"] == 12.5e6
    assert LINKS["10 Gbit/s"] == 1.25e9


def test_a_plan_multiplies_by_the_tokens_and_takes_the_rate_of_the_vectors() -> None:
    model = MODELS[-1]
    plan = Plan([model], {128: CodecRate({1: 9e9}, ""), 576: CodecRate({1: 1e9}, "")}, [1000], [1])
    naive, packed = plan.loads(model, 1000, 1e8, 1)
    assert naive == pytest.approx(0.70272)
    assert packed == pytest.approx(1000 * model.frame_bytes() / 1e8 + 0.070272)


def test_rates_of_bench_codec_are_read(tmp_path: Path) -> None:
    medians = {
        "turboquant encode": 1.0,
        "turboquant decode": 2.0,
        "turboquant, 2 threads decode": 3.0,
        "fp8 decode": 4.0,
    }
    results = [{"method": method, "median": median} for method, median in medians.items()]
    path = tmp_path / "codec.json"
    path.write_text(json.dumps({"settings": {"head_dim": 64, "threads": 2}, "rows": results}))
    assert dict(read_rates(path)[64].by_threads) == {1: 2e9, 2: 3e9}
    path.write_text(json.dumps({"settings": {"head_dim": 64}, "rows": results[2:]}))
    with pytest.raises(SystemExit, match="one thread"):
        read_rates(path)
