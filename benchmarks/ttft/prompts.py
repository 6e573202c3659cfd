"""Prompts of given lengths, cut from texts in a row, so that none begins as another does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.deployment import CHUNK_TOKENS

__all__ = ["Prompt", "cut", "whole_chunks"]

_TEXTS = Path(__file__).resolve().parents[1] / "texts"
_NAMES = ("alice", "gpl-3", "python-license")
_SHIFTS = 400


@dataclass(frozen=True)
class Prompt:
    """A text of whole chunks and one token more: the token that a hit computes."""

    text: str
    tokens: int

    @property
    def chunks(self) -> int:
        """Chunks that a hit finds."""
        return self.tokens // CHUNK_TOKENS


def whole_chunks(tokens: int) -> int:
    """The length next to ``tokens`` that is whole chunks and one token: LMCache stores whole chunks only."""
    return max(1, round(tokens / CHUNK_TOKENS)) * CHUNK_TOKENS + 1


def cut(model: Path, lengths: Sequence[int]) -> list[Prompt]:
    """One prompt for each length, each of which the model's tokenizer takes for exactly so many tokens.

    Raises:
        ValueError: The texts are too short.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    text = "\n\n".join((_TEXTS / f"{name}.txt").read_text(encoding="utf-8") for name in _NAMES)
    ids: list[int] = tokenizer(text).input_ids
    found, start = [], 0
    for length in lengths:
        begin = _begin(tokenizer, ids, start, length)
        found.append(Prompt(str(tokenizer.decode(ids[begin : begin + length])), length))
        start = begin + length
    return found


def _begin(tokenizer: Any, ids: list[int], start: int, length: int) -> int:
    """The first place, from ``start`` on, whose text has as many tokens on its own as it has there."""
    for begin in range(start, start + _SHIFTS):
        if begin + length > len(ids):
            break
        if len(tokenizer(tokenizer.decode(ids[begin : begin + length])).input_ids) == length:
            return begin
    raise ValueError(f"the texts have {len(ids)} tokens: not enough for one of {length} from number {start} on")
