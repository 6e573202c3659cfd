"""Options of the benchmarks that are not understood: what is allowed, and nothing is measured."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from benchmarks import bench_capacity, bench_codec, bench_model, bench_put, bench_transfer, bench_ttft
from benchmarks.samples import numbers

CAPACITY = "0.125 to 1.04858e+06"
WRONG = [
    (bench_capacity, "--ram-gb", "0", CAPACITY),
    (bench_capacity, "--ram-gb", "nan", CAPACITY),
    (bench_capacity, "--disk-gb", "-1", CAPACITY),
    (bench_capacity, "--disk-gb", "inf", CAPACITY),
    (bench_capacity, "--ram-gb", "much", "valid"),
    (bench_capacity, "--budgets", "4,0", CAPACITY),
    (bench_capacity, "--budgets", "4,,8", CAPACITY),
    (bench_capacity, "--budgets", "nan", CAPACITY),
    (bench_model, "--tokens", "8192,0", "whole numbers from 1"),
    (bench_model, "--threads", "1.5", "whole numbers from 1"),
    (bench_transfer, "--chunks", "-2", "0"),
    (bench_ttft, "--lengths", "500,x", "whole numbers from 1"),
    (bench_ttft, "--rates", "-1", "numbers from 0"),
]


@pytest.mark.parametrize(("bench", "option", "value", "allowed"), WRONG)
def test_typer(bench: Any, option: str, value: str, allowed: str) -> None:
    app = typer.Typer(rich_markup_mode=None)
    app.command()(bench.main)
    result = CliRunner().invoke(app, [f"{option}={value}"])
    assert (result.exit_code, result.exception.__class__) == (2, SystemExit)
    assert option in result.output
    assert allowed in result.output


@pytest.mark.parametrize(
    ("bench", "option", "value"),
    [(bench_codec, "--tokens", "0"), (bench_put, "--rounds", "2"), (bench_put, "--chunks", "0")],
)
def test_argparse(
    bench: Any, option: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", option, value])
    with pytest.raises(SystemExit) as caught:
        bench.main()
    assert caught.value.code == 2
    assert f"argument {option}: invalid whole number from " in capsys.readouterr().err


def test_numbers_within_bounds() -> None:
    assert numbers("4,0.5", "--budgets", float, 0.125) == [4.0, 0.5]
    assert numbers("1, 8", "--threads", int, 1) == [1, 8]
