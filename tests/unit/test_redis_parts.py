"""Parts of the Redis store that need no server: protocol, pause after a failure, map of errors."""

import inspect
import random
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from redis_wire import Wire, encode

from tq_offload.errors import (
    ConfigError,
    EntryTooLargeError,
    StoreAuthError,
    StoreError,
    StoreFullError,
    StoreIOError,
    StoreTimeoutError,
    StoreUnavailableError,
)
from tq_offload_connectors.redis.breaker import Breaker
from tq_offload_connectors.redis.errors import mapped, store_error
from tq_offload_connectors.redis.protocol import ReplyReader, ServerError, pack


def reader(data: bytes, seed: int = 0) -> ReplyReader:
    return ReplyReader(Wire(data, seed), 5.0)


REPLIES = st.recursive(
    st.none() | st.integers(-(2**63), 2**63 - 1) | st.binary(max_size=300), lambda inner: st.lists(inner, max_size=5)
)


@settings(deadline=None)
@given(st.lists(REPLIES, max_size=20), st.integers(0, 1000))
def test_reads_every_reply_however_it_is_cut(replies: list[object], seed: int) -> None:
    read = reader(b"".join(map(encode, replies)), seed)
    found = [read.read() for _ in replies]
    assert [bytes(reply) if isinstance(reply, memoryview) else reply for reply in found] == replies
    assert read.clean


def test_reads_a_long_string_into_the_lent_buffer() -> None:
    value = random.Random(0).randbytes(300_000)
    lent = bytearray(300_000)
    read = ReplyReader(Wire(encode(value) + encode(1)), 5.0, lambda nbytes: memoryview(lent)[:nbytes])
    found = read.read()
    assert found == value
    assert lent == value
    assert found.readonly
    assert read.read() == 1


def test_bytes_after_the_last_reply_are_noticed() -> None:
    read = ReplyReader(Wire(b"", 0), 5.0)
    assert read.clean
    wire = b":1\r\n:2\r\n"
    for seed in range(20):
        read = reader(wire, seed)
        assert read.read() == 1
        if not read.clean:
            return
    pytest.fail("no cut had both replies at once")


def test_errors_are_values() -> None:
    reply = reader(b"-WRONGTYPE of a key\r\n").read()
    assert isinstance(reply, ServerError)
    assert str(reply) == "WRONGTYPE of a key"


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 400 Bad Request\r\n", b"\r\n", b"$x\r\n", b"$\r\n", b"$--1\r\n", b"*1x\r\n", b":\r\n",
        b"$99999999999999999999\r\n", b"*99999999999\r\n", b"$3\r\nabcd\r\n", b"x" * (1 << 17), b"$1 \r\n",
    ],
)  # fmt: skip
def test_what_is_no_reply_is_refused(data: bytes) -> None:
    with pytest.raises(StoreIOError):
        reader(data).read()


def test_every_truncation_ends_in_an_error() -> None:
    data = encode([b"abc", 5, None, [b"d"]])
    for length in range(len(data)):
        with pytest.raises(StoreUnavailableError):
            reader(data[:length]).read()


def test_a_trickle_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("tq_offload_connectors.redis.protocol.time.monotonic", lambda: now[0])

    class Trickle(Wire):
        def recv_into(self, buffer: memoryview, nbytes: int = 0, flags: int = 0) -> int:
            now[0] += 0.9  # below a timeout of one second for each receive
            return super().recv_into(buffer[:1])

    with pytest.raises(StoreTimeoutError):
        ReplyReader(Trickle(encode(b"x" * 1000)), 1.0).read()
    assert now[0] < 3


def test_pack_copies_no_long_argument() -> None:
    value = memoryview(bytes(100_000))
    parts = pack([(b"SET", b"k", value), (b"GET", b"k")])
    assert any(part is value for part in parts)
    text = b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$100000\r\n%b\r\n*2\r\n$3\r\nGET\r\n$1\r\nk\r\n" % bytes(value)
    assert b"".join(parts) == text


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def breaker(clock: Clock) -> Breaker:
    return Breaker(1.0, 8.0, 20.0, clock)


def test_pauses_double_up_to_the_cap_and_vary() -> None:
    clock = Clock()
    gate = breaker(clock)
    pauses = []
    for _ in range(12):
        gate.fail(gate.enter(), StoreUnavailableError("refused"))
        start = clock.now
        while True:
            try:
                gate.check()
            except StoreUnavailableError:
                clock.now += 0.01
            else:
                break
        pauses.append(clock.now - start)
    for pause, longest in zip(pauses, [1, 2, 4, 8, 8, 8, 8, 8, 8, 8, 8, 8], strict=True):
        assert longest / 2 - 0.02 <= pause <= longest + 0.02
    assert len({round(pause, 2) for pause in pauses[3:]}) > 3


def test_one_call_at_a_time_probes() -> None:
    clock = Clock()
    gate = breaker(clock)
    gate.fail(gate.enter(), StoreUnavailableError("refused"))
    clock.now += 1.1
    probe = gate.enter()
    with pytest.raises(StoreUnavailableError, match="refused"):
        gate.enter()
    gate.succeed(probe)
    gate.enter()
    gate.enter()


def test_a_probe_that_never_reports_back_does_not_block_for_ever() -> None:
    clock = Clock()
    gate = breaker(clock)
    gate.fail(gate.enter(), StoreUnavailableError("refused"))
    clock.now += 1.1
    gate.enter()
    clock.now += 20.1
    gate.succeed(gate.enter())
    gate.check()


def test_what_fails_at_the_same_time_counts_once() -> None:
    clock = Clock()
    gate = breaker(clock)
    calls = [gate.enter() for _ in range(50)]
    for call in calls:
        gate.fail(call, StoreUnavailableError("refused"))
    clock.now += 1.01
    gate.enter()


def test_a_success_from_before_the_failure_does_not_end_the_pause() -> None:
    gate = breaker(Clock())
    early, late = gate.enter(), gate.enter()
    gate.fail(late, StoreTimeoutError("slow"))
    gate.succeed(early)
    with pytest.raises(StoreUnavailableError):
        gate.enter()


def test_the_pause_after_a_refused_password_says_so() -> None:
    gate = breaker(Clock())
    gate.fail(gate.enter(), StoreAuthError("WRONGPASS"))
    with pytest.raises(StoreAuthError, match="WRONGPASS"):
        gate.enter()


KINDS = {
    "AuthenticationError": StoreAuthError,
    "AuthenticationWrongNumberOfArgsError": StoreAuthError,
    "AuthorizationError": StoreAuthError,
    "BusyLoadingError": StoreUnavailableError,
    "ChildDeadlockedError": StoreUnavailableError,
    "ClusterDownError": StoreUnavailableError,
    "ClusterError": StoreUnavailableError,
    "ConnectionError": StoreUnavailableError,
    "ExternalAuthProviderError": StoreAuthError,
    "MasterDownError": StoreUnavailableError,
    "MaxConnectionsError": StoreUnavailableError,
    "NoPermissionError": StoreAuthError,
    "OutOfMemoryError": StoreFullError,
    "SlotNotCoveredError": StoreUnavailableError,
    "TimeoutError": StoreTimeoutError,
    "TryAgainError": StoreUnavailableError,
}
"""Classes of redis.exceptions that are more than an answer with an error."""


def test_every_exception_of_redis_py_is_mapped() -> None:
    exceptions = pytest.importorskip("redis.exceptions")
    classes = [c for _, c in inspect.getmembers(exceptions, inspect.isclass) if issubclass(c, Exception)]
    assert len(classes) > 20
    for found in classes:
        text = "1 127.0.0.1:1"  # what MovedError and AskError parse
        with pytest.raises(StoreError) as caught, mapped():
            raise found(text)
        assert isinstance(caught.value.__cause__, found)
        cluster = issubclass(found, exceptions.RedisClusterException)
        wanted = KINDS.get(found.__name__, StoreUnavailableError if cluster else StoreIOError)
        assert type(caught.value) is wanted, found


def test_the_map_of_exceptions_names_no_class_that_never_was() -> None:
    exceptions = pytest.importorskip("redis.exceptions")
    newer = {"ExternalAuthProviderError", "MaxConnectionsError"}
    assert not [name for name in KINDS if not hasattr(exceptions, name) and name not in newer]


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (ConnectionRefusedError(111, "refused"), StoreUnavailableError),
        (BrokenPipeError(32, "broken"), StoreUnavailableError),
        (OSError(24, "too many open files"), StoreUnavailableError),
        (TimeoutError("timed out"), StoreTimeoutError),
        (AttributeError("'NoneType' object has no attribute 'sendall'"), StoreIOError),
        (ServerError("OOM command not allowed when used memory > 'maxmemory'."), StoreFullError),
        (ServerError("NOPERM no permissions"), StoreAuthError),
        (ServerError("NOAUTH Authentication required."), StoreAuthError),
        (ServerError("WRONGPASS invalid username-password pair"), StoreAuthError),
        (ServerError("LOADING Redis is loading the dataset in memory"), StoreUnavailableError),
        (ServerError("ERR max number of clients reached"), StoreUnavailableError),
        (ServerError("CLUSTERDOWN The cluster is down"), StoreUnavailableError),
        (ServerError("ERR Protocol error: invalid bulk length"), EntryTooLargeError),
        (ServerError("MISCONF Redis is configured to save RDB snapshots"), StoreIOError),
        (ServerError("READONLY You can't write against a read only replica."), StoreIOError),
        (ServerError("ERR unknown command"), StoreIOError),
        (StoreFullError("itself"), StoreFullError),
    ],
    ids=str,
)
def test_sockets_and_answers_are_mapped(error: Exception, wanted: type[StoreError]) -> None:
    assert type(store_error(error)) is wanted


def test_interrupts_pass() -> None:
    class CancelledError(Exception):
        pass

    for kind in (KeyboardInterrupt, CancelledError):
        with pytest.raises(kind), mapped():
            raise kind


WITHOUT_REDIS = """
import sys, threading
from tq_offload_connectors.redis import RedisSettings, RedisStore
assert "redis" not in sys.modules and threading.active_count() == 1
sys.modules["redis"] = None  # as if it were not installed
try:
    RedisStore(RedisSettings.from_url("redis://cache"))
except Exception as error:
    print(type(error).__name__, error)
"""


def test_imports_without_redis_py_and_says_how_to_install_it() -> None:
    path = [entry for entry in sys.path if entry]
    code = f"import sys; sys.path[:0] = {path!r}\n{WITHOUT_REDIS}"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.startswith(ConfigError.__name__)
    assert "pip install 'tq-offload[lmcache]'" in out
