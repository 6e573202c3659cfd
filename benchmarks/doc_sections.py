"""Sections of docs/benchmarks.md that benchmarks write, each between its own two markers."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

__all__ = ["DOCUMENT", "markdown_table", "write_section"]

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "benchmarks.md"


def write_section(name: str, text: str, path: Path = DOCUMENT) -> None:
    """Put ``text`` between ``<!-- name:begin -->`` and ``<!-- name:end -->``, at the end where they are not there.

    The file is replaced as a whole, under a lock on its folder, so that two of these calls lose nothing.
    """
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        before = path.read_text(encoding="utf-8") if path.exists() else "# Benchmarks\n"
        if begin not in before:
            before = f"{before.rstrip()}\n\n{begin}\n{end}\n"
        head, _, rest = before.partition(begin)
        _, found, tail = rest.partition(end)
        if not found:
            raise ValueError(f"{path}: {begin} has no {end}")
        _replace(path, f"{head}{begin}\n\n{text.strip()}\n\n{end}{tail}")
    finally:
        os.close(folder)


def markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table whose first column is text and whose others are numbers."""
    lines = [list(heads), ["---", *["---:"] * (len(heads) - 1)], *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


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
