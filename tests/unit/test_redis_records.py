"""How a value lies in Redis: the sizes of its parts, and the same reading of any reply by both parsers."""

import bisect
import random
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from redis_wire import Wire, encode

from tq_offload.errors import StoreIOError
from tq_offload_connectors.redis.protocol import NoBufferError, ReplyReader, join_record, length_of
from tq_offload_connectors.redis.records import FIELDS, OVERHEAD, SMALL, part_sizes, read_command, write_command

SIZES = st.integers(1, 64 << 20) | st.integers(0, 26).flatmap(lambda bits: st.integers(1 << bits, (2 << bits) - 1))
CLASSES = [*range(16, 129, 16), *(base + base // 4 * i for base in (128 << b for b in range(24)) for i in (1, 2, 3, 4))]
"""Of jemalloc, from its manual."""


def allocated(nbytes: int) -> int:
    """Bytes that Redis allocates for a string: `sdsHdrSize` of sds.c, the string, and a terminator."""
    header = 1 if nbytes < 32 else 3 if nbytes < 256 else 5 if nbytes < 65536 else 9
    return CLASSES[bisect.bisect_left(CLASSES, header + nbytes + 1)]


def waste(nbytes: int) -> int:
    return sum(map(allocated, part_sizes(nbytes))) - nbytes


@settings(deadline=None, max_examples=200)
@given(SIZES)
def test_parts_fill_size_classes(nbytes: int) -> None:
    sizes = part_sizes(nbytes)
    assert sum(sizes) == nbytes
    assert 1 <= len(sizes) <= len(FIELDS)
    assert min(sizes) > 0
    assert sizes == sorted(sizes, reverse=True)
    for size in sizes[:-1]:
        assert size + OVERHEAD in CLASSES
        assert allocated(size) == size + OVERHEAD
    assert nbytes <= len(FIELDS) * sizes[0]  # what a reader takes for granted
    assert waste(nbytes) <= 0.01 * nbytes + (SMALL // 4 if nbytes > SMALL else nbytes // 4 + 32)


def test_parts_around_every_size_class() -> None:
    for edge in (size for size in CLASSES if size > 2 * SMALL):
        for nbytes in range(edge - 24, edge + 24):
            assert sum(part_sizes(nbytes)) == nbytes
            assert waste(nbytes) <= 0.01 * nbytes + SMALL // 4, nbytes


def test_hardly_any_memory_is_wasted() -> None:
    rng = random.Random(0)
    for low, high, mean, most in (
        (1, 64 << 20, 0.0001, 1),
        (16 << 10, 100 << 10, 0.01, 0.07),
        (100_000, 8_000_000, 0.001, 0.01),
    ):
        sizes = [rng.randint(low, high) for _ in range(5_000)]
        assert sum(map(waste, sizes)) < mean * sum(sizes)
        assert max(waste(size) / size for size in sizes) < most
        assert sum(allocated(size) - size for size in sizes) > 0.06 * sum(sizes), "parts are of no use"


def test_an_empty_value_has_no_parts() -> None:
    assert part_sizes(0) == []


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 70_000) | st.just(300_000), st.integers(0, 1000))
def test_a_record_that_is_written_is_read(nbytes: int, seed: int) -> None:
    value = random.Random(seed).randbytes(nbytes)
    name, key, *pairs = write_command(b"k", memoryview(value))
    fields = {bytes(field): bytes(content) for field, content in zip(pairs[::2], pairs[1::2], strict=True)}
    assert (name, key) == (b"HSET", b"k")
    assert len(fields) == 5  # also the empty ones, so that nothing stays of the record before
    reply = [fields[field] for field in read_command(b"k")[2:]]
    lent: list[bytearray] = []
    assert read(reply, seed, lent) == value
    assert [bytes(buffer) for buffer in lent] == ([value] if value else [])
    assert join_record(reply) == value


def read(reply: object, seed: int = 0, lent: "list[bytearray] | None" = None) -> object:
    """What the reader of a record makes of a reply; fails unless it leaves the reply after it as it is."""

    def allocate(nbytes: int) -> memoryview:
        buffer = bytearray(nbytes)
        if lent is not None:
            lent.append(buffer)
        return memoryview(buffer)

    reader = ReplyReader(Wire(encode(reply) + encode([b"next"]), seed), 5.0, allocate)
    found = reader.read_record()
    assert reader.read() == [b"next"]
    assert reader.clean
    return found


def outcome(call: object, *arguments: object) -> object:
    """What a call returns or raises; views as bytes."""
    try:
        found = call(*arguments)
    except StoreIOError:
        return StoreIOError
    return bytes(found) if isinstance(found, memoryview) else found


LENGTHS = st.sampled_from([None, b"", b"0", b"1", b"7", b"007", b"-1", b"x", b"9" * 12, b"9" * 13, b"9" * 5000, 5, []])
PARTS = st.none() | st.binary(max_size=9) | st.sampled_from([b"x" * 5000, b"y" * 66_000])
ODD = st.none() | st.integers(-5, 5) | st.binary(max_size=20) | st.lists(PARTS, max_size=3)


@st.composite
def records(draw: st.DrawFn) -> list[object]:
    """Replies to HMGET, about half of them whole records."""
    parts = draw(st.lists(PARTS, max_size=6))
    total = sum(len(part or b"") for part in parts)
    return [draw(st.just(b"%d" % total) | LENGTHS | st.integers(0, 30).map(lambda n: b"%d" % n)), *parts]


@settings(deadline=None, max_examples=500)
@given(records() | ODD | st.lists(ODD, max_size=8) | st.lists(PARTS, min_size=14, max_size=20), st.integers(0, 1000))
def test_both_parsers_read_the_same(reply: object, seed: int) -> None:
    odd = isinstance(reply, list) and any(not isinstance(field, (bytes, type(None))) for field in reply)
    if odd and 2 <= len(reply) <= 16:  # the connection is closed, what follows does not matter
        with pytest.raises(StoreIOError):
            ReplyReader(Wire(encode(reply), seed), 5.0).read_record()
        with pytest.raises(StoreIOError):
            join_record(reply)
    else:
        assert outcome(read, reply, seed) == outcome(join_record, reply)


@pytest.mark.parametrize(
    ("reply", "wanted"),
    [
        ([b"5", b"abc", b"de", b"", b""], b"abcde"),
        ([b"5", b"abc", b"de", None, None], b"abcde"),  # an empty part may be missing
        ([b"0", b"", b"", b"", b""], b""),
        ([None] * 5, None),
        (None, None),
        ([None, b"abc", b"de", b"", b""], b""),
        ([b"5", None, b"de", b"", b""], b""),
        ([b"5", b"abc", None, b"", b""], b""),
        ([b"5", None, None, None, None], b""),
        ([b"5", b"abc", b"d", b"", b""], b""),
        ([b"5", b"abc", b"def", b"", b""], b""),
        ([b"5", b"abc", b"de", b"", b"stale"], b""),
        ([b"3", b"abc", b"stale"], b""),
        ([b"7", b"a", b"bcdefg"], b""),  # the first part is not the longest, by so much that no length can be believed
        ([b"5x", b"abc", b"de"], b""), ([b"", b""], b""), ([b"-5", b"abcde"], b""), ([b"99999999999", b"abcde"], b""),
        ([b"9" * 5000, b"abcde"], b""),
        ([], []), ([b"5"], [b"5"]),
    ],
)  # fmt: skip
def test_what_is_no_whole_record_reads_as_empty(reply: object, wanted: object) -> None:
    assert outcome(read, reply) == wanted
    assert outcome(join_record, reply) == wanted


@pytest.mark.parametrize("length", [b"%d" % (1 << 39), b"999999999999", b"9" * 3_000_000, b"4000001"])
def test_a_length_that_no_part_bears_out_takes_no_memory(length: bytes) -> None:
    lent: list[bytearray] = []
    wire = Wire(encode([length, b"x" * 1_000_000, b"", b"", b""]))
    tracemalloc.start()
    found = ReplyReader(wire, 5.0, lambda nbytes: lent.append(bytearray(nbytes)) or memoryview(lent[-1])).read_record()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found == b""
    assert lent == []
    assert peak < 1_000_000


@pytest.mark.parametrize("field", [b"1", b"0", b"12", b"999999999999"])
def test_a_length_is_digits(field: bytes) -> None:
    assert length_of(field) == int(field)


@pytest.mark.parametrize("field", [None, 5, b"", b"-1", b" 1", b"1_0", b"0x1", "5", "\u0662".encode(), b"9" * 13])
def test_what_is_no_length(field: object) -> None:
    assert length_of(field) == -1


@pytest.mark.parametrize(
    "data",
    [
        b"*2\r\n$1\r\n3\r\n:3\r\n", b"*2\r\n:3\r\n$3\r\nabc\r\n", b"*2\r\n$1\r\n3\r\n$3\r\nabcd\r\n",
        b"*2\r\n$1\r\n3\r\n$9\r\nabcdefghij\r\n", b"*2\r\n$1\r\n3\r\n$x\r\n", b"*2\r\n$1\r\n3\r\n$\r\n",
        b"*2\r\n$1\r\n3\r\n$9999999999999999999999\r\n", b"*2\r\n$20\r\n123456789012345678901\r\n",
        b"*99999999999\r\n", b"*" + b"9" * 5000 + b"\r\n", b"*2\r\n$" + b"9" * 5000 + b"\r\n", b"*2x\r\n", b"*\r\n",
    ],
)  # fmt: skip
def test_what_is_no_reply_is_refused(data: bytes) -> None:
    for seed in range(5):
        with pytest.raises(StoreIOError):
            ReplyReader(Wire(data, seed), 5.0).read_record()


def test_no_memory_for_a_value_is_an_error_of_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*arguments: object) -> None:
        raise MemoryError

    monkeypatch.setattr("tq_offload_connectors.byte_store.np.empty", no_memory)
    with pytest.raises(NoBufferError, match="no memory for a value of 5 bytes") as caught:
        ReplyReader(Wire(encode([b"5", b"abcde"])), 5.0).read_record()
    assert type(caught.value.error) is StoreIOError
    assert caught.value.error.reason == "no_memory"


@pytest.mark.parametrize("lent", [bytearray(4), bytearray(6), b"12345"], ids=str)
@pytest.mark.parametrize("reply", [[b"5", b"abcde"], b"abcde"], ids=str)
def test_a_lent_buffer_that_cannot_take_the_value_is_refused(lent: bytes, reply: object) -> None:
    with pytest.raises(NoBufferError, match="lent"):
        ReplyReader(Wire(encode(reply)), 5.0, lambda nbytes: memoryview(lent)).read_record()
