"""Windows: replaced K and V, log probabilities, attention by layer, frames."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from kv_cache.tiny_models import MODELS, prompt
from packed_support import ids, small_llama
from support import one_torch_thread as one_torch_thread

from tq_offload.check.scoring import Window, layer_errors, through_frames
from tq_offload.codec import TurboQuantCodec
from tq_offload.errors import CacheTypeError, NonFiniteError
from tq_offload.layout import ChunkLayout, GroupLayout
from tq_offload.spec import CodecSpec

PREFIX, SCORED = 96, 16


@pytest.fixture(scope="module")
def window() -> Window:
    return Window(small_llama(), ids(PREFIX + SCORED + 1), PREFIX)


def noisy(tensors: list[torch.Tensor], amount: float) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [x + amount * torch.randn_like(x) for x in tensors]


def test_the_run_in_two_parts_is_the_run_in_one(window: Window) -> None:
    with torch.no_grad():
        logits = window.model(window.ids).logits[0]
    whole = torch.log_softmax(logits, -1)[PREFIX:-1]
    assert (whole - window.expected).abs().max() < 1e-3
    targets = window.ids[0, PREFIX + 1 :]
    assert torch.allclose(window.loss, -window.expected.gather(1, targets[:, None])[:, 0])
    assert window.loss.shape == (SCORED,)


def test_the_same_k_and_v_change_nothing(window: Window) -> None:
    for _ in range(2):  # a score leaves nothing behind
        found = window.compare(window.keys, window.values)
        assert not found.kl.any()
        assert not found.loss_change.any()
        assert found.top1.all()
    assert all(e.key == e.value == e.attention == 0 for e in layer_errors(window, window.keys, window.values))


def test_kl_is_that_of_the_definition(window: Window) -> None:
    keys = noisy(window.keys, 0.5)
    p, q = window.expected.double(), window.score(keys, window.values).double()
    expected = torch.nn.functional.kl_div(q, p, log_target=True, reduction="none").sum(-1)
    found = window.compare(keys, window.values)
    assert found.kl.mean() > 1e-3
    assert torch.allclose(found.kl.double(), expected, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_errors_of_the_layer_that_was_changed_alone(attention: str) -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    window = Window(small_llama(attention=attention), ids(PREFIX + SCORED + 1), PREFIX)
    keys = list(window.keys)
    keys[1] = noisy([keys[1]], 0.3)[0]
    errors = layer_errors(window, keys, window.values)
    assert [e.layer for e in errors] == [0, 1, 2]
    assert errors[0].key == errors[0].attention == errors[2].attention == errors[1].value == 0
    assert errors[1].key > 0
    assert errors[1].attention > 0
    wrapped = [name for name, f in ALL_ATTENTION_FUNCTIONS.items() if f.__module__.startswith("tq_offload.check")]
    assert wrapped == []


def test_attention_error_is_that_of_the_formula(window: Window) -> None:
    values = [2 * v for v in window.values]
    call = window.calls[2]
    q, groups = call.query[0], call.query.shape[1] // call.keys.shape[1]
    k = torch.cat([window.keys[2], call.keys], 2)[0].repeat_interleave(groups, 0)
    mask = torch.ones(SCORED, PREFIX + SCORED, dtype=torch.bool).tril(PREFIX)
    weights = ((q @ k.mT) / math.sqrt(q.shape[-1])).masked_fill(~mask, -math.inf).softmax(-1)
    new = torch.cat([values[2], call.values], 2)[0].repeat_interleave(groups, 0)
    old = torch.cat([window.values[2], call.values], 2)[0].repeat_interleave(groups, 0)
    expected = ((weights @ new - weights @ old).norm() / (weights @ old).norm()).item()
    assert layer_errors(window, window.keys, values)[2].attention == pytest.approx(expected, rel=1e-3)


def test_an_offset_that_all_keys_share_counts_in_the_error_but_not_in_the_energy(window: Window) -> None:
    biased = [k + 100 for k in window.keys]
    noise = noisy(window.keys, 0.1)
    plain = layer_errors(window, noise, window.values)
    keys, window.keys = window.keys, biased
    try:
        moved = layer_errors(window, [n + 100 for n in noise], window.values)
    finally:
        window.keys = keys
    assert moved[0].key == pytest.approx(plain[0].key, rel=1e-2)


@pytest.mark.parametrize("tokens", [32, 40, 256])
def test_frames_are_those_of_the_serde(window: Window, tokens: int) -> None:
    codec = TurboQuantCodec(CodecSpec())
    keys, values, stored = through_frames(codec, window.keys, window.values, tokens)
    expected = 0
    for start in range(0, PREFIX, tokens):
        sides = [
            torch.stack([x[0, :, start : start + tokens].transpose(0, 1).flatten(1) for x in side]).bfloat16()
            for side in (window.keys, window.values)
        ]
        chunk = torch.stack(sides)
        frame = codec.encode([chunk], ChunkLayout((GroupLayout("kv_first", tuple(chunk.shape), "bfloat16", 64),)))
        expected += len(frame)
        (decoded,) = codec.decode(frame)
        for layer in range(3):
            for side, found in enumerate((keys, values)):
                rows = found[layer][0, :, start : start + tokens].transpose(0, 1).flatten(1)
                assert torch.equal(rows, decoded[side, layer].float())
    assert stored == expected
    assert keys[0].dtype == torch.float32
    assert keys[0].shape == window.keys[0].shape


def test_layers_of_two_shapes_are_two_groups() -> None:
    keys = [
        torch.randn(1, h, 64, d, generator=torch.Generator().manual_seed(d)) for h, d in ((2, 64), (1, 128), (2, 64))
    ]
    out, _, stored = through_frames(TurboQuantCodec(CodecSpec(8, 8)), keys, keys)
    assert all((a - b).norm() < 0.02 * b.norm() for a, b in zip(out, keys, strict=True))
    assert 8 * stored / sum(2 * k.numel() for k in keys) < 10


@pytest.mark.parametrize("name", MODELS)
def test_architectures(name: str) -> None:
    tiny = MODELS[name]
    model, text = tiny.build(), prompt(60, rows=1)
    full = [i for i, packed in enumerate(tiny.packed) if packed]
    if not full or tiny.own_cache:
        with pytest.raises(CacheTypeError, match="serve the model without it"):
            Window(model, text, 48)
        return
    window = Window(model, text, 48)
    assert window.layers == full
    for _ in range(2):
        assert window.compare(window.keys, window.values).kl.abs().max() < 1e-6
    with torch.no_grad():
        whole = torch.log_softmax(model(text).logits[0], -1)[48:-1]
    assert (whole - window.expected).abs().max() < 1e-2
    if name == "deepseek_v3":  # MLA: what is cached is not what is attended to, or K and V are of two shapes
        with pytest.raises(CacheTypeError, match="measure it in the engine"):
            through_frames(TurboQuantCodec(), window.keys, window.values)
        return
    keys, values, _ = through_frames(TurboQuantCodec(), window.keys, window.values, 16)
    assert all(0 < e.attention < 1 for e in layer_errors(window, keys, values))


def test_a_model_without_a_kv_cache_is_refused() -> None:
    from transformers import MambaConfig, MambaForCausalLM

    model: Any = MambaForCausalLM(MambaConfig(vocab_size=256, hidden_size=32, num_hidden_layers=2)).eval()
    with pytest.raises(CacheTypeError, match="nothing to pack"):
        Window(model, ids(20), 10)


@pytest.mark.parametrize("side", ["k_proj", "v_proj"])
def test_nan_is_an_error_that_names_the_layer(side: str) -> None:
    model = small_llama()
    with torch.no_grad():
        getattr(model.model.layers[2].self_attn, side).weight[0, 0] = math.nan
    with pytest.raises(NonFiniteError, match="layer 2: load the model in another dtype"):
        Window(model, ids(20), 10)
