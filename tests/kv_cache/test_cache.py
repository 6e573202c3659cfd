"""`TurboQuantCache` in generate and in forward passes of small random models.

What the model makes of a packed cache must be, bit by bit, what it makes of a `DynamicCache` with the unpacked K and V.
"""

from __future__ import annotations

import copy
import itertools
import pickle
import threading
from typing import Any

import pytest
import torch
from packed_support import contents, copies, ids, kv, parts, same, small_llama, unpacked
from transformers import DynamicCache, LlamaConfig

from tq_offload.errors import ConfigError, LayoutError, NonFiniteError, PressOrderError
from tq_offload.kv_cache import TurboQuantCache, TurboQuantLayer, resident_bytes
from tq_offload.spec import CodecSpec

CONTEXT = 300


@pytest.fixture(scope="module", params=[64, 128])
def model(request: pytest.FixtureRequest) -> Any:
    return small_llama(request.param, layers=2 if request.param == 128 else 3)


@pytest.fixture(scope="module")
def llama() -> Any:
    return small_llama()


def prefill(model: Any, tokens: int = CONTEXT, *, rows: int = 1, seed: int = 0, **settings: Any) -> TurboQuantCache:
    cache = TurboQuantCache(config=model.config, **settings)
    with torch.no_grad():
        model(ids(tokens, rows, seed), past_key_values=cache)
    cache.pack()
    return cache


def generate(model: Any, prompt: torch.Tensor, cache: Any, new: int = 20, **settings: Any) -> list[list[int]]:
    """New tokens; `prompt` are all ids, those of the cache included."""
    settings = {"do_sample": False, "attention_mask": torch.ones_like(prompt), **settings}
    out = model.generate(prompt, past_key_values=cache, max_new_tokens=new, **settings)
    answers: list[list[int]] = out[:, prompt.shape[1] :].tolist()
    return answers


def test_prefill_is_exact_and_decoding_uses_what_is_unpacked(model: Any) -> None:
    cache = TurboQuantCache(config=model.config)
    plain = DynamicCache(config=model.config)
    with torch.no_grad():
        out = model(ids(CONTEXT), past_key_values=cache).logits
        assert torch.equal(out, model(ids(CONTEXT), past_key_values=plain).logits)
        plain = unpacked(cache)
        for step in range(5):
            new = ids(1 + step, seed=step)
            wanted = model(new, past_key_values=plain).logits
            assert torch.equal(model(new, past_key_values=cache).logits, wanted)
    assert all(isinstance(layer, TurboQuantLayer) for layer in cache.layers)
    assert cache.nbytes < resident_bytes(plain) / 1.5


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"num_beams": 3},
        {"num_beams": 4, "num_return_sequences": 2},
        {"do_sample": True, "temperature": 0.8},
        {"do_sample": True, "num_return_sequences": 3},
    ],
)
def test_generate_from_a_packed_context(model: Any, settings: dict[str, Any]) -> None:
    cache = prefill(model)
    plain = unpacked(cache)
    prompt = torch.cat([ids(CONTEXT), ids(7, seed=1)], dim=1)
    for held in (cache, plain):
        held.batch_repeat_interleave(max(settings.get("num_beams", 1), settings.get("num_return_sequences", 1)))
    torch.manual_seed(5)
    wanted = generate(model, prompt, plain, **settings)
    torch.manual_seed(5)
    assert generate(model, prompt, cache, **settings) == wanted
    assert cache.get_seq_length() == plain.get_seq_length()


def test_generate_without_a_context() -> None:
    """All of it in `generate`: the first token is the exact cache's, with a long window all of them."""
    model, prompt = small_llama(), ids(200, rows=2)
    plain = generate(model, prompt, DynamicCache(config=model.config), 30)
    exact = TurboQuantCache(config=model.config, window=1 << 20)
    assert generate(model, prompt, exact, 30) == plain
    assert generate(model, prompt, TurboQuantCache(config=model.config), 1) == [p[:1] for p in plain]


def test_generating_600_tokens_packs_them(llama: Any) -> None:
    cache = prefill(llama, 50)
    assert [type(run).__name__ for run in cache.layers[0].store.runs] == ["ExactRun"]
    generate(llama, torch.cat([ids(50), ids(5, seed=1)], dim=1), cache, 700)
    for layer in cache.layers:
        assert [(type(run).__name__, run.length) for run in layer.store.runs] == [("ExactRun", 50), ("PackedRun", 512)]
        assert layer.store.tail.length == 754 - 562
    with torch.no_grad():
        plain = unpacked(cache)
        assert torch.equal(llama(ids(1), past_key_values=cache).logits, llama(ids(1), past_key_values=plain).logits)


@pytest.mark.parametrize("chunk", [1, 64, 150])
def test_prefill_in_chunks(llama: Any, chunk: int) -> None:
    cache, prompt = TurboQuantCache(config=llama.config), ids(CONTEXT if chunk > 1 else 30)
    with torch.no_grad():
        for at in range(0, prompt.shape[1], chunk):
            llama(prompt[:, at : at + chunk], past_key_values=cache)
        assert cache.get_seq_length() == prompt.shape[1]
        plain = unpacked(cache)
        assert torch.equal(llama(ids(3), past_key_values=cache).logits, llama(ids(3), past_key_values=plain).logits)


def test_generate_that_prefills_in_chunks(llama: Any) -> None:
    cache = TurboQuantCache(config=llama.config, window=1 << 20)
    wanted = generate(llama, ids(CONTEXT), DynamicCache(config=llama.config), prefill_chunk_size=100)
    assert generate(llama, ids(CONTEXT), cache, prefill_chunk_size=100) == wanted


def test_a_batch_with_padding_on_the_left(llama: Any) -> None:
    prompt, mask = ids(200, rows=3), torch.ones(3, 200, dtype=torch.long)
    for row, padding in enumerate((0, 40, 150)):
        prompt[row, :padding], mask[row, :padding] = 0, 0
    cache = TurboQuantCache(config=llama.config)
    with torch.no_grad():
        llama(prompt, attention_mask=mask, past_key_values=cache)
    plain = unpacked(cache)
    longer = torch.cat([prompt, ids(5, rows=3, seed=1)], dim=1)
    mask = torch.cat([mask, torch.ones(3, 5, dtype=torch.long)], dim=1)
    wanted = generate(llama, longer, plain, attention_mask=mask)
    assert generate(llama, longer, cache, attention_mask=mask) == wanted


@pytest.mark.parametrize("tokens", [1, 2, 4, 5, 123, 124, 125, 128, 129])
def test_short_contexts(llama: Any, tokens: int) -> None:
    cache, plain = prefill(llama, tokens), DynamicCache(config=llama.config)
    with torch.no_grad():
        llama(ids(tokens), past_key_values=plain)
        wanted, found = (llama(ids(2, seed=1), past_key_values=c).logits for c in (plain, cache))
    assert torch.equal(wanted, found) == (tokens <= 128)
    assert torch.allclose(wanted, found, atol=0.5)
    generate(llama, torch.cat([ids(tokens), ids(3)], dim=1), cache, 3)


QUESTIONS = [(3, 5), (20, 12), (1, 280)]  # tokens of the question, of the answer


def ask(model: Any, cache: Any, question: int, answer: int, crop: str) -> list[list[int]]:
    prompt = torch.cat([ids(CONTEXT), ids(question, seed=question)], dim=1)
    answers = generate(model, prompt, cache, answer)
    if crop == "assign":  # as kvpress does
        for layer in cache.layers:
            layer.keys = layer.keys[:, :, :CONTEXT]
            layer.values = layer.values[:, :, :CONTEXT]
    else:
        cache.crop(CONTEXT - cache.get_seq_length())
    return answers


@pytest.mark.parametrize("crop", ["assign", "crop"])
def test_questions_in_every_order_have_the_same_answers(crop: str) -> None:
    llama = small_llama(layers=2)
    wanted: dict[tuple[int, int], list[list[int]]] = {}
    cache = prefill(llama)
    before = copies(cache)
    orders = list(itertools.permutations(QUESTIONS))
    for order in orders if crop == "crop" else orders[1:3]:
        for question in order:
            answers = ask(llama, cache, *question, crop)
            assert wanted.setdefault(question, answers) == answers
            assert same(copies(cache), before)


def test_copies_go_their_own_way(llama: Any) -> None:
    cache = prefill(llama)
    before, prompt = copies(cache), torch.cat([ids(CONTEXT), ids(5, seed=1)], dim=1)
    clone = copy.deepcopy(cache)
    loaded = pickle.loads(pickle.dumps(cache))
    assert same(copies(clone), before)
    assert same(copies(loaded), before)
    answers = generate(llama, prompt, clone, 40)
    assert clone.get_seq_length() > CONTEXT
    assert same(copies(cache), before)
    assert clone.workspace is not cache.workspace
    assert {id(layer.workspace) for layer in clone.layers} == {id(clone.workspace)}
    assert generate(llama, prompt, loaded, 40) == answers
    assert {id(layer.workspace) for layer in loaded.layers} == {id(loaded.workspace)}
    assert generate(llama, prompt, cache, 40) == answers


def test_a_copy_while_the_last_layer_waits(llama: Any) -> None:
    cache = TurboQuantCache(config=llama.config)
    with torch.no_grad():
        llama(ids(CONTEXT), past_key_values=cache)
    for other in (pickle.loads(pickle.dumps(cache)), copy.deepcopy(cache)):
        other.pack()
        assert same(copies(other), copies(prefill(llama)))


def test_reset_and_use_again(llama: Any) -> None:
    cache = prefill(llama)
    before = copies(cache)
    generate(llama, torch.cat([ids(CONTEXT), ids(5)], dim=1), cache)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert resident_bytes(cache) == 0
    with torch.no_grad():
        llama(ids(CONTEXT), past_key_values=cache)
    cache.pack()
    assert same(copies(cache), before)


@pytest.mark.parametrize("change", ["repeat", "select", "reorder"])
def test_changes_of_the_batch(llama: Any, change: str) -> None:
    cache = prefill(llama, rows=3)
    plain = unpacked(cache)
    for held in (cache, plain):
        if change == "repeat":
            held.batch_repeat_interleave(2)
        elif change == "select":
            held.batch_select_indices(torch.tensor([2, 0]))
        else:
            held.reorder_cache(torch.tensor([1, 1, 0]))
    rows = {"repeat": 6, "select": 2, "reorder": 3}[change]
    with torch.no_grad():
        found, wanted = (llama(ids(2, rows), past_key_values=held).logits for held in (cache, plain))
    assert torch.equal(found, wanted)


def test_it_can_be_used_without_a_config(llama: Any) -> None:
    cache = TurboQuantCache()
    assert len(cache) == 0
    with torch.no_grad():
        llama(ids(CONTEXT), past_key_values=cache)
    cache.pack()
    assert same(copies(cache), copies(prefill(llama)))
    assert [layer.last for layer in cache.layers] == [False, False, True]


def test_a_layer_is_exact_until_the_next_one_begins(llama: Any) -> None:
    """Presses read and replace K and V in hooks of the layer itself."""
    cache, seen = TurboQuantCache(config=llama.config), []

    def hook(module: Any, _inputs: Any, _output: Any) -> None:
        layers = [layer.store.tail is not None and layer.store.tail.length == CONTEXT for layer in cache.layers]
        seen.append((module.layer_idx, layers))

    handles = [layer.self_attn.register_forward_hook(hook) for layer in llama.model.layers]
    with torch.no_grad():
        llama(ids(CONTEXT), past_key_values=cache)
    for handle in handles:
        handle.remove()
    assert seen == [(i, [j == i for j in range(3)]) for i in range(3)]
    assert cache.get_seq_length() == CONTEXT
    assert cache.layers[2].store.tail is None


def grads(model: Any) -> list[torch.Tensor]:
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return found


@pytest.mark.parametrize("trained", ["all", "queries"])
def test_gradients_through_a_packed_past(trained: str) -> None:
    """With only the queries trained, attention keeps views of the buffer for its backward pass."""
    model = small_llama()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained == "all" or "q_proj" in name)
    cache = prefill(model)
    plain = unpacked(cache)
    new, found = ids(6, seed=1), []
    for held in (plain, cache):
        model(new, past_key_values=held, labels=new).loss.backward()
        found.append(grads(model))
    assert len(found[0]) == (3 if trained == "queries" else len(list(model.parameters())))
    assert all(g.abs().sum() > 0 for g in found[0])
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in zip(*found, strict=True))
    assert not any(x.requires_grad for x in copies(cache))


def test_inference_mode_and_back(llama: Any) -> None:
    cache = TurboQuantCache(config=llama.config)
    with torch.inference_mode():
        llama(ids(CONTEXT), past_key_values=cache)
        llama(ids(2), past_key_values=cache)
    with torch.no_grad():
        llama(ids(2), past_key_values=cache)
    llama(ids(2), past_key_values=cache).logits.sum().backward()
    llama.zero_grad()
    assert cache.get_seq_length() == CONTEXT + 6


def test_two_caches_in_two_threads(llama: Any) -> None:
    prompts = [ids(CONTEXT, seed=s) for s in (1, 2)]
    wanted = [generate(llama, p, TurboQuantCache(config=llama.config), 40) for p in prompts]
    found: dict[int, list[list[int]]] = {}

    def work(i: int) -> None:
        found[i] = generate(llama, prompts[i], TurboQuantCache(config=llama.config), 40)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[i] for i in range(2)] == wanted


@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize("side", [0, 1])
def test_nan_in_the_context_names_the_layer(layer: int, side: int) -> None:
    cache = TurboQuantCache()

    def fill(broken: bool) -> None:
        for index in range(3):
            new = kv(CONTEXT, seed=index)
            if broken and index == layer:
                new[side][0, 1, 100, 7] = float("inf")
            cache.update(*new, index)
        cache.pack()

    with pytest.raises(NonFiniteError, match=f"{('keys', 'values')[side]} of layer {layer}"):
        fill(broken=True)
    assert torch.isinf((cache.layers[layer].keys, cache.layers[layer].values)[side]).sum() == 1
    cache.reset()
    fill(broken=False)
    assert all(torch.isfinite(x).all() for x in contents(cache))


def test_an_error_in_the_middle_of_a_pass_does_no_harm_to_the_context(llama: Any) -> None:
    cache = prefill(llama)
    before = copies(cache)

    def fail(*_args: Any) -> None:
        raise RuntimeError("out of memory")

    handle = llama.model.layers[1].mlp.register_forward_hook(fail)
    with torch.no_grad(), pytest.raises(RuntimeError, match="out of memory"):
        llama(ids(5), past_key_values=cache)
    handle.remove()
    assert [layer.get_seq_length() for layer in cache.layers] == [CONTEXT + 5, CONTEXT + 5, CONTEXT]
    for layer in cache.layers:
        layer.store.crop(CONTEXT)
    assert same(copies(cache), before)
    with torch.no_grad():
        found, wanted = (llama(ids(2), past_key_values=held).logits for held in (cache, unpacked(cache)))
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    model = small_llama(dtype=dtype)
    cache = prefill(model)
    assert {x.dtype for x in contents(cache)} == {dtype}
    with torch.no_grad():
        found, wanted = (model(ids(2), past_key_values=held).logits for held in (cache, unpacked(cache)))
    assert torch.equal(found, wanted)


def test_a_model_in_float64_is_refused() -> None:
    model = small_llama(dtype=torch.float64)
    with torch.no_grad(), pytest.raises(LayoutError, match="load the model in bfloat16, float16 or float32"):
        model(ids(CONTEXT), past_key_values=TurboQuantCache())


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"bits": 0}, "bits"), ({"bits": 9}, "bits"), ({"bits": 4.0}, "bits"), ({"bits": "four"}, "bits"),
        ({"key_bits": 12}, "key_bits"), ({"preset": "int4"}, "preset"), ({"spec": "int4"}, "preset"),
        ({"spec": CodecSpec(), "bits": 3}, "spec"), ({"window": "all"}, "window"), ({"sink_tokens": -1}, "sink_tokens"),
        ({"chunk_tokens": 1}, "chunk_tokens"), ({"residual": 128}, "residual"),
        ({"protect_last": 2}, "config=model.config"),
    ],
)  # fmt: skip
def test_settings_that_are_not_understood(settings: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        TurboQuantCache(**settings)


def test_settings_reach_the_layers() -> None:
    config = LlamaConfig(num_hidden_layers=6)
    cache = TurboQuantCache("turboquant_k8v4", config=config, window=7, sink_tokens=1, chunk_tokens=64, value_bits=3)
    assert all(isinstance(layer, TurboQuantLayer) for layer in cache.layers)
    options = cache.layers[5].options
    assert (options.spec.key_bits, options.spec.value_bits) == (8, 3)
    assert (options.window, options.sink_tokens, options.chunk_tokens) == (7, 1, 64)
    assert TurboQuantCache(CodecSpec(2, 2)).options.spec == CodecSpec(2, 2)


def test_protected_layers_stay_exact() -> None:
    model = small_llama(layers=5)
    cache = prefill(model, protect_first=1, protect_last=2)
    assert [isinstance(layer, TurboQuantLayer) for layer in cache.layers] == [False, True, True, False, False]
    assert [layer.last for layer in cache.layers[1:3]] == [False, True]
    plain = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids(CONTEXT), past_key_values=plain)
    assert torch.equal(cache.layers[0].keys, plain.layers[0].keys)
    assert torch.equal(cache.layers[4].values, plain.layers[4].values)
    assert cache.nbytes > 3 * plain.layers[0].keys.nbytes * 2


def test_replacing_a_sealed_layer_says_what_to_do(llama: Any) -> None:
    cache = prefill(llama)
    cache.layers[0].sealed = "put it last"
    with pytest.raises(PressOrderError, match="put it last"):
        cache.layers[0].keys = cache.layers[0].keys[:, :, 1:]


def test_a_context_in_pieces_is_sealed() -> None:
    cache = TurboQuantCache(window=20, sink_tokens=4, chunk_tokens=32)
    for seed, n in enumerate((90, 70)):
        cache.update(*kv(n, seed=seed), 0)
    cache.seal()
    before = [p.clone() for p in parts(cache.layers[0].store)]
    cache.update(*kv(200, seed=9), 0)
    cache.layers[0].crop(-200)
    assert same(parts(cache.layers[0].store), before)
