"""`LayerStore`: which tokens are exact and which are packed, whatever comes, goes and is cropped."""

from __future__ import annotations

import copy
import pickle
from itertools import product

import pytest
import torch
from packed_support import kv, parts, same
from support import relative_mse

from tq_offload.errors import ConfigError, NonFiniteError
from tq_offload.kernels import get_backend
from tq_offload.kv_cache.memory import resident_bytes
from tq_offload.kv_cache.options import CacheOptions
from tq_offload.kv_cache.packed import PackedTokens, vector_params
from tq_offload.kv_cache.runs import ExactRun, PackedRun
from tq_offload.kv_cache.store import LayerStore

SMALL = CacheOptions(sink_tokens=4, window=20, chunk_tokens=32)
Pair = tuple[torch.Tensor, torch.Tensor]


def filled(tokens: int, options: CacheOptions = SMALL, *, seed: int = 0, **shape: int) -> tuple[LayerStore, Pair]:
    store, (k, v) = LayerStore(options), kv(tokens, seed=seed, **shape)
    store.append(k, v)
    store.pack(everything=True)
    return store, (k, v)


def more(store: LayerStore, tokens: int, *, step: int = 1, seed: int = 1) -> Pair:
    """Decode: append `tokens` in steps, packing after each."""
    k, v = kv(tokens, seed=seed)
    for at in range(0, tokens, step):
        store.append(k[:, :, at : at + step], v[:, :, at : at + step])
        store.pack()
    return k, v


def kinds(store: LayerStore) -> list[tuple[str, int]]:
    runs: list[tuple[str, int]] = [("P" if isinstance(run, PackedRun) else "E", run.length) for run in store.runs]
    return runs + ([("T", store.tail.length)] if store.tail else [])


def exact(store: LayerStore, k: torch.Tensor, side: str = "K") -> list[int]:
    """Positions whose vectors came back bit by bit, in all rows and heads."""
    back = store.unpack(side)[:, :, : k.shape[2]]
    return (back == k[:, :, : back.shape[2]]).all(dim=3).all(dim=0).all(dim=0).nonzero().flatten().tolist()


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 19, 20, 21, 23, 24, 25, 51, 52, 53, 84, 200])
def test_sinks_and_window_are_exact_and_the_rest_is_packed(tokens: int, backend: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TQ_OFFLOAD_BACKEND", backend)
    store, (k, v) = filled(tokens, rows=2)
    wanted = sorted({*range(min(4, tokens)), *range(max(tokens - 20, 0), tokens)})
    assert exact(store, k) == wanted
    assert exact(store, v, "V") == wanted
    assert store.length == tokens
    assert store.unpack("V").shape == v.shape
    assert relative_mse(store.unpack("K"), k) < 0.02
    taken = max(tokens - 20, 0)
    assert sum(n for kind, n in kinds(store) if kind == "P") == taken


@pytest.mark.parametrize(("sinks", "window"), [(0, 0), (4, 0), (0, 20), (100, 0), (0, 100), (100, 100)])
def test_other_numbers_of_exact_tokens(sinks: int, window: int) -> None:
    for tokens in (1, 2, 50, 99, 100, 101, 150, 250):
        store, (k, _) = filled(tokens, CacheOptions(sink_tokens=sinks, window=window, chunk_tokens=32))
        wanted = {*range(min(sinks, tokens)), *range(max(tokens - window, 0), tokens)}
        if tokens <= sinks:
            wanted = set(range(tokens))
        assert exact(store, k) == sorted(wanted), tokens


def test_the_packed_tokens_are_those_of_packed_tokens() -> None:
    """64 + 32 - 20 = 76 tokens: two chunks of 32 and one of 12."""
    store, (k, v) = filled(96)
    backend = get_backend()
    for side, x in (("K", k), ("V", v)):
        for run, (start, stop, chunk) in zip(store.runs, ((0, 64, 32), (64, 76, 12)), strict=False):
            params = vector_params(SMALL.spec, side, x.dtype, chunk, x.shape[3])
            wanted = PackedTokens.encode(backend, x[:, :, start:stop], params, chunk)
            assert isinstance(run, PackedRun)
            assert torch.equal(run.of(side).codes, wanted.codes)
            assert torch.equal(run.of(side).scales, wanted.scales)


@pytest.mark.parametrize("step", [1, 7, 100])
def test_generated_tokens_are_packed_in_whole_chunks(step: int) -> None:
    """As soon as a whole chunk has left the window, and never twice: the codes do not depend on the steps."""
    store, (k, _) = filled(60)
    assert kinds(store) == [("P", 32), ("P", 8), ("E", 20)]
    new, _ = more(store, 700, step=step)
    assert kinds(store) == [("P", 32), ("P", 8), ("E", 20), ("P", 672), ("T", 28)]
    at_once = LayerStore(SMALL)
    at_once.append(new[:, :, :672], kv(700, seed=1)[1][:, :, :672])
    packed = at_once._packed(ExactRun(new[:, :, :672], kv(700, seed=1)[1][:, :, :672]))
    run = store.runs[3]
    assert isinstance(run, PackedRun)
    assert torch.equal(run.keys.codes, packed.keys.codes)
    assert torch.equal(run.values.codes, packed.values.codes)
    back = store.unpack("K")
    assert torch.equal(back[:, :, 40:60], k[:, :, 40:])
    assert torch.equal(back[:, :, 732:], new[:, :, 672:])
    assert relative_mse(back[:, :, 60:], new) < 0.02


@pytest.mark.parametrize("context", [1, 3, 15, 20, 21, 100])
def test_what_is_generated_and_cropped_again_leaves_the_context_as_it_was(context: int) -> None:
    store, _ = filled(context)
    before, k, v = [p.clone() for p in parts(store)], store.unpack("K"), store.unpack("V")
    for seed, tokens in ((1, 700), (2, 1), (3, 40)):
        more(store, tokens, seed=seed, step=9)
        assert torch.equal(store.unpack("K")[:, :, :context], k)
        store.crop(context)
        assert same(parts(store), before)
        assert torch.equal(store.unpack("V"), v)


def test_crop_at_every_length() -> None:
    whole, _ = filled(90)
    more(whole, 100)
    k, v = whole.unpack("K"), whole.unpack("V")
    for length in range(190, 0, -1):
        store = copy.deepcopy(whole)
        store.unpack("K")  # a decoder that refers to the codes must go as well
        store.crop(length)
        assert store.length == length
        assert store.nbytes == sum(part.untyped_storage().nbytes() for part in parts(store))
        assert resident_bytes(store) == store.nbytes
        assert torch.equal(store.unpack("K"), k[:, :, :length])
        assert torch.equal(store.unpack("V"), v[:, :, :length])
    store.crop(0)
    assert (store.length, store.nbytes, kinds(store)) == (0, 0, [])
    assert torch.equal(whole.unpack("K"), k)


@pytest.mark.parametrize("length", [2, 30, 70, 90, 120, 185])
def test_tokens_after_a_crop(length: int) -> None:
    """The decoder of the runs before must not be used for those after."""
    store, _ = filled(90)
    more(store, 100)
    k = store.unpack("K")
    store.crop(length)
    kept = sum(run.length for run in store.runs)
    new, _ = more(store, 60, seed=4)
    back = store.unpack("K")
    assert torch.equal(back[:, :, :kept], k[:, :, :kept])
    assert relative_mse(back[:, :, :length], k[:, :, :length]) < 0.02  # what was in the tail may be packed by now
    assert relative_mse(back[:, :, length:], new) < 0.02
    assert torch.equal(back[:, :, -20:], new[:, :, -20:])


@pytest.mark.parametrize(("first", "window"), list(product((5, 15, 20, 50, 90), (0, 20, 50))))
def test_a_second_context_loses_nothing(first: int, window: int) -> None:
    """Its old window, even one longer than a chunk, is packed; the sinks stay exact; the new window is exact."""
    options = CacheOptions(sink_tokens=4, window=window, chunk_tokens=32)
    store, (k, _) = filled(first, options)
    second, _ = more(store, 160, step=16)
    third, v = kv(40, seed=2)
    store.append(third, v)
    store.pack(everything=True)
    everything = torch.cat([k, second, third], dim=2)
    total = everything.shape[2]
    assert store.length == total
    assert exact(store, everything) == [0, 1, 2, 3, *range(total - window, total)]
    assert relative_mse(store.unpack("K"), everything) < 0.02
    assert kinds(store)[-1] == (("E", window) if window else ("P", kinds(store)[-1][1]))
    assert store.tail is None


def test_contexts_that_grow_in_chunks() -> None:
    """Not everything: whole chunks only, until the context has ended."""
    store, (k, v) = LayerStore(SMALL), kv(300)
    for at in range(0, 300, 50):
        store.append(k[:, :, at : at + 50], v[:, :, at : at + 50])
        store.pack()
        assert store.tail is not None
        assert 20 <= store.tail.length < 20 + 32
        assert set(exact(store, k)) >= {0, 1, 2, 3, *range(at + 30, at + 50)}
    store.pack(everything=True)
    assert kinds(store) == [("P", 256), ("P", 24), ("E", 20)]
    at_once, _ = filled(300)
    assert same(parts(store), parts(at_once))


def test_sinks_of_rows_with_padding() -> None:
    store, (k, v) = LayerStore(SMALL), kv(100, rows=3)
    store.starts = (0, 11, 30)
    store.append(k, v)
    store.pack(everything=True)
    back = store.unpack("K")
    for row, start in enumerate(store.starts):
        assert (back[row] == k[row]).all(dim=2).all(dim=0).nonzero().flatten().tolist() == [
            *range(start, start + 4),
            *range(80, 100),
        ]
    store.select(torch.tensor([2, 2, 1]))
    assert store.starts == (30, 30, 11)
    assert torch.equal(store.unpack("K"), back[[2, 2, 1]])
    store.crop(32)
    assert torch.equal(store.unpack("K"), back[[2, 2, 1], :, :32])


def test_rows_are_selected_everywhere() -> None:
    store, _ = filled(60, rows=3)
    k, v = kv(90, rows=3, seed=1)
    store.append(k, v)
    store.pack()
    assert [kind for kind, _ in kinds(store)] == ["P", "P", "E", "P", "T"]
    before = store.unpack("K"), store.unpack("V")
    for rows in ([2, 0, 1], [1, 1, 1, 0, 2], [2]):
        other = copy.deepcopy(store)
        other.unpack("K")
        other.select(torch.tensor(rows))
        assert resident_bytes(other) == other.nbytes
        assert torch.equal(other.unpack("K"), before[0][rows])
        assert torch.equal(other.unpack("V"), before[1][rows])


@pytest.mark.parametrize("side", ["keys", "values"])
@pytest.mark.parametrize("everything", [True, False])
def test_nan_names_the_layer_and_changes_nothing(side: str, everything: bool) -> None:
    store = LayerStore(SMALL, "layer 17")
    store.append(*kv(60))
    store.pack(everything=True)
    more(store, 40)
    new = dict(zip(("keys", "values"), kv(60, seed=3), strict=True))
    new[side][0, 1, 2, 3] = float("nan")
    store.append(new["keys"], new["values"])
    runs, tail, sinks, k = list(store.runs), store.tail, store.sinks, store.unpack("K")
    with pytest.raises(NonFiniteError, match=f"NaN or Inf in the {side} of layer 17"):
        store.pack(everything=everything)
    assert all(a is b for a, b in zip(store.runs, runs, strict=True))
    assert store.tail is tail
    assert store.sinks is sinks
    assert torch.equal(store.unpack("K").nan_to_num(7), k.nan_to_num(7))
    store.crop(100)
    store.pack(everything=True)
    assert torch.isfinite(store.unpack(side[0].upper())).all()


def test_k_and_v_of_other_sizes() -> None:
    """As in multi-head latent attention: K of 192 elements, V of 128."""
    store, (k, v) = LayerStore(SMALL), (kv(100, dim=192)[0], kv(100, dim=128)[1])
    store.append(k, v)
    store.pack(everything=True)
    assert store.unpack("K").shape == k.shape
    assert store.unpack("V").shape == v.shape
    assert store.shape("V") == (1, 2, 100, 128)
    assert relative_mse(store.unpack("V"), v) < 0.02


def test_copies_and_pickles_hold_the_same() -> None:
    store, _ = filled(90)
    more(store, 100)
    store.unpack("K")
    for other in (copy.deepcopy(store), pickle.loads(pickle.dumps(store))):
        assert same(parts(other), parts(store))
        assert torch.equal(other.unpack("K"), store.unpack("K"))
        assert kinds(other) == kinds(store)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("window", -1), ("window", 1.5), ("window", "124"), ("window", None), ("window", True), ("window", 1 << 21),
        ("sink_tokens", -1), ("sink_tokens", [4]), ("chunk_tokens", 15), ("chunk_tokens", 0), ("chunk_tokens", 256.0),
        ("spec", "turboquant"),
    ],
)  # fmt: skip
def test_options_that_are_not_understood(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name):
        CacheOptions(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("chunk", [16, 17, 1 << 20])
def test_chunk_sizes_at_the_ends(chunk: int) -> None:
    store, (k, _) = filled(150, CacheOptions(chunk_tokens=chunk, window=10))
    assert relative_mse(store.unpack("K"), k) < 0.02
    more(store, 60)
    assert store.length == 210


def test_packing_lets_go_of_what_was_packed_before() -> None:
    """The decoder of the runs before refers to their codes: it must not keep them until the next step."""
    store, _ = filled(200)
    for seed in range(100):
        store.unpack("K")
        store.append(*kv(1, seed=seed))
        runs = list(store.runs)
        store.pack()
        if len(runs) != len(store.runs) or any(a is not b for a, b in zip(runs, store.runs, strict=True)):
            assert resident_bytes(store) == store.nbytes
