"""`by_position` puts the sinks to the front and the recent tokens to the end, in every head."""

from __future__ import annotations

import pytest
import torch
from packed_support import kv

from tq_offload.kv_cache.order import by_position

T, SINKS, WINDOW = 50, 4, 10


def evict(
    k: torch.Tensor, v: torch.Tensor, kept: int, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As a scorer does: other tokens in every row and head, in the order of their scores. Also their positions."""
    scores = torch.rand(k.shape[:3], generator=torch.Generator().manual_seed(seed))
    index = scores.topk(kept, dim=2).indices
    pick = [x.gather(2, index.unsqueeze(-1).expand(-1, -1, -1, x.shape[3])) for x in (k, v)]
    return pick[0], pick[1], index


def expected(index: list[int], total: int = T) -> list[int]:
    """The positions in the new order: sinks by position, the rest as it is, recent tokens by position."""
    sinks = sorted(i for i in index if i < SINKS)
    recent = sorted(i for i in index if i >= total - WINDOW and i >= SINKS)
    return sinks + [i for i in index if i not in sinks and i not in recent] + recent


def check(old: tuple[torch.Tensor, ...], new: tuple[torch.Tensor, ...], index: torch.Tensor) -> None:
    k, v = by_position((old[0], old[1]), (new[0], new[1]), SINKS, WINDOW)
    rows, heads, kept, _ = new[0].shape
    for row in range(rows):
        for head in range(heads):
            before = index[row, head].tolist()
            order = torch.tensor([before.index(i) for i in expected(before)])
            assert torch.equal(k[row, head], new[0][row, head, order])
            assert torch.equal(v[row, head], new[1][row, head, order])
    assert k.shape[2] == kept


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64", "float8_e4m3fn"])
@pytest.mark.parametrize("kept", [1, 3, 25, 49])
def test_tokens_in_the_order_of_their_scores(dtype: str, kept: int) -> None:
    kind = getattr(torch, dtype)
    old = tuple(x.float().to(kind) for x in kv(T, rows=2, heads=3))
    bits = [x.view(torch.int8) if kind.itemsize == 1 else x for x in old]  # gather knows no float8
    k, v, index = evict(bits[0], bits[1], kept)
    if kind.itemsize == 1:
        assert torch.equal(k, by_position((bits[0], bits[1]), (k, v), 0, 0)[0])
    check(tuple(bits), (k, v), index)


@pytest.mark.parametrize("changed", [0, 1])
def test_a_press_that_also_changes_k_or_v(changed: int) -> None:
    old = kv(T, rows=2, heads=3)
    new = list(evict(*old, 30))
    new[changed] = new[changed] * 1.5
    check(old, (new[0], new[1]), new[2])


def test_values_that_are_alike_in_many_tokens() -> None:
    """K tells the tokens apart when V does not."""
    k, v = kv(T, rows=1, heads=2)
    v = torch.zeros_like(v)
    new = evict(k, v, 20)
    ordered, _ = by_position((k, v), (new[0], new[1]), SINKS, WINDOW)
    for head in range(2):
        kept = {i for i in new[2][0, head].tolist() if i < SINKS}
        assert torch.equal(ordered[0, head, : len(kept)], k[0, head, sorted(kept)])


def test_what_is_in_order_already_is_not_copied() -> None:
    old = kv(T)
    new = tuple(x[:, :, torch.tensor([0, 1, 3, 20, 9, 45, 49])].contiguous() for x in old)
    k, v = by_position(old, (new[0], new[1]), SINKS, WINDOW)
    assert k is new[0]
    assert v is new[1]


def test_nothing_to_keep_exact() -> None:
    old = kv(T)
    k, v, _ = evict(*old, 20)
    assert by_position(old, (k, v), 0, 0) == (k, v)


def test_more_exact_tokens_than_there_are() -> None:
    old = kv(6)
    k, v, index = evict(*old, 5)
    ordered, _ = by_position(old, (k, v), 100, 100)
    for head in range(2):
        assert torch.equal(ordered[0, head], old[0][0, head, sorted(index[0, head].tolist())])


def test_vectors_that_are_no_part_of_the_old_ones_stay_in_the_middle() -> None:
    old = kv(T)
    strange = kv(3, seed=9)
    mixed = tuple(torch.cat([x[:, :, -1:], s, x[:, :, :1]], dim=2) for x, s in zip(old, strange, strict=True))
    k, _ = by_position(old, (mixed[0], mixed[1]), SINKS, WINDOW)
    assert torch.equal(k, torch.cat([old[0][:, :, :1], strange[0], old[0][:, :, -1:]], dim=2))
