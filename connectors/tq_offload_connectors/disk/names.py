"""Names of the disk store's files, from which their keys can be read back.

A folder holds 256 subfolders `00` to `ff`; an entry is `<subfolder>/<name>`, relative to the folder, and in it exactly
the value. What else lies in a folder is left alone and not counted.
"""

from __future__ import annotations

import hashlib
import os
from urllib.parse import quote_from_bytes, unquote_to_bytes

__all__ = ["KEY_ATTRIBUTE", "SUFFIX", "TEMP_PREFIX", "entry_key", "entry_name", "has_digest", "is_entry"]

SUFFIX = ".tqf"
TEMP_PREFIX = ".tqf-tmp-"
KEY_ATTRIBUTE = "user.tq_offload.key"
"""Extended attribute that holds a long key."""

MAX_NAME = 200  # bytes of an encoded key; file systems take 255 for a name
DIGEST = "%h"  # no percent-escape begins so


def entry_name(key: str) -> str:
    """Path of a key's file relative to the folder: the key percent-encoded, or for long keys `%h` and a digest."""
    data = key.encode("utf-8", "surrogatepass")
    digest = hashlib.blake2b(data, digest_size=32).hexdigest()
    name = quote_from_bytes(data, safe="@=,+")
    if name[0] == ".":  # no hidden files: those are temporary ones
        name = "%2E" + name[1:]
    return f"{digest[:2]}/{name if len(name) <= MAX_NAME else DIGEST + digest}{SUFFIX}"


def has_digest(name: str) -> bool:
    """True for the file of a long key, whose name does not tell it."""
    return name.startswith(DIGEST, 3)


def is_entry(name: str) -> bool:
    """True for what `entry_name` can return."""
    if has_digest(name):
        digest = name[3 + len(DIGEST) : -len(SUFFIX)]
        return digest[:2] == name[:2] and len(digest) == 64 and not set(digest) - set("0123456789abcdef")
    return _key(name, unquote_to_bytes(name[3 : -len(SUFFIX)])) is not None


def entry_key(name: str, folder: str) -> str | None:
    """The key of a file. None: that of a long key whose attribute does not tell it."""
    if not has_digest(name):
        return _key(name, unquote_to_bytes(name[3 : -len(SUFFIX)]))
    try:
        return _key(name, os.getxattr(f"{folder}/{name}", KEY_ATTRIBUTE, follow_symlinks=False))
    except OSError:
        return None


def _key(name: str, data: bytes) -> str | None:
    try:
        key = data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return None
    return key if key and entry_name(key) == name else None
