"""Values in Redis or Valkey: one key a value. Importing this needs no redis-py; opening a store does."""

from tq_offload_connectors.redis.settings import RedisSettings
from tq_offload_connectors.redis.store import RedisStore

__all__ = ["RedisSettings", "RedisStore"]
