"""A rank's heartbeat: its iteration and phase, in a small mapped file that its launcher reads (monitor.py).
No torch.

A rank that is stopped, or stuck in C with the GIL held, cannot report that itself. So it only records where
it is, in a microsecond or two, and the launcher decides what is overdue. The file survives a kill -9. In
addition, faulthandler writes all stacks into a second file at STACKS_SIGNAL, and a sleeping thread writes
torch's record of collectives when a byte arrives in a pipe.

Without the launcher's variable, for instance under a bare torchrun, every function here does nothing.
"""

import faulthandler
import mmap
import os
import signal
import struct
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from moe_exp.host.exit_codes import HEARTBEATS
from moe_exp.host.processes import allow_tracers

# The phases that make up an iteration's time.
ITERATION_PHASES = ("data", "forward_backward", "optimizer", "end_of_iteration")
PAUSED = "paused"  # for instance at a breakpoint: has no time limit
PHASES = (
    "start_up", "load", *ITERATION_PHASES, "evaluation", "checkpoint", "rollback", "check", "dump", "profile",
    "end", PAUSED,
)  # fmt: skip
STACKS_SIGNAL = signal.SIGUSR2

# Sequence number; phase, iteration, its micro-batches, start of the phase, seconds of the iteration before
# that, pid, number of finished iterations; the sequence number again, so that a reader detects a partial
# write.
_NOTE = struct.Struct("<q16sqqddqqq")
_NUM_DURATIONS = 32
_DURATIONS = struct.Struct(f"<{_NUM_DURATIONS}d")


@dataclass(frozen=True)
class Heartbeat:
    """Iteration and phase of a rank."""

    rank: int
    pid: int
    phase: str  # one of PHASES
    iteration: int  # the current one, from 1; 0 before the first
    num_microbatches: int  # in that iteration
    since: float  # when the phase began, seconds of the host's monotonic clock (which stops during suspend)
    spent: float  # seconds of the iteration before `since`, in ITERATION_PHASES
    durations: tuple[float, ...]  # of the latest iterations of this process, seconds per micro-batch


def rank_file(folder: Path, rank: int, ending: str) -> Path:
    """A rank's `beat`, `stacks` (by faulthandler), `collectives.json`, or the `pipe` that asks for it."""
    return folder / f"rank_{rank:05d}.{ending}"


def hung_file(folder: Path) -> Path:
    """Exists once the launcher has begun to end its hung ranks."""
    return folder / "hung"


def failures_file(folder: Path) -> Path:
    """Number of failures of the job so far, which the launcher's agent writes before the ranks start."""
    return folder / "failures"


def read_beats(folder: Path) -> list[Heartbeat]:
    """The heartbeats of a node's ranks, in order of rank."""
    beats = []
    for path in sorted(folder.glob("rank_*.beat")):
        rank = int(path.stem.removeprefix("rank_"))
        # A rank that was stopped during a write, which takes a nanosecond, is missing until the next call.
        for _ in range(10):
            try:
                data = path.read_bytes()
            except FileNotFoundError:  # being replaced
                continue
            note = _NOTE.unpack_from(data)
            count, phase, iteration, num_microbatches, since, spent, pid, num_ended, count_again = note
            if count == count_again:
                durations = _DURATIONS.unpack_from(data, _NOTE.size)[: min(num_ended, _NUM_DURATIONS)]
                name = phase.rstrip(b"\0").decode()
                beats.append(Heartbeat(rank, pid, name, iteration, num_microbatches, since, spent, durations))
                break
    return beats


class HeartbeatWriter:
    """Writes one rank's heartbeat into the launcher's folder."""

    def __init__(self, folder: Path, rank: int):
        self._pid, self._count = os.getpid(), 0
        self._iteration = self._num_microbatches = self._num_ended = 0
        self.phase, self._since, self._spent = "start_up", time.monotonic(), 0.0
        path = rank_file(folder, rank, "beat")
        # readers never see a partial file, or the counts of a previous process
        temporary = path.with_suffix(".new")
        temporary.write_bytes(bytes(_NOTE.size + _DURATIONS.size))
        with temporary.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self._note()
        temporary.replace(path)

    def enter(self, phase: str) -> None:
        now = time.monotonic()
        # evaluations and saves between two iterations do not count
        if self.phase in ITERATION_PHASES:
            self._spent += now - self._since
        self.phase, self._since = phase, now
        self._note()

    def begin(self, iteration: int, num_microbatches: int) -> None:
        """Records that an iteration begins with reading its data, and how long the previous one took."""
        self.enter(ITERATION_PHASES[0])
        if self._num_microbatches:
            # a ring: the newest duration replaces the oldest
            place = _NOTE.size + 8 * (self._num_ended % _NUM_DURATIONS)
            struct.pack_into("<d", self._map, place, self._spent / self._num_microbatches)
            self._num_ended += 1
        self._iteration, self._num_microbatches, self._spent = iteration, num_microbatches, 0.0
        self._note()

    def _note(self) -> None:
        self._count += 1
        where = self.phase.encode(), self._iteration, self._num_microbatches, self._since, self._spent
        _NOTE.pack_into(self._map, 0, self._count, *where, self._pid, self._num_ended, self._count)


_heart: HeartbeatWriter | None = None
_outer = ""  # the phase that includes all others
_files: list[TextIO] = []  # must stay open for faulthandler


def start() -> None:
    """Starts this rank's heartbeat if its launcher requests one. Called once per process."""
    global _heart
    folder_name = os.environ.get(HEARTBEATS)
    if not folder_name:
        return
    folder, rank = Path(folder_name), int(os.environ["RANK"])
    allow_tracers()
    _files.append(rank_file(folder, rank, "stacks").open("w"))
    faulthandler.register(STACKS_SIGNAL, file=_files[-1], all_threads=True)
    pipe = rank_file(folder, rank, "pipe")
    pipe.unlink(missing_ok=True)
    os.mkfifo(pipe)
    threading.Thread(target=_write_collectives, args=(folder, rank), name="collectives", daemon=True).start()
    # Last: a reader of the heartbeat may send the signal, which ends a process that has no handler for it.
    _heart = HeartbeatWriter(folder, rank)


def enter(phase: str) -> None:
    """Records that this rank begins `phase`, one of PHASES."""
    if _heart is not None:
        _heart.enter(_outer or phase)


def begin(iteration: int, num_microbatches: int) -> None:
    if _heart is not None:
        _heart.begin(iteration, num_microbatches)


@contextmanager
def during(phase: str) -> Iterator[None]:
    """Counts everything inside as `phase`, including phases entered there; also a decorator."""
    global _outer
    if _heart is None:
        yield
        return
    before, outer_before = _heart.phase, _outer
    _heart.enter(phase)
    _outer = phase
    try:
        yield
    finally:
        _outer = outer_before
        _heart.enter(before)


def paused() -> AbstractContextManager[None]:
    """Context for pauses of any length, such as a debugger prompt: no hang is reported meanwhile."""
    return during(PAUSED)


def _write_collectives(folder: Path, rank: int) -> None:
    """Sleeps in C until the pipe has a byte, then writes torch's flight recorder if there is one."""
    # Open for writing, too: otherwise read returns at once whenever the other side closes.
    pipe = os.open(rank_file(folder, rank, "pipe"), os.O_RDWR)
    path = rank_file(folder, rank, "collectives.json")
    while os.read(pipe, 128):
        torch = sys.modules.get("torch")
        c10d = getattr(getattr(torch, "_C", None), "_distributed_c10d", None)
        groups = getattr(torch, "distributed", None)
        is_nccl = groups is not None and groups.is_initialized() and groups.get_backend() == "nccl"
        dump = getattr(c10d, "_dump_nccl_trace_json" if is_nccl else "_dump_fr_trace_json", None)
        temporary = path.with_suffix(".new")
        temporary.write_bytes(dump() if dump else b"{}")
        temporary.replace(path)
