"""What bench_growth computes: lines through times, its cases, its checks, the peak of a call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from benchmarks.growth import report
from benchmarks.growth.cases import FITTED, SWEEPS, Case, cases, thread_counts
from benchmarks.growth.fit import fit
from benchmarks.growth.memory import Extra
from benchmarks.growth.report import MOST_EXTRA, Result, checks
from benchmarks.growth.result import read
from benchmarks.growth.times import Times
from benchmarks.growth.work import Work
from benchmarks.peak_memory import extra_bytes
from benchmarks.samples import Quantiles, read_results, write_results
from benchmarks.transfer.chunks import Shape

SIZES = [1 << bits for bits in range(20, 28)]
TINY = [Case("layers", layers, Shape("", layers, 1, 64, 64)) for layers in (1, 3)]


def test_a_fixed_cost_and_a_rate_are_found_and_the_slope_is_that_of_the_sizes_where_work_dominates() -> None:
    line = fit(SIZES, [300e-6 + n / 2e9 for n in SIZES])
    assert line.fixed_s == pytest.approx(300e-6)
    assert line.rate == pytest.approx(2e9)
    assert SIZES[line.first - 1] / 2e9 < 9 * 300e-6 <= SIZES[line.first] / 2e9
    assert 0.95 < line.slope < 1


@pytest.mark.parametrize("power", [0.5, 1.0, 1.5, 2.0])
def test_the_slope_is_the_power_of_the_growth(power: float) -> None:
    line = fit(SIZES, [1e-9 * n**power for n in SIZES])
    if power >= 1:
        assert (line.first, line.fixed_s) == (0, pytest.approx(0, abs=1e-9))
    assert line.slope == pytest.approx(power)
    assert line.worst == pytest.approx(0, abs=1e-9)


def test_one_time_off_the_line_is_the_worst() -> None:
    seconds = [n / 1e9 for n in SIZES]
    seconds[-2] *= 1.3
    assert 0.15 < fit(SIZES, seconds).worst < 0.3


def test_three_sizes_are_fitted_even_where_the_fixed_cost_dominates() -> None:
    line = fit(SIZES, [1.0 + n / 1e9 for n in SIZES])
    assert line.first == len(SIZES) - 3
    assert line.slope < 0.9


def test_two_sizes_are_no_line() -> None:
    with pytest.raises(ValueError, match="2 sizes"):
        fit(SIZES[:2], [1.0, 2.0])


def test_threads_go_up_to_one_more_than_there_are_cores() -> None:
    assert thread_counts(1) == [1, 2]
    assert thread_counts(2) == [1, 2, 3]
    assert thread_counts(6) == [1, 2, 4, 6, 7]
    assert thread_counts(200) == [1, 2, 4, 8, 16, 32, 64]


def test_one_thing_grows_in_a_sweep_and_a_short_run_keeps_both_ends() -> None:
    every, short = cases(2), cases(2, short=True)
    assert set(short) < set(every)
    assert len(set(every)) == len(every)
    for sweep in SWEEPS:
        found, kept = ([c for c in some if c.sweep == sweep] for some in (every, short))
        assert [c.nbytes for c in found] == sorted(c.nbytes for c in found)
        assert (kept[0], kept[-1]) == (found[0], found[-1])
        if sweep in FITTED:
            assert len(kept) >= 3
            assert all(c.nbytes * found[0].size == found[0].nbytes * c.size for c in found)


def test_memory_is_bounded_whatever_the_cores() -> None:
    for cores in (1, 2, 64, 1000):
        wanted = cases(cores)
        frames = max(Work.frame_bytes(case) * case.chunks for case in wanted)
        assert max(c.shape.nbytes for c in wanted) + max(c.nbytes for c in wanted) + frames < 1.7 * (1 << 30)


@pytest.mark.parametrize("case", [*TINY, Case("threads", 2, TINY[1].shape, threads=2, chunks=3)], ids=str)
def test_what_is_decoded_is_compared(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    work = Work([*TINY, case])
    work.check(case)
    encode, _ = work.calls(case)
    monkeypatch.setattr(work, "calls", lambda _: (encode, lambda: None))
    with pytest.raises(SystemExit, match="squared error"):
        work.check(case)
    work.close()


def test_chunks_at_once_have_frames_of_their_own() -> None:
    case = Case("threads", 3, TINY[1].shape, chunks=3)
    work = Work([case])
    work.calls(case)[0]()
    first, *others = np.split(work._frames, case.chunks)
    assert first.any()
    assert all((first == other).all() for other in others)
    work.close()


def _result(powers: tuple[float, float], extra: Sequence[int]) -> Result:
    """Times that grow with those powers, for encoding and decoding, and extra bytes: the last case has other ones."""
    wanted = cases(1)
    times = {c: Times(*(Quantiles(*[1e-9 * c.nbytes**power] * 3) for power in (*powers, *powers))) for c in wanted}
    return Result(times, {c: Extra(0, extra[c is wanted[-1]]) for c in wanted} if extra else {}, 3, 1.0, (0.0, 0.0))


def test_times_in_proportion_and_little_memory_meet_the_checks() -> None:
    held = checks(_result((1.0, 1.05), (4096, MOST_EXTRA)))
    assert len(held) == 2 * len(FITTED) + 2
    assert all(one.passed for one in held)


def test_a_time_that_grows_faster_is_missed_in_its_direction_only() -> None:
    missed = [one.name for one in checks(_result((1.0, 1.3), (0, 0))) if not one.passed]
    assert len(missed) == len(FITTED)
    assert all(name.startswith("decode") for name in missed)


def test_waits_for_a_core_are_not_growth() -> None:
    result = _result((1.0, 1.0), ())
    slow = {case: replace(t, encode=Quantiles(*[case.nbytes**2.0] * 3)) for case, t in result.times.items()}
    assert all(one.passed for one in checks(replace(result, times=slow)))


def test_one_size_above_the_bound_of_memory_is_missed_and_named() -> None:
    (missed,) = [one for one in checks(_result((1.0, 1.0), (0, MOST_EXTRA + 4096))) if not one.passed]
    assert missed.name.startswith("decode: at most 2 MiB")
    assert SWEEPS[-1] in missed.seen


def test_memory_that_cannot_be_measured_is_not_checked() -> None:
    assert not any("MiB" in one.name for one in checks(_result((1.0, 1.0), ())))


@pytest.mark.parametrize("extra", [(0, 4096), ()])
def test_the_section_and_the_plots_are_made_from_the_results_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, extra: Sequence[int]
) -> None:
    result = _result((1.0, 1.0), extra)
    monkeypatch.setattr(report, "write_results", partial(write_results, folder=tmp_path))
    report.write(result, checks(result))
    files = {"growth": read_results("growth", tmp_path)}
    assert read(files["growth"]) == result
    text = report.section(files)
    assert "* met: encode, tokens from " in text
    assert ("growth-memory.svg" in text) == ("growth-memory" in report.plots(files)) == bool(extra)


def test_the_peak_of_a_call_is_what_it_takes_for_a_while() -> None:
    seen = extra_bytes(lambda: np.ones(64 << 20, np.uint8).sum())
    if seen is None:
        pytest.skip("the kernel does not let the peak be reset")
    assert 60 << 20 < seen < 80 << 20
