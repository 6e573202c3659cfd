"""Where a layer is unpacked while it attends: buffers that the layers of a cache share."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

__all__ = ["Workspace"]

ROUND = 256  # tokens: a buffer grows in steps of so many, so that not every new token takes a new one


class Workspace:
    """One buffer for K and one for V, reused from layer to layer and let go by the last one.

    A buffer that somebody still refers to (a model that shares K and V between layers, autograd) is left to them, and
    a new one is made.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def take(self, side: str, shape: tuple[int, int, int, int], dtype: torch.dtype, *, keep: bool) -> torch.Tensor:
        """A contiguous CPU tensor [B, H, T, D] with undefined contents, good until the next call for the same side.

        Args:
            side: `K` or `V`.
            shape: B, H, T, D.
            dtype: Its dtype.
            keep: Another layer will follow; False: the buffer is freed as soon as the caller lets go of it.
        """
        rows, heads, tokens, dim = shape
        size = rows * heads * tokens * dim
        flat = self._buffers.pop(side, None)
        if flat is None or flat.dtype != dtype or flat.numel() < size or _shared(flat):
            flat = None  # freed before the next one is made
            flat = torch.empty(rows * heads * -(-tokens // ROUND) * ROUND * dim if keep else size, dtype=dtype)
        if keep:
            self._buffers[side] = flat
        return flat[:size].view(shape)

    @property
    def nbytes(self) -> int:
        """Bytes held between two layers."""
        return sum(flat.nbytes for flat in self._buffers.values())

    def __deepcopy__(self, _memo: dict[int, Any]) -> Workspace:
        return Workspace()

    def __reduce__(self) -> tuple[type[Workspace], tuple[()]]:
        return Workspace, ()


def _shared(flat: torch.Tensor) -> bool:
    """True if a tensor other than `flat` uses its storage, or if this torch cannot tell."""
    return _users(flat) != _users_of_one()


def _users(flat: torch.Tensor) -> int:
    count: Callable[[int], int] = getattr(torch._C, "_storage_Use_Count", lambda _storage: -1)
    return count(flat.untyped_storage()._cdata)


@cache
def _users_of_one() -> int:
    """The count of a storage that one tensor uses: it includes torch's own handles."""
    users = _users(torch.empty(1))
    return users if users > 0 else -2
