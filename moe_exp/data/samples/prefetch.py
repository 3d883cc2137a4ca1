"""Worker processes that read a rank's next micro-batches while the rank computes.

The processes are forked DataLoader workers, which share the sample order with the rank and start in
milliseconds; `spawn` and `forkserver` would import the training loop and Megatron in each process. A forked
process inherits the memory of its parent but not the threads, so it must not use CUDA, gloo or NCCL. Forking
is safe for these workers because they only read files and copy integers.
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

_PLACED = 64  # samples located before the fork, enough to touch the files of a usual blend


def microbatch_start(consumed_samples: int, index: int, *, mbsz: int, dp_rank: int, dp_size: int) -> int:
    """First sample of a data-parallel rank's micro-batch `index` in the iteration after `consumed_samples`.

    Each micro-batch has consecutive samples, so the micro-batches of an iteration do not depend on the number
    of ranks.
    """
    return consumed_samples + (index * dp_size + dp_rank) * mbsz


def microbatch_starts(
    consumed_samples: int, schedule: Callable[[int], tuple[int, int, int]], *, dp_rank: int, dp_size: int,
) -> Iterator[tuple[int, int]]:  # fmt: skip
    """Yields (first sample, number of samples) of each micro-batch of a data-parallel rank, endlessly.

    `schedule`: takes the number of consumed samples. For the next iteration, it returns the number of
    micro-batches per rank, the micro-batch size and the global batch size.
    """
    while True:
        num_microbatches, mbsz, batch_size = schedule(consumed_samples)
        for index in range(num_microbatches):
            yield microbatch_start(consumed_samples, index, mbsz=mbsz, dp_rank=dp_rank, dp_size=dp_size), mbsz
        consumed_samples += batch_size


class ReadAhead:
    """Implements `Samples` and prefetches the next batches of the schedule (`starts`). A jump within the
    schedule restarts the workers. Batches outside the schedule are read by the rank itself.

    Args:
        starts: takes a batch's first sample and yields (first sample, number of samples) of this batch and of
            each later batch.
        num_workers: number of processes (at least 1), started at the first batch.
        pin_memory: copy batches to page-locked memory for asynchronous copies to the GPU.
    """

    def __init__(
        self, samples: Samples, *, starts: Callable[[int], Iterator[tuple[int, int]]], num_workers: int,
        pin_memory: bool = False,
    ):  # fmt: skip
        self.samples, self._starts = samples, starts
        self._num_workers, self._pin_memory = num_workers, pin_memory
        self._batches: Any = None  # DataLoader's iterator
        self._expected: Iterator[tuple[int, int]] = iter(())
        self._next: tuple[int, int] | None = None

    def stage_at(self, index: int) -> DataStage:
        return self.samples.stage_at(index)

    def origin(self, index: int) -> Origin:
        return self.samples.origin(index)

    def batch(self, first: int, count: int) -> torch.Tensor:
        """Like `Samples.batch`, but raises RuntimeError if a worker has died."""
        if self._batches is None or (first, count) != self._next:
            # Read batches outside the schedule in the rank itself.
            if next(self._starts(first)) != (first, count):
                return self.samples.batch(first, count)
            self._start(first)
        try:
            tokens = next(self._batches)
        except (RuntimeError, OSError, EOFError) as error:
            # Batches are fetched from the worker's memory over a connection, which breaks when it dies.
            is_cut_off = isinstance(error, OSError | EOFError) and not str(error).startswith("Caught")
            if not is_cut_off and not str(error).startswith("DataLoader worker"):  # raised by the samples
                raise
            rule = f"a worker died ({error}): it was killed, or memory or /dev/shm is full"
            fix = "check the kernel log, or set NUM_WORKERS=0 to read samples in the rank itself"
            raise RuntimeError(f"NUM_WORKERS={self._num_workers}: {rule}. Fix: {fix}.") from error
        self._next = next(self._expected)
        return tokens

    def _start(self, first: int) -> None:
        self.close()
        # Compute this epoch's document orders before the fork, so that the workers share them.
        with suppress(ValueError):  # Megatron's order is finite
            for index in range(first, first + _PLACED):
                self.samples.origin(index)
        self._expected = self._starts(first)
        next(self._expected)
        loader: DataLoader[torch.Tensor] = DataLoader(
            # With a sampler, the DataLoader only calls __getitem__.
            _Batches(self.samples),  # type: ignore[arg-type]
            sampler=self._starts(first),
            batch_size=None,
            num_workers=self._num_workers,
            prefetch_factor=PREFETCHED_MICROBATCHES,
            pin_memory=self._pin_memory,
            generator=torch.Generator(),  # so that a start of workers takes nothing from dropout's stream
            multiprocessing_context="fork",
            worker_init_fn=partial(_end_with_rank, os.getpid()),
        )
        before = signal.getsignal(signal.SIGCHLD)
        # Ctrl-C and schedulers signal every process, but a rank that finishes its iteration and saves a
        # checkpoint still needs its workers.
        with warnings.catch_warnings(), signals_blocked():
            # Python 3.12 and later warn; the module docstring explains why a fork is safe here.
            warnings.filterwarnings("ignore", message=".*use of fork.*", category=DeprecationWarning)
            self._batches = iter(loader)
            # When a worker dies, PyTorch's handler raises an error immediately, even in the middle of a
            # checkpoint. Without the handler, the next batch raises it.
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGCHLD, before)
        # Otherwise multiprocessing sends SIGTERM at exit, which the workers block, and waits forever.
        atexit.register(self.close)

    def close(self) -> None:
        """Terminates the workers; a later call of `batch` starts new workers."""
        # Not left to garbage collection: an error may keep the iterator alive until a later fork collects it
        # and waits forever for the lock of a killed worker.
        if self._batches is not None:
            self._batches._shutdown_workers()
        self._batches = None
        self._next = None
        atexit.unregister(self.close)


def _end_with_rank(rank_pid: int, worker: int) -> None:
    # PyTorch's worker only checks every five seconds whether its parent has changed since it started, and so
    # misses a rank that ended earlier.
    end_with_parent(signal.SIGKILL)
    if os.getppid() != rank_pid:
        os._exit(1)


@dataclass
class _Batches:
    """Dataset that the workers read, indexed by (first sample, number of samples)."""

    samples: Samples

    def __getitem__(self, place: tuple[int, int]) -> torch.Tensor:
        return self.samples.batch(*place)
