"""These tests need transformers; where it is missing they are not collected."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch

collect_ignore_glob = [] if find_spec("transformers") else ["test_*.py"]


@pytest.fixture(autouse=True)
def _one_torch_thread() -> Iterator[None]:
    """Small tensors: more threads only get in each other's way."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
