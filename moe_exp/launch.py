"""From settings to a running job on this node: checks, embedded corpus, torchrun, signals, exit code.

torchrun answers Ctrl-C and SIGTERM by ending its ranks within 30 seconds and printing a traceback, which is too short for a
checkpoint and no clean end. So it never gets to see them: it runs in a session of its own, out of reach of the terminal, and
the launcher sends the first signal straight to the ranks as SIGTERM. They finish the step, save and exit with 0, and
torchrun ends by itself with 0. A second signal kills the job. Should the launcher be killed, torchrun ends its ranks.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any

from moe_exp.checks import check_config
from moe_exp.config import Config, ConfigError, load_config
from moe_exp.data.embedded import ensure_embedded_corpus
from moe_exp.hosts import BAD_INPUT, EXIT_CODE_FILE, KEEP_FREED_MEMORY, START_AGAIN, count_gpus
from moe_exp.machine_checks import check_environment, check_files, check_machine
from moe_exp.misspelt import unknown_variables
from moe_exp.planner.params import startup_report
from moe_exp.presets import preset_values
from moe_exp.report.finish import finish_run
from moe_exp.run_folder import RunFolder
from moe_exp.watch.hang import HangWatch

TRAIN_MODULE = "moe_exp.train"
_CLEAN_ENDS = ("finished", "stopped")


def train(flags: Mapping[str, Any], *, dry_run: bool = False) -> int:
    """Checks the settings and runs the job of this node, or with `dry_run` prints what would run.

    Args:
        flags: settings from the command line by field name; None counts as not given.
        dry_run: nothing is started or created; devices and packages that this machine lacks are only warned about.

    Returns:
        Exit code: 0 for a run that finished or was stopped and saved, 2 for settings that cannot run.
    """
    for name, near in unknown_variables(os.environ):
        _complain(f"warning: {name} is not a setting; did you mean {near}?")
    try:
        config = load_config(flags)
        if problems := check_config(config) + ([] if dry_run else check_environment(config)):
            raise ConfigError(problems)
        return _dry_run(config, flags) if dry_run else launch(config, flags)
    except ConfigError as error:
        for line in error.problems:
            _complain(line)
        return BAD_INPUT


def launch(config: Config, flags: Mapping[str, Any], module: str = TRAIN_MODULE) -> int:
    """Runs the ranks of this node under torchrun until they end.

    Args:
        config: settings that passed the checks.
        flags: the settings of the command line, which the ranks resolve again together with the environment.
        module: what each rank runs.

    Raises:
        ConfigError: the embedded corpus cannot be made.
    """
    if not config.train_data:
        try:
            ensure_embedded_corpus(Path(config.data_dir))
        except ValueError as error:
            raise ConfigError(str(error).splitlines()) from None
    started, start = datetime.now().astimezone(), time.monotonic()
    stopping = _STOPPING if config.save_at_end else _STOPPING_UNSAVED
    command, environ = torchrun_command(config, module_arguments(flags), module), child_environment(config)
    with HangWatch(config, RunFolder.of(config)) if module == TRAIN_MODULE else nullcontext() as watch:
        environ |= watch.environment if watch else {}
        poll = watch.poll if watch else None
        while (code := run_job(command, environ, stopping=stopping, poll=poll)) == START_AGAIN:
            _complain("the ranks start again")
    if config.node_rank:
        return code
    ended = finish_run(config, RunFolder.of(config), since=started, wall_seconds=time.monotonic() - start)
    if ended is None:
        return code
    status, text = ended
    print(f"\n{text}", flush=True)
    # Ranks that have saved may still be torn down with an error, for instance by a peer that left earlier.
    return 0 if status in _CLEAN_ENDS else code or 1


def module_arguments(flags: Mapping[str, Any]) -> list[str]:
    """`flags` as command-line arguments, in the form that `config.add_arguments` reads."""
    return [f"--{name.replace('_', '-')}={value}" for name, value in flags.items() if value is not None]


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


_STOPPING = "stopping: the run saves a checkpoint and ends; a second signal kills it"
_STOPPING_UNSAVED = "stopping: the run ends, and saves nothing with SAVE_AT_END=false; a second signal kills it"


def run_job(
    command: Sequence[str], environ: Mapping[str, str], *, stopping: str = _STOPPING, poll: Callable[[], None] | None = None
) -> int:
    """Runs torchrun, hands signals to its ranks as described at the top of this file, and returns the exit code.

    A job that a signal ended before it could save gives 128 + the number of the signal, as a shell does.

    Args:
        command: torchrun's.
        environ: its environment.
        stopping: what is said at the first signal.
        poll: called every 0.2 s; it may not take long.
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
            if poll is not None:
                poll()
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
        _complain(stopping)
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


def _complain(line: str) -> None:
    print(f"moe-exp: {line}", file=sys.stderr, flush=True)


def _dry_run(config: Config, flags: Mapping[str, Any]) -> int:
    """Prints the text also where files are missing, and only warns of a full disk: a run can be planned on another machine."""
    print(dry_run_text(config, flags), flush=True)
    problems = check_files(config, with_space=False)
    for line in [*check_machine(config), *(line for line in check_files(config) if line not in problems)]:
        _complain(f"warning: {line}")
    if problems:
        raise ConfigError(problems)
    return 0


def dry_run_text(config: Config, flags: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None) -> str:
    """Merged settings with where each comes from (nothing: its default), the torchrun command and the start-up report."""
    flags = {name: value for name, value in (flags or {}).items() if value is not None}
    lines = []
    for name, value in config.model_dump().items():
        source = _source(name, config.preset, flags, os.environ if environ is None else environ)
        setting = f"{name.upper()}={_shown(value)}"
        lines.append(f"{setting:<32}  # {source}" if source else setting)
    command = shlex.join(torchrun_command(config, module_arguments(flags)))
    return "\n".join([*lines, "", f"run folder: {RunFolder.of(config).path}", command, "", startup_report(config)])


def _shown(value: object) -> str:
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _source(name: str, preset: str, flags: Mapping[str, Any], environ: Mapping[str, str]) -> str:
    if name in flags:
        return "command line"
    if environ.get(name.upper()):
        return "environment"
    return f"preset {preset}" if name in preset_values(preset) else ""
