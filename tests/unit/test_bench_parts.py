"""Helpers of the benchmarks: sections of a document, quantiles, result files, the rate of a link."""

from __future__ import annotations

import csv
import errno
import json
import socket
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import shaped_link
from benchmarks.doc_sections import markdown_table, write_section
from benchmarks.samples import Quantiles, write_results
from benchmarks.shaped_link import BURST_S, Bucket, Forwarder


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
    bucket, start = Bucket(1e6), time.monotonic()
    for _ in range(20):
        bucket.spend(5000)
    assert time.monotonic() - start >= 0.1 - BURST_S


@pytest.mark.parametrize("late", [0.0, 0.03])
def test_late_wake_ups_are_made_good_and_pauses_of_the_sender_are_not(
    monkeypatch: pytest.MonkeyPatch, late: float
) -> None:
    now = [100.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds + late

    monkeypatch.setattr(shaped_link, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    bucket = Bucket(1e6)
    for _ in range(100):
        bucket.spend(4000)
    assert 0.4 - BURST_S <= now[0] - 100.0 + 1e-9 <= 0.4 + late
    now[0] += 5  # nothing to send
    idle = now[0]
    for _ in range(100):
        bucket.spend(4000)
    assert 0.4 - BURST_S - late <= now[0] - idle + 1e-9 <= 0.4 + late


def test_a_bucket_without_a_rate_does_not_wait_and_one_with_a_rate_asks_for_no_more_than_a_burst() -> None:
    bucket, start = Bucket(), time.monotonic()
    bucket.spend(1 << 40)
    assert time.monotonic() - start < 1
    bucket.rate = 1e6
    assert bucket.most() == 1e6 * BURST_S


def test_a_forwarder_keeps_to_its_rate_both_ways_and_ends_with_its_connections() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, Forwarder(listener.getsockname()[1]) as link:
        link.shape(8)  # 1 MB a second
        with socket.create_connection((link.host, link.port), timeout=10) as near, listener.accept()[0] as far:
            for source, target in ((near, far), (far, near)):
                start = time.monotonic()
                source.sendall(bytes(100_000))
                with target.makefile("rb") as stream:
                    assert len(stream.read(100_000)) == 100_000
                assert time.monotonic() - start >= 0.1 - BURST_S
            link.__exit__()
            assert near.recv(1) == b""


def test_a_forwarder_without_file_descriptors_pauses_says_so_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    failed: list[float] = []
    lines: list[str] = []

    class Listener(socket.socket):
        def accept(self) -> tuple[socket.socket, object]:
            if len(failed) < 3:
                failed.append(time.monotonic())
                raise OSError(errno.EMFILE, "Too many open files")
            return super().accept()

    with socket.create_server(("127.0.0.1", 0)) as target:
        link = Forwarder(target.getsockname()[1])
        monkeypatch.setattr(link, "_listener", Listener(fileno=link._listener.detach()))
        monkeypatch.setattr(link._log, "warning", lambda _, line: lines.append(line))
        with link, socket.create_connection((link.host, link.port), timeout=10) as near, target.accept()[0] as far:
            near.sendall(b"x")
            assert far.recv(1) == b"x"
    assert all(later - before >= 0.04 for before, later in pairwise(failed))
    assert lines == ["the link accepts no connection: [Errno 24] Too many open files"] * 3
