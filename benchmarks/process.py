"""Server processes that always stop: own process group, health check, log file, clean-up on every way out."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TypeVar

import psutil

__all__ = [
    "DeploymentError", "Progress", "ServerProcess", "free_ports", "local_http", "redis_answers", "silent",
    "stop_on_signals",
]  # fmt: skip

Progress = Callable[[str, float], None]
"""Called about twice a second with what is being waited for and the seconds since that began."""

_Self = TypeVar("_Self", bound="ServerProcess")
_POLL_S = 0.4
_running: set[ServerProcess] = set()

local_http = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""HTTP without a proxy: every server here is on this machine, whatever http_proxy says."""


class DeploymentError(RuntimeError):
    """A server did not do what was asked; says what to do, and carries the tail of its log."""

    def __init__(self, what: str, advice: str, log: Path | None = None) -> None:
        lines = [what, f"what to do: {advice}"]
        if log is not None:
            lines += [f"last lines of {log}:", _tail(log)]
        super().__init__("\n".join(lines))
        self.what = what
        self.advice = advice
        self.log = log


def silent(what: str, elapsed_s: float) -> None:
    """Report no progress."""


def free_ports(count: int) -> list[int]:
    """Return ``count`` different TCP ports of the loopback interface that nothing listens on."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]


def redis_answers(port: int) -> bool:
    """Whether a Redis server, or what forwards to one, answers at a port of this machine."""
    import redis

    try:
        with redis.Redis(port=port, socket_timeout=2) as client:
            return bool(client.ping())
    except redis.RedisError:
        return False


@contextlib.contextmanager
def stop_on_signals() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into ``SystemExit``, so that every ``with`` block stops its servers; main thread only.

    SIGINT raises ``KeyboardInterrupt`` even where a shell started this in the background, with SIGINT ignored.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class ServerProcess:
    """One server with its children, as a context manager: entered when healthy, stopped however it is left."""

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        log: Path,
        health_url: str,
        *,
        start_timeout_s: float,
        advice: str,
        progress: Progress = silent,
    ) -> None:
        self.name = name
        self.argv = list(argv)
        self.env = dict(env)
        self.log = log
        self.health_url = health_url
        self.start_timeout_s = start_timeout_s
        self.advice = advice
        self.progress = progress
        self.started_in_s = 0.0
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self: _Self) -> _Self:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start and wait until healthy. Raises DeploymentError (after stopping it) when it dies or the time is up."""
        if self._process is not None:
            raise DeploymentError(f"{self.name} is already running", "stop it before starting it again")
        self.log.parent.mkdir(parents=True, exist_ok=True)
        if not _running:
            atexit.register(_stop_all)
        _running.add(self)
        try:
            with self.log.open("ab") as sink:
                self._process = subprocess.Popen(
                    self.argv,
                    env=self.env,
                    cwd=self.log.parent,
                    stdin=subprocess.DEVNULL,
                    stdout=sink,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            self._wait_until_healthy(self._process)
        except BaseException:
            self.stop()
            raise

    def stop(self, grace_s: float = 15.0) -> None:
        """Stop the server and every descendant. Safe to repeat.

        SIGTERM goes to the server alone, which then takes its children down in order (they unlink their shared memory);
        after ``grace_s`` whatever is left of its group and its descendants is killed.
        """
        process = self._process
        if process is not None:
            family = _family(process.pid)
            process.terminate()
            try:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(grace_s)
            finally:
                _signal_group(process.pid, signal.SIGKILL)
                for member in family:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        member.kill()
                process.wait()
                psutil.wait_procs(family, timeout=5)
                _unlink_shared_memory([process.pid, *(member.pid for member in family)])
                self._process = None
        _running.discard(self)

    def anonymous_bytes(self) -> int:
        """Return the bytes of memory with contents of the process and its descendants: heap and mmap, not files.

        Raises DeploymentError when it is not running.
        """
        self.check_alive()
        assert self._process is not None
        return sum(_anonymous_bytes(pid) for pid in (self._process.pid, *(p.pid for p in _family(self._process.pid))))

    def check_alive(self) -> None:
        """Raise DeploymentError if the server has ended by itself."""
        if self._process is None or self._process.poll() is not None:
            status = "not started" if self._process is None else f"exit status {self._process.returncode}"
            raise DeploymentError(f"{self.name} is not running ({status})", self.advice, self.log)

    def _healthy(self) -> bool:
        return _answers(self.health_url)

    def _wait_until_healthy(self, process: subprocess.Popen[bytes]) -> None:
        began = time.monotonic()
        while not self._healthy():
            elapsed = time.monotonic() - began
            self.progress(f"waiting for {self.name}", elapsed)
            if process.poll() is not None:
                what = f"{self.name} ended with status {process.returncode} while starting"
                raise DeploymentError(what, self.advice, self.log)
            if elapsed > self.start_timeout_s:
                what = f"{self.name} was not healthy after {elapsed:.0f} s"
                raise DeploymentError(what, self.advice, self.log)
            time.sleep(_POLL_S)
        self.started_in_s = time.monotonic() - began


def _answers(url: str) -> bool:
    try:
        with local_http.open(url, timeout=2) as reply:
            return bool(reply.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def _family(pid: int) -> list[psutil.Process]:
    """Return the living descendants of ``pid``, which may have process groups of their own."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _anonymous_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) * 1024
    return 0


def _signal_group(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def _unlink_shared_memory(pids: Sequence[int]) -> None:
    """Remove what these ended processes left in /dev/shm; LMCache names its segments after their process."""
    for pid in pids:
        for segment in Path("/dev/shm").glob(f"lmcache_*_{pid}_*"):
            segment.unlink(missing_ok=True)


def _stop_all() -> None:
    for server in list(_running):
        server.stop(grace_s=2)


def _tail(path: Path, lines: int = 25) -> str:
    try:
        text = path.read_text(errors="replace").splitlines()
    except OSError as error:
        return f"  (unreadable: {error})"
    return "\n".join(f"  {line}" for line in text[-lines:]) or "  (empty)"
