"""What a cache really holds: the storages that can be reached from it."""

from __future__ import annotations

import gc
import types
from typing import Any

import numpy as np
import torch

__all__ = ["resident_bytes"]

_CODE = (type, types.ModuleType, types.BuiltinFunctionType, types.CodeType, types.FrameType)


def resident_bytes(*roots: Any) -> int:
    """Bytes of all tensor storages and arrays that can be reached from these objects, each counted once and whole.

    A view counts with the whole storage that it keeps alive, so nothing can hide behind one.
    """
    storages: dict[int, int] = {}
    seen: set[int] = set()
    stack: list[Any] = list(roots)
    while stack:
        item = stack.pop()
        kind = type(item)
        if id(item) in seen or issubclass(kind, _CODE):
            continue
        seen.add(id(item))
        if issubclass(kind, torch.Tensor):
            storages |= _storage(item)
        elif issubclass(kind, np.ndarray):
            if item.base is None:
                storages[item.ctypes.data] = item.nbytes
            stack.append(item.base)
        if kind is types.FunctionType:
            stack += [item.__defaults__, item.__closure__]  # and not the module that it is from
        else:
            stack += gc.get_referents(item)
    return sum(storages.values())


def _storage(tensor: torch.Tensor) -> dict[int, int]:
    """Address and size of a tensor's storage; nothing for a wrapper around other tensors, which are reached anyway."""
    try:
        storage = tensor.untyped_storage()
        return {storage.data_ptr(): storage.nbytes()}
    except RuntimeError:
        return {}
