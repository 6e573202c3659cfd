"""Helpers of the benchmarks: sections of a document, quantiles, result files, the rate of a link."""

from __future__ import annotations

import csv
import json
import time
from pathlib import Path

import pytest

from benchmarks.doc_sections import markdown_table, write_section
from benchmarks.samples import Quantiles, write_results
from benchmarks.transfer.link import Rate


def test_only_the_text_between_the_markers_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "doc.md"
    path.write_text("before\n\n<!-- a:begin -->\nold\n<!-- a:end -->\n\nafter\n")
    write_section("a", "new", path)
    assert path.read_text() == "before\n\n<!-- a:begin -->\n\nnew\n\n<!-- a:end -->\n\nafter\n"
    write_section("b", "second", path)
    assert path.read_text().startswith("before\n\n<!-- a:begin -->\n\nnew\n")
    assert path.read_text().endswith("after\n\n<!-- b:begin -->\n\nsecond\n\n<!-- b:end -->\n")
    assert [one.name for one in tmp_path.iterdir()] == ["doc.md"]


def test_a_missing_end_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "doc.md"
    path.write_text("<!-- a:begin -->\nall that follows\n")
    with pytest.raises(ValueError, match="has no"):
        write_section("a", "new", path)
    assert path.read_text() == "<!-- a:begin -->\nall that follows\n"


def test_a_new_document_gets_a_title(tmp_path: Path) -> None:
    write_section("a", "text", tmp_path / "doc.md")
    assert (tmp_path / "doc.md").read_text().startswith("# Benchmarks\n\n<!-- a:begin -->\n\ntext\n")


def test_table() -> None:
    assert markdown_table(["x", "y"], [["a", "1"]]) == ["| x | y |", "| --- | ---: |", "| a | 1 |"]


def test_quantiles() -> None:
    assert Quantiles.of([5, 1, 2, 3, 4, 0]) == Quantiles(1.0, 2.5, 4.0)


def test_results_carry_host_and_versions(tmp_path: Path) -> None:
    write_results("x", {"seed": 1}, [{"way": "a", "put": {"p20": 1, "p50": 2}}, {"way": "b", "extra": 3}], tmp_path)
    content = json.loads((tmp_path / "x.json").read_text())
    assert content["seed"] == 1
    assert content["rows"][0]["put"] == {"p20": 1, "p50": 2}
    with (tmp_path / "x.csv").open() as source:
        rows = list(csv.DictReader(source))
    assert (rows[0]["put.p50"], rows[0]["extra"], rows[1]["extra"]) == ("2", "", "3")
    assert rows[0]["host.cpu"] == content["host"]["cpu"]
    assert rows[0]["version.torch"] == content["versions"]["torch"]


def test_a_rate_is_kept_over_many_small_pieces() -> None:
    rate, start = Rate(1e6), time.monotonic()
    for _ in range(20):
        rate.wait(5000)
    assert time.monotonic() - start >= 0.1 - 0.005
