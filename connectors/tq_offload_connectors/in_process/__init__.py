"""LMCache's in-process mode: the storage plugin `TurboQuantBackend`."""

from tq_offload_connectors.in_process.backend import TurboQuantBackend

__all__ = ["TurboQuantBackend"]
