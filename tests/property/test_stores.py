"""Memory and disk store against a model: a dict in the order of use, with a budget and pins."""

import shutil
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tq_offload.errors import EntryTooLargeError, StoreFullError
from tq_offload_connectors.byte_store import ByteStore
from tq_offload_connectors.disk import DiskStore
from tq_offload_connectors.memory import MemoryStore

CAPACITY = 100
KEYS = st.sampled_from(["a", "b", "c/d", "../e", "é", "k" * 250]) | st.text(min_size=1, max_size=3)
VALUES = st.binary(max_size=60) | st.integers(80, 120).map(lambda size: bytes(size))


class StoreMachine(RuleBasedStateMachine):
    """Every method, in any order; after each step store and model agree."""

    def make(self) -> ByteStore:
        raise NotImplementedError

    def look(self) -> None:
        """Before every comparison."""

    @initialize()
    def start(self) -> None:
        self.model: dict[str, bytes] = {}  # least recently used first
        self.pins: Counter[str] = Counter()
        self.store = self.make()

    def use(self, key: str) -> None:
        self.model[key] = self.model.pop(key)

    def room_for(self, key: str, size: int) -> list[str] | None:
        """What is evicted for it; None: it is refused."""
        short = sum(map(len, self.model.values())) - len(self.model.get(key, b"")) + size - CAPACITY
        victims = []
        for other, value in self.model.items():
            if short > 0 and other != key and not self.pins[other]:
                victims.append(other)
                short -= len(value)
        return victims if short <= 0 else None

    @rule(key=KEYS, value=VALUES, owned=st.booleans())
    def put(self, key: str, value: bytes, owned: bool) -> None:
        victims = self.room_for(key, len(value))
        view = memoryview(bytearray(value))
        if len(value) > CAPACITY:
            with pytest.raises(EntryTooLargeError):
                self.store.put(key, view, owned=owned)
        elif victims is None:
            with pytest.raises(StoreFullError):
                self.store.put(key, view, owned=owned)
        else:
            self.store.put(key, view, owned=owned)
            for victim in victims:
                del self.model[victim]
            self.model.pop(key, None)
            self.model[key] = value

    @rule(key=KEYS, lend=st.booleans())
    def get(self, key: str, lend: bool) -> None:
        found = self.store.get(key, (lambda size: memoryview(bytearray(size))) if lend else None)
        assert (None if found is None else bytes(found)) == self.model.get(key)
        if found is not None:
            assert found.readonly
            self.use(key)

    @rule(key=KEYS)
    def contains(self, key: str) -> None:
        assert self.store.contains(key) == (key in self.model)

    @rule(key=KEYS)
    def delete(self, key: str) -> None:
        assert self.store.delete(key) == (self.model.pop(key, None) is not None)

    @rule(key=KEYS)
    def pin(self, key: str) -> None:
        assert self.store.pin(key) == (key in self.model)
        if key in self.model:
            self.pins[key] += 1
            self.use(key)

    @rule(key=KEYS)
    def unpin(self, key: str) -> None:
        assert self.store.unpin(key) == (key in self.model)
        if self.pins[key]:
            self.pins[key] -= 1
            if key in self.model and not self.pins[key]:
                self.use(key)

    @rule()
    def clear(self) -> None:
        gone = [key for key in self.model if not self.pins[key]]
        assert self.store.clear() == len(gone)
        for key in gone:
            del self.model[key]

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def prefix(self, data: st.DataObject) -> None:
        keys = data.draw(st.lists(st.sampled_from(sorted(self.model)), max_size=3))
        assert self.store.contains_prefix([*keys, "absent", *keys]) == len(keys)

    @invariant()
    def agrees(self) -> None:
        self.look()
        usage = self.store.usage()
        assert (usage.entries, usage.nbytes) == (len(self.model), sum(map(len, self.model.values())))
        assert usage.nbytes <= CAPACITY
        free = [key for key in self.model if not self.pins[key]]
        assert list(self.store.keys()) == free + [key for key in self.model if self.pins[key]]


class MemoryMachine(StoreMachine):
    def make(self) -> ByteStore:
        return MemoryStore(CAPACITY)


class DiskMachine(StoreMachine):
    """With a scan after every step, which must change nothing; and with other stores, as other processes have."""

    def make(self) -> ByteStore:
        self.folder = Path(tempfile.mkdtemp())
        self.disk = DiskStore(self.folder, CAPACITY)
        return self.disk

    def look(self) -> None:
        self.disk._index.resync()

    @rule(key=KEYS)
    def another_process_deletes(self, key: str) -> None:
        assert DiskStore(self.folder).delete(key) == (self.model.pop(key, None) is not None)

    @rule(key=KEYS)
    def another_process_reads(self, key: str) -> None:
        found = DiskStore(self.folder).get(key)
        assert (None if found is None else bytes(found)) == self.model.get(key)

    @rule()
    def the_files_are_the_values(self) -> None:
        stored = sorted(path.read_bytes() for path in self.folder.rglob("*") if path.is_file())
        assert stored == sorted(self.model.values())

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            shutil.rmtree(self.folder)


TestMemoryStore = MemoryMachine.TestCase
TestMemoryStore.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestDiskStore = DiskMachine.TestCase
TestDiskStore.settings = settings(
    max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
