"""A rank's heartbeat: which iteration and phase it is in, in a small mapped file that its launcher reads
(watch/hangs/monitor.py). No torch.

A rank that is stopped, or stuck in C with the GIL held, cannot say so. So it only notes where it is as it
goes on, at a microsecond or two per note; what is overdue is decided outside of it. The file outlives a kill
-9. With it the rank has Python's faulthandler write all its stacks into a second file at STACKS_SIGNAL, and a
sleeping thread write torch's record of collectives at a byte in a pipe.

Without the launcher's variable, under a bare torchrun for instance, every function here does nothing.
"""

from __future__ import annotations

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

# An iteration's time is that spent in these.
ITERATION_PHASES = ("data", "forward_backward", "optimizer", "end_of_iteration")
PAUSED = "paused"  # at a breakpoint, for instance: a phase that may last
PHASES = (
    "start_up",
    "load",
    *ITERATION_PHASES,
    "evaluation",
    "checkpoint",
    "rollback",
    "check",
    "dump",
    "profile",
    "end",
    PAUSED,
)
STACKS_SIGNAL = signal.SIGUSR2

# Count of notes; phase, iteration, micro-batches of it, seconds at which the phase began, seconds of the
# iteration before that, process id, number of iterations that ended; the count again, so that a reader sees
# when it has read half of a note.
_NOTE = struct.Struct("<q16sqqddqqq")
_NUM_DURATIONS = 32
_DURATIONS = struct.Struct(f"<{_NUM_DURATIONS}d")


@dataclass(frozen=True)
class Beat:
    """Where a rank is.

    Args:
        rank: of the job.
        pid: its process.
        phase: one of PHASES.
        iteration: that it works on, from 1; 0 before the first.
        num_microbatches: of that iteration.
        since: when the phase began, seconds of the host's monotonic clock, which stands still while the host
            is suspended.
        spent: seconds of the iteration before that, in ITERATION_PHASES.
        durations: of the latest iterations of this process, seconds per micro-batch.
    """

    rank: int
    pid: int
    phase: str
    iteration: int
    num_microbatches: int
    since: float
    spent: float
    durations: tuple[float, ...]


def beat_file(folder: Path, rank: int) -> Path:
    """Where the beats of a rank are."""
    return folder / f"rank_{rank:05d}.beat"


def stacks_file(folder: Path, rank: int) -> Path:
    """Where faulthandler adds the stacks of a rank."""
    return folder / f"rank_{rank:05d}.stacks"


def collectives_pipe(folder: Path, rank: int) -> Path:
    """A byte into it makes the rank write `collectives_file`."""
    return folder / f"rank_{rank:05d}.pipe"


def collectives_file(folder: Path, rank: int) -> Path:
    """torch's flight recorder of a rank, JSON."""
    return folder / f"rank_{rank:05d}.collectives.json"


def hung_file(folder: Path) -> Path:
    """There once the launcher has begun to end its ranks, as they hang."""
    return folder / "hung"


def failures_file(folder: Path) -> Path:
    """How often the job has failed so far, as a number: the launcher's agent writes it before the ranks
    start.
    """
    return folder / "failures"


def read_beats(folder: Path) -> list[Beat]:
    """The beats of the ranks of a node, in order of rank."""
    beats = (_read(path, int(path.stem.removeprefix("rank_"))) for path in sorted(folder.glob("rank_*.beat")))
    return [beat for beat in beats if beat is not None]


def _read(path: Path, rank: int) -> Beat | None:
    for _ in range(10):
        try:
            data = path.read_bytes()
        except FileNotFoundError:  # a new one takes its place
            continue
        count, phase, iteration, num_microbatches, since, spent, pid, num_ended, count_again = (
            _NOTE.unpack_from(data)
        )
        if count == count_again:
            durations = _DURATIONS.unpack_from(data, _NOTE.size)[: min(num_ended, _NUM_DURATIONS)]
            return Beat(
                rank, pid, phase.rstrip(b"\0").decode(), iteration, num_microbatches, since, spent, durations
            )
    return None  # stopped in the middle of a note, which takes a nanosecond: the next reader tries again


class Heart:
    """Writer of one rank's beats.

    Args:
        folder: of this node's launcher.
        rank: of the job.
    """

    def __init__(self, folder: Path, rank: int):
        self._pid, self._count = os.getpid(), 0
        self._iteration = self._num_microbatches = self._num_ended = 0
        self._phase, self._since, self._spent = "start_up", time.monotonic(), 0.0
        path = beat_file(folder, rank)
        # nobody reads half a file, nor goes on with that of a process that is gone
        temporary = path.with_suffix(".new")
        temporary.write_bytes(bytes(_NOTE.size + _DURATIONS.size))
        with temporary.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self._note()
        temporary.replace(path)

    @property
    def phase(self) -> str:
        """Of the latest note."""
        return self._phase

    def enter(self, phase: str) -> None:
        """Notes that `phase` begins."""
        now = time.monotonic()
        if self._phase in ITERATION_PHASES:
            self._spent += now - self._since
        self._phase, self._since = phase, now
        self._note()

    def begin(self, iteration: int, num_microbatches: int) -> None:
        """Notes that an iteration begins, with reading its data, and how long the one before has taken."""
        self.enter(ITERATION_PHASES[0])
        if self._num_microbatches:
            place = _NOTE.size + 8 * (self._num_ended % _NUM_DURATIONS)
            struct.pack_into("<d", self._map, place, self._spent / self._num_microbatches)
            self._num_ended += 1
        self._iteration, self._num_microbatches, self._spent = iteration, num_microbatches, 0.0
        self._note()

    def _note(self) -> None:
        self._count += 1
        where = self._phase.encode(), self._iteration, self._num_microbatches, self._since, self._spent
        _NOTE.pack_into(self._map, 0, self._count, *where, self._pid, self._num_ended, self._count)


_heart: Heart | None = None
_outer = ""  # a phase of which all others are a part
_files: list[TextIO] = []  # faulthandler needs its file open


def start() -> None:
    """Begins the heartbeat of this rank, where its launcher asks for one. Called once per process."""
    global _heart
    told = os.environ.get(HEARTBEATS)
    if not told:
        return
    folder, rank = Path(told), int(os.environ["RANK"])
    _files.append(stacks_file(folder, rank).open("w"))
    faulthandler.register(STACKS_SIGNAL, file=_files[-1], all_threads=True)
    pipe = collectives_pipe(folder, rank)
    pipe.unlink(missing_ok=True)
    os.mkfifo(pipe)
    threading.Thread(target=_write_collectives, args=(folder, rank), name="collectives", daemon=True).start()
    # Last: who sees beats may send the signal, which ends a process that has no handler for it.
    _heart = Heart(folder, rank)


def enter(phase: str) -> None:
    """Notes that this rank begins `phase`, one of PHASES."""
    if _heart is not None:
        _heart.enter(_outer or phase)


def begin(iteration: int, num_microbatches: int) -> None:
    """Notes that this rank begins an iteration."""
    if _heart is not None:
        _heart.begin(iteration, num_microbatches)


@contextmanager
def during(phase: str) -> Iterator[None]:
    """What runs inside is part of `phase`, whatever it enters; also a decorator."""
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
    """For what may last, such as a debugger's prompt: while one rank of a job is in it, no rank is taken to
    hang.
    """
    return during(PAUSED)


def _write_collectives(folder: Path, rank: int) -> None:
    """Waits for bytes in the pipe, asleep in C; on a byte writes what torch's flight recorder has, if this
    torch has one.
    """
    # Open for writing, too: reading would else return at once whenever the other side closes.
    pipe = os.open(collectives_pipe(folder, rank), os.O_RDWR)
    path = collectives_file(folder, rank)
    while os.read(pipe, 128):
        torch = sys.modules.get("torch")
        c10d = getattr(getattr(torch, "_C", None), "_distributed_c10d", None)
        is_nccl = (
            torch is not None
            and torch.distributed.is_initialized()
            and torch.distributed.get_backend() == "nccl"
        )
        dump = getattr(c10d, "_dump_nccl_trace_json" if is_nccl else "_dump_fr_trace_json", None)
        temporary = path.with_suffix(".new")
        temporary.write_bytes(dump() if dump else b"{}")
        temporary.replace(path)
