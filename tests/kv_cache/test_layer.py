"""`TurboQuantLayer` behaves as a `DynamicLayer` that holds what it unpacks to."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from packed_support import kv, parts, same
from support import relative_mse
from transformers.cache_utils import DynamicLayer

from tq_offload.errors import LayoutError, NonFiniteError, PressOrderError
from tq_offload.kv_cache import CacheOptions, TurboQuantLayer, resident_bytes
from tq_offload.spec import CodecSpec

OPTIONS = CacheOptions(sink_tokens=4, window=20, chunk_tokens=32)


def filled(tokens: int = 150, *, options: CacheOptions = OPTIONS, **shape: int) -> TurboQuantLayer:
    layer = TurboQuantLayer(options, index=3)
    layer.update(*kv(tokens, **shape))
    return layer


def held(layer: TurboQuantLayer) -> tuple[torch.Tensor, torch.Tensor]:
    assert layer.keys is not None
    assert layer.values is not None
    return layer.keys, layer.values


def plain(layer: TurboQuantLayer) -> DynamicLayer:
    twin = DynamicLayer()
    twin.update(*held(layer))
    return twin


def assert_alike(layer: TurboQuantLayer, twin: DynamicLayer) -> None:
    assert layer.get_seq_length() == twin.get_seq_length()
    assert torch.equal(layer.keys, twin.keys)
    assert torch.equal(layer.values, twin.values)
    if hasattr(twin, "get_max_cache_shape"):  # up to transformers 5.23
        assert layer.get_max_cache_shape() == twin.get_max_cache_shape()


def test_the_first_tokens_are_returned_as_they_are() -> None:
    layer, (k, v) = TurboQuantLayer(OPTIONS), kv(150)
    out = layer.update(k, v)
    assert out[0] is k
    assert out[1] is v
    assert not torch.equal(layer.keys, k)
    assert relative_mse(held(layer)[0], k) < 0.02
    assert (layer.dtype, layer.device) == (k.dtype, k.device)


def test_later_tokens_see_all_of_the_past() -> None:
    layer = filled(rows=2)
    for step in range(1, 5):
        past = held(layer)
        k, v = kv(step, rows=2, seed=step)
        out = layer.update(k, v)
        for got, before, new in zip(out, past, (k, v), strict=True):
            assert torch.equal(got, torch.cat([before, new], dim=2))
    assert layer.get_seq_length() == 160


def test_before_the_first_tokens() -> None:
    layer = TurboQuantLayer()
    assert layer.keys is None
    assert layer.values is None
    assert (layer.get_seq_length(), layer.nbytes, layer.is_initialized) == (0, 0, False)
    layer.crop(3)
    layer.batch_repeat_interleave(2)
    layer.batch_select_indices(torch.tensor([0]))
    layer.reorder_cache(torch.tensor([0]))
    layer.reset()
    assert layer.keys is None
    assert "0 tokens, 0 bytes" in repr(layer)


def test_no_tokens_at_all() -> None:
    layer = TurboQuantLayer()
    k, v = kv(0)
    assert layer.update(k, v)[0].shape == (1, 2, 0, 64)
    assert layer.get_seq_length() == 0
    assert layer.keys is not None
    assert layer.keys.numel() == 0
    k, v = kv(150)
    layer.update(k, v)
    assert layer.update(k[:, :, :0], v[:, :, :0])[0].shape == (1, 2, 150, 64)
    assert layer.get_seq_length() == 150


def test_what_is_read_is_a_copy() -> None:
    layer = filled()
    before = [p.clone() for p in parts(layer.store)]
    held(layer)[0].zero_()
    assert same(parts(layer.store), before)


@pytest.mark.parametrize("length", [1, 3, 50, 131, 149, 150])
@pytest.mark.parametrize("order", ["keys first", "values first"])
def test_assigning_the_first_tokens_crops(length: int, order: str) -> None:
    layer = filled()
    twin, whole = plain(layer), copy.deepcopy(layer)
    for name in ("keys", "values") if order == "keys first" else ("values", "keys"):
        setattr(layer, name, getattr(layer, name)[:, :, :length])
        assert getattr(layer, name).shape[2] == length
        setattr(twin, name, getattr(twin, name)[:, :, :length])
    assert_alike(layer, twin)
    whole.store.crop(length)
    assert same(parts(layer.store), parts(whole.store))


def test_assigning_no_tokens_crops_to_nothing() -> None:
    layer = filled()
    layer.keys = held(layer)[0][:, :, :0]
    layer.values = held(layer)[1][:, :, :0]
    assert layer.get_seq_length() == layer.nbytes == 0
    layer.keys, layer.values = layer.keys, layer.values
    k, v = kv(30)
    assert torch.equal(layer.update(k, v)[0], k)


@pytest.mark.parametrize("nothing", [None, torch.empty(0)])
def test_assigning_nothing_clears(nothing: torch.Tensor | None) -> None:
    layer = filled()
    layer.keys = nothing
    layer.values = nothing
    assert layer.get_seq_length() == 0
    assert layer.keys is None


def test_assigning_something_else_packs_it() -> None:
    layer, (k, v) = filled(), kv(90, seed=5)
    layer.keys, layer.values = k, v
    fresh = TurboQuantLayer(OPTIONS)
    fresh.update(k, v)
    assert same(parts(layer.store), parts(fresh.store))
    assert resident_bytes(layer) == layer.nbytes


def test_assigning_more_tokens_than_are_held() -> None:
    layer, (k, v) = filled(50), kv(200, seed=5)
    layer.keys, layer.values = k, v
    assert layer.get_seq_length() == 200


def test_one_side_alone_waits_for_the_other() -> None:
    layer, (k, v) = filled(), kv(90, seed=5)
    old = held(layer)
    layer.keys = k
    assert torch.equal(held(layer)[0], k)
    assert torch.equal(held(layer)[1], old[1])
    with pytest.raises(LayoutError, match=r"layer 3.*different numbers of tokens"):
        layer.update(*kv(1))
    layer.values = v
    assert layer.get_seq_length() == 90


def test_changing_one_side_of_the_same_length() -> None:
    """As ThinK does with K: the other side is held as it was, its exact tokens too."""
    layer = filled()
    k, v = held(layer)
    layer.keys = k * 0.5
    assert layer.get_seq_length() == 150
    assert relative_mse(held(layer)[0], k * 0.5) < 0.01
    assert relative_mse(held(layer)[1], v) < 0.01


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_packing_again_changes_little(bits: int) -> None:
    """The least-squares scale gives the same codes again, but for one in a thousand bytes; the error hardly grows."""
    k, v = kv(256, dtype=torch.bfloat16)
    for spec in (CodecSpec(bits, bits, mean=False), CodecSpec(bits, bits)):
        layer = TurboQuantLayer(CacheOptions(spec, sink_tokens=0, window=0))
        layer.update(k, v)
        once = held(layer)
        again = TurboQuantLayer(layer.options)
        again.update(*once)
        first, second = layer.store.runs[0].of("K"), again.store.runs[0].of("K")
        assert (first.codes != second.codes).float().mean() < 0.002
        assert relative_mse(held(again)[0], once[0]) < 3e-4
        assert relative_mse(held(again)[0], k) < 1.03 * relative_mse(once[0], k)


def test_an_evicted_part_of_what_is_packed() -> None:
    """Tokens go and come in another order: those that stay differ by little, sinks and recent ones not at all."""
    layer = filled(200, heads=2)
    k, v = held(layer)
    index = torch.stack([torch.randperm(200, generator=torch.Generator().manual_seed(s))[:120] for s in (0, 1)])
    at = index[None, :, :, None].expand(1, 2, 120, 64)
    layer.keys, layer.values = k.gather(2, at), v.gather(2, at)
    assert layer.get_seq_length() == 120
    new = held(layer)[0]
    for head in range(2):
        kept = index[head].tolist()
        sinks = sorted(i for i in kept if i < 4)
        recent = sorted(i for i in kept if i >= 180)
        middle = [i for i in kept if i not in sinks and i not in recent]
        wanted = k[0, head, sinks + middle + recent]
        assert torch.equal(new[0, head, : len(sinks)], wanted[: len(sinks)])
        assert torch.equal(new[0, head, 120 - len(recent) :], wanted[120 - len(recent) :])
        assert relative_mse(new[0, head], wanted) < 0.02


def test_a_sealed_layer_takes_crops_and_new_tokens_only() -> None:
    layer = filled()
    layer.sealed = "put TurboQuantPress last"
    before = [p.clone() for p in parts(layer.store)]
    k, v = held(layer)
    for attempt in (k[:, :, 5:], k * 2, torch.cat([k, k], dim=2)):
        with pytest.raises(PressOrderError, match="put TurboQuantPress last"):
            layer.keys = attempt
        assert same(parts(layer.store), before)
    layer.keys, layer.values = k[:, :, :80], v[:, :, :80]
    assert layer.get_seq_length() == 80
    layer.update(*kv(1))
    layer.keys, layer.values = k[:, :, 5:], v[:, :, 5:]
    assert layer.get_seq_length() == 145


@pytest.mark.parametrize("argument", [-1000, -151, -150, -149, -1, 0, 1, 100, 149, 150, 151, 1000])
def test_crop_means_what_it_means_to_transformers(argument: int) -> None:
    layer, error = filled(), None
    twin = plain(layer)
    try:
        twin.crop(argument)
    except Exception as raised:
        error = type(raised)
    if error is not None:
        with pytest.raises(error):
            layer.crop(argument)
        return
    layer.crop(argument)
    assert layer.get_seq_length() == twin.get_seq_length()
    if twin.get_seq_length():
        assert_alike(layer, twin)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.reorder_cache(torch.tensor([2, 0, 0])),
        lambda x: x.batch_select_indices(torch.tensor([1])),
        lambda x: x.batch_select_indices(torch.tensor([True, False, True])),
        lambda x: x.batch_repeat_interleave(2),
    ],
    ids=["reorder", "select", "mask", "repeat"],
)
def test_changes_of_the_batch(change: Callable[[object], None]) -> None:
    layer = filled(rows=3)
    layer.update(*kv(40, rows=3, seed=1))
    twin = plain(layer)
    change(layer)
    change(twin)
    assert_alike(layer, twin)
    rows = held(layer)[0].shape[0]
    new = kv(1, rows=rows, seed=2)
    assert torch.equal(layer.update(*new)[0], twin.update(*new)[0])


def test_reset_starts_anew() -> None:
    layer = filled()
    layer.update(*kv(40, seed=1))
    layer.reset()
    assert (layer.get_seq_length(), resident_bytes(layer)) == (0, 0)
    layer.update(*kv(150))
    assert same(parts(layer.store), parts(filled().store))


@pytest.mark.parametrize("side", [0, 1])
def test_nan_names_the_layer_and_stays_what_it_is(side: int) -> None:
    new = kv(150)
    new[side][0, 0, 60, 5] = float("nan")
    layer = TurboQuantLayer(OPTIONS, index=3)
    with pytest.raises(NonFiniteError, match="layer 3"):
        layer.update(*new)
    assert held(layer)[side].isnan().sum() == 1
    layer.reset()
    layer.update(*kv(150))
    assert torch.isfinite(held(layer)[side]).all()


def test_nan_among_generated_tokens() -> None:
    layer = filled()
    context = [p.clone() for p in parts(layer.store)]
    k, v = kv(1)
    layer.update(torch.full_like(k, float("nan")), v)
    out = layer.update(k, v)[0]
    assert out.isnan().any(dim=3).all(dim=1).flatten().nonzero().flatten().tolist() == [150]
    many = k.expand(-1, -1, 60, -1), v.expand(-1, -1, 60, -1)
    with pytest.raises(NonFiniteError, match="keys of layer 3"):
        layer.update(*many)
    assert held(layer)[0].isnan().any(dim=3).all(dim=1).flatten().nonzero().flatten().tolist() == [150]
    layer.store.crop(150)
    assert same(parts(layer.store), context)
    layer.update(k, v)


def test_adopting_a_layer_of_transformers() -> None:
    twin, (k, v) = DynamicLayer(), kv(150)
    twin.update(k, v)
    layer = TurboQuantLayer.adopt(twin, OPTIONS, index=5, workspace=filled().workspace)
    assert torch.equal(held(layer)[0], k)
    layer.finish()
    assert same(parts(layer.store), parts(filled().store))
    empty = TurboQuantLayer.adopt(DynamicLayer(), OPTIONS, index=5, workspace=filled().workspace)
    empty.finish()
    assert empty.get_seq_length() == 0


def test_gradients_of_new_tokens_only() -> None:
    layer = filled()
    past = held(layer)
    new = [x.requires_grad_() for x in kv(3, seed=1)]
    k, v = layer.update(new[0], new[1])
    assert torch.equal(k[:, :, :150], past[0])
    (k.square().sum() + v.sum()).backward()
    assert torch.equal(new[0].grad, 2 * new[0].detach())
    assert torch.equal(new[1].grad, torch.ones_like(new[1]))
    assert not any(part.requires_grad for part in parts(layer.store))
