"""Fixtures of every test."""

from __future__ import annotations

import pytest


@pytest.fixture(params=["reference", "numba"])
def backend(request: pytest.FixtureRequest) -> str:
    """Every backend in turn."""
    return str(request.param)
