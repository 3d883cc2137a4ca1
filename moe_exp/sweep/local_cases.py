"""Runs one case on this node, in processes that end with it. No torch."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from filelock import FileLock, Timeout

from moe_exp.config import Config
from moe_exp.hosts import free_port
from moe_exp.launch import children_of, end_with_parent, module_arguments
from moe_exp.run_folder import RunFolder
from moe_exp.sweep.cases import Case
from moe_exp.sweep.sweep_settings import SweepSettings

_END_SECONDS = 60.0


def train_command(flags: Mapping[str, str]) -> list[str]:
    """The launcher of a case."""
    return [sys.executable, "-m", "moe_exp", "train", *module_arguments(flags)]


def case_environment() -> dict[str, str]:
    """This environment without settings: those of a case are flags, and its lists would look like misspelt settings."""
    ours = {name.upper() for name in (*Config.model_fields, *SweepSettings.model_fields)}
    return {name: value for name, value in os.environ.items() if name not in ours}


def clear(folder: RunFolder, log: Path) -> None:
    """Removes what an earlier attempt has left, once its processes are gone.

    Raises:
        ValueError: they are still there.
    """
    if folder.lock.exists():
        try:
            with FileLock(folder.lock, timeout=_END_SECONDS):
                pass
        except Timeout:
            raise ValueError(f"{folder.path}: another run is writing it. Fix: wait for its end, or end it.") from None
    if folder.path.exists():
        shutil.rmtree(folder.path)
    log.unlink(missing_ok=True)


def run_case(case: Case, log: Path, timeout: int) -> int | None:
    """Runs a case to its end, or for `timeout` seconds; returns the launcher's exit code, None after a time-out.

    Whatever ends this function, a Ctrl-C too, ends the processes of the case. They are in a session of their own, which the signals of a
    terminal do not reach. If this process is killed, the kernel kills the launcher, and torchrun, which sees that, ends its ranks.
    """
    command = train_command(case.flags | {"master_port": str(free_port()), "master_addr": "localhost"})
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as file:
        launcher = subprocess.Popen(
            command,
            env=case_environment(),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=partial(end_with_parent, signal.SIGKILL),
        )
        try:
            return launcher.wait(timeout)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if launcher.poll() is None:
                _kill(launcher)


def _kill(launcher: subprocess.Popen[bytes]) -> None:
    """Kills a launcher and all that it has started, parents first, so that none starts another; returns when they are gone."""
    pids, level = [launcher.pid], [launcher.pid]
    while level:
        for pid in level:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)  # it starts no more children
        level = [child for pid in level for child in children_of(pid)]
        pids += level
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    launcher.wait()
    deadline = time.monotonic() + _END_SECONDS
    while any(map(_is_running, pids[1:])) and time.monotonic() < deadline:
        time.sleep(0.02)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    # In a container nobody may be there to take note of the end of an orphan, which then stays as a zombie.
    return not stat.exists() or stat.read_text(errors="replace").rpartition(")")[2].split()[0] not in "ZX"
