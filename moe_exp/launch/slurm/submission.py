"""Hands a run to sbatch: checks, the sbatch file in the run folder, and the ids of the jobs. No torch."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from moe_exp.config import Config, ConfigError, load_config, problem
from moe_exp.config.checks.checks import check_config
from moe_exp.config.setting_types import NOT_ONE_LINE_RULE, is_one_line
from moe_exp.host.files import write_atomically
from moe_exp.host.slurm_queue import still_there
from moe_exp.launch.machine_checks import check_files
from moe_exp.launch.slurm.batch_script import RunJob, batch_script, mounts, own_folders
from moe_exp.launch.slurm.settings import SlurmSettings, load_slurm_settings
from moe_exp.watch.nodes.exclude import read_excluded

SUBMITTED = "submitted"  # ids of all jobs of a run, one a line

# Variables by which sbatch gets options; they stand above those of the file. A site may set these for all of
# its users.
_KEPT_OPTIONS = ("SBATCH_ACCOUNT", "SBATCH_PARTITION", "SBATCH_QOS", "SBATCH_RESERVATION", "SBATCH_CLUSTERS")
_KEPT_OF_SLURM = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_TIME_FORMAT", "SLURM_JWT")


def plan_job(flags: Mapping[str, Any], environ: Mapping[str, str]) -> RunJob:
    """What is to be submitted, from the command line and the environment.

    Raises:
        ConfigError: with all settings that cannot be, of the run and of its jobs.
    """
    if not is_one_line(str(Path.cwd())):  # part of every path that is given from here
        raise ConfigError([problem("pwd", Path.cwd(), NOT_ONE_LINE_RULE, "call it in another folder")])
    of_slurm = {name: value for name, value in flags.items() if name in SlurmSettings.model_fields}
    given = {name: environ[name.upper()] for name in Config.model_fields if environ.get(name.upper())}
    given |= {
        name: str(value) for name, value in flags.items() if name in Config.model_fields and value is not None
    }
    for name in ("node_rank", "master_addr"):  # which each job finds out by itself
        given.pop(name, None)
    problems: list[str] = []
    slurm = config = None
    try:
        slurm = load_slurm_settings(of_slurm, environ)
    except ConfigError as error:
        problems += error.problems
    try:
        config, given = _run_settings(given, of_slurm, environ)
    except ConfigError as error:
        problems += error.problems
    if config:
        problems += [*check_config(config), *check_files(config)]
    if config and slurm:
        job = RunJob(config, given, slurm)
        problems += _run_problems(job)
    if problems:
        raise ConfigError(problems)
    return job


def _run_settings(
    given: Mapping[str, str], of_slurm: Mapping[str, Any], environ: Mapping[str, str]
) -> tuple[Config, dict[str, str]]:
    """Settings whose defaults depend on the host are those of a node: a login node has no GPUs."""
    on_cpus = str(of_slurm.get("cpu_nodes") or environ.get("CPU_NODES") or "false").lower() in (
        "true",
        "1",
        "yes",
        "on",
    )
    fixed = {"preset": "cpu" if on_cpus else "reference", **given}
    config = load_config(fixed, {})
    if not on_cpus and "gpus_per_node" not in fixed:
        rule = "must be given, as this host need not be like the nodes"
        raise ConfigError([problem("gpus_per_node", "none", rule, "set GPUS_PER_NODE, or CPU_NODES=true")])
    run_dir = str(Path(config.run_dir).expanduser().absolute())
    fixed |= {"run_name": config.name, "run_dir": run_dir, "gpus_per_node": str(config.gpus_per_node)}
    return load_config(fixed, {}), fixed


def _run_problems(job: RunJob) -> list[str]:
    found = []
    if re.search(r"[%\\]", str(job.folder)):  # patterns in the names of SLURM's log files
        rule = f"{job.run_folder} has a % or a backslash, which mean something in the names of SLURM's logs"
        found.append(problem("run_name", job.config.name, rule, "give another RUN_NAME or RUN_DIR"))
    if not job.slurm.job_name and not re.fullmatch(r"[\w.+=-]+", job.name, re.ASCII):
        found.append(
            problem(
                "job_name",
                job.name,
                "has characters that squeue cannot look for",
                "give a JOB_NAME of letters and digits",
            )
        )
    return [*found, *_mount_problems(job)]


def _mount_problems(job: RunJob) -> Iterator[str]:
    """apptainer and pyxis take mounts apart at commas and colons, and enroot at spaces
    (github.com/NVIDIA/pyxis/issues/133).
    """
    runtime = job.slurm.runtime
    for folder in mounts(job) if runtime else ():
        words = [("," in folder or (":" in folder and folder in own_folders(job)), "a comma or a colon")]
        words += [(runtime == "pyxis" and " " in folder, "a space")]
        for what in (what for is_there, what in words if is_there):
            rule = f"the job has to see {folder}, and {runtime} can mount no path with {what}"
            yield problem(
                "container", job.slurm.container, rule, "rename it, or give a link to it with another name"
            )


def script_of(job: RunJob) -> str:
    """The sbatch file as it is now.

    Raises:
        ValueError: a line of EXCLUDE_FILE is no host name.
    """
    return batch_script(job, excluded=read_excluded(job.exclude_file))


def planned_commands(job: RunJob) -> list[str]:
    """The calls of sbatch that `submit` would make, as lines of a shell."""
    path = shlex.quote(str(job.folder / "TIME.sbatch"))
    number, after = job.slurm.num_jobs, [*job.slurm.jobs_before]
    if job.slurm.chain == "array" or number == 1:
        what = f"a job array: {number} jobs, one after another" if number > 1 else "one job"
        return [f"{shlex.join(['sbatch', '--parsable', *_dependency(after)])} {path}  # {what}"]
    lines = []
    for this in range(1, number + 1):
        lines.append(
            " ".join(["sbatch --parsable", *_dependency(after), f"{path}  # job {this} of {number}"])
        )
        after = [f"ID_OF_JOB_{this}"]
    return lines


def submit(job: RunJob) -> list[str]:
    """Writes the sbatch file into the run folder and submits it; returns the ids.

    Raises:
        ValueError: jobs of this run are in the queue already, or sbatch refuses; then nothing of this call is
            left in the queue.
    """
    submitted = job.folder / SUBMITTED
    known = submitted.read_text().split() if submitted.exists() else []
    if (there := still_there(known)) and not job.slurm.jobs_before:
        fix = f"scancel {' '.join(there)}, or set AFTER={there[-1]} to add jobs behind them"
        raise ValueError(
            f"{job.run_folder}: its jobs {', '.join(there)} are in the queue already. Fix: {fix}."
        )
    script = script_of(job)
    job.folder.mkdir(parents=True, exist_ok=True)
    path = job.folder / f"{datetime.now():%Y%m%d-%H%M%S}.sbatch"
    write_atomically(path, script)
    ids: list[str] = []
    num_calls = 1 if job.slurm.chain == "array" else job.slurm.num_jobs
    try:
        for _ in range(num_calls):
            ids.append(_sbatch(path, ids[-1:] or job.slurm.jobs_before))
            # at once: the first job may have ended before the last is submitted
            with submitted.open("a") as file:
                file.write(f"{ids[-1]}\n")
    except ValueError:
        if ids:
            subprocess.run(["scancel", *ids], capture_output=True)
        raise
    return ids


def _sbatch(path: Path, before: Sequence[str]) -> str:
    command = ["sbatch", "--parsable", *_dependency(before), str(path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=sbatch_environment(os.environ))
    except FileNotFoundError:
        raise ValueError(
            "sbatch: there is none here. Fix: call it on a login node of the cluster, or look at it with"
            " --dry-run."
        ) from None
    # With --parsable the id, and the cluster where there are several: 123;name.
    found = re.search(r"^(\d+)(;.*)?$", done.stdout, re.MULTILINE)
    if done.returncode or not found:
        said = " ".join((done.stderr or done.stdout).split())
        raise ValueError(
            f"sbatch: exit code {done.returncode}: {said}. Fix: change what it names; {shlex.join(command)}"
            " tries again."
        )
    return found[1]


def _dependency(before: Sequence[str]) -> list[str]:
    return [f"--dependency=afterany:{':'.join(before)}"] if before else []


def sbatch_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Without what an interactive job or a profile has set for other jobs: sbatch passes SLURM_* on, and
    SBATCH_* stand above the file.
    """
    kept = (*_KEPT_OPTIONS, *_KEPT_OF_SLURM)
    return {
        name: value
        for name, value in environ.items()
        if name in kept or not name.startswith(("SLURM_", "SBATCH_", "SRUN_"))
    }
