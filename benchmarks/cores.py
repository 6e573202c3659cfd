"""Threads that stay on cores of their own.

A kernel may start two threads that wake up together on one core and move one of them only milliseconds later, above
all in a virtual machine of two cores. That is neither the codec's time nor a store's, so threads are pinned where it
would be measured as theirs.
"""

from __future__ import annotations

import itertools
import os
from concurrent.futures import ThreadPoolExecutor

__all__ = ["pinned_pool"]


def pinned_pool(workers: int) -> ThreadPoolExecutor:
    """A pool whose threads are bound to one core each, in turn, where the system can do that."""
    if not hasattr(os, "sched_setaffinity"):
        return ThreadPoolExecutor(workers)
    cores = itertools.cycle(sorted(os.sched_getaffinity(0)))
    return ThreadPoolExecutor(workers, initializer=lambda: os.sched_setaffinity(0, {next(cores)}))
