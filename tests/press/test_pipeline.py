"""kvpress's own pipeline with the press and with the cache: many questions, and presses that it treats specially."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kvpress import (
    BasePress,
    DecodingPress,
    DMSPress,
    ExpectedAttentionPress,
    FinchPress,
    KeyDiffPress,
    KeyRerotationPress,
    KnormPress,
    PrefillDecodingPress,
    SnapKVPress,
)
from packed_support import copies, same, small_llama, text, word_tokenizer
from transformers import DynamicCache, pipeline

from tq_offload.hf_compat import patched_kvpress
from tq_offload.kv_cache import TurboQuantCache, TurboQuantLayer
from tq_offload.press import TurboQuantPress

CONTEXT = 299  # and the token that begins a text


@pytest.fixture(scope="module")
def pipe() -> Any:
    """Compatible with every supported transformers."""
    model = small_llama(layers=2)
    made = pipeline("kv-press-text-generation", model=model, tokenizer=word_tokenizer(), device="cpu")

    def ask(context: str, **settings: Any) -> dict[str, Any]:
        for layer in model.model.layers:
            layer.self_attn.masked_key_indices = None
        with patched_kvpress(model):
            answer: dict[str, Any] = made(context, **settings)
        return answer

    ask.model = model  # type: ignore[attr-defined]
    ask.tokenizer = made.tokenizer  # type: ignore[attr-defined]
    return ask


QUESTIONS = (text(3, 1), text(20, 2), text(1, 3))


@pytest.mark.parametrize("press", [None, SnapKVPress(0.5), TurboQuantPress(), TurboQuantPress(SnapKVPress(0.4))])
def test_questions_in_every_order_have_the_same_answers(pipe: Any, press: Any) -> None:
    """Answers longer than a chunk too; afterwards the codes of the context are bit by bit what they were."""
    wanted: dict[str, list[str]] = {}
    before: list[torch.Tensor] = []
    orders = list(itertools.permutations(QUESTIONS))
    for i, order in enumerate(orders):
        packs = isinstance(press, TurboQuantPress)
        cache = DynamicCache() if packs else TurboQuantCache()
        length = 400 if i == 3 else 8
        answers = pipe(text(CONTEXT), questions=list(order), press=press, cache=cache, max_new_tokens=length)["answers"]
        for question, answer in zip(order, answers, strict=True):
            words = answer.split()
            assert len(words) > 0.9 * length - 3  # but for special tokens
            assert words[:5] == wanted.setdefault(question, words[:5])
        assert all(isinstance(layer, TurboQuantLayer) for layer in cache.layers)
        before = before or copies(cache)
        assert same(copies(cache), before)
    left = {0.0: 300, 0.5: 150, 0.4: 180}[getattr(press, "compression_ratio", 0.0)]
    assert cache.get_seq_length() == left


def test_questions_again_over_the_same_cache(pipe: Any) -> None:
    """The pipeline crops by assigning K and V: the context is not packed again."""
    cache = TurboQuantCache()
    pipe(text(CONTEXT), question=text(3, 1), cache=cache, max_new_tokens=2)
    before = copies(cache)
    runs = [layer.store.runs for layer in cache.layers]
    for layer in cache.layers:
        layer.update(*(torch.zeros(1, 2, 400, 64) for _ in range(2)))
        layer.keys = layer.keys[:, :, :300]
        layer.values = layer.values[:, :, :300]
    assert same(copies(cache), before)
    for layer, old in zip(cache.layers, runs, strict=True):
        assert all(a is b for a, b in zip(layer.store.runs, old, strict=True))


def finch(pipe: Any) -> BasePress:
    press = FinchPress(0.5)
    press.update_model_and_tokenizer(pipe.model, pipe.tokenizer, "w255")
    return press


SPECIAL: dict[str, Callable[[Any], BasePress]] = {
    "key rerotation": lambda _: KeyRerotationPress(KnormPress(0.5)),
    "finch": finch,
    "decoding": lambda _: DecodingPress(KeyDiffPress(), compression_interval=20, target_size=150),
    "prefill and decoding": lambda _: PrefillDecodingPress(
        SnapKVPress(0.4), DecodingPress(KeyDiffPress(), compression_interval=20, target_size=100)
    ),
    "dms": lambda _: DMSPress(KnormPress(), threshold=-8.0, sliding_window_size=32),
    "dms while decoding": lambda _: DMSPress(KnormPress(), threshold=-8.0, sliding_window_size=32, decoding=True),
}


@pytest.mark.parametrize("name", SPECIAL)
def test_presses_that_the_pipeline_asks_for(pipe: Any, name: str) -> None:
    """With the cache they work as ever: everything exact, the answers are those without it; packed, nearly so."""
    context = text(CONTEXT).replace("w255", "w254")
    if name == "finch":
        context = " ".join([*context.split()[:250], "w255", *context.split()[250:]])
    answers, lengths = [], []
    for cache in (DynamicCache(), TurboQuantCache(window=1 << 20), TurboQuantCache(bits=8, window=16)):
        settings = {"question": text(5, 1), "press": SPECIAL[name](pipe), "cache": cache, "max_new_tokens": 60}
        answers.append(pipe(context, **settings)["answer"].split())
        lengths.append([layer.get_seq_length() for layer in cache.layers])
        if isinstance(cache, TurboQuantCache):
            assert all(isinstance(layer, TurboQuantLayer) for layer in cache.layers)
    assert answers[1] == answers[0]
    assert len(answers[2]) > 50
    assert lengths[1] == lengths[0] == lengths[2]


@pytest.mark.parametrize("tokens", [0, 1, 2, 50])
def test_short_contexts(pipe: Any, tokens: int) -> None:
    """The window holds them, so answers are those of the exact cache."""
    settings = {"question": text(5, 1), "max_new_tokens": 10}
    wanted = pipe(text(tokens), cache=DynamicCache(), **settings)
    for press, cache in (
        (None, TurboQuantCache()), (TurboQuantPress(), None), (TurboQuantPress(ExpectedAttentionPress(0.0)), None),
    ):  # fmt: skip
        assert pipe(text(tokens), press=press, cache=cache, **settings) == wanted


def test_no_question(pipe: Any) -> None:
    assert pipe(text(CONTEXT), press=TurboQuantPress(), max_new_tokens=3)["answer"]
