"""Which tokens of a text are the prefix and which are scored."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tq_offload.errors import CheckError

__all__ = ["Sample", "cut", "default_text", "starts_with", "token_ids"]

MAX_SCORED = 256
"""Scored tokens of a window; more are spread over more windows."""


@dataclass(frozen=True)
class Sample:
    """How much of a text is used: `tokens` scored ones in windows of at most 256, each after `prefix` tokens.

    Raises:
        CheckError: A number below 1.
    """

    prefix: int = 1024
    tokens: int = 768

    def __post_init__(self) -> None:
        for name in ("prefix", "tokens"):
            if getattr(self, name) < 1:
                raise CheckError(f"--{name} {getattr(self, name)}: at least 1 token is needed")

    @property
    def sizes(self) -> list[int]:
        """Scored tokens of each window."""
        count = -(-self.tokens // MAX_SCORED)
        return [self.tokens // count + (i < self.tokens % count) for i in range(count)]


def default_text() -> str:
    """The English text that ships with the package: a story, a manual, letters; about 2,600 tokens."""
    return (Path(__file__).parent / "default.txt").read_text(encoding="utf-8")


def token_ids(tokenizer: Any, text: str) -> torch.Tensor:
    """Tokens of a text, i64 [1, T], with the special tokens that the tokenizer adds."""
    ids: torch.Tensor = tokenizer(text, return_tensors="pt").input_ids
    return ids


def starts_with(tokenizer: Any, ids: torch.Tensor) -> bool:
    """True if the first token is the tokenizer's token for the beginning of a text: every window gets it then."""
    bos = getattr(tokenizer, "bos_token_id", None)
    return bos is not None and ids.shape[1] > 0 and int(ids[0, 0]) == bos


def cut(ids: torch.Tensor, sample: Sample, *, first: bool = False, limit: int | None = None) -> list[torch.Tensor]:
    """Windows of a text, spread over it evenly; none of its tokens is scored twice, prefixes may overlap.

    Args:
        ids: i64 [1, T].
        sample: Sizes.
        first: Every window starts with the first token of the text.
        limit: Tokens that the model can take; None: not known.

    Returns:
        Windows i64 [1, prefix + S + 1].

    Raises:
        CheckError: The text is too short, or a window is longer than the model can take.
    """
    sizes, total = sample.sizes, ids.shape[1]
    longest = sample.prefix + max(sizes) + 1
    if limit is not None and longest - 1 > limit:
        raise CheckError(
            f"the model takes {limit} tokens and a window has {longest - 1}: "
            f"lower --prefix to {max(limit - max(sizes), 1)}"
        )
    needed = sample.prefix + sample.tokens + 1
    if total < needed:
        raise CheckError(
            f"the text has {total} tokens, {needed} are needed ({sample.prefix} before the scored ones, "
            f"{sample.tokens} scored): give a longer text with --text, or lower --tokens or --prefix"
        )
    windows, spare = [], total - needed
    for i, size in enumerate(sizes):
        start = sum(sizes[:i]) + (spare * i // (len(sizes) - 1) if len(sizes) > 1 else 0)
        window = ids[:, start : start + sample.prefix + size + 1].clone()
        if first:
            window[:, 0] = ids[:, 0]
        windows.append(window)
    return windows
