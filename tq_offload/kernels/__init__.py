"""Kernel backends. `get_backend` chooses one; a backend is imported when it is first asked for."""

from __future__ import annotations

import importlib
import logging
import os
from functools import cache

from tq_offload.errors import BackendError, ConfigError
from tq_offload.kernels.base import (
    Backend,
    Chunks,
    Decoder,
    Sections,
    Stream,
    VectorParams,
    stream_params,
)

__all__ = [
    "AUTOMATIC", "BACKENDS", "BACKEND_ENV", "Backend", "Chunks", "Decoder", "Sections", "Stream", "VectorParams",
    "get_backend", "stream_params",
]  # fmt: skip

BACKEND_ENV = "TQ_OFFLOAD_BACKEND"

# Name, module, class.
BACKENDS = {
    "numba": ("tq_offload.kernels.cpu_numba", "NumbaBackend"),
    "reference": ("tq_offload.kernels.reference", "ReferenceBackend"),
    "triton": ("tq_offload.kernels.triton", "TritonBackend"),
}
AUTOMATIC = ("numba", "reference")
"""Tried in this order by `auto`. Tensors on a GPU go to the Triton kernels whatever the backend (`kernels.device`)."""

_log = logging.getLogger(__name__)


@cache
def _load(name: str) -> Backend:
    module, cls = BACKENDS[name]
    try:
        backend: Backend = getattr(importlib.import_module(module), cls)()
    except ImportError as error:
        raise BackendError(f"backend {name!r} cannot run here: {error}") from error
    return backend


@cache
def _automatic() -> Backend:
    failures = []
    for name in AUTOMATIC:
        try:
            backend = _load(name)
        except BackendError as error:
            failures.append(str(error))
            continue
        if failures:
            _log.warning("TQ-Offload uses the slower backend %r: %s", name, "; ".join(failures))
        return backend
    raise BackendError("; ".join(failures))


def get_backend(name: str = "auto") -> Backend:
    """The backend of that name; `auto` follows TQ_OFFLOAD_BACKEND, else takes the fastest that can run here.

    Raises:
        ConfigError: The name is not known.
        BackendError: It was asked for by name and cannot run here.
    """
    setting, wanted = "backend", name
    if name == "auto" and os.environ.get(BACKEND_ENV):
        setting, wanted = BACKEND_ENV, os.environ[BACKEND_ENV]
    if wanted == "auto":
        return _automatic()
    if wanted not in BACKENDS:
        raise ConfigError(setting, wanted, ["auto", *BACKENDS])
    return _load(wanted)
