"""Sections of docs/benchmarks.md, tables of README.md and plots, from the results files alone; nothing is measured.

usage: python -m benchmarks.render_docs [--check] [NAME ...]

NAME is a section (all). `--check` writes nothing and fails where what is there differs from what the files give.
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.doc_sections import DOCUMENT, README, with_section, write_section
from benchmarks.samples import DOCS, RESULTS, read_results, svg

__all__ = ["SECTIONS", "Section", "differences", "main", "update"]


@dataclass(frozen=True)
class Section:
    """What a benchmark writes.

    Args:
        module: Has `section(files)`: Markdown; `readme(files)`: tables of README.md by name; `plots(files)`: figures by
            name. Each may be absent. `files` are the contents of the results files by name, nothing else is looked at.
        files: Names of results files.
        optional: Nothing is written while there are no such files.
    """

    module: str
    files: tuple[str, ...]
    optional: bool = False


SECTIONS: Mapping[str, Section] = {
    "codec": Section("benchmarks.codec_report", ("codec", "codec-64", "codec-96", "codec-576")),
    "growth": Section("benchmarks.growth.report", ("growth",), optional=True),
    "put": Section("benchmarks.put_report", ("put",)),
    "press": Section("benchmarks.press_report", ("press",)),
    "quality": Section("benchmarks.quality.report", ("quality",)),
    "guard": Section("benchmarks.guard_report", ("guard",)),
    "transfer": Section("benchmarks.transfer.report", ("transfer",)),
    "model": Section("benchmarks.planner_report", ("model",)),
    "capacity": Section("benchmarks.capacity.report", ("capacity",)),
    "ttft": Section("benchmarks.ttft.report", ("ttft",)),
    "demo": Section("benchmarks.demo_report", ("demo", "tiers"), optional=True),
}


def update(*names: str) -> None:
    """Write what these sections give. Raises FileNotFoundError where a results file is missing."""
    for name in names:
        texts, plots = _rendered(name)
        for (path, block), text in texts.items():
            write_section(block, text, path)
        for path, content in plots.items():
            path.write_bytes(content)


def differences(names: Iterable[str]) -> Iterator[str]:
    """What the results files would change, a line each.

    A plot is compared only with the matplotlib that drew it: others place texts elsewhere.
    """
    for name in names:
        try:
            texts, plots = _rendered(name)
        except FileNotFoundError as error:
            yield f"{name}: {error.filename} is missing"
            continue
        for (path, block), text in texts.items():
            before = path.read_text(encoding="utf-8")
            if f"<!-- {block}:begin -->" not in before:
                yield f"{path.name}: no section {block}"
            elif with_section(before, block, text) != before:
                yield f"{path.name}, section {block}: not what benchmarks/results gives"
        for path, content in plots.items():
            if not path.exists():
                yield f"{path.name}: missing"
            elif _creator(path.read_bytes()) == _creator(content) and path.read_bytes() != content:
                yield f"{path.name}: not what benchmarks/results gives"


def _rendered(name: str) -> tuple[dict[tuple[Path, str], str], dict[Path, bytes]]:
    """Texts by document and marker, and plots by path."""
    section = SECTIONS[name]
    there = [one for one in section.files if not section.optional or (RESULTS / f"{one}.json").exists()]
    if not there:
        return {}, {}
    module = importlib.import_module(section.module)
    files = {one: read_results(one) for one in there}
    texts: dict[tuple[Path, str], str] = {}
    if hasattr(module, "section"):
        texts[DOCUMENT, name] = module.section(files)
    if hasattr(module, "readme"):
        texts |= {(README, block): text for block, text in module.readme(files).items()}
    figures: dict[str, Any] = module.plots(files) if hasattr(module, "plots") else {}
    return texts, {DOCS / f"{one}.svg": svg(figure) for one, figure in figures.items()}


def _creator(content: bytes) -> bytes:
    found = re.search(rb"<dc:title>(.*?)</dc:title>", content)
    return found[1] if found else b""


def main(argv: list[str] | None = None) -> int:
    """Write, or compare; 1 if something differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(SECTIONS)}")
    parser.add_argument("--check", action="store_true", help="write nothing, fail where something differs")
    options = parser.parse_args(argv)
    if unknown := set(options.names) - set(SECTIONS):
        parser.error(f"unknown {', '.join(sorted(unknown))}; known: {', '.join(SECTIONS)}")
    names = options.names or list(SECTIONS)
    if not options.check:
        update(*names)
        return 0
    found = list(differences(names))
    for line in found:
        print(line, file=sys.stderr)
    if found:
        print("make bench-docs writes them anew", file=sys.stderr)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
