"""Serializer and Deserializer of LMCache's multi-process mode over the codec: in place, exact sizes, all groups."""

from __future__ import annotations

import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.serde import Deserializer, Serializer
from lmcache.v1.memory_management import MemoryObj

from tq_offload.codec import TurboQuantCodec, cache_key_digest, model_fingerprint
from tq_offload.errors import EncodeError
from tq_offload.integrations.lmcache.layouts import LayoutResolver

__all__ = ["TurboQuantDeserializer", "TurboQuantSerializer", "key_digest"]


def key_digest(key: ObjectKey) -> bytes:
    """16 bytes that stand for every field of an ObjectKey."""
    return cache_key_digest(key.chunk_hash, key.model_name, key.kv_rank, key.object_group_id, key.cache_salt)


class TurboQuantSerializer(Serializer):
    """Encodes a MemoryObj into a byte buffer. The size is that of `estimate_serialized_size`, always.

    Args:
        codec: Codec.
        layouts: Chooses the layout of an object.
    """

    def __init__(self, codec: TurboQuantCodec, layouts: LayoutResolver) -> None:
        self._codec, self._layouts = codec, layouts

    def estimate_serialized_size(self, layout_desc: MemoryLayoutDesc) -> int:
        """Exact size in bytes of the frame of an object of that layout."""
        return self._codec.frame_size(self._layouts.resolve(layout_desc.shapes, layout_desc.dtypes))

    def serialize(self, src: MemoryObj, dst: MemoryObj, key: ObjectKey) -> int:
        """Encode `src` into `dst`.

        Returns:
            The size of the frame in bytes.

        Raises:
            EncodeError: The object must not be stored; `reason` says why.
        """
        layout = self._layouts.resolve(src.get_shapes(), src.get_dtypes(), key)
        size = self._codec.frame_size(layout)
        out = _bytes_of(dst)
        if len(out) != size:
            raise _refused("buffer_size", f"the buffer has {len(out)} bytes, the frame needs {size}")
        written = self._codec.encode_into(
            _tensors_of(src, self._layouts), layout, out, key=key_digest(key), model=model_fingerprint(key.model_name)
        )
        if written != size:
            raise _refused("frame_size", f"{written} bytes written, {size} expected")
        return written


class TurboQuantDeserializer(Deserializer):
    """Decodes a frame into a MemoryObj. The destination is untouched unless the whole frame is sound and its own.

    Args:
        codec: Codec.
        layouts: Chooses the layout of an object.
    """

    def __init__(self, codec: TurboQuantCodec, layouts: LayoutResolver) -> None:
        self._codec, self._layouts = codec, layouts

    def deserialize(self, src: MemoryObj, dst: MemoryObj, key: ObjectKey) -> None:
        """Decode `src` into `dst`.

        Raises:
            FrameError: The bytes must not be served; `reason` says why.
        """
        layout = self._layouts.resolve(dst.get_shapes(), dst.get_dtypes(), key)
        self._codec.decode_into(
            _bytes_of(src),
            _tensors_of(dst, self._layouts),
            layout=layout,
            key=key_digest(key),
            model=model_fingerprint(key.model_name),
        )


def _refused(reason: str, message: str) -> EncodeError:
    error = EncodeError(message)
    error.reason = reason
    return error


def _bytes_of(obj: MemoryObj) -> memoryview:
    return memoryview(obj.byte_array).cast("B")


def _tensors_of(obj: MemoryObj, layouts: LayoutResolver) -> list[torch.Tensor]:
    tensors = []
    for index in range(len(obj.get_shapes())):
        tensor = obj.get_tensor(index)
        if tensor is None:
            raise _refused("no_host_memory", f"group {index} of the object has no tensor in host memory")
        tensors.append(layouts.view(tensor))
    return tensors
