"""What is known of LMCache's remote connectors: how each keeps an object's length, and whose memory it needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

__all__ = ["CONNECTORS", "UNKNOWN", "Handling", "handling_of", "innermost"]


@dataclass(frozen=True)
class Handling:
    """How frames go through a connector.

    Args:
        length: `kept`: an object comes back with the length that it was stored with; `fixed`: every object must have
            the size of a full chunk, so shorter frames are padded; `lost`: it keeps no data at all.
        memory: `heap`: any memory will do; `pool`: it must be LMCache's, which the connector has registered with its
            device; `pool_without_meta`: so if `save_chunk_meta` is false.
        asks_first: A get of an absent key would not end, so the connector is asked for it before.
        refused: Why it cannot be used, and what to use instead.
        note: Why it is so, for people.
    """

    length: str
    memory: str = "heap"
    asks_first: bool = False
    refused: str = ""
    note: str = ""

    def needs_pool(self, save_chunk_meta: bool) -> bool:
        """Whether objects must lie in LMCache's own CPU memory."""
        return self.memory == "pool" or (self.memory == "pool_without_meta" and not save_chunk_meta)


_HEADER = "keeps a header with shape and length"
_SENTINEL = (
    "another connector: LMCache's connector for Redis Sentinel never awaits its client, so it stores nothing; "
    "TQ-Offload's own Redis tier (LMCACHE_SERDE=turboquant) speaks Sentinel"
)

CONNECTORS: Mapping[str, Handling] = MappingProxyType(
    {
        "FSConnector": Handling("kept", note=_HEADER + ", without save_chunk_meta the length of the file"),
        "HF3fsConnector": Handling("kept", note=_HEADER + ", without save_chunk_meta the length of the file"),
        "LMCServerConnector": Handling("kept", note="the protocol carries shape and length"),
        "RedisConnector": Handling("kept", note=_HEADER + " under a key of its own"),
        "RedisClusterConnector": Handling("kept", note=_HEADER + " under a key of its own"),
        "RedisSentinelConnector": Handling("kept", refused=_SENTINEL),
        "InfinistoreConnector": Handling("kept", note=_HEADER + "; at most 40 MiB an object"),
        "SageMakerHyperPodConnector": Handling("kept", note=_HEADER),
        "MooncakestoreConnector": Handling(
            "kept", "pool_without_meta", note=_HEADER + ", without save_chunk_meta the length that the store reports"
        ),
        "EICConnector": Handling("kept", "pool", note=_HEADER + " under a key of its own"),
        "BigtableConnector": Handling("kept", note="the length of the cell; layer groups become one column"),
        "RESPConnector": Handling(
            "fixed", asks_first=True, note="a value of another length is an error that it does not report"
        ),
        "ValkeyConnector": Handling("fixed", note="reads into a full chunk and does not say how much"),
        "SyncValkeyConnector": Handling("fixed", note="reads into a full chunk and does not say how much"),
        "S3Connector": Handling("fixed", note="refuses objects of another size than a full chunk"),
        "AzureConnector": Handling("fixed", note="refuses objects of another size than a full chunk"),
        "HFBucketConnector": Handling("fixed", note="refuses objects of another size than a full chunk"),
        "MockConnector": Handling("lost", note="keeps sizes, but no bytes: every load is a miss"),
        "BlackholeConnector": Handling("lost", note="keeps nothing"),
    }
)
"""By the name of the class, for classes of LMCache 0.5.3 to 0.5.6."""

UNKNOWN = Handling("kept", note="not a connector of LMCache: taken for one that keeps lengths; the frame proves it")


def innermost(connector: Any) -> Any:
    """The connector that does the work: below LMCache's audit."""
    while any(cls.__name__ == "AuditConnector" for cls in type(connector).__mro__):
        connector = connector.real_connector
    return connector


def handling_of(connector: Any) -> Handling:
    """How to use that connector: its class's, or that of the nearest class of LMCache that it derives from."""
    for cls in type(connector).__mro__:
        if cls.__module__.startswith("lmcache.") and cls.__name__ in CONNECTORS:
            return CONNECTORS[cls.__name__]
    return UNKNOWN
