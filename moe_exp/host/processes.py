"""Helpers for processes, signals and free ports."""

import atexit
import ctypes
import multiprocessing
import os
import random
import resource
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path
from types import FrameType

# Signals to save and exit; USR1 is SLURM's warning (--signal=B:USR1@300). SIGHUP is treated as SIGTERM.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


def own_command() -> list[str]:
    """Command that starts this environment's `moe-exp` in the user's shell."""
    beside, on_path = Path(sys.executable).with_name("moe-exp"), shutil.which("moe-exp")
    if on_path and (Path(on_path) == beside or not beside.is_file()):
        return ["moe-exp"]
    # PATH has no moe-exp, or another environment's: name this one by its path
    words = [str(beside)] if beside.is_file() else [sys.executable, "-m", "moe_exp"]
    if Path(words[0]).is_relative_to(Path.cwd()):
        words[0] = os.path.relpath(words[0])
    return words


def allow_open_files() -> int:
    """Raises this process's open-file limit to the system's maximum; returns the new limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 10240 if hard == resource.RLIM_INFINITY else hard  # macOS refuses infinity
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Masks the termination signals inside the block; child processes inherit the mask."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*STOP_SIGNALS, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def signals_handled(
    handler: Callable[[int, FrameType | None], object] | signal.Handlers,
    *,
    signals: Sequence[signal.Signals] = (*STOP_SIGNALS, signal.SIGHUP),
) -> Iterator[None]:
    """Inside the block, `handler` handles `signals` (default: all signals that end a job)."""
    before = {number: signal.signal(number, handler) for number in signals}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


class QuickExit:
    """If `code` is set, Python exits with this code and does not spend a second on freeing objects."""

    def __init__(self) -> None:
        self.code: int | None = None
        atexit.register(self._exit)  # before all others: the first handler registered runs last

    def _exit(self) -> None:
        if self.code is None:
            return
        # os._exit below does not flush them
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):  # a log on a full disk, or a closed stream
                stream.flush()
        os._exit(self.code)


# Loaded at import, because only a plain call is safe between fork and exec. Numbers are from <sys/prctl.h>.
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def end_with_parent(number: int = signal.SIGTERM) -> None:
    """Makes the kernel send a signal to this process when the parent process dies (Linux only)."""
    if _LIBC:
        _LIBC.prctl(1, number)  # PR_SET_PDEATHSIG


def allow_tracers() -> None:
    """Lets the same user's py-spy read this process even if Yama's ptrace_scope is 1."""
    if _LIBC:
        _LIBC.prctl(0x59616D61, ctypes.c_ulong(-1), 0, 0, 0)  # PR_SET_PTRACER, any process


@contextmanager
def orphans_adopted() -> Iterator[None]:
    """Makes this process adopt orphaned descendants inside the block (Linux only)."""
    adopt = _LIBC.prctl if _LIBC else lambda *_: None
    adopt(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    try:
        yield
    finally:
        adopt(36, 0, 0, 0, 0)


def worker_context(module: str) -> ForkServerContext | SpawnContext:
    """Context for process pools; on Linux, workers are forks of a process that has imported `module`."""
    if sys.platform != "linux":  # not all libraries survive a fork on macOS
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([module])
    return context


def free_port() -> int:
    """A free TCP port below the ephemeral range, so that no outgoing connection can take it."""
    while True:
        # not from the seeded generator: two runs with the same seed would try the same port
        port = random.SystemRandom().randrange(10_000, 30_000)
        with socket.socket() as probe, suppress(OSError):  # it is taken: try another
            probe.bind(("", port))
            return port


def send_signal(pid: int, number: int) -> None:
    """Sends a signal to a process if it still exists."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def children_of(pid: int) -> list[int]:
    import psutil

    with suppress(psutil.NoSuchProcess):
        return [child.pid for child in psutil.Process(pid).children()]
    return []
