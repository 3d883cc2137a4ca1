"""This node's job: command line, environment, signals and exit code. No torch.

The agent (launch/agent.py) gets its signals from here and passes them to the ranks, which finish the step,
save and exit. If the launcher is killed, the agent lets the ranks save and exit.
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
from moe_exp.host.devices import KEEP_FREED_MEMORY, count_gpus
from moe_exp.host.exit_codes import EXIT_CODE_FILE, RENDEZVOUS_KEY, alive_file, complain, settings_file
from moe_exp.host.processes import (
    children_of,
    end_with_parent,
    free_port,
    orphans_adopted,
    send_signal,
    signals_blocked,
    signals_handled,
)

TRAIN_MODULE = "moe_exp.train"


def torchrun_command(config: Config, module_args: Sequence[str], module: str = TRAIN_MODULE) -> list[str]:
    """The command line of this node's agent, the same as torchrun's."""
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
    """The problem with a MASTER_PORT that node 0 cannot use."""
    fix = f"set MASTER_PORT to a free port, for instance {free_port()}"
    fix += ", on all nodes" if num_nodes > 1 else ", or leave it out: one node takes a free one"
    return problem("master_port", port, rule, fix)


def child_environment(config: Config, key: str = "") -> dict[str, str]:
    """Ours plus threads per rank, the allocator on a CPU, DETERMINISTIC, and `key`, that of several nodes."""
    environ = dict(os.environ)
    environ |= config.deterministic_environment(environ)
    if threads := config.threads_per_rank or (0 if count_gpus() else 1):
        environ["OMP_NUM_THREADS"] = str(threads)
    environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun would set this, too, with a warning
    environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if not count_gpus():
        environ = KEEP_FREED_MEMORY | environ
    if config.tp > 1 or config.cp > 1:
        # Megatron overlaps collectives with matrix products by launch order, which this preserves (before
        # Blackwell).
        environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    environ[RENDEZVOUS_KEY] = key if config.nnodes > 1 else secrets.token_hex(16)
    return environ


_KEY_SECONDS = 10.0  # from the creation of the file until its node writes it


def shared_key(path: Path) -> str:
    """The key of a multi-node job, which the first node writes into the run folder, only for its user."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        # O_EXCL: one node creates it, the others read what that one writes
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        os.write(descriptor, secrets.token_hex(16).encode())
        os.close(descriptor)
    deadline = time.monotonic() + _KEY_SECONDS
    while len(key := path.read_text()) != 32:  # another node is writing it
        if time.monotonic() > deadline:
            raise ValueError(f"{path}: has no key in it. Fix: remove it while no node of the run is up")
        time.sleep(0.1)
    return key


_STILL_SECONDS = 60.0  # limit for an agent that should end its ranks
_SAVE_SECONDS = 600.0  # for ranks whose agent was killed
_KILL_SECONDS = 30.0  # from SIGKILL until a process ends


def run_job(
    command: Sequence[str],
    environ: Mapping[str, str],
    *,
    config: Config | None = None,
    poll: Callable[[bool], bool] | None = None,
) -> int:
    """Runs the agent, passes signals on (see the top of this file), and returns the ranks' exit code.

    If a signal ends the job before its ranks report one, returns 128 + the signal's number, as a shell does.

    `config` is that of a training run, checked; None: the ranks have nothing to save, and the first signal
    kills them. `poll`, which must be fast, is called every 0.2 s with whether the job was asked to stop; it
    returns whether it ended the ranks because of a hang.
    """
    received: list[int] = []
    num_sent = 0
    receiving = signals_handled(lambda number, _: received.append(number))
    with receiving, orphans_adopted(), tempfile.TemporaryDirectory() as folder:
        code_file = Path(folder) / "exit_code"
        if config:
            settings_file(str(code_file)).write_text(config.model_dump_json())
        # torchrun would leave a folder of its own for its error files in that for temporary files
        environ = {"PET_LOG_DIR": folder, **environ, EXIT_CODE_FILE: str(code_file)}
        # a session of its own: the terminal's Ctrl-C must not reach agent and ranks besides the launcher's
        # signal
        with signals_blocked():  # signals during its imports wait until it can pass them on
            agent = subprocess.Popen(command, env=environ, start_new_session=True, preexec_fn=end_with_parent)
        stillness = _Stillness(alive_file(str(code_file)))
        before, orphans = set(children_of(os.getpid())), _Orphans()
        while True:
            with suppress(subprocess.TimeoutExpired):
                agent.wait(timeout=0.2)
            if (code := agent.returncode) is not None and not orphans.are_left(code, before):
                break
            pids = [agent.pid] if code is None else orphans.pids
            # only a second Ctrl-C: schedulers send other signals several times
            if received.count(signal.SIGINT) > 1 or (received and config is None):
                _kill_job(pids)
            # each signal once, in the order in which they came
            for number in received[num_sent:]:
                if num_sent == 0 and config:
                    unsaved = "ends, and saves nothing with SAVE_AT_END=false"
                    what = "saves a checkpoint and ends" if config.save_at_end else unsaved
                    complain(f"stopping: the run {what}; a second Ctrl-C kills it")
                num_sent += 1
                for pid in pids:
                    is_rank = code is not None
                    send_signal(pid, signal.SIGTERM if is_rank and number == signal.SIGHUP else number)
            has_hung = poll is not None and poll(bool({*received} - {signal.SIGUSR1}))
            if code is None and stillness.seconds(counts=has_hung or bool(received)) > _STILL_SECONDS:
                complain(f"the agent has not moved for {_STILL_SECONDS:.0f} s: it and its ranks are killed")
                _kill_job([agent.pid])
        # Empty if the rank died while writing it, or the disk is full.
        if code_file.exists() and (reported := code_file.read_text()):
            return int(reported)
    if code and received:
        return 128 + received[0]
    return code if code >= 0 else 128 - code


class _Stillness:
    """How long a file has not been touched, counted only while there is a reason and this process runs."""

    def __init__(self, path: Path):
        self._path, self._touched, self._seconds = path, 0.0, 0.0
        self._looked = time.monotonic()

    def seconds(self, *, counts: bool) -> float:
        # counts at most one second per call: this process may have been suspended itself (Ctrl-Z)
        now, touched = time.monotonic(), 0.0
        with suppress(OSError):
            touched = self._path.stat().st_mtime
        is_still = counts and touched == self._touched
        self._seconds = self._seconds + min(now - self._looked, 1.0) if is_still else 0.0
        self._looked, self._touched = now, touched
        return self._seconds


class _Orphans:
    """The ranks of a killed agent; SIGTERM makes them save, and the launcher waits for their exit code."""

    def __init__(self) -> None:
        self.pids: list[int] = []
        self._deadline: float | None = None

    def are_left(self, code: int, before: set[int]) -> bool:
        """Whether some run; `code`: the agent's; `before`: children it did not start, and the agent."""
        if code >= 0:
            return False
        if self._deadline is None:
            self._deadline = time.monotonic() + _SAVE_SECONDS
        self.pids = []
        for pid in children_of(os.getpid()):
            with suppress(ChildProcessError):  # it has been reaped already
                if pid not in before and os.waitpid(pid, os.WNOHANG)[0] != pid:
                    self.pids.append(pid)
        if not self.pids:
            return False
        late = time.monotonic() - self._deadline
        if late > 0:
            _kill_job(self.pids)
        if late > _KILL_SECONDS:  # such as in a driver that does not answer
            complain(f"processes {', '.join(map(str, self.pids))} do not end, although they were killed")
            return False
        time.sleep(0.2)
        return True


def _kill_job(pids: Sequence[int]) -> None:
    # The agent first, so that it does not report the ranks as failed.
    for pid in [*pids, *(child for parent in pids for child in children_of(parent))]:
        send_signal(pid, signal.SIGKILL)
