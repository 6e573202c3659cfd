"""The job pool: every job is done once, errors come out, nothing runs on, the caller waits for no idle thread."""

from __future__ import annotations

import copy
import os
import pickle
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tq_offload.jobs import JobPool


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("count", [0, 1, 3, 200])
def test_every_job_is_done_once(threads: int, count: int) -> None:
    done: list[int] = []
    JobPool(threads).run([lambda i=i: done.append(i) for i in range(count)])  # type: ignore[misc]
    assert sorted(done) == list(range(count))


def test_jobs_run_at_once() -> None:
    barrier = threading.Barrier(3)
    JobPool(3).run([lambda: barrier.wait(timeout=30) and None] * 3)


@pytest.mark.parametrize("threads", [1, 3])
def test_the_first_error_comes_out_and_no_job_is_begun_after_it(threads: int) -> None:
    done: list[int] = []

    def fail() -> None:
        raise LookupError("this one")

    def job(i: int) -> Callable[[], None]:
        return lambda: done.append(i)

    with pytest.raises(LookupError, match="this one"):
        JobPool(threads).run([job(0), fail, *map(job, range(1, 1000))])
    assert len(done) < 1000


def test_an_error_of_another_thread_comes_out_when_all_have_ended() -> None:
    caller, running, ended = threading.get_ident(), threading.Event(), threading.Event()

    def job() -> None:
        if threading.get_ident() == caller:
            assert running.wait(30)
            return
        running.set()
        ended.set()
        raise OSError("elsewhere")

    with pytest.raises(OSError, match="elsewhere"):
        JobPool(2).run([job, job])
    assert ended.is_set()


def test_a_call_does_not_wait_for_threads_that_another_call_holds() -> None:
    pool, inside, go_on = JobPool(2), threading.Barrier(3), threading.Event()

    def hold() -> None:
        inside.wait(timeout=30)
        assert go_on.wait(30)

    other = threading.Thread(target=pool.run, args=([hold, hold],))
    other.start()
    inside.wait(timeout=30)  # the other call's own thread and the pool's only one are busy
    done: list[int] = []
    pool.run([lambda i=i: done.append(i) for i in range(4)])  # type: ignore[misc]
    assert done == [0, 1, 2, 3]
    go_on.set()
    other.join(30)
    assert not other.is_alive()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_does_them_itself() -> None:
    pool = JobPool(3)
    pool.run([lambda: None] * 3)  # its threads are there, and will not be in the child
    child = os.fork()
    if not child:
        os._exit(_exit_status_of_ten_jobs(pool))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_threads_that_cannot_be_started_are_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that were started before the limit have ended on return, too."""
    submit, asked = ThreadPoolExecutor.submit, []

    def limited(self: ThreadPoolExecutor, *args: Any) -> Any:
        if asked:
            raise RuntimeError("can't start new thread")
        asked.append(submit(self, *args))
        return asked[0]

    monkeypatch.setattr(ThreadPoolExecutor, "submit", limited)
    done: list[int] = []

    def job(i: int) -> Callable[[], None]:
        return lambda: (time.sleep(0.01), done.append(i))[1]

    JobPool(4).run([job(i) for i in range(10)])
    assert sorted(done) == list(range(10))


def test_an_executor_that_was_shut_down_is_done_without() -> None:
    pool, done = JobPool(2), []
    pool.run([lambda: None] * 2)
    pool._executor().shutdown()
    pool.run([lambda i=i: done.append(i) for i in range(5)])  # type: ignore[misc]
    assert sorted(done) == list(range(5))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pool: pickle.loads(pickle.dumps(pool))])
def test_a_copy_has_threads_of_its_own(copied: Callable[[JobPool], JobPool]) -> None:
    pool = JobPool(3)
    pool.run([lambda: None] * 3)
    other = copied(pool)
    other.run([lambda: None] * 3)
    assert other.threads == 3
    assert other._executor() is not pool._executor()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_process_forked_while_jobs_are_handed_out_does_not_hang() -> None:
    pool, stop = JobPool(2), threading.Event()

    def go_on() -> None:
        while not stop.is_set():
            pool.run([lambda: None] * 8)

    busy = threading.Thread(target=go_on)
    busy.start()
    try:
        for _ in range(20):
            child = os.fork()
            if not child:
                os._exit(_exit_status_of_ten_jobs(pool))
            end = time.monotonic() + 30
            while not (waited := os.waitpid(child, os.WNOHANG))[0]:
                if time.monotonic() > end:
                    os.kill(child, 9)
                time.sleep(0.001)
            assert os.waitstatus_to_exitcode(waited[1]) == 0
    finally:
        stop.set()
        busy.join()


def _exit_status_of_ten_jobs(pool: JobPool) -> int:
    done: list[int] = []
    pool.run([lambda i=i: done.append(i) for i in range(10)])  # type: ignore[misc]
    return 0 if sorted(done) == list(range(10)) else 1
