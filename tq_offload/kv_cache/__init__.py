"""KV caches of Hugging Face models held packed in memory. Importing this package imports transformers."""

from tq_offload.kv_cache.cache import TurboQuantCache
from tq_offload.kv_cache.layer import TurboQuantLayer
from tq_offload.kv_cache.memory import resident_bytes
from tq_offload.kv_cache.options import CacheOptions

__all__ = ["CacheOptions", "TurboQuantCache", "TurboQuantLayer", "resident_bytes"]
