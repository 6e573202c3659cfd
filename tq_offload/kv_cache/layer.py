"""`TurboQuantLayer`: a layer of a Hugging Face cache whose K and V are held packed."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import DynamicLayer

from tq_offload.errors import LayoutError, PressOrderError
from tq_offload.kv_cache.options import CacheOptions
from tq_offload.kv_cache.order import by_position
from tq_offload.kv_cache.runs import SIDES
from tq_offload.kv_cache.store import LayerStore
from tq_offload.kv_cache.workspace import Workspace

__all__ = ["TurboQuantLayer"]


class TurboQuantLayer(DynamicLayer):
    """K and V of one attention layer, packed; drop-in for transformers' `DynamicLayer`.

    The first tokens to come are attended to exactly as they are, then packed. Later the whole layer is unpacked for
    each forward pass into a buffer that the layers of a cache share. `keys` and `values` are properties: reading
    unpacks into a new tensor [B, H, T, D]; assigning the first tokens of what is held crops, without a new
    quantisation; assigning anything else replaces the contents once K and V are equally long again.

    Args:
        options: What is packed and how.
        index: Number of the layer, for error messages.
        workspace: The shared buffer.
    """

    def __init__(
        self, options: CacheOptions | None = None, *, index: int | None = None, workspace: Workspace | None = None
    ) -> None:
        self.options = CacheOptions() if options is None else options
        self.workspace = Workspace() if workspace is None else workspace
        self.store = LayerStore(self.options, "a layer" if index is None else f"layer {index}")
        self.last = True  # no layer after this one shares the workspace
        self.waiting = False  # somebody may still read or replace what has just come in; they call `finish`
        self._fresh = False  # the tail is a context that has not been packed yet
        self.sealed = ""  # who packed what has just come in, so that nobody may change it any more
        self._assigned: dict[str, torch.Tensor | int] = {}  # new contents, or a crop, of one side only
        self._empty: dict[str, torch.Tensor] = {}  # the shape of no tokens, once there have been some
        super().__init__()

    @classmethod
    def adopt(cls, layer: Any, options: CacheOptions, *, index: int, workspace: Workspace) -> TurboQuantLayer:
        """The same contents in a packed layer, still exact and waiting for `finish`."""
        new = cls(options, index=index, workspace=workspace)
        new.waiting = True
        if layer.is_initialized and layer.keys is not None and layer.keys.numel():
            new.lazy_initialization(layer.keys, layer.values)
            new.store.append(layer.keys, layer.values)
            new._fresh = True
        return new

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.get_seq_length()} tokens, {self.nbytes} bytes)"

    @property
    def nbytes(self) -> int:
        """Bytes held by K and V of this layer."""
        return self.store.nbytes

    @property
    def fresh(self) -> bool:
        """True while all that is held is a context that has not been packed yet."""
        return self._fresh

    def lazy_initialization(self, key_states: torch.Tensor, _value_states: torch.Tensor | None = None) -> None:
        """Note dtype and device. There is nothing to allocate."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take new tokens and return all of K and V, unpacked.

        Args:
            key_states: [B, H, n, D].
            value_states: [B, H, n, D'].

        Raises:
            NonFiniteError: NaN or Inf among tokens that are to be packed; it names the layer.
        """
        if self._assigned:
            raise LayoutError(f"{self.store.name}: keys and values have been given different numbers of tokens")
        self.sealed = ""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if not self.store.length:
            self.store.append(key_states, value_states)
            self._fresh = True
            if not self.waiting:
                self.finish()
            return key_states, value_states
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            past = [self._held(side) for side in SIDES]
            self.store.append(key_states, value_states)
            keys, values = torch.cat([past[0], key_states], dim=2), torch.cat([past[1], value_states], dim=2)
        else:
            self.store.append(key_states, value_states)
            keys, values = self._unpack_to_attend()
        if not self._fresh:
            self.store.pack()
        return keys, values

    def _unpack_to_attend(self) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = (self._unpack_into_workspace(side) for side in SIDES)
        return keys, values

    def _unpack_into_workspace(self, side: str) -> torch.Tensor:
        store = self.store
        out = self.workspace.take(side, store.shape(side), store.dtype(side), keep=not self.last)
        store.unpack_into(side, out)
        return out.to(self.device)

    def finish(self, *, everything: bool = True) -> None:
        """Pack a context that has come in, if there is one.

        Args:
            everything: The context is complete. False: more of it may come, so only whole chunks are packed.
        """
        self.waiting = False
        if self._fresh or everything:
            self.store.pack(everything=everything)
            self._fresh = False

    def settle(self) -> None:
        """Pack what was waiting for others to be done with it."""
        if self.waiting:
            self.waiting = False
            if self._fresh:
                self.finish()

    @property
    def keys(self) -> torch.Tensor | None:
        """K of all tokens, [B, H, T, D], unpacked into a new tensor; None before the first ones."""
        return self._get("K")

    @keys.setter
    def keys(self, new: torch.Tensor | None) -> None:
        self._set("K", new)

    @property
    def values(self) -> torch.Tensor | None:
        """V of all tokens, [B, H, T, D']; see `keys`."""
        return self._get("V")

    @values.setter
    def values(self, new: torch.Tensor | None) -> None:
        self._set("V", new)

    def _held(self, side: str) -> torch.Tensor:
        """What the store holds of one side. There must be tokens."""
        if self._fresh and self.store.tail is not None:
            return self.store.tail.of(side)
        return self.store.unpack(side).to(self.device)

    def _get(self, side: str) -> torch.Tensor | None:
        given = self._assigned.get(side)
        if isinstance(given, torch.Tensor):
            return given
        if not self.is_initialized:
            return None
        if not self.store.length:
            return self._empty.get(side, torch.empty(0, dtype=self.dtype, device=self.device))
        return self._held(side)[:, :, :given]

    def _set(self, side: str, new: torch.Tensor | None) -> None:
        if new is None or new.dim() != 4:
            self._clear()
            return
        if not self.is_initialized:
            self.lazy_initialization(new)
        self._assigned.pop(side, None)
        n = new.shape[2]
        if not n and not self.store.length:
            self._empty[side] = new
        elif n > self.store.length or not _equal(self._held(side)[:, :, :n], new):
            if self.sealed:
                raise PressOrderError(self.sealed)
            self._assigned[side] = new.detach()
        elif n < self.store.length:
            self._assigned[side] = n
        if self._length_of("K") == self._length_of("V"):
            self._commit()

    def _length_of(self, side: str) -> int:
        given = self._assigned.get(side, self.store.length)
        return given if isinstance(given, int) else given.shape[2]

    def _commit(self) -> None:
        """Both sides are equally long again: crop, or replace the contents."""
        if not self._assigned:
            return
        if all(isinstance(given, int) for given in self._assigned.values()):
            length = self._length_of("K")
            self._assigned = {}
            self._crop_to(length)
            return
        keys, values = self._get("K"), self._get("V")
        assert keys is not None
        assert values is not None
        if not keys.shape[2]:
            self._assigned = {}
            self._crop_to(0)
            self._empty = {"K": keys, "V": values}
            return
        if keys.shape[2] < self.store.length:
            old = self._held("K"), self._held("V")
            keys, values = by_position(old, (keys, values), self.options.sink_tokens, self.options.window)
        self._assigned = {}
        self.dtype, self.device = keys.dtype, keys.device
        self.store.load(keys, values)
        self._fresh = True
        if not self.waiting:
            self.finish()

    def _clear(self) -> None:
        self.store.clear()
        self._assigned = {}
        self._empty = {}
        self._fresh = False
        self.is_initialized = False

    def _crop_to(self, length: int) -> None:
        if length <= 0:
            for side in SIDES:
                rows, heads, _, dim = self.store.shape(side)
                self._empty[side] = torch.empty((rows, heads, 0, dim), dtype=self.dtype, device=self.device)
            self._fresh = False
        self.store.crop(length)

    def get_seq_length(self, *_args: Any, **_kwargs: Any) -> int:
        """Tokens held."""
        return self._length_of("K") if self._assigned else self.store.length

    def crop(self, max_length: int) -> None:
        """Keep the first tokens; what the argument means, a length or tokens to remove, is up to this transformers."""
        length = self.get_seq_length()
        if not length:
            return
        probe = DynamicLayer()
        probe.keys = probe.values = torch.empty((1, 1, length, 1), device="meta")
        probe.is_initialized = True
        probe.crop(max_length)
        if probe.keys.shape[2] < length:
            self._crop_to(probe.keys.shape[2])

    def reset(self) -> None:
        """Forget all tokens."""
        self._clear()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Take rows of the batch: i64 [B]."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these rows of the batch: i64 [B'], or a mask bool [B]."""
        if self.store.length:
            self.store.select(indices.nonzero().flatten() if indices.dtype == torch.bool else indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row of the batch."""
        if self.store.length:
            self.store.select(torch.arange(self.store.shape("K")[0]).repeat_interleave(repeats))

    def offload(self) -> None:
        """Nothing: packed tokens are in CPU memory."""

    def prefetch(self) -> None:
        """Nothing, see `offload`."""


def _equal(held: torch.Tensor, new: torch.Tensor) -> bool:
    if held.shape != new.shape or held.dtype != new.dtype or held.device != new.device:
        return False
    same_memory = held.data_ptr() == new.data_ptr() and held.stride() == new.stride()
    return same_memory or torch.equal(held, new)
