"""Processes that read the next micro-batches of a rank while it computes, with the same numbers.

The processes are torch's DataLoader workers, forked: they share the order of the samples with the rank, start
in milliseconds and import nothing, where `spawn` and `forkserver` would import the training loop with all of
Megatron once per process. A forked process may not use CUDA, gloo or NCCL, of which it has the memory but not
the threads; the workers read files and copy integers, no more.
"""

import atexit
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader

from moe_exp.config import PREFETCHED_MICROBATCHES
from moe_exp.data.samples.dataset import DataStage, Origin, Samples
from moe_exp.host.processes import end_with_parent, signals_blocked

_PLACED = 64  # samples, of the files of a blend


def microbatch_start(consumed_samples: int, index: int, *, mbsz: int, dp_rank: int, dp_size: int) -> int:
    """First sample of micro-batch `index` of a data parallel rank in the iteration after `consumed_samples`.

    A micro-batch is MBSZ samples in a row, so an iteration has the same set of micro-batches at any number of
    ranks.
    """
    return consumed_samples + (index * dp_size + dp_rank) * mbsz


def microbatch_starts(
    consumed_samples: int,
    schedule: Callable[[int], tuple[int, int, int]],
    *,
    dp_rank: int,
    dp_size: int,
) -> Iterator[tuple[int, int]]:
    """First sample and number of samples of all micro-batches of a data parallel rank, without end.

    `schedule`: micro-batches per rank, samples of one, samples of all, of the iteration that begins after
    this number of samples.
    """
    while True:
        num_microbatches, mbsz, batch_size = schedule(consumed_samples)
        for index in range(num_microbatches):
            first = microbatch_start(consumed_samples, index, mbsz=mbsz, dp_rank=dp_rank, dp_size=dp_size)
            yield first, mbsz
        consumed_samples += batch_size


class ReadAhead:
    """`Samples` of which the next batches are read in advance, by a guess which call comes next: a wrong one
    costs a restart of the processes, not a wrong sample.

    Args:
        starts: given the first sample of a batch, first sample and number of samples of this batch and of
            those that follow it.
        num_workers: processes, at least 1; started at the first batch.
        pin_memory: copy batches to page-locked memory, for copies to a GPU that wait for nothing.
    """

    def __init__(
        self,
        samples: Samples,
        *,
        starts: Callable[[int], Iterator[tuple[int, int]]],
        num_workers: int,
        pin_memory: bool = False,
    ):
        self._samples, self._starts = samples, starts
        self._num_workers, self._pin_memory = num_workers, pin_memory
        self._batches: Any = None  # DataLoader's iterator
        self._expected: Iterator[tuple[int, int]] = iter(())
        self._next: tuple[int, int] | None = None

    def stage_at(self, index: int) -> DataStage:
        return self._samples.stage_at(index)

    def origin(self, index: int) -> Origin:
        return self._samples.origin(index)

    def batch(self, first: int, count: int) -> torch.Tensor:
        """As `Samples.batch`; RuntimeError if a worker has died."""
        if self._batches is None or (first, count) != self._next:
            # not where the schedule has a batch: read in the rank itself
            if next(self._starts(first)) != (first, count):
                return self._samples.batch(first, count)
            self._start(first)
        try:
            tokens = next(self._batches)
        except (RuntimeError, OSError, EOFError) as error:
            # A batch is fetched from the memory of its worker, by a connection that a dead one cannot answer.
            is_cut_off = isinstance(error, OSError | EOFError) and not str(error).startswith("Caught")
            if not is_cut_off and not str(error).startswith("DataLoader worker"):  # it comes from the samples
                raise
            rule = f"a process that reads ahead has died ({error}), killed or out of memory or of /dev/shm"
            fix = "see the kernel's log, or set NUM_WORKERS=0 to read in the rank itself"
            raise RuntimeError(f"NUM_WORKERS={self._num_workers}: {rule}. Fix: {fix}.") from error
        self._next = next(self._expected)
        return tokens

    def _start(self, first: int) -> None:
        self.close()
        # The orders of documents of this epoch, made before the fork, so that the processes share them.
        with suppress(ValueError):  # Megatron's order ends with the run
            for index in range(first, first + _PLACED):
                self._samples.origin(index)
        self._expected = self._starts(first)
        next(self._expected)
        loader: DataLoader[torch.Tensor] = DataLoader(
            # A data set with a sampler needs no more than __getitem__.
            _Batches(self._samples),  # type: ignore[arg-type]
            sampler=self._starts(first),
            batch_size=None,
            num_workers=self._num_workers,
            prefetch_factor=PREFETCHED_MICROBATCHES,
            pin_memory=self._pin_memory,
            multiprocessing_context="fork",
            worker_init_fn=partial(_end_with_rank, os.getpid()),
        )
        before = signal.getsignal(signal.SIGCHLD)
        # Ctrl-C reaches every process of the terminal, and a scheduler signals every process of a job; a rank
        # that finishes its step and saves a checkpoint still needs its workers.
        with warnings.catch_warnings(), signals_blocked():
            # Python 3.12 on; see the top of the file for why a fork is safe here.
            warnings.filterwarnings("ignore", message=".*use of fork.*", category=DeprecationWarning)
            self._batches = iter(loader)
            # torch's handler raises wherever the rank is when a worker dies, in the middle of a checkpoint
            # for instance. Without it the next batch does.
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGCHLD, before)
        # Otherwise multiprocessing sends SIGTERM at exit, which the processes block, and joins them forever.
        atexit.register(self.close)

    def close(self) -> None:
        """Ends the processes; a later batch starts new ones."""
        # Not left to the end of the iterator, which an error may refer to: a process that is forked later
        # would collect it, and wait for ever if a worker was killed while it held the lock.
        if self._batches is not None:
            self._batches._shutdown_workers()
        self._batches = None
        self._next = None
        atexit.unregister(self.close)


def _end_with_rank(rank_pid: int, worker: int) -> None:
    # By itself a worker looks every five seconds whether its parent is another than at its start, and stays
    # if the rank ended before that.
    end_with_parent(signal.SIGKILL)
    if os.getppid() != rank_pid:
        os._exit(1)


@dataclass
class _Batches:
    """Dataset of a worker, by first sample and number of samples."""

    samples: Samples

    def __getitem__(self, place: tuple[int, int]) -> torch.Tensor:
        return self.samples.batch(*place)
