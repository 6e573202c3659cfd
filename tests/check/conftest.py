"""A tiny model in a folder, as a user has one."""

from __future__ import annotations

from pathlib import Path

import pytest
from packed_support import small_llama, word_tokenizer


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of 3 layers, 2 KV heads of 64, and its tokenizer of words w3, w4, ..."""
    path = tmp_path_factory.mktemp("model")
    small_llama().save_pretrained(path)
    word_tokenizer().save_pretrained(path)
    return path
