"""Sections of docs/benchmarks.md and README.md that benchmarks write, each between its own two markers."""

from __future__ import annotations

import fcntl
import os
import re
import tempfile
import textwrap
from collections.abc import Sequence
from pathlib import Path

from benchmarks.samples import ROOT

__all__ = ["DOCUMENT", "README", "markdown_table", "paragraph", "with_section", "write_section"]

DOCUMENT, README = ROOT / "docs" / "benchmarks.md", ROOT / "README.md"


def with_section(before: str, name: str, text: str) -> str:
    """A document with ``text`` between ``<!-- name:begin -->`` and ``<!-- name:end -->``, at its end if it has neither.

    Raises:
        ValueError: There is a begin without an end.
    """
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    if begin not in before:
        before = f"{before.rstrip()}\n\n{begin}\n{end}\n"
    head, _, rest = before.partition(begin)
    _, found, tail = rest.partition(end)
    if not found:
        raise ValueError(f"{begin} has no {end}")
    return f"{head}{begin}\n\n{text.strip()}\n\n{end}{tail}"


def write_section(name: str, text: str, path: Path = DOCUMENT) -> None:
    """Write `with_section`. The file is replaced as a whole, under a lock on its folder: two of these lose nothing."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        before = path.read_text(encoding="utf-8") if path.exists() else "# Benchmarks\n"
        _replace(path, with_section(before, name, text))
    finally:
        os.close(folder)


def markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table whose first column is text and whose others are numbers."""
    lines = [list(heads), ["---", *["---:"] * (len(heads) - 1)], *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def paragraph(*parts: str) -> str:
    """The parts, joined by spaces, in lines of 118 characters at most; what stands in backticks is not broken."""
    whole = re.sub(r"`[^`]*`", lambda found: found[0].replace(" ", "\0"), " ".join(parts))
    return textwrap.fill(whole, 118, break_long_words=False, break_on_hyphens=False).replace("\0", " ")


def _replace(path: Path, text: str) -> None:
    mode = path.stat().st_mode & 0o777 if path.exists() else 0o644
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as sink:
            sink.write(text)
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
