"""A rank's heartbeat: a memory-mapped file with its iteration and phase, for its launcher (monitor.py).

A rank cannot report its state while it is stopped, or stuck in C code that holds the GIL. So each rank only
records the start of each phase (a microsecond or two), and its launcher decides whether the rank is overdue.
The file survives kill -9. When the rank receives STACKS_SIGNAL, faulthandler writes all stacks into a second
file. When a byte arrives in the rank's pipe, a waiting thread writes torch's record of collectives into a
third file. This module does not import torch.

Without the launcher's environment variable, for instance under plain torchrun, all functions are no-ops.
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
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from moe_exp.host.exit_codes import HEARTBEATS
from moe_exp.host.processes import allow_tracers

# The phases that make up an iteration's time.
ITERATION_PHASES = ("data", "forward_backward", "optimizer", "end_of_iteration")
PAUSED = "paused"  # for instance at a breakpoint; without time limit
PHASES = (
    "start_up", "load", *ITERATION_PHASES, "evaluation", "checkpoint", "rollback", "check", "dump", "profile",
    "end", PAUSED,
)  # fmt: skip
STACKS_SIGNAL = signal.SIGUSR2
# Files of launcher and agent beside the heartbeats.
HUNG = "hung"  # exists once the launcher has begun to kill its hung ranks
FAILURES = "failures"  # the job's number of failures; the agent writes it before the ranks start

# Sequence number; phase, iteration, its micro-batches, start of the phase, seconds of the iteration before
# that, pid, number of finished iterations; the sequence number again: it differs after a partial write.
_NOTE = struct.Struct("<q16sqqddqqq")
_NUM_DURATIONS = 32
_DURATIONS = struct.Struct(f"<{_NUM_DURATIONS}d")


@dataclass(frozen=True)
class Heartbeat:
    rank: int
    pid: int
    phase: str  # one of PHASES
    iteration: int  # the current one, from 1; 0 before the first
    num_microbatches: int  # in that iteration
    since: float  # start of the phase, seconds of the host's monotonic clock (which stops during suspend)
    spent: float  # seconds that the iteration spent in ITERATION_PHASES before `since`
    durations: tuple[float, ...]  # latest iterations of this process, seconds per micro-batch


def rank_file(folder: Path, rank: int, ending: str) -> Path:
    """Path of a rank's file with this `ending`, such as `beat`, `stacks` (from faulthandler) or `pipe`."""
    return folder / f"rank_{rank:05d}.{ending}"


def standby_file(folder: Path, pid: int) -> Path:
    """Path of the file that exists while process `pid` is on standby and thus not yet a rank."""
    return folder / f"standby_{pid}"


def read_beats(folder: Path) -> list[Heartbeat]:
    """Reads the heartbeats of a node's ranks, in rank order."""
    beats = []
    for path in sorted(folder.glob("rank_*.beat")):
        rank = int(path.stem.removeprefix("rank_"))
        # a rank that was stopped in the middle of a write is missing; a write takes nanoseconds
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
        # written aside and renamed: readers never see a partial file or the counts of a previous process
        temporary = path.with_suffix(".new")
        temporary.write_bytes(bytes(_NOTE.size + _DURATIONS.size))
        with temporary.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self._note()
        temporary.replace(path)

    def enter(self, phase: str) -> None:
        now = time.monotonic()
        # time in evaluations and saves does not count towards the iteration
        if self.phase in ITERATION_PHASES:
            self._spent += now - self._since
        self.phase, self._since = phase, now
        self._note()

    def begin(self, iteration: int, num_microbatches: int) -> None:
        """Records the start of an iteration and of its first phase, and the previous iteration's duration."""
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
_outer = ""  # the phase of `during`, which hides phases inside it
_files: list[TextIO] = []  # keeps faulthandler's file open


def start() -> None:
    """Starts this rank's heartbeat, once per process, if its launcher requests one."""
    global _heart
    if not (folder_name := os.environ.get(HEARTBEATS)):
        return
    folder, rank = Path(folder_name), int(os.environ["RANK"])
    allow_tracers()
    _files.append(rank_file(folder, rank, "stacks").open("w"))
    faulthandler.register(STACKS_SIGNAL, file=_files[-1], all_threads=True)
    pipe = rank_file(folder, rank, "pipe")
    pipe.unlink(missing_ok=True)
    os.mkfifo(pipe)
    threading.Thread(target=_write_collectives, args=(folder, rank), name="collectives", daemon=True).start()
    # last: a reader of the heartbeat may send STACKS_SIGNAL, which would kill a process without the handler
    _heart = HeartbeatWriter(folder, rank)


def enter(phase: str) -> None:
    """Records that this rank enters `phase`, one of PHASES."""
    if _heart is not None:
        _heart.enter(_outer or phase)


def begin(iteration: int, num_microbatches: int) -> None:
    if _heart is not None:
        _heart.begin(iteration, num_microbatches)


@contextmanager
def during(phase: str) -> Iterator[None]:
    """Reports `phase` during a `with` block or decorated function, even if code in it enters other phases."""
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


def _write_collectives(folder: Path, rank: int) -> None:
    """Writes torch's flight recorder dump ({} without a recorder) when a byte arrives in the rank's pipe."""
    # read and write: as a mere reader, `read` would return at once after the other side has closed
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
