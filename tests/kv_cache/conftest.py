"""These tests need transformers; where it is missing they are not collected."""

from __future__ import annotations

from importlib.util import find_spec

from support import one_torch_thread

__all__ = ["one_torch_thread"]

collect_ignore_glob = [] if find_spec("transformers") else ["test_*.py"]
