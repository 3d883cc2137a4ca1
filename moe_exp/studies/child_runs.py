"""Runs of `moe-exp train` that another command starts on this node, one after another. No torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from moe_exp.config import Config, load_config, module_arguments
from moe_exp.host.processes import children_of, end_with_parent, free_port
from moe_exp.runs.run_folder import RunFolder

_END_SECONDS = 60.0
# A rank may be in the middle of an iteration, and has to write a checkpoint after it.
_SAVE_SECONDS = 600.0

# Of a run that is only measured: it trains at the full global batch from the start, and writes nothing but
# its metrics.
MEASURED_ONLY = {
    "log_interval": 1, "eval_interval": 0, "save_interval": 0, "save_at_end": "false", "async_save": "false",
    "exit_interval": 0, "keep_last": 0, "keep_every": 0, "keep_best": 0, "load_dir": "", "upcycle_from": "",
    "upcycle_granularity": 1, "rampup_batch_size": "", "max_restarts": 0, "exit_duration": 0,
    "profile_iters": "", "memory_snapshot": "", "warmup_iters": 0, "decay_iters": 0,
    "lr_decay_style": "constant", "wandb_project": "", "node_rank": 0, "preflight": "false",
}  # fmt: skip


def given_settings(flags: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    """Settings of the environment and of `flags`, with the preset that they mean here: on a node with other
    devices it stays that.

    Raises:
        ConfigError: a value cannot be read.
    """
    given = {name: environ[name.upper()] for name in Config.model_fields if environ.get(name.upper())}
    given |= {name: value for name, value in flags.items() if value is not None}
    return given | {"preset": load_config(given, {}).preset}


def train_command(flags: Mapping[str, Any]) -> list[str]:
    """The launcher of a run."""
    return [sys.executable, "-m", "moe_exp", "train", *module_arguments(flags)]


def run_environment(also_without: Iterable[str] = ()) -> dict[str, str]:
    """This environment without settings, which are flags of a run, and without `also_without`, settings of
    the command that starts it.
    """
    ours = {name.upper() for name in (*Config.model_fields, *also_without)}
    return {name: value for name, value in os.environ.items() if name not in ours}


@contextmanager
def held(folder: Path, name: str, what: str) -> Iterator[None]:
    """Makes `folder`, and keeps it for the block.

    Args:
        folder: where a command writes its runs and tables.
        name: setting and value that named it, for the error.
        what: the command is, in a word.

    Raises:
        ValueError: another process has it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / ".lock", timeout=0):
            yield
    except Timeout:
        raise ValueError(
            f"{name}: another {what} is writing {folder}. Fix: wait for it, or give another name."
        ) from None


def wait_until_free(folder: RunFolder) -> None:
    """Returns once no process holds a run folder: those of a command that was killed need a while for their
    end.

    Raises:
        ValueError: one still does.
    """
    if not folder.lock.exists():
        return
    try:
        with FileLock(folder.lock, timeout=_END_SECONDS):
            pass
    except Timeout:
        raise ValueError(
            f"{folder.path}: another run is writing it. Fix: wait for its end, or end it."
        ) from None


def run_to_end(
    flags: Mapping[str, Any],
    log: Path,
    *,
    timeout: float | None,
    environ: Mapping[str, str],
    saving: bool = False,
) -> int | None:
    """Runs a launcher until it ends, or for `timeout` seconds; returns its exit code, None after a time-out.

    Whatever ends this function, a Ctrl-C too, ends the processes of the run. They are in a session of their
    own, which the signals of a terminal do not reach. If this process is killed, the kernel ends the
    launcher, and the agent of the ranks has them end.

    Args:
        flags: settings of the run, but for its port.
        log: that gets what it prints, after what it holds.
        timeout: seconds; None: none.
        environ: of the run.
        saving: let a run that has to end before its time save a checkpoint first; a second Ctrl-C kills it.
    """
    command = train_command({**flags, "master_port": free_port(), "master_addr": "localhost"})
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        launcher = subprocess.Popen(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=partial(end_with_parent, signal.SIGTERM if saving else signal.SIGKILL),
        )
        try:
            return launcher.wait(timeout)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _end(launcher, saving=saving)


def _end(launcher: subprocess.Popen[bytes], *, saving: bool) -> None:
    try:
        if saving and launcher.poll() is None:
            launcher.terminate()
            with suppress(subprocess.TimeoutExpired):
                launcher.wait(_SAVE_SECONDS)
    finally:
        if launcher.poll() is None:
            _kill(launcher)


def _kill(launcher: subprocess.Popen[bytes]) -> None:
    """Kills a launcher and all that it has started, parents first, so that none starts another; returns when
    they are gone.
    """
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
