"""Runs `moe-exp train` for each case of a study, locally or as a SLURM job, and explains failures.

SLURM jobs keep running when the command ends; repeat the command to collect their results. No torch.
"""

import logging
import os
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import psutil
from filelock import FileLock, Timeout

from moe_exp.config import Config, load_config, module_arguments
from moe_exp.config.loading import fixed_for, given_values
from moe_exp.data.tokens.manifests import with_vocab_size
from moe_exp.host.devices import Nodes
from moe_exp.host.exit_codes import CAUSED_BY_ANOTHER
from moe_exp.host.files import write_atomically
from moe_exp.host.processes import children_of, end_with_parent, send_signal, signals_handled
from moe_exp.host.slurm_queue import job_environment, still_there
from moe_exp.launch.slurm.submission import directives, sbatch
from moe_exp.runs.records import read_metrics
from moe_exp.runs.run_folder import RunFolder

logger = logging.getLogger(__name__)

POLL_SECONDS = 10.0
_PATIENCE_SECONDS = 900.0  # with a squeue that does not answer
_END_SECONDS = 60.0
_SAVE_SECONDS = 600.0  # enough to finish an iteration and write a checkpoint

# Settings of runs that are only measured: full global batch from the start, and no output except metrics.
MEASURED_ONLY = {
    "node_rank": 0, "upcycle_from": "", "upcycle_granularity": 1, "lr_decay_style": "constant",
    "warmup_iters": 0, "decay_iters": 0, "rampup_batch_size": "", "average_every": 1, "data_stages": "",
    "load_dir": "", "remote_dir": "", "save_interval": 0, "save_at_end": False, "async_save": False,
    "keep_last": 0, "keep_every": 0, "keep_best": 0, "exit_interval": 0, "log_interval": 1,
    "eval_interval": 0, "wandb_project": "", "prometheus_file": "", "dump_iters": "", "dump_ranks": "",
    "spike_action": "none", "sdc_check_every": 0, "preflight": False, "slow_rank_every": 0,
    "max_restarts": 0, "exit_duration": 0, "profile_iters": "", "memory_snapshot": "",
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One run of a study."""

    name: str  # of its folder and log
    flags: Mapping[str, Any]  # all settings that are not defaults, as options of `moe-exp train`
    config: Config  # the resulting configuration
    log: Path  # output of its launcher
    variant: str = ""  # name of its model in a comparison or ladder
    problems: tuple[str, ...] = ()  # why it cannot run (only in a sweep, whose other cases still run)

    @property
    def folder(self) -> RunFolder:
        return RunFolder.of(self.config)


def given_settings(
    flags: Mapping[str, Any], environ: Mapping[str, str], nodes: Nodes | None = None
) -> dict[str, Any]:
    """Returns the settings in `environ` and `flags`, with VOCAB_SIZE from the data. Without `nodes`,
    adds the PRESET for this machine; with `nodes`, adds all defaults that depend on the nodes' devices.
    Raises ConfigError for invalid values.
    """
    given = given_values(flags, environ)
    given = fixed_for(nodes, given) if nodes else given
    config, vocabulary = with_vocab_size(load_config(given, {}), given)
    return given | {"preset": config.preset} | ({"vocab_size": config.vocab_size} if vocabulary else {})


def train_command(flags: Mapping[str, Any]) -> list[str]:
    return [sys.executable, "-m", "moe_exp", "train", *module_arguments(flags)]


def run_environment(also_without: Iterable[str] = ()) -> dict[str, str]:
    """Returns the environment without run settings (they are passed as flags) and without `also_without`."""
    ours = {name.upper() for name in (*Config.model_fields, *also_without)}
    return {name: value for name, value in os.environ.items() if name not in ours}


@contextmanager
def held(folder: Path, name: str, what: str) -> Iterator[None]:
    """Creates `folder` and locks it in a `with` block; ValueError about setting `name` if already locked."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / ".lock", timeout=0):
            yield
    except Timeout:
        rule, fix = f"another {what} is writing to {folder}", "wait for it to end, or use another name"
        raise ValueError(f"{name}: {rule}. Fix: {fix}.") from None


@contextmanager
def at_work(folder: Path, name: str, what: str, *, executor: str = "local") -> Iterator[None]:
    """Like `held`. Turns SIGTERM and SIGHUP into KeyboardInterrupt. An interrupt prints how to resume."""
    handled = signals_handled(signal.default_int_handler, signals=(signal.SIGTERM, signal.SIGHUP))
    with held(folder, name, what), handled:
        try:
            yield
        except KeyboardInterrupt:
            jobs = "; the SLURM jobs continue" if executor == "slurm" else ""
            print(f"stopped{jobs}. Repeat the command to resume.", flush=True)
            raise


def wait_until_free(folder: RunFolder) -> None:
    """Waits until a killed command's processes release the run folder; ValueError after one minute."""
    if not folder.lock.exists():
        return
    try:
        with FileLock(folder.lock, timeout=_END_SECONDS):
            pass
    except Timeout:
        rule = "another run is writing to this folder. Fix: wait for that run to end, or terminate it"
        raise ValueError(f"{folder.path}: {rule}.") from None


def run_to_end(
    flags: Mapping[str, Any], log: Path, *, timeout: float | None, environ: Mapping[str, str],
    saving: bool = False,
) -> int | None:  # fmt: skip
    """Runs a launcher, appends its output to `log`, and returns its exit code, or None on a timeout.

    A timeout or an exception such as Ctrl-C kills the run. If `saving` is true, the run first gets time to
    save a checkpoint; a second Ctrl-C then kills the run immediately.
    """
    command = train_command({**flags, "master_port": 0, "master_addr": "localhost"})
    log.parent.mkdir(parents=True, exist_ok=True)
    launcher, received = None, list[int]()
    try:
        # Ctrl-C is deferred until Popen returns, since it would lose the new process. The launcher gets its
        # own session, which receives no signals from the terminal. If we are killed, the kernel terminates
        # the launcher, whose elastic agent terminates the ranks.
        later = signals_handled(lambda number, _: received.append(number), signals=(signal.SIGINT,))
        with log.open("ab") as file, later:
            end_with_us = partial(end_with_parent, signal.SIGTERM if saving else signal.SIGKILL)
            launcher = subprocess.Popen(
                command, env=environ, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
                start_new_session=True, preexec_fn=end_with_us,
            )  # fmt: skip
        if received:
            raise KeyboardInterrupt
        return launcher.wait(timeout)
    except subprocess.TimeoutExpired:
        return None
    finally:
        # Nested, so that a second Ctrl-C during the wait still kills the launcher.
        try:
            if saving and launcher is not None and launcher.poll() is None:
                launcher.terminate()
                with suppress(subprocess.TimeoutExpired):
                    launcher.wait(_SAVE_SECONDS)
        finally:
            if launcher is not None and launcher.poll() is None:
                _kill(launcher)


def records_after(folder: RunFolder, iteration: int) -> list[dict[str, Any]]:
    """Reads a run's train records after `iteration`, the end of the warm-up."""
    records = read_metrics(folder.metrics) if folder.metrics.exists() else []
    return [one for one in records if one["kind"] == "train" and one["iteration"] > iteration]


def median_seconds(records: Iterable[Mapping[str, Any]]) -> float:
    return statistics.median(record["elapsed_time_per_iteration_ms"] for record in records) / 1e3


def clear(case: Case) -> None:
    """Removes the folder and log of an earlier attempt; ValueError if its processes are still running."""
    wait_until_free(case.folder)
    if case.folder.path.exists():
        shutil.rmtree(case.folder.path)
    case.log.unlink(missing_ok=True)


def _kill(launcher: subprocess.Popen[bytes]) -> None:
    """Kills a launcher and its descendants, and waits until they have exited."""
    pids, level = [launcher.pid], [launcher.pid]
    # Stop each generation before listing its children, so that it cannot start more.
    while level:
        for pid in level:
            send_signal(pid, signal.SIGSTOP)
        level = [child for pid in level for child in children_of(pid)]
        pids += level
    for pid in pids:
        send_signal(pid, signal.SIGKILL)
    launcher.wait()
    deadline = time.monotonic() + _END_SECONDS
    while any(map(_is_running, pids[1:])) and time.monotonic() < deadline:
        time.sleep(0.02)


def _is_running(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        # In a container without an init process, dead orphans remain zombies.
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    return False


# SLURM jobs


@dataclass(frozen=True)
class JobOptions:
    """sbatch options shared by all jobs of a study."""

    sbatch: Sequence[str]  # the user's options
    time_limit_seconds: int
    on_gpus: bool  # whether to request a GPU per rank, unless `sbatch` has such an option
    is_cleared: bool = False  # whether a case loses what an earlier attempt has left


def run_jobs(cases: Mapping[str, Case], jobs: Path, options: JobOptions) -> Iterator[tuple[Case, int | None]]:
    """Submits a job for each of `cases` (key: job name), unless an earlier call submitted it. When a job
    ends, yields its case and the exit code of its launchers (None if the job has left no exit code).

    `jobs`: folder of NAME.sh (script), NAME.id (job id) and NAME.code (exit code). Raises ValueError if
    sbatch is missing or fails.
    """
    missing = "EXECUTOR=slurm: sbatch not found. Fix: run on a login node, or set EXECUTOR=local."
    fix = f"correct the options SBATCH={shlex.join(options.sbatch)}"
    waiting = {}
    for name, case in cases.items():
        script, job, code = (jobs / f"{name}.{suffix}" for suffix in ("sh", "id", "code"))
        if not job.exists():
            if options.is_cleared:
                clear(case)
            for path in (script, case.log):
                path.parent.mkdir(parents=True, exist_ok=True)
            code.unlink(missing_ok=True)  # left by a command that was killed after it removed the job id
            write_atomically(script, batch_script(name, case, jobs, options))
            write_atomically(job, sbatch(["sbatch", "--parsable", str(script)], missing, fix))
        waiting[name] = job.read_text()
    for name in ended_jobs(waiting):
        code = jobs / f"{name}.code"
        yield cases[name], int(code.read_text()) if code.exists() else None
        # Only now, after the caller has saved the result, so that a killed command finds the job again.
        (jobs / f"{name}.id").unlink(missing_ok=True)
        code.unlink(missing_ok=True)


def batch_script(name: str, case: Case, jobs: Path, options: JobOptions) -> str:
    """Returns the sbatch script, which runs a launcher per node and writes the exit code to a file."""
    num_nodes = case.config.nnodes
    # Derived from the job id, as jobs may share a node; 0 chooses a free port, which works on a single node.
    port = "$((20000 + SLURM_JOB_ID % 10000))" if num_nodes > 1 else "0"
    by_job = ("node_rank", "master_addr", "master_port")
    launcher = shlex.join(train_command({key: case.flags[key] for key in case.flags if key not in by_job}))
    launcher += ' --node-rank="${SLURM_NODEID:-0}" --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT"'
    asks_for_gpus = any(option.startswith(("--gpus", "--gres", "-G")) for option in options.sbatch)
    settings = {
        "job-name": name, "nodes": num_nodes, "ntasks-per-node": 1,
        "time": -(-options.time_limit_seconds // 60), "output": case.log.resolve(), "chdir": Path.cwd(),
        **({"gpus-per-node": case.config.gpus_per_node} if options.on_gpus and not asks_for_gpus else {}),
        "mem": 0,
    }  # fmt: skip
    # Whole nodes: by default a task gets one core, and other jobs on the node would distort the time.
    own = [*(f"--{key}={value}" for key, value in settings.items()), "--exclusive"]
    code = shlex.quote(str((jobs / f"{name}.code").resolve()))
    srun = f"srun --nodes={num_nodes} --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=1"
    lines = [
        "#!/bin/bash",
        *directives([*own, *options.sbatch]),
        job_environment(),
        'MASTER_ADDR="$(scontrol show hostnames "${SLURM_JOB_NODELIST:-$SLURM_NODELIST}" | head -n 1)"',
        f'MASTER_PORT="{port}"',
        "export MASTER_ADDR MASTER_PORT",
        f"{srun} bash -c {shlex.quote('exec ' + launcher)}",
        f"echo $? >{code}.partial && mv {code}.partial {code}",  # atomic
    ]
    return "\n".join([*lines, ""])


def ended_jobs(waiting: Mapping[str, str]) -> Iterator[str]:
    """Yields names in `waiting` (name to job id) as their jobs end; ValueError if squeue keeps failing."""
    left, answered = dict(waiting), time.monotonic()
    while left:
        try:
            there, answered = set(still_there(list(left.values()))), time.monotonic()
        except ValueError as error:
            if time.monotonic() - answered > _PATIENCE_SECONDS:
                raise
            logger.warning("%s Retrying.", error)
            there = set(left.values())
        for name in [name for name, job in left.items() if job not in there]:
            del left[name]
            yield name
        if left:
            time.sleep(POLL_SECONDS)


# Failures

# Out-of-memory messages of PyTorch's allocators, C++, Python and SLURM.
_OOM = re.compile(
    r"OutOfMemoryError|out of memory|DefaultCPUAllocator: (can't|not enough)|cannot allocate"
    r" memory|\bMemoryError\b|std::bad_alloc|oom[-_]kill",
    re.IGNORECASE,
)
# torchrun's message if the first rank to end was killed, for instance by the kernel.
_KILLED = re.compile(r"exitcode\s*:\s*-9\b|Signal 9 \(SIGKILL\)")
_SIGNAL = re.compile(r"Signal \d+ \(SIG\w+\) received by PID")
_ERROR = re.compile(
    r"^\s*(\[rank\d+\]:\s*)?([\w.]+(Error|Exception|Interrupt)\b.*|(srun|slurmstepd): error:.*|Fatal Python"
    r" error.*)"
)
LONGEST = 300  # maximum length of a reason (characters)


def why_it_failed(text: str, code: int | None) -> tuple[Literal["failed", "oom"], str]:
    """Returns whether a failed run ran out of memory, and the most useful line of its log."""
    status: Literal["failed", "oom"] = "failed"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    reason, by_rank = _most_useful(lines), _by_rank(lines)
    killed = next((line for line in _root_cause(lines) if _KILLED.search(line)), "")
    if out_of_memory := [line for line in lines if _OOM.search(line)]:
        status, reason = "oom", _most_useful(out_of_memory)
    elif not by_rank and (hung := [line for line in lines if line.startswith("moe-exp: the run hangs: ")]):
        reason = hung[-1]  # the launcher killed the ranks, so "Signal 9" doesn't mean out of memory here
    elif not by_rank and (killed or code in (137, -9)):
        # Probably the kernel's OOM killer; but if a rank has reported an error, torchrun killed the others.
        said = killed or reason
        status, reason = "oom", f"a process was killed, probably by the kernel for lack of memory: {said}"
    reason = reason or f"exit code {code} without any output"
    return status, re.sub(r"^(moe-exp: |traceback\s*: )", "", reason)[:LONGEST]


def _by_rank(lines: Sequence[str]) -> list[str]:
    """Returns the errors reported by ranks, except errors caused by another rank's failure."""
    named = [line for line in lines if re.match(r"moe-exp: rank \d+ on .* failed: ", line)]
    return [line for line in named if not any(text in line for text in CAUSED_BY_ANOTHER)]


def _root_cause(lines: Sequence[str]) -> Sequence[str]:
    """Returns torchrun's report on the first rank that failed (torchrun then terminates the other ranks)."""
    head = "Root Cause (first observed failure)"
    return lines[next((number for number, line in enumerate(lines) if line.startswith(head)), 0) :]


def _most_useful(lines: Sequence[str]) -> str:
    """Returns the first that exists: rank error, fatal signal, moe-exp's last line, last error, last line."""
    signals = [line for line in _root_cause(lines) if _SIGNAL.search(line)]
    of_ours = re.compile(r"moe-exp: (?!warning|stopping|rank \d+ on .* has failed|the ranks )")
    ours = [line for line in lines if of_ours.match(line)]
    errors = [line for line in lines if _ERROR.match(line) and "ChildFailedError" not in line]
    return [*_by_rank(lines)[:1], *signals[:1], *ours[-1:], *errors[-1:], *lines[-1:], ""][0]
