"""`LruIndex`: what the stores that evict by themselves count with."""

from __future__ import annotations

from collections import OrderedDict

__all__ = ["LruIndex"]


class LruIndex:
    """Sizes under keys, in the order of use, with counted pins. Every operation is O(1), `victims` O(their number).

    Pins belong to the key, not to the entry: they outlive a replacement, and a removal too, until they are undone.
    Not thread-safe: its owner holds a lock.
    """

    def __init__(self) -> None:
        self._free: OrderedDict[str, int] = OrderedDict()  # least recently used first
        self._pinned: OrderedDict[str, int] = OrderedDict()
        self._pins: dict[str, int] = {}
        self.nbytes = 0
        self.pinned_nbytes = 0

    def __len__(self) -> int:
        return len(self._free) + len(self._pinned)

    def __contains__(self, key: str) -> bool:
        return key in self._free or key in self._pinned

    def size(self, key: str) -> int | None:
        """Bytes of an entry; None: there is none."""
        return self._free.get(key, self._pinned.get(key))

    def set(self, key: str, nbytes: int) -> None:
        """Add an entry or change its size; it becomes the most recently used one."""
        self.remove(key)
        self.nbytes += nbytes
        if key in self._pins:
            self._pinned[key] = nbytes
            self.pinned_nbytes += nbytes
        else:
            self._free[key] = nbytes

    def remove(self, key: str) -> bool:
        """Forget an entry. Returns whether there was one."""
        nbytes = self._free.pop(key, None)
        if nbytes is None:
            nbytes = self._pinned.pop(key, None)
            self.pinned_nbytes -= nbytes or 0
        self.nbytes -= nbytes or 0
        return nbytes is not None

    def touch(self, key: str) -> None:
        """Make an entry the most recently used one."""
        (self._pinned if key in self._pins else self._free).move_to_end(key)

    def pin(self, key: str) -> bool:
        """Count a pin. Returns whether the entry is there; if not, nothing is counted."""
        nbytes = self.size(key)
        if nbytes is None:
            return False
        self._pins[key] = self._pins.get(key, 0) + 1
        self.set(key, nbytes)
        return True

    def unpin(self, key: str) -> bool:
        """Undo a pin, which counts as a use. Returns whether the entry is there."""
        nbytes, count = self.size(key), self._pins.pop(key, 0)
        if count > 1:
            self._pins[key] = count - 1
        elif count == 1 and nbytes is not None:
            self._pinned.pop(key)
            self.pinned_nbytes -= nbytes
            self._free[key] = nbytes
        return nbytes is not None

    def is_pinned(self, key: str) -> bool:
        """Whether a pin of the key has not been undone."""
        return key in self._pins

    def victims(self, nbytes: int, spare: str) -> list[str] | None:
        """The least recently used entries that hold at least `nbytes` bytes, without the pinned ones and `spare`.

        Returns:
            Their keys; None if there are not enough of them.
        """
        if nbytes > self.nbytes - self.pinned_nbytes - self._free.get(spare, 0):
            return None
        found = []
        for key, size in self._free.items():
            if nbytes <= 0:
                break
            if key != spare:
                found.append(key)
                nbytes -= size
        return found

    def keys(self) -> list[str]:
        """Least recently used first, the pinned ones last."""
        return [*self._free, *self._pinned]

    def free_keys(self) -> list[str]:
        """Those that are not pinned, least recently used first."""
        return [*self._free]
