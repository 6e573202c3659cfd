"""kvpress's own tests: taken from its source distribution when the tests run, never from this repository."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from importlib.metadata import version
from pathlib import Path

import pytest

WANTED = ("tests", "evaluation")  # not kvpress itself: the installed one is tested


def cache_folder() -> Path:
    """Where downloads are kept."""
    base = os.environ.get("TQ_TEST_CACHE")
    if base:
        return Path(base)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tq-offload-tests"


def _download(release: str, folder: Path) -> Path:
    """The archive of that release, downloaded unless it is there."""
    archive = folder / f"kvpress-{release}.tar.gz"
    if archive.exists():
        return archive
    # Building its metadata would need its build backend; the archive alone is wanted, so what is installed serves.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary=:all:", "-d", str(folder)]
    result = subprocess.run([*command, f"kvpress=={release}"], capture_output=True, text=True)
    if not archive.exists():
        pytest.fail(
            f"the source distribution of kvpress {release} cannot be had: put it at {archive} (TQ_TEST_CACHE names the "
            f"parent of sdists), or allow pip to download it. pip said:\n{result.stdout}\n{result.stderr}"
        )
    return archive


def unpack(folder: Path) -> Path:
    """Unpack the tests of the installed release of kvpress to `folder`, and return the folder to run them in."""
    release = version("kvpress")
    archive = _download(release, cache_folder() / "sdists")
    top = f"kvpress-{release}"
    with tarfile.open(archive) as tar:
        members = [m for m in tar.getmembers() if m.name.split("/")[1:2] and m.name.split("/")[1] in WANTED]
        tar.extractall(folder, members=members, filter="data")
    return folder / top
