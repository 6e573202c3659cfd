"""LMCache's own remote connectors (fs, lm, S3, Mooncake, plugins, …) with frames in them, in in-process mode."""

from tq_offload_connectors.remote.connector import CompressedConnector
from tq_offload_connectors.remote.setup import install

__all__ = ["CompressedConnector", "install"]
