"""A pass key hidden in a text: does the model still find it when the text's cache was packed?"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.quality.codecs import Codec
from benchmarks.quality.texts import rounded
from tq_offload.check.scoring import Window

__all__ = ["DEPTHS", "LENGTHS", "Case", "Recall", "cases", "recall"]

LENGTHS, DEPTHS = (512, 1024, 1536), (0.1, 0.5, 0.9)
_DIGITS = 5
_QUESTION = "\n\nQuestion: What is the pass key?\nAnswer: The pass key is"


@dataclass(frozen=True)
class Case:
    """`window` holds the prefix with the key in it; `question` i64 [Q]; `answer` i64 [A], greedy on the fp cache."""

    length: int
    depth: float
    key: str
    window: Window
    question: torch.Tensor
    answer: torch.Tensor


@dataclass(frozen=True)
class Recall:
    """Shares of the cases: the greedy answer is the one of the fp cache; it contains the key."""

    same: float
    found: float


def cases(model: Any, tokenizer: Any, text: torch.Tensor, *, short: bool) -> Iterator[tuple[Case, bool]]:
    """Every length and depth, with a key of its own, and whether the fp cache finds it."""
    draw = random.Random(11)
    question = tokenizer(_QUESTION, return_tensors="pt").input_ids[0]
    for length in LENGTHS[:1] if short else LENGTHS:
        for depth in DEPTHS:
            key = "".join(str(draw.randrange(10)) for _ in range(_DIGITS))
            needle = f"\n\nThe pass key is {key}. Remember it. {key} is the pass key.\n\n"
            hidden, at = tokenizer(needle, return_tensors="pt").input_ids[0], int(depth * length)
            prefix = torch.cat((text[:at], hidden, text[at : length - len(hidden)]))
            window = Window(model, torch.cat((prefix, question, question[:1]))[None], len(prefix))
            answer = _greedy(window, question, window.keys, window.values)
            yield Case(length, depth, key, window, question, answer), key in tokenizer.decode(answer)


def recall(tokenizer: Any, found: list[Case], codec: Codec) -> Recall:
    """Ask every case with the prefix coded."""
    same = keys = 0
    for case in found:
        k, v, _ = codec.run(*rounded(case.window))
        k, v = (x.bfloat16().float()[:, None] for x in (k, v))
        scores = _follow(case.window, torch.cat((case.question, case.answer)), k, v)
        predicted = scores[len(case.question) - 1 :].argmax(dim=-1)
        if not torch.equal(predicted, case.answer):
            predicted = _greedy(case.window, case.question, k, v)
        same += torch.equal(predicted, case.answer)
        keys += case.key in tokenizer.decode(predicted)
    return Recall(same / len(found), keys / len(found))


def _follow(window: Window, ids: torch.Tensor, keys: Any, values: Any) -> torch.Tensor:
    """Log probabilities after every token of `ids` but the last, behind the prefix."""
    window.ids = torch.cat((window.ids[0, : window.prefix], ids))[None]
    return window.score(keys, values)


def _greedy(window: Window, ids: torch.Tensor, keys: Any, values: Any) -> torch.Tensor:
    """The tokens that the model answers with, one more than the digits of a key (its first may be a space)."""
    start = len(ids)
    for _ in range(_DIGITS + 1):
        scores = _follow(window, torch.cat((ids, ids[:1])), keys, values)
        ids = torch.cat((ids, scores[-1].argmax()[None]))
    return ids[start:]
