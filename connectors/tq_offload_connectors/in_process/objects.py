"""Between LMCache's MemoryObj and the codec's layouts and tensors, in in-process mode."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.memory_management import MemoryFormat, MemoryObj, MemoryObjMetadata, TensorMemoryObj

from tq_offload.errors import FrameMismatchError
from tq_offload.integrations.lmcache.advice import advise, advise_model
from tq_offload.integrations.lmcache.layouts import LayoutResolver
from tq_offload.integrations.lmcache.model_config import HeadGeometry, ModelGeometry, load_geometry
from tq_offload.integrations.lmcache.settings import SerdeSettings
from tq_offload.layout import ChunkLayout, dtype_name

__all__ = ["ChunkObjects", "Patience", "heap_object"]

ALLOCATE_WAIT_S = 2.0
ALLOCATE_PAUSE_S = 0.005
_LAYER_KINDS = {MemoryFormat.KV_T2D: "token_kv", MemoryFormat.KV_2TD: "kv_token"}


class _Key:
    """What LayoutResolver wants to know of a key."""

    def __init__(self, model_name: str, kv_rank: int) -> None:
        self.model_name, self.kv_rank = model_name, kv_rank


class Patience:
    """Shared by the loads of a batch: once one of them waited for memory in vain, no other waits."""

    def __init__(self) -> None:
        self.over = False


class ChunkObjects:
    """Reads chunks to store, and allocates those to load, of one worker. Thread-safe.

    Args:
        config: LMCache's configuration.
        metadata: LMCache's metadata: shapes, dtypes and head_dim come from it.
        local_cpu_backend: Lends memory; None in the scheduler.
        settings: Settings of the codec.
    """

    def __init__(self, config: Any, metadata: Any, local_cpu_backend: Any, settings: SerdeSettings) -> None:
        self._metadata, self._cpu = metadata, local_cpu_backend
        advise(settings.spec)
        advise_model(str(metadata.model_name), settings.spec)
        self.layerwise, self._mla = bool(config.use_layerwise), bool(metadata.use_mla)
        self.head_dim: int | None = settings.head_dim or int(metadata.kv_shape[4])
        self._resolver = LayoutResolver(settings.head_dim, settings.uint8_as, load=self._geometry)
        self._resolver.models_known = True
        self._key = _Key(metadata.model_name, min(255, metadata.world_size) << 24)
        self._format = self._format_of_loads(bool(config.enable_blending))

    def _geometry(self, model_name: str) -> ModelGeometry | None:
        """Heads of the engine's own metadata, and of the model's config for groups that have others."""
        known, head_dim = load_geometry(model_name), int(self._metadata.kv_shape[4])
        heads = known.heads if known is not None else ()
        if self._mla:
            return ModelGeometry(heads, head_dim, known is not None and known.recurrent)
        if head_dim not in [h.head_dim for h in heads]:
            heads = (HeadGeometry(head_dim, None), *heads)
        return ModelGeometry(heads, None, known is not None and known.recurrent)

    def _format_of_loads(self, blending: bool) -> MemoryFormat:
        if self._mla:
            return MemoryFormat.KV_MLA_FMT
        if self.layerwise:
            return MemoryFormat.KV_2TD if blending else MemoryFormat.KV_T2D
        return MemoryFormat.KV_2LTD

    # Store

    def source(self, obj: MemoryObj, key: CacheEngineKey) -> tuple[ChunkLayout, Sequence[torch.Tensor]]:
        """Layout and tensors of a chunk to store.

        Raises:
            ValueError: It has no tensor in host memory.
        """
        shapes, dtypes = _groups_of(obj)
        kind = _LAYER_KINDS.get(obj.get_memory_format())
        layout = self._resolver.resolve([_coded(shape) for shape in shapes], dtypes, self._key, kind)
        return layout, self.targets(obj)

    # Load

    def allocate(self, layout: ChunkLayout, patience: Patience) -> MemoryObj | None:
        """Memory for a chunk that a frame holds, waiting a moment for chunks under way; None: there is no room.

        In layerwise mode a load must not fail: it gets memory outside LMCache's pool.

        Args:
            layout: What the frame holds.
            patience: Of the batch.

        Raises:
            FrameMismatchError: Not a chunk of this engine.
        """
        shapes, dtypes = self._expected(layout)
        deadline = time.monotonic() + ALLOCATE_WAIT_S
        while True:
            obj: MemoryObj | None = self._cpu.allocate(shapes, dtypes, fmt=self._format, busy_loop=False)
            if obj is not None:
                return obj
            if self.layerwise:
                return heap_object(shapes, dtypes, self._format)
            patience.over = patience.over or time.monotonic() >= deadline
            if patience.over:
                return None
            time.sleep(ALLOCATE_PAUSE_S)

    def targets(self, obj: MemoryObj) -> list[torch.Tensor]:
        """The tensors of a chunk as the codec sees them, one for each group.

        Raises:
            ValueError: It has no tensor in host memory.
        """
        tensors = []
        for index, shape in enumerate(_groups_of(obj)[0]):
            tensor = obj.get_tensor(index)
            if tensor is None or tensor.device.type != "cpu":
                raise ValueError(f"group {index} of the object has no tensor in host memory")
            tensors.append(self._resolver.view(tensor).view(_coded(shape)))
        return tensors

    def _expected(self, layout: ChunkLayout) -> tuple[list[torch.Size], list[torch.dtype]]:
        """Shapes and dtypes of LMCache for a chunk of as many tokens as the frame has."""
        tokens = self._tokens(layout)
        if self.layerwise:
            width = int(self._metadata.kv_shape[3]) * int(self._metadata.kv_shape[4])
            shapes = [torch.Size(self._layer_shape(tokens, width))]
            dtypes = [self._metadata.kv_dtype]
        else:
            shapes, dtypes = self._metadata.get_shapes(tokens), self._metadata.get_dtypes()
        wanted = [
            (_coded(shape), dtype_name(self._resolver.dtype(dtype)))
            for shape, dtype in zip(shapes, dtypes, strict=True)
        ]
        found = [(group.shape, group.dtype) for group in layout.groups]
        for (shape, dtype), (in_frame, frame_dtype) in zip(wanted, found, strict=False):
            if shape != in_frame:
                raise FrameMismatchError("shape", shape, in_frame)
            if dtype != frame_dtype:
                raise FrameMismatchError("dtype", dtype, frame_dtype)
        if len(wanted) != len(found):
            raise FrameMismatchError("groups", len(wanted), len(found))
        return shapes, dtypes

    def _tokens(self, layout: ChunkLayout) -> int:
        """Tokens of a frame, by the axis that they have in this engine's format; a wrong guess does not fit later."""
        shape = layout.groups[0].shape if layout.groups else ()
        axis = 0 if self.layerwise and self._format == MemoryFormat.KV_T2D else 1 if self.layerwise else 2
        tokens = shape[axis] if len(shape) > axis else 0
        if not 0 < tokens <= int(self._metadata.chunk_size):
            raise FrameMismatchError("tokens", f"1 to {self._metadata.chunk_size}", tokens)
        return tokens

    def _layer_shape(self, tokens: int, width: int) -> tuple[int, ...]:
        if self._mla:
            return (tokens, width)
        return (tokens, 2, width) if self._format == MemoryFormat.KV_T2D else (2, tokens, width)


def _groups_of(obj: MemoryObj) -> tuple[list[torch.Size], list[torch.dtype]]:
    return list(obj.get_shapes()), list(obj.get_dtypes())


def _coded(shape: Sequence[int]) -> tuple[int, ...]:
    """The shape that the codec sees: a layerwise latent [T, C] is one plane [1, T, C]."""
    sizes = tuple(int(n) for n in shape)
    return (1, *sizes) if len(sizes) == 2 else sizes


def heap_object(shapes: Sequence[torch.Size], dtypes: Sequence[torch.dtype], fmt: MemoryFormat) -> MemoryObj:
    """A MemoryObj outside LMCache's pool. Its memory goes with the last reference in Python."""
    nbytes = sum(shape.numel() * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True))
    metadata = MemoryObjMetadata(
        shape=shapes[0],
        dtype=dtypes[0],
        address=0,
        phy_size=nbytes,
        ref_count=1,
        pin_count=0,
        fmt=fmt,
        shapes=list(shapes),
        dtypes=list(dtypes),
    )
    return TensorMemoryObj(torch.empty(nbytes, dtype=torch.uint8), metadata, parent_allocator=None)
