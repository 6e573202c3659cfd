"""Models of every shape of cache: what is packed, what is left, and that the logits stay what they were."""

from __future__ import annotations

import pytest
import torch
from kv_cache.tiny_models import (
    CONTEXT,
    IDS,
    MODELS,
    OPTIONS,
    OWN_CACHE,
    PACKABLE,
    exact_cache,
    generated,
    logits_of,
    relative_error,
)

from tq_offload.kv_cache import TurboQuantCache, TurboQuantLayer


@pytest.mark.parametrize("name", PACKABLE)
def test_logits_at_8_bits_are_those_of_the_exact_cache(name: str) -> None:
    tiny = MODELS[name]
    model = tiny.build()
    exact = logits_of(model, exact_cache(model, tiny), IDS, context=CONTEXT)
    cache = TurboQuantCache(bits=8, config=model.config, **OPTIONS)
    error = relative_error(logits_of(model, cache, IDS, context=CONTEXT), exact)
    assert error < 0.03
    rough = TurboQuantCache(bits=2, config=model.config, **OPTIONS)
    rough_error = relative_error(logits_of(model, rough, IDS, context=CONTEXT), exact)
    assert (rough_error > 3 * error) if any(tiny.packed) else (error == rough_error == 0.0)


@pytest.mark.parametrize("name", PACKABLE)
def test_packs_what_is_claimed_and_leaves_the_rest(name: str) -> None:
    tiny = MODELS[name]
    model = tiny.build()
    cache, exact = TurboQuantCache(bits=4, config=model.config, **OPTIONS), exact_cache(model, tiny)
    assert generated(model, cache, IDS).shape == (2, 8)
    generated(model, exact, IDS)
    cache.pack()
    assert [isinstance(layer, TurboQuantLayer) for layer in cache.layers] == tiny.packed
    for held, other in zip(cache.layers, exact.layers, strict=True):
        if isinstance(held, TurboQuantLayer):
            assert held.get_seq_length() == other.get_seq_length() == IDS.shape[1] + 7
            assert held.nbytes < 0.75 * (other.keys.nbytes + other.values.nbytes)
        else:
            assert type(held) is type(other)


@pytest.mark.parametrize("name", PACKABLE)
def test_generates_what_the_exact_cache_generates(name: str) -> None:
    tiny = MODELS[name]
    model = tiny.build()
    exact = generated(model, exact_cache(model, tiny), IDS)
    packed = generated(model, TurboQuantCache(bits=8, config=model.config, **OPTIONS), IDS)
    assert torch.equal(packed[:, 0], exact[:, 0])  # the context is attended to exactly
    assert (packed == exact).float().mean() >= 0.75


@pytest.mark.parametrize("name", OWN_CACHE)
def test_a_model_with_a_cache_of_its_own_runs_as_before(name: str) -> None:
    """Until transformers 5.4; it makes its cache itself. The press says that it packs nothing: tests/press."""
    model = MODELS[name].build()
    assert generated(model, None, IDS).shape == (2, 8)
