"""The highest resident memory during a call, on Linux, where the kernel's own peak can be reset."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["MALLOC", "extra_bytes"]

MALLOC: Mapping[str, str] = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
"""For the environment of a process that is measured: glibc gives large blocks back at once.

It would else keep those of the call before, and the next call would seem to need none.
"""

_PROCESS = Path("/proc/self")


def extra_bytes(call: Callable[[], Any]) -> int | None:
    """Bytes of resident memory at the peak of a call beyond those before it. None: the peak cannot be reset here."""
    try:
        (_PROCESS / "clear_refs").write_text("5")
    except OSError:
        return None
    before = _status("VmRSS")
    call()
    return max(0, _status("VmHWM") - before)


def _status(field: str) -> int:
    lines = (_PROCESS / "status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))
