"""Where the tokens that an eviction kept came from.

KVPress's scorers keep tokens in the order of their scores, another one in every head, so that the first and the last
tokens of what they leave are not the first and the last of the context. Attention does not see the order of the keys:
here sinks go back to the front and recent tokens to the end.
"""

from __future__ import annotations

import torch

__all__ = ["by_position"]


def by_position(
    old: tuple[torch.Tensor, torch.Tensor],
    new: tuple[torch.Tensor, torch.Tensor],
    sinks: int,
    window: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Order what was kept so that the sinks come first, then the rest as it is, then the recent tokens.

    A token is known by its K or its V, bit by bit: presses change one of them at most.

    Args:
        old: K [B, H, T, D] and V before the eviction, in order of position.
        new: K [B, H, n, D] and V after it, n < T.
        sinks: How many of the first old tokens are sinks.
        window: How many of the last old tokens are recent.

    Returns:
        K and V, each head in its new order; `new` itself where that is the order already.
    """
    total, sinks, window = old[0].shape[2], min(sinks, old[0].shape[2]), min(window, old[0].shape[2])
    rank = torch.zeros(new[0].shape[:3], dtype=torch.int64, device=new[0].device)
    if not sinks and not window:
        return new
    wanted = torch.zeros(total, dtype=torch.int64)
    wanted[total - window :] = torch.arange(1, window + 1)
    wanted[:sinks] = torch.arange(-sinks, 0)
    wanted = wanted.to(rank.device)
    for before, after in zip(old, new, strict=True):
        if before.shape[:2] != after.shape[:2] or before.shape[3] != after.shape[3] or before.dtype != after.dtype:
            continue
        ordered, index = _digests(before).sort(dim=2, stable=True)
        seen = _digests(after)
        at = torch.searchsorted(ordered, seen).clamp(max=total - 1)
        same = ordered.gather(2, at) == seen
        rank = torch.where((rank == 0) & same, wanted[index.gather(2, at)], rank)
        if same.all():  # K is as it was. V of a first layer would mistake tokens of the same word for each other
            break
    order = rank.argsort(dim=2, stable=True)
    if torch.equal(order, torch.arange(order.shape[2], device=order.device).expand_as(order)):
        return new
    keys, values = (x.gather(2, order.unsqueeze(-1).expand(-1, -1, -1, x.shape[3])) for x in new)
    return keys, values


def _digests(x: torch.Tensor) -> torch.Tensor:
    """A number for every vector, from its bits: [B, H, n, D] to i64 [B, H, n]."""
    bits = (
        x.detach().contiguous().view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])
    )
    total = torch.zeros(x.shape[:3], dtype=torch.int64, device=x.device)
    for d in range(x.shape[3]):  # Horner's rule modulo 2**64, a column at a time: no copy of x in 64 bits
        total = total * 6364136223846793005 + bits[..., d]
    return total
