"""These tests need kvpress. Where it is not installed they are not collected, and one line says so."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

MISSING = find_spec("kvpress") is None
collect_ignore_glob = ["test_*.py"] if MISSING else []


def pytest_report_header() -> str | None:
    """The line."""
    return f"{Path(__file__).parent.name}: left out, kvpress is not installed (make test-kvpress)" if MISSING else None
