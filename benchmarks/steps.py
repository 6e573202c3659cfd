"""Progress of a long run: which step of how many, and for how long; a live line on a terminal, plain lines in a log."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

from benchmarks.process import Progress

__all__ = ["Steps"]

_LOG_EVERY_S = 15.0


class Steps:
    """Counts ``total`` steps and shows the running one on ``console``."""

    def __init__(self, console: Console, total: int) -> None:
        self.console = console
        self.total = total
        self.done = 0
        self._began = time.monotonic()
        self._doing = ""

    @contextmanager
    def step(self, what: str) -> Iterator[Progress]:
        """Run one step; yields a callback that tells what is being done just now. Its line keeps moving by itself."""
        self.done += 1
        self._doing = ""
        head = f"[{self.done}/{self.total}] {what}"
        began, over = time.monotonic(), threading.Event()
        ticker = threading.Thread(target=self._tick, args=(head, began, over), daemon=True)
        ticker.start()
        try:
            yield self._tell
        finally:
            over.set()
            ticker.join()
        self._line(f"{head}: done in {time.monotonic() - began:.1f} s")

    def _tell(self, doing: str, elapsed_s: float) -> None:
        self._doing = f": {doing}"

    def _tick(self, head: str, began: float, over: threading.Event) -> None:
        if self.console.is_terminal:
            with self.console.status(head) as status:
                while not over.wait(0.5):
                    status.update(f"{head}{self._doing} ({time.monotonic() - began:.0f} s)")
            return
        self._line(f"{head} ...")
        while not over.wait(_LOG_EVERY_S):
            self._line(f"{head}{self._doing} ({time.monotonic() - began:.0f} s)")

    def _line(self, text: str) -> None:
        minutes, seconds = divmod(int(time.monotonic() - self._began), 60)
        self.console.print(f"{minutes:02d}:{seconds:02d} {text}", markup=False, highlight=False)
