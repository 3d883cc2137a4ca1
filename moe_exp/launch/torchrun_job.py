"""This node's job: command line, environment, signals and exit code. Does not import torch.

The launcher forwards signals to the agent (launch/agent.py), which forwards them to the ranks. The ranks then
finish the iteration, save and exit. If the launcher is killed, the agent lets the ranks save and exit.
"""

import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from moe_exp.config import Config, problem
from moe_exp.host import processes
from moe_exp.host.devices import KEEP_FREED_MEMORY, count_gpus
from moe_exp.host.exit_codes import AGENT_ALIVE, EXIT_CODE_FILE, RENDEZVOUS_KEY, RESOLVED_SETTINGS, complain
from moe_exp.host.processes import children_of, end_with_parent, free_port, send_signal

TRAIN_MODULE = "moe_exp.train"


def torchrun_command(config: Config, module_args: Sequence[str], module: str = TRAIN_MODULE) -> list[str]:
    """Command line of this node's agent, with torchrun's options."""
    return [
        sys.executable, "-m", "moe_exp.launch.agent",
        "--nnodes", str(config.nnodes),
        "--node-rank", str(config.node_rank),
        "--nproc-per-node", str(config.gpus_per_node),
        "--master-addr", config.master_addr,
        "--master-port", str(config.rendezvous_port),
        "--max-restarts", str(config.max_restarts if module == TRAIN_MODULE else 0),
        "-m", module, *module_args,
    ]  # fmt: skip


def port_problem(port: int, rule: str, *, num_nodes: int) -> str:
    """Error for a MASTER_PORT that node 0 cannot use."""
    fix = f"set MASTER_PORT to a free port, for instance {free_port()}"
    fix += ", on all nodes" if num_nodes > 1 else ", or omit MASTER_PORT: a single node chooses a free port"
    return problem("master_port", port, rule, fix)


def child_environment(config: Config, key: str = "") -> dict[str, str]:
    """`os.environ` with the rendezvous key and variables for threads, allocators, NCCL and DETERMINISTIC."""
    environ = dict(os.environ)
    environ |= config.deterministic_environment(environ)
    if threads := config.threads_per_rank or (0 if count_gpus() else 1):
        environ["OMP_NUM_THREADS"] = str(threads)
    environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun would set it with a warning
    environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if not count_gpus():
        environ = KEEP_FREED_MEMORY | environ
    if config.tp > 1 or config.cp > 1:
        # Megatron overlaps collectives with matrix products by launch order, which GPUs before Blackwell keep
        # only with one connection.
        environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if config.use_moe and config.ep > 1 and count_gpus():
        # Layers receive different numbers of rows, which fragments memory of fixed segments.
        environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
        # Exchanges of tokens and gradients run on different communicators: without one order on all ranks,
        # they can wait for each other's multiprocessors. From NCCL 2.26 on.
        environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
    environ[RENDEZVOUS_KEY] = key if config.nnodes > 1 else secrets.token_hex(16)
    return environ


_KEY_SECONDS = 10.0  # from the creation of the file until its content is visible


def shared_key(path: Path) -> str:
    """Rendezvous key of a multi-node job. The first call creates `path`, readable only by its owner."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        # O_EXCL: exactly one node creates the file, the others read its key
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        os.write(descriptor, secrets.token_hex(16).encode())
        os.close(descriptor)
    deadline = time.monotonic() + _KEY_SECONDS
    while len(key := path.read_text()) != 32:  # another node is writing it
        if time.monotonic() > deadline:
            raise ValueError(f"{path}: contains no key. Fix: delete this file while the run is stopped")
        time.sleep(0.1)
    return key


_STILL_SECONDS = 60.0  # time limit for an agent that should terminate its ranks
_SAVE_SECONDS = 600.0  # time limit for ranks whose agent was killed
_KILL_SECONDS = 30.0  # from SIGKILL until a process must have ended


def run_job(
    command: Sequence[str], environ: Mapping[str, str], *, config: Config | None = None,
    poll: Callable[[bool], bool] | None = None,
) -> int:  # fmt: skip
    """Runs the agent, forwards signals, and returns the ranks' exit code. If a signal ends the job before the
    ranks report an exit code, returns 128 + the signal's number, like a shell.

    Args:
        config: settings of a training run. If None, the ranks save nothing: the first signal kills them.
        poll: called every 0.2 s. The argument is True if a stop was requested; the result is True if
            `poll` has killed hung ranks.
    """
    received: list[int] = []
    num_sent = 0
    receiving = processes.signals_handled(lambda number, _: received.append(number))
    with receiving, processes.orphans_adopted(), tempfile.TemporaryDirectory() as folder:
        code_file = Path(folder) / "exit_code"
        if config:
            code_file.with_name(RESOLVED_SETTINGS).write_text(config.model_dump_json())
        # PET_LOG_DIR: otherwise torchrun would leave a folder for error files in the temporary folder
        environ = {"PET_LOG_DIR": folder, **environ, EXIT_CODE_FILE: str(code_file)}
        # Signals during the agent's imports stay pending until it can forward them. A separate session: the
        # terminal's Ctrl-C must reach the agent and ranks only through the launcher.
        with processes.signals_blocked():
            agent = subprocess.Popen(command, env=environ, start_new_session=True, preexec_fn=end_with_parent)
        stillness = _Stillness(code_file.with_name(AGENT_ALIVE))
        before, orphans = set(children_of(os.getpid())), _Orphans()
        while True:
            with suppress(subprocess.TimeoutExpired):
                agent.wait(timeout=0.2)
            if (code := agent.returncode) is not None and not orphans.are_left(code, before):
                break
            pids = [agent.pid] if code is None else orphans.pids
            # only a second Ctrl-C kills: schedulers send other signals repeatedly
            if received.count(signal.SIGINT) > 1 or (received and config is None):
                kill_job(pids)
            # each signal once, in the order of arrival
            for number in received[num_sent:]:
                if num_sent == 0 and config:
                    unsaved = "ends without a save (SAVE_AT_END=false)"
                    what = "saves a checkpoint and ends" if config.save_at_end else unsaved
                    complain(f"stopping: the run {what}; a second Ctrl-C kills it")
                num_sent += 1
                for pid in pids:
                    is_rank = code is not None
                    send_signal(pid, signal.SIGTERM if is_rank and number == signal.SIGHUP else number)
            has_hung = poll is not None and poll(bool({*received} - {signal.SIGUSR1}))
            if code is None and stillness.seconds(counts=has_hung or bool(received)) > _STILL_SECONDS:
                complain(f"no response from the agent for {_STILL_SECONDS:.0f} s; killing agent and ranks")
                kill_job([agent.pid])
        # empty if the rank died while writing it, or the disk is full
        if code_file.exists() and (reported := code_file.read_text()):
            return int(reported)
    if code and received:
        return 128 + received[0]
    return code if code >= 0 else 128 - code


class _Stillness:
    """Seconds since a file was last modified, not counting time in which this process was suspended."""

    def __init__(self, path: Path):
        self._path, self._touched, self._seconds = path, 0.0, 0.0
        self._looked = time.monotonic()

    def seconds(self, *, counts: bool) -> float:
        # at most one second per call counts: this process itself may have been suspended (Ctrl-Z)
        now, touched = time.monotonic(), 0.0
        with suppress(OSError):
            touched = self._path.stat().st_mtime
        is_still = counts and touched == self._touched
        self._seconds = self._seconds + min(now - self._looked, 1.0) if is_still else 0.0
        self._looked, self._touched = now, touched
        return self._seconds


class _Orphans:
    """Ranks whose agent was killed: they get SIGTERM and save, and the launcher waits for their exit code."""

    def __init__(self) -> None:
        self.pids: list[int] = []
        self._deadline: float | None = None

    def are_left(self, code: int, before: set[int]) -> bool:
        """Whether ranks still run. `code`: exit code of the agent; `before`: children that are not ranks."""
        if code >= 0:
            return False
        if self._deadline is None:
            self._deadline = time.monotonic() + _SAVE_SECONDS
        self.pids = []
        for pid in children_of(os.getpid()):
            with suppress(ChildProcessError):  # already reaped
                if pid not in before and os.waitpid(pid, os.WNOHANG)[0] != pid:
                    self.pids.append(pid)
        if not self.pids:
            return False
        late = time.monotonic() - self._deadline
        if late > 0:
            kill_job(self.pids)
        if late > _KILL_SECONDS:  # for instance blocked in a driver
            complain(f"processes {', '.join(map(str, self.pids))} did not end after SIGKILL")
            return False
        time.sleep(0.2)
        return True


def kill_job(pids: Sequence[int]) -> None:
    # the agent first, or it would report the ranks as failed
    for pid in [*pids, *(child for parent in pids for child in children_of(parent))]:
        send_signal(pid, signal.SIGKILL)
