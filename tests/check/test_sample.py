"""Windows of a text."""

import pytest
import torch

from tq_offload.check.sample import Sample, cut, default_text
from tq_offload.errors import CheckError


def test_no_token_is_scored_twice_and_the_whole_text_is_used() -> None:
    ids = torch.arange(2602)[None]
    windows = cut(ids, Sample())
    assert [w.shape[1] for w in windows] == [1281] * 3
    targets = torch.cat([w[0, 1025:] for w in windows])
    assert targets.unique().numel() == 768
    assert windows[0][0, 0] == 0
    assert windows[-1][0, -1] == 2601


@pytest.mark.parametrize(("tokens", "sizes"), [(1, [1]), (256, [256]), (257, [129, 128]), (768, [256] * 3)])
def test_sizes(tokens: int, sizes: list[int]) -> None:
    assert Sample(tokens=tokens).sizes == sizes
    (*_, last) = cut(torch.arange(1024 + tokens + 1)[None], Sample(tokens=tokens))
    assert last[0, -1] == 1024 + tokens


def test_every_window_starts_with_the_first_token_where_asked() -> None:
    ids = torch.arange(100, 400)[None]
    windows = cut(ids, Sample(prefix=10, tokens=260), first=True)
    assert [int(w[0, 0]) for w in windows] == [100, 100]
    assert int(ids[0, 131]) == 231


def test_too_short() -> None:
    with pytest.raises(CheckError, match=r"1792 tokens, 1793 are needed .* give a longer text with --text"):
        cut(torch.zeros(1, 1792, dtype=torch.int64), Sample())


def test_longer_than_the_model_takes() -> None:
    with pytest.raises(CheckError, match="takes 1024 tokens and a window has 1280: lower --prefix to 768"):
        cut(torch.zeros(1, 3000, dtype=torch.int64), Sample(), limit=1024)
    assert cut(torch.zeros(1, 3000, dtype=torch.int64), Sample(prefix=768), limit=1024)


@pytest.mark.parametrize("sizes", [(0, 1), (1, 0), (-5, 1)])
def test_sizes_below_one(sizes: tuple[int, int]) -> None:
    with pytest.raises(CheckError, match="at least 1 token"):
        Sample(*sizes)


def test_the_text_of_the_package_is_long_enough_for_the_defaults() -> None:
    text = default_text()
    assert len(text.split()) > 2000
    assert text.isascii()
