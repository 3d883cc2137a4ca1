"""Submission of a run to SLURM: checks, the sbatch file in the run folder, and job ids. No torch."""

import os
import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from moe_exp.config import Config, ConfigError, load_config, problem
from moe_exp.config.loading import fixed_for, given_values, with_file
from moe_exp.config.setting_types import NOT_ONE_LINE_RULE, is_one_line
from moe_exp.data.tokens.manifests import with_vocab_size
from moe_exp.host.devices import Nodes
from moe_exp.host.files import write_atomically
from moe_exp.host.slurm_queue import still_there
from moe_exp.launch.machine_checks import check_files, training_problem
from moe_exp.launch.slurm.batch_script import RunJob, batch_script, mounts, own_folders
from moe_exp.launch.slurm.settings import NOT_SOUGHT, SlurmSettings, load_slurm_settings, passed_variables
from moe_exp.runs.run_folder import RunFolder
from moe_exp.watch.excluded_nodes import read_excluded

# These stay in sbatch's environment, since a site may set them for all users; others could override the file.
_KEPT = (
    "SBATCH_ACCOUNT", "SBATCH_PARTITION", "SBATCH_QOS", "SBATCH_RESERVATION", "SBATCH_CLUSTERS",
    "SLURM_CONF", "SLURM_CLUSTERS", "SLURM_TIME_FORMAT", "SLURM_JWT",
)  # fmt: skip
_NO_SBATCH = "sbatch: not found. Fix: run the command on a login node, or use --dry-run."


def plan_job(flags: Mapping[str, Any], environ: Mapping[str, str], *, with_space: bool = True) -> RunJob:
    """Returns the job to submit or raises ConfigError with all problems; `with_space`: check disk space."""
    if not is_one_line(str(Path.cwd())):  # part of every relative path
        raise ConfigError([problem("pwd", Path.cwd(), NOT_ONE_LINE_RULE, "use another folder")])
    flags = with_file(flags, environ)
    of_slurm = {name: value for name, value in flags.items() if name in SlurmSettings.model_fields}
    of_run = {name: str(value) for name, value in flags.items() if name in Config.model_fields}
    given = given_values(of_run, environ)
    # each job sets its own; the submitting shell may have those of another job
    for name in ("node_rank", "master_addr"):
        given.pop(name, None)
    problems: list[str] = []
    slurm = config = None
    try:
        slurm = load_slurm_settings(of_slurm, environ)
    except ConfigError as error:
        problems += error.problems
    try:
        # defaults must depend on the nodes, not on this host: login nodes have no GPUs
        asked = str(of_slurm.get("cpu_nodes") or environ.get("CPU_NODES")).lower()
        given = fixed_for(Nodes(gpus=0 if asked in ("true", "1", "yes", "on") else None), given)
        config = load_config(given, {})
        given |= {"run_name": config.name, "run_dir": str(Path(config.run_dir).expanduser().absolute())}
        config, vocabulary = with_vocab_size(config, given, RunFolder.of(config).config)
        given |= {"vocab_size": str(config.vocab_size)} if vocabulary else {}
        config = load_config(given, {})
    except ConfigError as error:
        config, problems = None, problems + error.problems
    if config:
        problems += [*config.problems(), *check_files(config, with_space=with_space)]
    if config and slurm:
        job = RunJob(config, given, slurm, passed_variables(slurm, environ))
        problems += _place_problems(job)
    if problems:
        raise ConfigError(problems)
    return job


def _place_problems(job: RunJob) -> Iterator[str]:
    """Problems with names that SLURM would misread and folders that the container runtime cannot mount."""
    if re.search(r"[%\\]", str(job.folder)):  # patterns in SLURM's log file names
        rule = f"{job.run_folder} contains % or a backslash, which SLURM interprets in log file names"
        yield problem("run_name", job.config.name, rule, "change RUN_NAME or RUN_DIR")
    if not job.slurm.job_name and not re.fullmatch(r"[\w.+=-]+", job.name, re.ASCII):
        yield problem("job_name", job.name, NOT_SOUGHT, "set JOB_NAME to letters and digits")
    runtime = job.slurm.runtime
    # apptainer and pyxis split mounts at commas and colons, enroot at spaces (NVIDIA/pyxis issue 133)
    for folder in mounts(job) if runtime else ():
        what = "a space" if runtime == "pyxis" and " " in folder else ""
        if "," in folder or (":" in folder and folder in own_folders(job)):
            what = "a comma or a colon"
        if what:
            rule = f"the job needs {folder}, but {runtime} cannot mount a path with {what}"
            fix = "rename the folder, or use a symbolic link with another name"
            yield problem("container", job.slurm.container, rule, fix)


def script_of(job: RunJob) -> str:
    """The sbatch file, excluding nodes of EXCLUDE_FILE; ValueError if EXCLUDE_FILE has an invalid line."""
    return batch_script(job, excluded=read_excluded(job.exclude_file))


def planned_commands(job: RunJob) -> list[str]:
    """The sbatch commands that `submit` would run, as shell lines."""
    path, number = shlex.quote(str(job.folder / "TIME.sbatch")), job.slurm.num_jobs
    jobs = [f"job {this} of {number}" for this in range(1, number + 1)]
    if job.slurm.chain == "array" or number == 1:
        jobs = [f"a job array: {number} jobs, one after another" if number > 1 else "one job"]
    # the id of a job is unknown until it has been submitted
    lines, after = [], job.slurm.jobs_before
    for this, what in enumerate(jobs, 1):
        lines.append(" ".join(["sbatch --parsable", *_dependency(after), f"{path}  # {what}"]))
        after = [f"ID_OF_JOB_{this}"]
    return lines


def submit(job: RunJob) -> list[str]:
    """Writes the sbatch file into the run folder and submits it; returns the job ids. Raises ValueError if
    the run already has jobs in the queue, if the jobs' Python cannot run training, or if sbatch fails. In
    the last case, cancels the jobs that were submitted before the failure.
    """
    if not job.slurm.container and (lacking := training_problem()):
        raise ValueError(f"{lacking[:-1]}; or set CONTAINER. Jobs without a container use this Python.")
    submitted = RunFolder(job.run_folder).submitted
    # two chains of one run would overwrite each other's checkpoints
    known = submitted.read_text().split() if submitted.exists() else []
    if (there := still_there(known)) and not job.slurm.jobs_before:
        fix = f"scancel {' '.join(there)}, or set AFTER={there[-1]} to append jobs"
        rule = f"the run's jobs {', '.join(there)} are already in the queue"
        raise ValueError(f"{job.run_folder}: {rule}. Fix: {fix}.")
    if not there:  # a new chain resets the count of failures
        (job.folder / "failures").unlink(missing_ok=True)
    script = script_of(job)
    job.folder.mkdir(parents=True, exist_ok=True)
    path = job.folder / f"{datetime.now():%Y%m%d-%H%M%S}.sbatch"
    write_atomically(path, script)
    ids: list[str] = []
    try:
        for _ in range(1 if job.slurm.chain == "array" else job.slurm.num_jobs):
            command = ["sbatch", "--parsable", *_dependency(ids[-1:] or job.slurm.jobs_before), str(path)]
            fix = f"correct the setting that sbatch names, or retry: {shlex.join(command)}"
            ids.append(sbatch(command, _NO_SBATCH, fix))
            # recorded immediately: the first job may end before the last is submitted
            with submitted.open("a") as file:
                file.write(f"{ids[-1]}\n")
    except ValueError:
        # the jobs submitted so far would form a chain that ends too early
        if ids:
            subprocess.run(["scancel", *ids], capture_output=True)
        raise
    return ids


def sbatch(command: Sequence[str], missing: str, fix: str) -> str:
    """Calls `sbatch --parsable ...`; returns the job id. Without sbatch, raises ValueError(`missing`)."""
    # Drop other jobs' variables: sbatch passes SLURM_* on, and SBATCH_* override the file.
    others = ("SLURM_", "SBATCH_", "SRUN_")
    names = [name for name in os.environ if name in _KEPT or not name.startswith(others)]
    environ = {name: os.environ[name] for name in names}
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environ)
    except FileNotFoundError:
        raise ValueError(missing) from None
    # --parsable prints the id, and the cluster if there are several: 123;name.
    found = re.search(r"^(\d+)(;.*)?$", done.stdout, re.MULTILINE)
    if done.returncode or not found:
        said = " ".join((done.stderr or done.stdout).split())
        raise ValueError(f"sbatch: exit code {done.returncode}: {said}. Fix: {fix}.")
    return found[1]


def _dependency(before: Sequence[str]) -> list[str]:
    return [f"--dependency=afterany:{':'.join(before)}"] if before else []
