"""The planner's predictions of measured loads: what is read, what is added, what misses."""

from __future__ import annotations

import copy
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.planner import SMOLLM2, CodecRate
from benchmarks.planner_ttft import CHECKED, DELIVERIES, Measured, Prediction, checks, gains, off, predict, read_runs
from benchmarks.planner_ttft_report import Against, as_json, markdown, read, tables
from benchmarks.samples import RESULTS
from benchmarks.ttft.measure import Hits, Run
from benchmarks.ttft.ways import WAYS

CHUNKS = 3
TOKENS = 256 * CHUNKS + 1
RAW = 256 * CHUNKS * SMOLLM2.raw_bytes
PACKED = 256 * CHUNKS * SMOLLM2.frame_bytes()
MBIT = {"100 Mbit/s": 80.0, "1 Gbit/s": 800.0, "unshaped": 8000.0}
LINK = {name: mbit * 1e6 / 8 for name, mbit in MBIT.items()}
FIXED, DELIVERY, DECODE, FP8 = 0.05, 0.02, {1: 1e9, 2: 1.8e9}, {1: 0.5e9}
RATES = {"turboquant": CodecRate(DECODE, "test"), "fp8": CodecRate(FP8, "test")}


def _hits(seconds: float, sent: float = 0) -> Hits:
    """Three of them; the median is what is said, and the others are off to both sides."""
    return Hits([FIXED + seconds + more for more in (-0.001, 0, 0.009)], [TOKENS - 1] * 3, [int(sent)] * 3)


def _run(name: str, stored: float, decode: float, *, delivery: float = DELIVERY) -> Run:
    """A way that is exactly the model: link, decoding, and a delivery."""
    hits = {f"redis {link}": _hits(delivery + stored / speed + decode, stored) for link, speed in LINK.items()}
    return Run(WAYS[name], TOKENS, 1.0, _hits(0), {"ram": _hits(delivery), "disk": _hits(2 * delivery), **hits})


def _measured(**other: Run) -> Measured:
    runs = {
        "naive": _run("naive", RAW, 0),
        "turboquant": _run("turboquant", PACKED, RAW / DECODE[2]),
        "mp-naive": _run("mp-naive", RAW, 0),
        "mp-fp8": _run("mp-fp8", RAW / 2, RAW / FP8[1]),
    }
    return Measured("a CPU", 2, MBIT, {name: [run] for name, run in (runs | other).items()})


def _written(measured: Measured, path: Path) -> dict[str, Any]:
    content: dict[str, Any] = {
        "host": {"cpu": measured.cpu, "cores": measured.cores, "python": "3.11.7"},
        "link": {"how": "tc", "measured_mbit": dict(measured.mbit)},
        "runs": {name: [asdict(run) for run in found] for name, found in measured.runs.items()},
    }
    path.write_text(json.dumps(content))
    return content


def test_what_bench_ttft_writes_is_read_back(tmp_path: Path) -> None:
    _written(_measured(), tmp_path / "ttft.json")
    assert read_runs(tmp_path / "ttft.json") == _measured()


def test_the_results_in_the_repository_are_read_and_every_load_of_them_is_predicted() -> None:
    measured = read_runs(RESULTS / "ttft.json")
    found = predict(measured, RATES)
    runs = [run for ways in measured.runs.values() for run in ways]
    assert len(found) == sum(place.startswith("redis ") for run in runs for place in run.hits) > 0
    for one in found:
        assert one.stored == pytest.approx(one.sent, rel=0.01)
        assert one.measured > 0
        assert all(seconds > 0 for seconds in one.seconds.values())


@pytest.mark.parametrize("missing", ["host", "link", "runs"])
def test_another_file_is_refused_and_named(tmp_path: Path, missing: str) -> None:
    content, path = _written(_measured(), tmp_path / "ttft.json"), tmp_path / "ttft.json"
    path.write_text(json.dumps({key: value for key, value in content.items() if key != missing}))
    with pytest.raises(SystemExit, match=r"ttft\.json: not what bench_ttft writes"):
        read_runs(path)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"host": 1, "link": 2, "runs": 3}'])
def test_what_is_no_result_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "ttft.json"
    path.write_text(text)
    with pytest.raises(SystemExit, match="not what bench_ttft writes"):
        read_runs(path)


def test_a_run_with_an_unknown_field_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ttft.json"
    content = copy.deepcopy(_written(_measured(), path))
    content["runs"]["naive"][0]["fixed"]["more"] = 1
    path.write_text(json.dumps(content))
    with pytest.raises(SystemExit, match="not what bench_ttft writes"):
        read_runs(path)


def test_a_load_is_link_and_decoding_and_what_naive_pays_elsewhere() -> None:
    by = {(p.way.label, p.link): p for p in predict(_measured(), RATES)}
    naive, ours = (by[WAYS[name].label, "1 Gbit/s"] for name in ("naive", "turboquant"))
    assert naive.seconds["none"] == pytest.approx(RAW / 1e8)
    assert ours.seconds["none"] == pytest.approx(PACKED / 1e8 + RAW / DECODE[2])
    fp8 = by[WAYS["mp-fp8"].label, "1 Gbit/s"]
    assert fp8.seconds["none"] == pytest.approx(RAW / 2 / 1e8 + RAW / FP8[1])
    for one in by.values():
        for delivery in set(one.seconds) - {"none"}:
            assert one.seconds[delivery] - one.seconds["none"] == pytest.approx(DELIVERY)
            assert one.ratio(delivery) == pytest.approx(1)


def test_one_chunk_is_decoded_by_one_thread() -> None:
    measured = _measured()
    short = replace(measured.runs["turboquant"][0], tokens=257)
    (one, *_) = predict(replace(measured, runs={"turboquant": [short]}), RATES)
    nbytes = 256 * SMOLLM2.raw_bytes
    assert one.seconds["none"] == pytest.approx(256 * SMOLLM2.frame_bytes() / LINK["100 Mbit/s"] + nbytes / DECODE[1])


def test_nothing_of_a_load_is_in_its_own_prediction() -> None:
    """Other times of every shaped load, and of all of ours, change no prediction; those of naive's CPU RAM do."""
    before, measured = predict(_measured(), RATES), _measured()
    slow = {}
    for name, (run,) in measured.runs.items():
        theirs = {
            place: _hits(7.0) if "bit/s" in place or run.way.serde != "naive" else h for place, h in run.hits.items()
        }
        slow[name] = [replace(run, hits=theirs)]
    after = predict(replace(measured, runs=slow), RATES)
    assert [p.seconds for p in after] == [p.seconds for p in before]
    naive = _run("naive", RAW, 0, delivery=3.0)
    changed = predict(_measured(naive=naive), RATES)
    assert [p.seconds for p in changed] != [p.seconds for p in before]


def test_the_unshaped_load_of_naive_does_not_predict_itself() -> None:
    unshaped = {p.way.serde: p for p in predict(_measured(), RATES) if p.link == "unshaped"}
    assert set(unshaped["naive"].seconds) == {"none", "ram"}
    assert set(unshaped["turboquant"].seconds) == set(DELIVERIES)


def test_without_naive_in_the_mode_only_the_plain_arithmetic_is_left_and_nothing_is_checked() -> None:
    measured = _measured()
    found = predict(replace(measured, runs={"turboquant": measured.runs["turboquant"]}), RATES)
    assert {name for p in found for name in p.seconds} == {"none"}
    assert checks(found) == []
    assert gains(found) == []


def test_a_way_whose_decoding_is_not_known_is_left_out() -> None:
    found = predict(_measured(), {"turboquant": RATES["turboquant"]})
    assert {p.way.serde for p in found} == {"naive", "turboquant"}


def test_the_ratio_of_both_is_that_of_their_seconds() -> None:
    found = predict(_measured(), RATES)
    (gain,) = [g for g in gains(found) if g.link == "100 Mbit/s"]
    seconds = DELIVERY + RAW / 1e7, DELIVERY + PACKED / 1e7 + RAW / DECODE[2]
    assert gain.mode == "in-process"
    assert gain.measured == pytest.approx(seconds[0] / seconds[1])
    assert gain.predicted[CHECKED] == pytest.approx(gain.measured)


def test_off_counts_both_sides() -> None:
    assert off([0.74, 0.76, 1.0, 1.24, 1.26]) == 2


def _changed(found: list[Prediction], serde: str, link: str, factor: float) -> list[Prediction]:
    return [replace(p, measured=p.measured * factor) if (p.way.serde, p.link) == (serde, link) else p for p in found]


def test_predictions_that_hold_meet_every_check() -> None:
    held = checks(predict(_measured(), RATES))
    assert len(held) == 2 * 3 + 1
    assert all(one.passed for one in held)


@pytest.mark.parametrize("factor", [0.7, 1.5])
def test_a_load_far_off_is_missed_and_named(factor: float) -> None:
    found = _changed(predict(_measured(), RATES), "turboquant", "1 Gbit/s", factor)
    missed = [one for one in checks(found) if not one.passed]
    assert missed[0].name == "Redis at 1 Gbit/s, TQ-Offload: every load predicted within 25%"
    assert f"{WAYS['turboquant'].label}, {TOKENS:,} tokens: {1 / factor:.2f}" in missed[0].seen


@pytest.mark.parametrize(("serde", "link"), [("naive", "unshaped"), ("fp8", "1 Gbit/s")])
def test_the_unshaped_link_and_fp8_are_shown_and_not_checked(serde: str, link: str) -> None:
    found = _changed(predict(_measured(), RATES), serde, link, 3.0)
    assert any(off([p.ratio(CHECKED)]) for p in found)
    assert all(one.passed for one in checks(found))


def test_other_bytes_than_predicted_are_missed() -> None:
    found = [replace(p, sent=int(1.02 * p.sent)) for p in predict(_measured(), RATES)]
    assert [one.name for one in checks(found) if not one.passed] == ["bytes from Redis predicted within 1%"]


def _against(measured: Measured) -> Against:
    found = predict(measured, RATES)
    return Against("ttft.json", measured, found, checks(found), "words")


def test_the_report_has_every_load_says_what_misses_and_names_another_host() -> None:
    slow = _run("turboquant", PACKED, RAW / DECODE[2], delivery=DELIVERY + 0.05)
    against = _against(_measured(turboquant=slow))
    text, found = "\n".join(markdown(against)), as_json(against)
    assert len(tables(against)) == 3
    assert len(found["loads"]) == len(against.predictions) == 4 * 3
    assert all(set(row["ratio"]) == set(row["predicted_s"]) for row in found["loads"])
    assert "MISSED: Redis at 1 Gbit/s, TQ-Offload" in text
    assert "* Beyond, + naive's hit from CPU RAM: TQ-Offload, in-process" in text
    assert found["other_host"]
    assert "another host (a CPU)" in text


def test_the_part_of_the_section_is_made_from_the_results_file() -> None:
    against = _against(_measured())
    results = {"host": {"cpu": "another CPU"}, "against_ttft": json.loads(json.dumps(as_json(against)))}
    again = read(results)
    assert (
        again.other_host == "The runs are of another host (a CPU) than decoding (another CPU): no one machine has both."
    )
    assert markdown(again) == markdown(replace(against, cpu="another CPU"))


def test_on_the_same_host_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.planner_ttft_report.where", lambda: {"host": {"cpu": "a CPU"}})
    against = _against(_measured())
    assert against.other_host == ""
    assert "another host" not in "\n".join(markdown(against))
