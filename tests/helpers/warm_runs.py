"""Whole runs in processes forked from one that has imported torch, Megatron and this package.

As in a run that the script starts, the launcher checks the settings, starts the ranks, writes the summary and
returns their exit code. The script, torchrun's agent and all imports are left out: nothing restarts ranks or
passes signals on.
"""

import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from helpers.ranks import free_port, rank_variables, start_process
from moe_exp.config import Config, module_arguments
from moe_exp.host.exit_codes import EXIT_CODE_FILE, RESOLVED_SETTINGS
from moe_exp.launch.torchrun_job import TRAIN_MODULE

_LEFT_SECONDS = 5.0  # for ranks after one has failed, as in launch/agent.py


def run_warm(
    environ: Mapping[str, str], out: Path, err: Path, *flags: str, timeout: float | None
) -> int | None:
    """The exit code of `moe-exp train` with the settings in `environ` and `flags`; None if it was killed with
    its ranks, after `timeout` seconds.
    """
    process = start_process(_launch, dict(environ), out, err, *flags)
    process.join(timeout)
    if process.exitcode is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.join()
        return None
    return process.exitcode


def answer_warm(
    argv: Sequence[str], environ: Mapping[str, str], folder: Path, *, timeout: float = 120.0
) -> subprocess.CompletedProcess[str]:
    """`moe-exp` with the arguments `argv` in `folder`, to its end; runs that `compare` starts are forks."""
    with tempfile.TemporaryDirectory() as streams:
        out, err = Path(streams) / "out", Path(streams) / "err"
        process = start_process(_command, list(argv), dict(environ), folder, out, err)
        process.join(timeout)
        if process.exitcode is None:
            os.killpg(process.pid, signal.SIGKILL)
            raise AssertionError(f"{argv} did not end in {timeout} s:\n{out.read_text()}{err.read_text()}")
        return subprocess.CompletedProcess(list(argv), process.exitcode, out.read_text(), err.read_text())


def become_program(environ: Mapping[str, str], err: Path, out: Path | None = None) -> None:
    """Gives this forked process a session, an environment and streams of its own, which are appended to."""
    os.setsid()
    for path, descriptor in ((out, 1), (err, 2)):
        if path is not None:
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    os.environ.clear()
    os.environ.update(environ)


def _command(argv: list[str], environ: dict[str, str], folder: Path, out: Path, err: Path) -> None:
    become_program(environ, err, out)
    os.chdir(folder)
    from moe_exp.cli import main
    from moe_exp.studies.compare import back_to_back

    back_to_back.run_to_end = _run_to_end
    sys.argv = ["moe-exp", *argv]
    sys.exit(main(argv))


def _run_to_end(
    flags: Mapping[str, Any], log: Path, *, timeout: float | None, environ: Mapping[str, str], **_: Any
) -> int | None:
    """In place of child_runs.run_to_end."""
    log.parent.mkdir(parents=True, exist_ok=True)
    arguments = module_arguments({**flags, "master_port": 0, "master_addr": "localhost"})
    return run_warm(environ, log, log, *arguments, timeout=timeout)


def _launch(environ: dict[str, str], out: Path, err: Path, *flags: str) -> None:
    for path in (out, err):
        path.write_text("")
    become_program(environ, err, out)
    from moe_exp.cli import main
    from moe_exp.launch import launch

    launch.run_job = _run_ranks
    sys.argv = ["moe-exp", "train", *flags]
    sys.exit(main(["train", *flags]))


def _run_ranks(
    command: Sequence[str], environ: Mapping[str, str], *, config: Config, poll: Callable[[bool], bool]
) -> int:
    """In place of torchrun_job.run_job: forks the ranks that `command` asks for."""
    num_ranks = int(command[command.index("--nproc-per-node") + 1])
    arguments = list(command[command.index(TRAIN_MODULE) + 1 :])
    port = free_port()
    sys.stdout.flush()
    with tempfile.TemporaryDirectory() as folder:
        code_file = Path(folder) / "exit_code"
        environ = {**environ, EXIT_CODE_FILE: str(code_file)}
        code_file.with_name(RESOLVED_SETTINGS).write_text(config.model_dump_json())
        left = {}
        for rank in range(num_ranks):
            pid = os.fork()
            if pid == 0:
                _rank({**environ, **rank_variables(rank, num_ranks, port)}, arguments)
            left[pid] = rank
        code = _wait(left, poll)
        return int(code_file.read_text()) if code_file.exists() else code


def _wait(left: dict[int, int], poll: Callable[[bool], bool]) -> int:
    """The first exit code that is not 0; `left` has ranks by process id."""
    failed, deadline = 0, float("inf")
    while left:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in left:
            del left[pid]
            code = os.waitstatus_to_exitcode(status)
            if code and not failed:
                failed, deadline = code if code > 0 else 128 - code, time.monotonic() + _LEFT_SECONDS
            continue
        if time.monotonic() > deadline:
            for rank in left:
                os.kill(rank, signal.SIGKILL)
        poll(False)
        time.sleep(0.02)
    return failed


def _rank(environ: Mapping[str, str], arguments: list[str]) -> NoReturn:
    os.environ.clear()
    os.environ.update(environ)
    logging.root.handlers.clear()  # the launcher's
    code: Any = 1
    try:
        from moe_exp.training import loop

        sys.argv = ["train", *arguments]
        code = loop.main(arguments)
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)
