"""Sections of docs/benchmarks.md, README's tables and plots are what the files in benchmarks/results give."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks import demo_report, render_docs
from benchmarks.doc_sections import paragraph
from benchmarks.samples import RESULTS


@pytest.mark.parametrize("name", render_docs.SECTIONS)
def test_what_is_committed_is_what_the_results_give(name: str) -> None:
    assert list(render_docs.differences([name])) == []


def test_results_name_no_path_of_the_machine_that_wrote_them() -> None:
    for path in sorted(RESULTS.glob("*.*")):
        found = re.findall(r"(?:^|[\s\"'=(:])(/(?:[\w.-]+/)+)", path.read_text(encoding="utf-8"))
        assert found == [], path.name


def test_readme_has_no_figure_of_a_benchmark_outside_the_sections() -> None:
    text = render_docs.README.read_text(encoding="utf-8")
    outside = re.sub(r"<!-- ([\w-]+):begin -->.*?<!-- \1:end -->", "", text, flags=re.DOTALL)
    assert outside.count(":begin -->") == 0
    found = [line for line in outside.splitlines() if re.search(r"\d ?(×|%|GB/s|times)", line)]
    assert [line for line in found if "about 4× smaller" not in line] == []


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The documents, plots and results in a folder of their own."""
    for name in ("DOCUMENT", "README"):
        shutil.copy(getattr(render_docs, name), tmp_path)
        monkeypatch.setattr(render_docs, name, tmp_path / getattr(render_docs, name).name)
    for plot in render_docs.DOCS.glob("*.svg"):
        shutil.copy(plot, tmp_path)
    monkeypatch.setattr(render_docs, "DOCS", tmp_path)
    return tmp_path


@pytest.mark.parametrize("document", ["benchmarks.md", "README.md", "capacity-hit-rate.svg"])
def test_a_figure_changed_by_hand_is_found_and_written_anew(copy: Path, document: str) -> None:
    path = copy / document
    before = path.read_text(encoding="utf-8")
    old = "unlimited" if document.endswith("svg") else "9,787 requests"
    changed = before.replace("9,787\nrequests", "9,787 requests").replace(old, "10,787 requests")
    assert changed != before
    path.write_text(changed, encoding="utf-8")
    assert [line.split(",")[0].split(":")[0] for line in render_docs.differences(["capacity"])] == [document]
    assert render_docs.main(["--check", "capacity"]) == 1
    assert path.read_text(encoding="utf-8") == changed
    assert render_docs.main(["capacity"]) == 0
    assert path.read_text(encoding="utf-8") == before
    assert render_docs.main(["--check", "capacity"]) == 0


def test_a_plot_of_another_matplotlib_is_left_alone_and_a_missing_one_is_not(copy: Path) -> None:
    path = copy / "capacity-hit-rate.svg"
    path.write_bytes(path.read_bytes().replace(b"Matplotlib v", b"Matplotlib v0.").replace(b"unlimited", b"other"))
    assert list(render_docs.differences(["capacity"])) == []
    path.unlink()
    assert list(render_docs.differences(["capacity"])) == ["capacity-hit-rate.svg: missing"]


def test_a_missing_results_file_or_section_is_named(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    render_docs.DOCUMENT.write_text("# Benchmarks\n", encoding="utf-8")
    assert "benchmarks.md: no section capacity" in list(render_docs.differences(["capacity"]))
    monkeypatch.setattr(render_docs, "SECTIONS", {"x": render_docs.Section("benchmarks.put_report", ("absent",))})
    (line,) = render_docs.differences(["x"])
    assert line.startswith("x: ")
    assert line.endswith("absent.json is missing")


def test_tables_of_the_demos() -> None:
    def run(nbytes: int) -> dict[str, Any]:
        hits = [{"ttft_s": s} for s in (1.0, 3.0, 2.0)]
        return {
            "stored": {"bytes": nbytes},
            "hits": hits,
            "hit_tokens": [1536] * 3,
            "cold": {"ttft_s": 40.0, "prompt_tokens": 1600},
        }

    place = {"host": {"cpu": "a CPU", "cores": 2}, "versions": {}}
    demo = {**place, "runs": {"naive": run(4000), "turboquant": run(1000)}}
    held = {tier: {"bytes": 1000} for tier in ("ram", "disk", "redis")}
    runs = {
        "naive": {"held": held, "after_restart": {"disk": {"tokens": 0}}},
        "turboquant": {"held": held, "after_restart": {"disk": {"tokens": 1536}}},
    }
    tiers = {
        **place,
        "modes": {"in-process": {"uncompressed": {"ram": 4000, "disk": 4000, "redis": 5000}, "runs": runs}},
    }
    texts = demo_report.readme({"demo": demo, "tiers": tiers})
    assert "| turboquant | 1,000 | 4.00× | 1,536 | 40.0 s | 2.00 s (1.00–3.00) |" in texts["demo"]
    assert "| disk (allocated blocks) | 4,000 | 1,000 | 4.00× | 0 / 1,536 |" in texts["tiers"]
    assert "| Redis (`MEMORY USAGE`) | 5,000 | 1,000 | 5.00× |  |" in texts["tiers"]
    assert list(demo_report.readme({"demo": demo})) == ["demo"]


def test_a_paragraph_breaks_no_code() -> None:
    lines = paragraph("a " * 55, "`make bench-all`", "b " * 55).split("\n")
    assert max(map(len, lines)) <= 118
    assert sum("`make bench-all`" in line for line in lines) == 1
