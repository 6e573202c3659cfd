"""From LMCache's ObjectKey to the key of a frame."""

from __future__ import annotations

import hashlib

from lmcache.v1.distributed.api import ObjectKey

from tq_offload.codec import model_fingerprint
from tq_offload.integrations.lmcache.serde import key_digest
from tq_offload_connectors.byte_store import MAX_KEY_BYTES
from tq_offload_connectors.frame_store import FrameKey

__all__ = ["frame_key", "object_name"]


def object_name(key: ObjectKey) -> str:
    """Name of an object in a store: `model@rank@group@hash[@salt]`, different for different keys.

    LMCache keeps `@` out of models and salts. A model too long for a key is replaced by `@` and its digest.
    """
    rest = f"@{key.kv_rank:08x}@{key.object_group_id}@{key.chunk_hash.hex()}"
    if key.cache_salt:
        rest += f"@{key.cache_salt}"
    model = key.model_name.encode("utf-8", "surrogatepass")
    if len(model) + len(rest.encode("utf-8", "surrogatepass")) <= MAX_KEY_BYTES:
        return f"{key.model_name}{rest}"
    return f"@{hashlib.blake2b(model, digest_size=16).hexdigest()}{rest}"


def frame_key(key: ObjectKey) -> FrameKey:
    """Key of an object's frame: its digest stands for the same fields as in frames that our serde writes."""
    return FrameKey(object_name(key), key_digest(key), model_fingerprint(key.model_name))
