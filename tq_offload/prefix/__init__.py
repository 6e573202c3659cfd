"""KV caches of prompts, kept in a store: packed once, loaded as they were, in this process or another.

Importing this package imports transformers.
"""

from tq_offload.prefix.load import load_prefix
from tq_offload.prefix.save import PrefixInfo, save_prefix
from tq_offload.prefix.store import Store

__all__ = ["PrefixInfo", "Store", "load_prefix", "save_prefix"]
