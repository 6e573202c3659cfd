"""What a packed cache holds in memory, counted over every storage that can be reached."""

from __future__ import annotations

import copy
import functools
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from packed_support import ids, kv, small_llama
from transformers import DynamicCache

from tq_offload.kv_cache import TurboQuantCache, TurboQuantLayer, resident_bytes
from tq_offload.kv_cache.workspace import Workspace

L, HEADS, DIM = 4096, 4, 128
FULL = 2 * L * HEADS * DIM * 2  # K and V of a layer in bfloat16


def test_every_storage_counts_once_and_whole() -> None:
    x = torch.zeros(1000)
    assert resident_bytes([x[:1], {"again": x, "view": x[5:7]}]) == 4000
    assert resident_bytes(x.numpy()[3:4].view(np.uint8)) == 4000
    assert resident_bytes(np.zeros(10)[2:3]) == 80
    assert resident_bytes(functools.partial(max, x)) == 4000
    assert resident_bytes(lambda: x) == 4000
    assert resident_bytes(lambda y=x: y) == 4000

    class Holder:
        __slots__ = ("me", "x")

    holder = Holder()
    holder.x, holder.me = x, holder
    assert resident_bytes(holder) == 4000
    assert resident_bytes(weakref.ref(x), 5, "text", None) == 0


def attend(cache: Any, tokens: int, *, layers: int = 2, seed: int = 0) -> None:
    """What the attention modules of a model with random K and V do to a cache."""
    for index in range(layers):
        k, v = kv(tokens, heads=HEADS, dim=DIM, dtype=torch.bfloat16, seed=seed + index)
        out = cache.update(k, v, index)
        assert out[0].shape[2] == out[1].shape[2]


@pytest.mark.parametrize(("exact", "ratio"), [((0, 0), 3.8), ((4, 124), 3.5)])
def test_ratio_at_4096_tokens(exact: tuple[int, int], ratio: float) -> None:
    cache = TurboQuantCache(sink_tokens=exact[0], window=exact[1])
    attend(cache, L)
    cache.pack()
    assert 2 * FULL / resident_bytes(cache) >= ratio
    assert resident_bytes(cache) - cache.nbytes < 1000
    attend(cache, 1, seed=5)
    assert 2 * FULL / resident_bytes(cache) >= ratio  # the tables of the decoders are there now
    assert cache.workspace.nbytes == 0


def test_half_the_tokens_in_4_bits() -> None:
    """What a press with a compression ratio of 0.5 leaves, assigned to the layer: 7.5 times less."""
    layer = TurboQuantLayer()
    k, v = kv(L, heads=HEADS, dim=DIM, dtype=torch.bfloat16)
    layer.waiting = True
    layer.update(k, v)
    order = torch.randperm(L, generator=torch.Generator().manual_seed(0))[: L // 2]
    layer.keys, layer.values = k[:, :, order], v[:, :, order]
    layer.finish()
    del k, v
    assert layer.get_seq_length() == L // 2
    assert FULL / resident_bytes(layer) > 6.4  # 128 exact tokens of 2,048
    bare = TurboQuantLayer(TurboQuantCache(sink_tokens=0, window=0).options)
    bare.update(*kv(L // 2, heads=HEADS, dim=DIM, dtype=torch.bfloat16))
    assert FULL / resident_bytes(bare) >= 7.5


def test_nothing_exact_is_left_behind_by_decoding_cropping_and_copying() -> None:
    cache = TurboQuantCache()
    attend(cache, 1000)
    bound = 2 * (2 * 2 * 380 * HEADS * DIM * 2)  # two layers: an exact window of 124, a tail of at most 380 tokens

    def packed(tokens: int) -> float:
        return 2 * FULL * tokens / L / 3.8

    for step in range(300):
        attend(cache, 4, seed=step)
    assert resident_bytes(cache) < packed(2200) + bound
    assert resident_bytes(cache) - cache.nbytes < 4000
    clone = copy.deepcopy(cache)
    exact = [layer.store.tail.nbytes + layer.store.runs[2].nbytes + layer.store.sinks.nbytes for layer in clone.layers]
    assert resident_bytes(cache, clone) - resident_bytes(cache) == sum(exact)  # the codes are shared
    for layer in clone.layers:
        layer.crop(300 - layer.get_seq_length())  # below 0: what every transformers understands
        assert layer.get_seq_length() == 300
    assert resident_bytes(clone) < packed(300) + bound
    assert resident_bytes(clone) - clone.nbytes < 1000
    cache.reorder_cache(torch.tensor([0]))
    assert resident_bytes(cache) - cache.nbytes < 4000
    cache.batch_repeat_interleave(3)
    assert resident_bytes(cache) < 3 * (packed(2200) + bound)
    cache.reset()
    assert resident_bytes(cache) == 0


def test_the_buffer_is_freed_after_the_last_layer() -> None:
    cache = TurboQuantCache()
    attend(cache, 600, layers=3)
    held = []
    for index in range(3):
        out = cache.update(*kv(1, heads=HEADS, dim=DIM, dtype=torch.bfloat16), index)
        held.append(cache.workspace.nbytes)
        del out
    assert held == [2 * 768 * HEADS * DIM * 2] * 2 + [0]  # 601 tokens, in steps of 256


@pytest.mark.parametrize("beams", [1, 3])
def test_a_model_after_generating(beams: int) -> None:
    model, prompt = small_llama(), ids(500)
    cache, plain = TurboQuantCache(config=model.config), DynamicCache(config=model.config)
    for held in (cache, plain):
        model.generate(prompt, past_key_values=held, max_new_tokens=100, num_beams=beams, do_sample=False)
    assert cache.get_seq_length() == plain.get_seq_length() == 599
    assert resident_bytes(cache) - cache.nbytes < 10_000
    exact = 3 * 2 * 2 * beams * (4 + 124 + 380) * 64 * 4
    assert resident_bytes(cache) < resident_bytes(plain) / 6.5 + exact
    assert cache.workspace.nbytes == 0


def test_workspace_leaves_a_buffer_that_is_in_use() -> None:
    workspace = Workspace()
    first = workspace.take("K", (1, 2, 10, 4), torch.float32, keep=True)
    address = first.data_ptr()
    first.fill_(1)
    second = workspace.take("K", (1, 2, 10, 4), torch.float32, keep=True)
    second.fill_(2)
    assert (first == 1).all()
    assert second.data_ptr() != address
    where = second.data_ptr()
    del second
    third = workspace.take("K", (1, 2, 11, 4), torch.float32, keep=True)
    assert third.data_ptr() == where  # nobody looked at it any more
    assert workspace.take("V", (1, 2, 11, 4), torch.float32, keep=True).data_ptr() != where
    del third
    assert workspace.take("K", (1, 2, 11, 4), torch.bfloat16, keep=True).dtype == torch.bfloat16
    larger = workspace.take("K", (1, 2, 300, 4), torch.bfloat16, keep=True)
    assert larger.shape == (1, 2, 300, 4)
    assert larger.is_contiguous()
