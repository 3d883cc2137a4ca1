"""Processes and signals: children, the end of a parent, a free port."""

from __future__ import annotations

import ctypes
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# What asks a run to save and end: a person, a scheduler, and SLURM's warning (--signal=B:USR1@300). SIGHUP
# counts as SIGTERM.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Processes that the block starts have the signals that ask for an end blocked, until they unblock
    them.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*STOP_SIGNALS, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# Loaded here: between fork and exec only a plain call is safe.
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None

_PR_SET_PDEATHSIG = 1


def end_with_parent(number: int = signal.SIGTERM) -> None:
    """The system sends this process the signal when its parent dies, which cannot forward anything then
    (Linux only).
    """
    if _LIBC:
        _LIBC.prctl(_PR_SET_PDEATHSIG, number)


def free_port() -> int:
    """A TCP port that nobody listens on, below those that the system gives to connections: nobody takes it by
    chance meanwhile.
    """
    while True:
        port = random.SystemRandom().randrange(10_000, 30_000)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        return port


def children_of(pid: int) -> list[int]:
    """Process ids of the children of `pid`. From /proc where there is one: slim containers have no ps."""
    if Path("/proc/self/stat").exists():
        pairs = [(int(stat.parent.name), _parent(stat)) for stat in Path("/proc").glob("[0-9]*/stat")]
    else:
        lines = subprocess.run(
            ["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True
        ).stdout.splitlines()
        pairs = [(int(child), int(parent)) for child, parent in map(str.split, lines)]
    return [child for child, parent in pairs if parent == pid]


def _parent(stat: Path) -> int:
    try:
        # The second field is the program's name in brackets, with any characters in it; state and parent
        # follow.
        return int(stat.read_text(errors="replace").rpartition(")")[2].split()[1])
    except OSError:
        return -1
