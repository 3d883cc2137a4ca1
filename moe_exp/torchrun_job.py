"""One torchrun on this node: its command line, its environment, the signals on their way to its ranks, its exit code. No torch.

torchrun answers Ctrl-C and SIGTERM by ending its ranks within 30 seconds and printing a traceback, which is too short for a
checkpoint and no clean end. So it never gets to see them: it runs in a session of its own, out of reach of the terminal, and
the launcher sends the first signal straight to the ranks as SIGTERM. They finish the step, save and exit with 0, and
torchrun ends by itself with 0. A second signal kills the job. Should the launcher be killed, torchrun ends its ranks.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from moe_exp.config import Config
from moe_exp.hosts import EXIT_CODE_FILE, KEEP_FREED_MEMORY, count_gpus

TRAIN_MODULE = "moe_exp.train"


def torchrun_command(config: Config, module_args: Sequence[str], module: str = TRAIN_MODULE) -> list[str]:
    """The torchrun command line of this node."""
    return [
        sys.executable, "-m", "torch.distributed.run",
        "--nnodes", str(config.nnodes),
        "--node-rank", str(config.node_rank),
        "--nproc-per-node", str(config.gpus_per_node),
        "--master-addr", config.master_addr,
        "--master-port", str(config.master_port),
        "-m", module, *module_args,
    ]  # fmt: skip


def child_environment(config: Config) -> dict[str, str]:
    """Environment of torchrun and its ranks: ours, with threads per rank, the allocator on a CPU, and without useless log lines."""
    environ = dict(os.environ)
    if threads := config.threads_per_rank or (0 if count_gpus() else 1):
        environ["OMP_NUM_THREADS"] = str(threads)
    environ.setdefault("OMP_NUM_THREADS", "1")  # what torchrun would set, with a warning
    environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if not count_gpus():
        environ = KEEP_FREED_MEMORY | environ
    if config.tp > 1 or config.cp > 1:
        # Megatron overlaps collectives with matrix products by the order of launches, which this keeps (before Blackwell).
        environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    return environ


STOPPING = "stopping: the run saves a checkpoint and ends; a second signal kills it"


def run_job(command: Sequence[str], environ: Mapping[str, str], *, stopping: str = STOPPING) -> int:
    """Runs torchrun, hands signals to its ranks as described at the top of this file, and returns the exit code.

    A job that a signal ended before it could save gives 128 + the number of the signal, as a shell does.

    Args:
        command: torchrun's.
        environ: its environment.
        stopping: what is said at the first signal.
    """
    received: list[int] = []
    told: set[int] = set()
    with _signals_into(received), tempfile.TemporaryDirectory() as folder:
        code_file = Path(folder) / "exit_code"
        environ = {**environ, EXIT_CODE_FILE: str(code_file)}
        torchrun = subprocess.Popen(command, env=environ, start_new_session=True, preexec_fn=end_with_parent)
        while (code := _wait(torchrun)) is None:
            if len(received) == 1:
                told |= _stop_ranks(torchrun, told, stopping)
            elif received:
                _kill_job(torchrun)
        if not code and code_file.exists():
            return int(code_file.read_text())
    if code and received:
        return 128 + received[0]
    return code if code >= 0 else 128 - code


@contextmanager
def _signals_into(received: list[int]) -> Iterator[None]:
    """Inside the block the signals that ask for an end are only appended to `received`."""

    def receive(number: int, frame: FrameType | None) -> None:
        received.append(number)

    before = {number: signal.signal(number, receive) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def _wait(torchrun: subprocess.Popen[bytes]) -> int | None:
    try:
        return torchrun.wait(timeout=0.2)
    except subprocess.TimeoutExpired:
        return None


def _stop_ranks(torchrun: subprocess.Popen[bytes], told: set[int], stopping: str) -> set[int]:
    """SIGTERM to the ranks that are not in `told`, or to torchrun when it has not started any; returns whom it told."""
    if not told:
        complain(stopping)
    pids = set(children_of(torchrun.pid)) - told
    if not pids and not told:
        pids = {torchrun.pid}
    for pid in pids:
        _send(pid, signal.SIGTERM)
    return pids


def _kill_job(torchrun: subprocess.Popen[bytes]) -> None:
    # torchrun first, so that it does not report the ranks as failed.
    for pid in [torchrun.pid, *children_of(torchrun.pid)]:
        _send(pid, signal.SIGKILL)


def _send(pid: int, number: int) -> None:
    # It may have ended meanwhile.
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def children_of(pid: int) -> list[int]:
    """Process ids of the children of `pid`. From /proc where there is one: slim containers have no ps."""
    if Path("/proc/self/stat").exists():
        pairs = [(int(stat.parent.name), _parent(stat)) for stat in Path("/proc").glob("[0-9]*/stat")]
    else:
        lines = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout.splitlines()
        pairs = [(int(child), int(parent)) for child, parent in map(str.split, lines)]
    return [child for child, parent in pairs if parent == pid]


def _parent(stat: Path) -> int:
    try:
        # The second field is the program's name in brackets, with any characters in it; state and parent follow.
        return int(stat.read_text(errors="replace").rpartition(")")[2].split()[1])
    except OSError:
        return -1


# Loaded here: between fork and exec only a plain call is safe.
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_PR_SET_PDEATHSIG = 1


def end_with_parent(number: int = signal.SIGTERM) -> None:
    """Runs in a child before its program starts: gets it the signal when its parent dies, which cannot forward anything (Linux only)."""
    if _LIBC:
        _LIBC.prctl(_PR_SET_PDEATHSIG, number)


def complain(line: str) -> None:
    """One line about the job on stderr."""
    print(f"moe-exp: {line}", file=sys.stderr, flush=True)
