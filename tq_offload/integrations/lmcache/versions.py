"""Which LMCache releases this integration works with."""

from __future__ import annotations

import importlib.metadata
import re

from tq_offload.errors import IncompatibleError

__all__ = ["SUPPORTED", "check_lmcache", "has_plugins", "installed_lmcache"]

SUPPORTED = "0.5.3 to 0.5.6"
_FIRST, _LAST = (0, 5, 3), (0, 5, 6)
_PLUGINS = (0, 5, 4)


def installed_lmcache() -> str | None:
    """Version of the installed LMCache, without importing it; None if there is none."""
    try:
        return importlib.metadata.version("lmcache")
    except importlib.metadata.PackageNotFoundError:
        return None


def check_lmcache(version: str | None = None) -> str:
    """Return the version of LMCache if it is supported.

    Args:
        version: Version to check; None: the installed one.

    Raises:
        IncompatibleError: LMCache is not installed, or of another version. The message names both.
    """
    found = version or installed_lmcache()
    if found is None:
        raise IncompatibleError(f"TQ-Offload: LMCache is not installed; supported: lmcache {SUPPORTED}")
    if not _FIRST <= _numbers(found) <= _LAST:
        raise IncompatibleError(f"TQ-Offload: lmcache {found} is installed; supported: lmcache {SUPPORTED}")
    return found


def has_plugins(version: str) -> bool:
    """True if that LMCache loads entry points, so that `LMCACHE_SERDE` reaches its server."""
    return _numbers(version) >= _PLUGINS


def _numbers(version: str) -> tuple[int, ...]:
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    return tuple(int(part) for part in match.groups()) if match else ()
