"""One task per expert, over torch's threads."""

from __future__ import annotations

import functools
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager

import torch

# Experts over threads pay while the fullest thread has at most this much more than its share.
_MAX_IMBALANCE = 1.15


def for_each_expert(task: Callable[[int], None], rows_L: Sequence[int]) -> None:
    """Calls `task(expert)` for every expert, without autograd; the tasks must write to different memory.

    With several torch threads, every thread takes whole experts, the fullest first, and computes them alone:
    no thread waits for another inside a matrix product. Where a few experts have most of the rows that would
    leave threads idle, so all threads work on one expert after the other. Which of the two happens depends on
    `rows_L` and torch.get_num_threads() alone, so the bits of a result do not change from run to run.

    torch.set_num_threads is set to 1 meanwhile, for the whole process where torch's BLAS is MKL.

    Args:
        task: does one expert's work.
        rows_L: rows of each expert.
    """
    num_threads = min(torch.get_num_threads(), len(rows_L))
    if num_threads <= 1 or not _is_balanced(rows_L, num_threads):
        _drain(task, deque(range(len(rows_L))))
        return
    experts = deque(sorted(range(len(rows_L)), key=lambda expert: -rows_L[expert]))
    with _one_thread_each():
        others = [_pool(num_threads - 1).submit(_drain, task, experts) for _ in range(num_threads - 1)]
        try:
            _drain(task, experts)
        finally:
            wait(others)
    for other in others:
        other.result()


def _drain(task: Callable[[int], None], experts: deque[int]) -> None:
    """Takes experts until none is left."""
    with torch.no_grad():  # a setting of the thread
        while experts:
            try:
                expert = experts.popleft()
            except IndexError:  # another thread took the last one
                return
            task(expert)


def _is_balanced(rows_L: Sequence[int], num_threads: int) -> bool:
    """Whether threads that take the experts fullest first end with nearly the same number of rows."""
    loads = [0] * num_threads
    for rows in sorted(rows_L, reverse=True):
        loads[loads.index(min(loads))] += rows
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
    # OpenMP's number of threads belongs to a thread: each sets its own.
    return ThreadPoolExecutor(num_threads, "experts", initializer=torch.set_num_threads, initargs=(1,))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)  # threads do not follow into a child process
