"""The job of this node: its command line, its environment, the signals on their way to its ranks, its exit
code. No torch.

It is torchrun's agent with other manners (launch/agent.py). It runs in a session of its own, out of reach of
the terminal, and gets the signals from here: it passes them on to the ranks, which finish the step, save and
end. A second Ctrl-C kills the job; a second signal of another kind does not, as schedulers send several.
Should the launcher be killed, the agent has the ranks save and end.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from moe_exp.config import Config
from moe_exp.config.determinism import deterministic_environment
from moe_exp.host.devices import KEEP_FREED_MEMORY, count_gpus
from moe_exp.host.exit_codes import EXIT_CODE_FILE, complain
from moe_exp.host.processes import STOP_SIGNALS, children_of, end_with_parent, signals_blocked

TRAIN_MODULE = "moe_exp.train"


def torchrun_command(config: Config, module_args: Sequence[str], module: str = TRAIN_MODULE) -> list[str]:
    """The command line of this node's agent, which is torchrun's."""
    return [
        sys.executable, "-m", "moe_exp.launch.agent",
        "--nnodes", str(config.nnodes),
        "--node-rank", str(config.node_rank),
        "--nproc-per-node", str(config.gpus_per_node),
        "--master-addr", config.master_addr,
        "--master-port", str(config.master_port),
        "--max-restarts", str(config.max_restarts if module == TRAIN_MODULE else 0),
        "-m", module, *module_args,
    ]  # fmt: skip


def child_environment(config: Config) -> dict[str, str]:
    """Environment of torchrun and its ranks: ours, with threads per rank, the allocator on a CPU, what
    DETERMINISTIC asks for, and without useless log lines.
    """
    environ = dict(os.environ)
    environ |= deterministic_environment(config, environ)
    if threads := config.threads_per_rank or (0 if count_gpus() else 1):
        environ["OMP_NUM_THREADS"] = str(threads)
    environ.setdefault("OMP_NUM_THREADS", "1")  # what torchrun would set, with a warning
    environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if not count_gpus():
        environ = KEEP_FREED_MEMORY | environ
    if config.tp > 1 or config.cp > 1:
        # Megatron overlaps collectives with matrix products by the order of launches, which this keeps
        # (before Blackwell).
        environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    return environ


STOPPING = "stopping: the run saves a checkpoint and ends; a second Ctrl-C kills it"


def run_job(
    command: Sequence[str],
    environ: Mapping[str, str],
    *,
    stopping: str = STOPPING,
    poll: Callable[[], None] | None = None,
) -> int:
    """Runs the agent, hands signals on as described at the top of this file, and returns the exit code that
    the ranks told.

    A job that a signal ended before its ranks could tell one gives 128 + the number of the signal, as a shell
    does.

    Args:
        command: the agent's.
        environ: its environment.
        stopping: what is said at the first signal; empty: the ranks have nothing to save, and it kills them.
        poll: called every 0.2 s; it may not take long.
    """
    received: list[int] = []
    num_sent = 0
    with _signals_into(received), tempfile.TemporaryDirectory() as folder:
        code_file = Path(folder) / "exit_code"
        environ = {**environ, EXIT_CODE_FILE: str(code_file)}
        with signals_blocked():  # one that comes while it imports waits until it can pass it on
            agent = subprocess.Popen(command, env=environ, start_new_session=True, preexec_fn=end_with_parent)
        while (code := _wait(agent)) is None:
            if received.count(signal.SIGINT) > 1 or (received and not stopping):
                _kill_job(agent)
            for number in received[num_sent:]:
                if num_sent == 0 and stopping:
                    complain(stopping)
                num_sent += 1
                _send(agent.pid, number)
            if poll is not None:
                poll()
        # Empty where a rank has died over it, or the disk is full.
        if code_file.exists() and (told := code_file.read_text()):
            return int(told)
    if code and received:
        return 128 + received[0]
    return code if code >= 0 else 128 - code


@contextmanager
def _signals_into(received: list[int]) -> Iterator[None]:
    """Inside the block the signals that ask for an end are only appended to `received`."""

    def receive(number: int, frame: FrameType | None) -> None:
        received.append(number)

    before = {number: signal.signal(number, receive) for number in (*STOP_SIGNALS, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


@contextmanager
def signals_ignored() -> Iterator[None]:
    """Inside the block the signals that ask for an end do nothing: it is the end."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (*STOP_SIGNALS, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def _wait(agent: subprocess.Popen[bytes]) -> int | None:
    try:
        return agent.wait(timeout=0.2)
    except subprocess.TimeoutExpired:
        return None


def _kill_job(agent: subprocess.Popen[bytes]) -> None:
    # The agent first, so that it does not report the ranks as failed.
    for pid in [agent.pid, *children_of(agent.pid)]:
        _send(pid, signal.SIGKILL)


def _send(pid: int, number: int) -> None:
    # It may have ended meanwhile.
    with suppress(ProcessLookupError):
        os.kill(pid, number)
