"""Time per phase of an iteration (LOG_TIMERS): by CUDA events that are read once per log interval, on a CPU by its clock."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

# In the order of the log line. all_to_all and experts are parts of forward_backward; checkpoint is no part of the iteration's time.
PHASES = ("data", "forward_backward", "all_to_all", "experts", "optimizer", "checkpoint")


class PhaseTimers:
    """Sums of the time between `start` and `stop` of each phase, on this rank.

    On a GPU the two put events into the current stream, and nobody waits for them until `take`. A phase is then the time that the
    stream needs to get from one to the other, its wait for other ranks and for the host included.

    Args:
        device: where the phases run.
    """

    def __init__(self, device: torch.device):
        self._on_gpu = device.type == "cuda"
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._since: dict[str, float] = {}
        self._begun: dict[str, torch.cuda.Event] = {}
        self._pairs: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._unused: list[torch.cuda.Event] = []

    def start(self, phase: str) -> None:
        """Begins `phase`; where it was begun and not ended, anew."""
        if self._on_gpu:
            self._begun[phase] = self._event()
        else:
            self._since[phase] = time.perf_counter()

    def stop(self, phase: str) -> None:
        """Ends `phase`; nothing where it was not begun."""
        if self._on_gpu:
            if (begun := self._begun.pop(phase, None)) is not None:
                self._pairs.append((phase, begun, self._event()))
        elif (since := self._since.pop(phase, None)) is not None:
            self._seconds[phase] += time.perf_counter() - since

    def add(self, phase: str, seconds: float) -> None:
        """Counts a time that was measured elsewhere."""
        self._seconds[phase] += seconds

    def take(self) -> dict[str, float]:
        """Seconds per phase since the last call; waits for the device."""
        for phase, begun, ended in self._pairs:
            ended.synchronize()
            self._seconds[phase] += begun.elapsed_time(ended) / 1e3
            self._unused += [begun, ended]
        self._pairs = []
        taken, self._seconds = self._seconds, dict.fromkeys(PHASES, 0.0)
        return taken

    def _event(self) -> torch.cuda.Event:
        # Used again: an interval of a large model has tens of thousands, and making one is a call to the driver.
        event = self._unused.pop() if self._unused else torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def timed(timers: PhaseTimers | None, phase: str) -> AbstractContextManager[None]:
    """Counts what runs inside as `phase`; without timers nothing is done."""
    return nullcontext() if timers is None else _timed(timers, phase)


@contextmanager
def _timed(timers: PhaseTimers, phase: str) -> Iterator[None]:
    timers.start(phase)
    try:
        yield
    finally:
        timers.stop(phase)
