"""A run's jobs in SLURM: checks, the sbatch file in the run folder, submission and job ids. No torch.

The sbatch file consists of options, settings and paths, followed by the constant batch_body.sh.
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from moe_exp.config import Config, ConfigError, load_config, module_arguments, problem, raise_for
from moe_exp.config.loading import fixed_for, given_values, with_file
from moe_exp.config.presets import preset_values
from moe_exp.config.setting_types import NOT_ONE_LINE_RULE, as_given, blend_members, is_one_line
from moe_exp.data.tokens.manifests import with_vocab_size
from moe_exp.host.devices import Nodes
from moe_exp.host.files import is_url, write_atomically
from moe_exp.host.processes import own_command
from moe_exp.host.slurm_queue import job_environment, still_there
from moe_exp.launch.machine_checks import check_files, training_problem
from moe_exp.launch.slurm.settings import NOT_SOUGHT, PASSED_ALWAYS, SlurmSettings, load_slurm_settings
from moe_exp.runs.run_folder import RunFolder
from moe_exp.watch.excluded_nodes import EXCLUDE_NODES, read_excluded, slurm_option

_BODY = Path(__file__).with_name("batch_body.sh")
_PACKAGE_ROOT = Path(__file__).resolve().parents[3]
# These stay in sbatch's environment, since a site may set them for all users; others could override the file.
_KEPT = (
    "SBATCH_ACCOUNT", "SBATCH_PARTITION", "SBATCH_QOS", "SBATCH_RESERVATION", "SBATCH_CLUSTERS",
    "SLURM_CONF", "SLURM_CLUSTERS", "SLURM_TIME_FORMAT", "SLURM_JWT",
)  # fmt: skip
_NO_SBATCH = "sbatch: not found. Fix: run the command on a login node, or use --dry-run."


@dataclass(frozen=True)
class RunJob:
    config: Config
    given: Mapping[str, str]  # settings that were set, or whose default depends on the host: text by name
    slurm: SlurmSettings
    passed: Mapping[str, str]  # variables that the job gets from the submitting shell, and values to print

    @property
    def run_folder(self) -> Path:
        return RunFolder.of(self.config).path.absolute()

    @property
    def folder(self) -> Path:
        """Folder for sbatch files, logs and notes."""
        return self.run_folder / "slurm"

    @property
    def name(self) -> str:
        return self.slurm.job_name or self.config.name.replace("/", "_")

    @property
    def exclude_file(self) -> Path:
        path = Path(self.slurm.exclude_file or Path(self.config.run_dir) / EXCLUDE_NODES)
        return path.expanduser().absolute()


def plan_job(flags: Mapping[str, Any], environ: Mapping[str, str], *, with_space: bool = True) -> RunJob:
    """The job to submit. Raises ConfigError with all problems. `with_space`: also check disk space."""
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
        job = RunJob(config, given, slurm, slurm.passed_variables(environ))
        problems += _place_problems(job)
    raise_for(problems)
    return job


def _place_problems(job: RunJob) -> Iterator[str]:
    """Error lines for names that SLURM would misread and folders that the container runtime cannot mount."""
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


def planned_commands(job: RunJob) -> Iterator[str]:
    """The sbatch commands that `submit` would run, as shell lines."""
    path, number = shlex.quote(str(job.folder / "TIME.sbatch")), job.slurm.num_jobs
    jobs = [f"job {this} of {number}" for this in range(1, number + 1)]
    if job.slurm.chain == "array" or number == 1:
        jobs = [f"a job array: {number} jobs, one after another" if number > 1 else "one job"]
    # the id of a job is unknown until it has been submitted
    after = job.slurm.jobs_before
    for this, what in enumerate(jobs, 1):
        yield " ".join(["sbatch --parsable", *_dependency(after), f"{path}  # {what}"])
        after = [f"ID_OF_JOB_{this}"]


def submit(job: RunJob) -> list[str]:
    """Writes the sbatch file into the run folder and submits it; returns the job ids. Raises ValueError if
    the run already has jobs in the queue, if the jobs' Python cannot run training, or if sbatch fails. If
    sbatch fails, cancels the jobs that were already submitted.
    """
    if not job.slurm.container and (lacking := training_problem()):
        other = "or set CONTAINER. Without it, jobs use the Python at the start of this line"
        raise ValueError(f"{lacking[:-1]}; {other}.")
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
    """Runs `sbatch --parsable ...`. Returns the job id. Raises ValueError(`missing`) if sbatch is missing."""
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


def script_of(job: RunJob) -> str:
    """Text of the sbatch file. Raises ConfigError if a value has a control character, such as a newline.
    Raises ValueError if EXCLUDE_FILE, the list of nodes that the job avoids, has an invalid line.
    """
    excluded = slurm_option(read_excluded(job.exclude_file))
    options = [*(f"--{option}" for option in _options(job)), *filter(None, [excluded])]
    lines = directives([*options, *job.slurm.extra_options])
    now = datetime.now().astimezone().isoformat(timespec="seconds")
    written = f"# Written by run_slurm.sh, {now}; submit this file with sbatch."
    head = ["#!/bin/bash", *lines, written, "set -uo pipefail", ""]
    head.append("# Settings of the run; all other settings have their defaults.")
    # quoted here, since the body of the script is constant
    head += [f"export {name.upper()}={_shell(value)}" for name, value in sorted(job.given.items())]
    return "\n".join([*head, "", *_variables(job), "", _BODY.read_text(encoding="utf-8")])


def _options(job: RunJob) -> list[str]:
    slurm, config = job.slurm, job.config
    is_array = slurm.chain == "array" and slurm.num_jobs > 1
    options = {
        "job-name": job.name,
        "nodes": config.nnodes,
        "ntasks-per-node": 1,
        "time": slurm.time_limit,
        "signal": f"B:USR1@{slurm.signal_seconds}",  # B: only to the batch script
        "open-mode": "append",  # a requeued job appends to its log
        "output": job.folder / ("job%A_%a.log" if is_array else "job%j.log"),
        "chdir": Path.cwd(),
        # ALL would pass the submitting shell's variables, NONE those of a login shell
        "export": ",".join([*PASSED_ALWAYS, *job.passed]),
    }
    for name in ("partition", "account", "qos", "constraint", "cpus_per_task", "nice"):
        if value := getattr(slurm, name):
            options[name.replace("_", "-")] = value
    asks_for_gpus = any(option.startswith(("--gpus", "--gres")) for option in slurm.extra_options)
    if not slurm.cpu_nodes and not asks_for_gpus:
        options["gpus-per-node"] = config.gpus_per_node
    if slurm.exclusive:
        options["mem"] = 0  # all memory; an exclusive job may otherwise get that of one core
    if is_array:
        options["array"] = f"1-{slurm.num_jobs}%1"
    flags = ["requeue" if slurm.requeue else "no-requeue", *(["exclusive"] if slurm.exclusive else [])]
    return [f"{name}={value}" for name, value in options.items()] + flags


def checked_line(text: str) -> str:
    """Returns `text`. Raises ConfigError for control characters (some file paths are checked only here)."""
    if not is_one_line(text):
        raise ConfigError([problem("sbatch file", text, NOT_ONE_LINE_RULE, "rename the file or folder")])
    return text


def _shell(text: object) -> str:
    return shlex.quote(checked_line(str(text)))


def directives(options: Iterable[str]) -> list[str]:
    """Quoted `#SBATCH` lines for options --name=value. If an option is repeated, sbatch uses the last one."""
    lines = []
    for option in map(checked_line, options):
        plain = all(character.isalnum() or character in "-_=./,:@%+&|[]*()" for character in option)
        quoted = option if plain else '"' + option.replace("\\", "\\\\").replace('"', '\\"') + '"'
        lines.append(f"#SBATCH {quoted}")
    return lines


def _variables(job: RunJob) -> list[str]:
    slurm = job.slurm
    values = {
        "run_folder": job.run_folder, "slurm_folder": job.folder, "exclude_file": job.exclude_file,
        "setup": Path(slurm.setup).absolute() if slurm.setup else "", "requeue": str(slurm.requeue).lower(),
        "max_failures": slurm.max_failures, "retry_seconds": slurm.retry_seconds,
    }  # fmt: skip
    # otherwise the node's task, with all ranks, is bound to one core; srun ignores sbatch's cpus-per-task
    srun = ["--cpu-bind=none", *([f"--cpus-per-task={slurm.cpus_per_task}"] if slurm.cpus_per_task else [])]
    # Empty settings must be flags: an exported empty variable would not override the preset.
    preset = preset_values(job.config.preset)
    emptied = {name: "" for name, value in job.given.items() if value == "" and preset.get(name)}
    # the path of this Python does not exist inside an image
    python = slurm.container_python if slurm.container else sys.executable
    launcher = [python, "-m", "moe_exp", "train", *module_arguments(emptied)]
    if slurm.runtime == "pyxis":
        places = (folder if ":" in folder else f"{folder}:{folder}" for folder in mounts(job))
        srun += [f"--container-image={slurm.container}", f"--container-mounts={','.join(places)}"]
        srun.append(f"--container-workdir={Path.cwd()}")
    elif slurm.runtime == "apptainer":
        gpus = [] if slurm.cpu_nodes else ["--nv"]
        binds = ["--bind", ",".join(mounts(job)), "--pwd", str(Path.cwd())]
        launcher = ["apptainer", "exec", *gpus, *binds, slurm.container, *launcher]
    lists = {"modules": slurm.modules.split(), "srun_options": srun, "launcher": launcher}
    # The command that submits such a job, without the settings that the file exports.
    own = slurm.model_dump(exclude_defaults=True, exclude={"after", "job_name"})
    flags = {name: as_given(value) for name, value in own.items()} | emptied
    command = shlex.join([*own_command(), "slurm", *module_arguments(flags)])
    return [
        checked_line(job_environment()),
        f"export MOE_EXP_COMMAND={_shell(command)}  # the command that the run prints to resume",
        *(f"{name}={_shell(value)}" for name, value in values.items()),
        *(f"{name}=({' '.join(map(_word, words))})" for name, words in lists.items()),
        'export EXCLUDE_FILE="$exclude_file"  # for PREFLIGHT',
    ]


def _word(text: str) -> str:
    # shellcheck takes unquoted commas for a mistake
    return f"'{text}'" if "," in text and _shell(text) == text else _shell(text)


def mounts(job: RunJob) -> list[str]:
    """Folders to mount in the container: `own_folders` and CONTAINER_MOUNTS."""
    return list(dict.fromkeys([*own_folders(job), *filter(None, job.slurm.container_mounts.split(","))]))


def own_folders(job: RunJob) -> list[str]:
    """Folders that the run needs: this package, the current folder, RUN_DIR, data and checkpoints to load."""
    c = job.config
    blends = (c.train_data, c.valid_data, *c.stage_blends)
    # a container only sees mounted folders: data may be anywhere
    files = [name for blend in blends for _, name in blend_members(blend) if not is_url(name)]
    files += [c.tokenizer] if c.tokenizer else []
    given = (place for place in (c.load_dir, c.upcycle_from) if place and not is_url(place))
    folders = [_PACKAGE_ROOT, Path.cwd(), Path(c.run_dir), Path(c.data_dir)]
    folders += [*(Path(name).parent for name in files), *map(Path, given)]
    # not resolved: settings name the links
    paths = [os.path.abspath(folder.expanduser()) for folder in folders]  # noqa: PTH100
    return list(dict.fromkeys(paths))
