"""One task per group of experts, over torch's threads."""

from __future__ import annotations

import functools
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager

import torch

# Threads work on whole groups as long as the fullest thread has at most this multiple of its share.
_MAX_IMBALANCE = 1.15


def for_each_group(task: Callable[[int], None], rows: Sequence[int]) -> None:
    """Calls `task(group)` for every group, without autograd; the tasks must write to different memory.

    With several torch threads, each takes whole groups, fullest first, so no thread waits for another inside
    a matrix product. If a few groups have most of the rows, that would leave threads idle, and all threads
    work on one group after another instead. The choice depends only on `rows` and torch.get_num_threads(),
    so results are bitwise reproducible.

    Meanwhile torch.set_num_threads is 1, for the whole process if torch's BLAS is MKL.

    Args:
        task: computes one group.
        rows: of each group.
    """
    num_threads = min(torch.get_num_threads(), len(rows))
    if num_threads <= 1 or not _is_balanced(rows, num_threads):
        _drain(task, deque(range(len(rows))))
        return
    groups = deque(sorted(range(len(rows)), key=lambda group: -rows[group]))
    with _one_thread_each():
        others = [_pool(num_threads - 1).submit(_drain, task, groups) for _ in range(num_threads - 1)]
        try:
            _drain(task, groups)
        finally:
            wait(others)
    for other in others:
        other.result()


def _drain(task: Callable[[int], None], groups: deque[int]) -> None:
    """Takes groups until none is left."""
    with torch.no_grad():  # a setting of the thread
        while groups:
            try:
                group = groups.popleft()
            except IndexError:  # another thread took the last one
                return
            task(group)


def _is_balanced(rows: Sequence[int], num_threads: int) -> bool:
    """Whether threads that take the fullest groups first get nearly equal numbers of rows."""
    loads = [0] * num_threads
    for size in sorted(rows, reverse=True):
        loads[loads.index(min(loads))] += size
    return max(loads) * num_threads <= _MAX_IMBALANCE * sum(loads)


@contextmanager
def _one_thread_each() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


@functools.cache
def _pool(num_threads: int) -> ThreadPoolExecutor:
    # OpenMP's number of threads is per thread: each sets its own.
    return ThreadPoolExecutor(num_threads, "experts", initializer=torch.set_num_threads, initargs=(1,))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)  # a child process does not inherit threads
