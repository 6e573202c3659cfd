"""From the shapes and dtypes of a MemoryObj to the codec's layout, with what the model's config says."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Protocol

import torch

from tq_offload.errors import LayoutError
from tq_offload.integrations.lmcache.advice import advise, advise_model
from tq_offload.integrations.lmcache.log import logger
from tq_offload.integrations.lmcache.model_config import HeadGeometry, ModelGeometry, load_geometry
from tq_offload.integrations.lmcache.settings import ENV_PREFIX, SerdeSettings
from tq_offload.layout import CODED_DTYPES, ChunkLayout, GroupLayout, dtype_name

__all__ = ["KeyLike", "LayoutResolver"]

_FP8 = {"float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}


class KeyLike(Protocol):
    """The fields of LMCache's ObjectKey that decide a layout."""

    @property
    def model_name(self) -> str:
        """Name of the model."""

    @property
    def kv_rank(self) -> int:
        """World size and ranks, 8 bits each."""


@dataclass(frozen=True)
class _Channels:
    """What is known of a group: elements a token and layer, and whether K and V share them."""

    count: int
    packed: bool

    def heads(self, head_dim: int) -> int:
        """KV heads of that head_dim in the channels; 0 if it does not divide them."""
        unit = 2 * head_dim if self.packed else head_dim
        return self.count // unit if self.count % unit == 0 else 0


class LayoutResolver:
    """Chooses the layout of a chunk. Thread-safe; the answer for the same shapes, dtypes and model never changes.

    LMCache asks for the size of a frame without saying for which key. `for_key` states it for the calling thread.

    Args:
        head_dim: Explicit head_dim; None: from the model's config.
        uint8_as: `none`, or the fp8 type that uint8 tensors hold.
        load: Reads a model's geometry by name.
        on_model: Called with the name of every model that is seen, once.
    """

    def __init__(
        self,
        head_dim: int | None = None,
        uint8_as: str = "none",
        load: Callable[[str], ModelGeometry | None] = load_geometry,
        on_model: Callable[[str], None] | None = None,
    ) -> None:
        self._head_dim = head_dim
        self._fp8 = _FP8.get(uint8_as)
        self._local = threading.local()
        self._warned: set[str] = set()
        self._geometry = lru_cache(maxsize=256)(load)
        self._on_model = lru_cache(maxsize=256)(on_model or (lambda _name: None))
        self._layout = lru_cache(maxsize=1024)(self._build)
        self.models_known = False
        """Set by the adapter that calls `for_key`; without it the model must not be used for any size."""

    @classmethod
    def of(cls, settings: SerdeSettings) -> LayoutResolver:
        """The resolver of a server with these settings. What is risky about them is said now, and model by model."""
        advise(settings.spec)
        return cls(settings.head_dim, settings.uint8_as, on_model=partial(advise_model, spec=settings.spec))

    @contextmanager
    def for_key(self, key: KeyLike) -> Iterator[None]:
        """State the key for `resolve` calls of this thread that have none."""
        self._local.key = key
        try:
            yield
        finally:
            self._local.key = None

    def resolve(
        self,
        shapes: Sequence[Sequence[int]],
        dtypes: Sequence[torch.dtype],
        key: KeyLike | None = None,
        kind: str | None = None,
    ) -> ChunkLayout:
        """Layout of an object with these groups. Never raises for a shape that LMCache can have.

        Args:
            shapes: Shapes of the groups.
            dtypes: Their dtypes.
            key: Key of the object.
            kind: Kind of the layout where the caller knows it (LMCache's layerwise formats); None: from the shapes.
        """
        key = key or getattr(self._local, "key", None)
        model, world = "", 1
        if key is not None and self.models_known:
            model, world = key.model_name, (key.kv_rank >> 24) & 0xFF or 1
        sizes = tuple(tuple(int(n) for n in shape) for shape in shapes)
        return self._layout(sizes, tuple(dtypes), model, world, kind)

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor as the codec is to see it: uint8 that holds fp8 is reinterpreted."""
        return tensor.view(self._fp8) if self._fp8 is not None and tensor.dtype == torch.uint8 else tensor

    def dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of what `view` gives."""
        return self._fp8 if self._fp8 is not None and dtype == torch.uint8 else dtype

    def _build(
        self,
        shapes: tuple[tuple[int, ...], ...],
        dtypes: tuple[torch.dtype, ...],
        model: str,
        world: int,
        kind: str | None,
    ) -> ChunkLayout:
        if model:
            self._on_model(model)
        geometry = self._geometry(model) if model else None
        pairs = zip(shapes, dtypes, strict=True)
        groups = (self._group(shape, dtype, kind or _kind(shape), model, geometry, world) for shape, dtype in pairs)
        return ChunkLayout(tuple(groups))

    def _group(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        kind: str,
        model: str,
        geometry: ModelGeometry | None,
        world: int,
    ) -> GroupLayout:
        name = dtype_name(self.dtype(dtype))
        try:
            if name not in CODED_DTYPES or kind == "opaque":
                if name in ("uint8", "int8") and len(shape) in (3, 4):
                    self._warn(_uint8_message(name, model))
                return GroupLayout("opaque", shape, name)
            return self._coded(shape, name, kind, model, geometry, world)
        except LayoutError as error:
            self._warn(f"shape {shape} of {name} is stored as it is: {error}")
            return GroupLayout("opaque", shape, name)

    def _coded(
        self, shape: tuple[int, ...], name: str, kind: str, model: str, geometry: ModelGeometry | None, world: int
    ) -> GroupLayout:
        channels = _Channels(shape[-1], kind == "packed")
        latent_dim = geometry.latent_dim if geometry is not None else None
        if self._head_dim is not None:
            latent = latent_dim is not None or (channels.packed and channels.count == self._head_dim)
            return GroupLayout.infer(shape, name, head_dim=self._head_dim, latent=latent, kind=kind)
        if latent_dim is not None and channels.packed and channels.count == latent_dim:
            return GroupLayout.infer(shape, name, head_dim=latent_dim, latent=True, kind=kind)
        head_dim = _choose(channels, geometry.heads, world) if geometry is not None and latent_dim is None else None
        if head_dim is not None:
            return GroupLayout.infer(shape, name, head_dim=head_dim, latent=False, kind=kind)
        if geometry is not None and geometry.recurrent:
            self._warn(f"shape {shape} of {model!r} is no KV of its attention layers and is stored as it is")
            return GroupLayout("opaque", shape, name)
        layout = GroupLayout.infer(shape, name, kind=kind)
        if self.models_known or not model:
            self._warn(
                f"head_dim of model {model or '(not known)'!r} is not known for shape {shape}: vectors of "
                f"{layout.head_dim} are used, at some cost in quality; set {ENV_PREFIX}HEAD_DIM, or head_dim of the "
                "serde"
            )
        return layout

    def _warn(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            logger().warning("TQ-Offload: %s", message)


def _uint8_message(name: str, model: str) -> str:
    head = f"{name} tensors of model {model or '(not known)'!r} are stored as they are, not compressed"
    if name == "int8":
        return f"{head}: int8 KV has no codec"
    values = " or ".join(_FP8)
    return f"{head}: if they are its fp8 KV cache, set {ENV_PREFIX}UINT8_AS (now none) to {values}"


def _kind(shape: tuple[int, ...]) -> str:
    """`packed` stands for packed or latent. LMCache's multi-process mode has [kv, L, T, C]; three dimensions are one
    K|V or latent plane a layer."""
    if len(shape) == 4 and shape[0] == 2:
        return "kv_first"
    return "packed" if len(shape) == 3 or (len(shape) == 4 and shape[0] == 1) else "opaque"


def _choose(channels: _Channels, candidates: Sequence[HeadGeometry], world: int) -> int | None:
    """The head_dim that fits the channels: with the number of heads a rank of `world` holds, else the only one that
    can be a shard of the model's heads; None if that leaves no or several candidates."""
    exact, possible = [], []
    for candidate in candidates:
        heads, total = channels.heads(candidate.head_dim), candidate.num_kv_heads
        if heads == 0 or (total is not None and total % heads):
            continue
        possible.append(candidate.head_dim)
        if total is not None and heads == max(1, total // world):
            exact.append(candidate.head_dim)
    for found in (exact, possible):
        if len(found) == 1:
            return found[0]
    return None
