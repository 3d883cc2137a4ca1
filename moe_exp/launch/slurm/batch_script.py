"""The sbatch file of a run: options, settings and paths, then the constant batch_body.sh. No torch."""

import os
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from moe_exp.config import Config, ConfigError, module_arguments, problem
from moe_exp.config.presets import preset_values
from moe_exp.config.setting_types import NOT_ONE_LINE_RULE, as_given, blend_members, is_one_line
from moe_exp.host.files import is_url
from moe_exp.host.processes import own_command
from moe_exp.host.slurm_queue import job_environment
from moe_exp.launch.slurm.settings import PASSED_ALWAYS, SlurmSettings
from moe_exp.runs.run_folder import RunFolder
from moe_exp.watch.excluded_nodes import EXCLUDE_NODES

_BODY = Path(__file__).with_name("batch_body.sh")
_PACKAGE_ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class RunJob:
    """A job to submit."""

    config: Config
    given: Mapping[str, str]  # settings that were set, or whose default depends on the host: text by name
    slurm: SlurmSettings
    passed: Mapping[str, str]  # variables that the job gets from the submitting shell, see `passed_variables`

    @property
    def run_folder(self) -> Path:
        return RunFolder.of(self.config).path.absolute()

    @property
    def folder(self) -> Path:
        """Folder for sbatch files, logs and notes."""
        return self.run_folder / "slurm"

    @property
    def name(self) -> str:
        """Name of the jobs in SLURM's queue."""
        return self.slurm.job_name or self.config.name.replace("/", "_")

    @property
    def exclude_file(self) -> Path:
        path = Path(self.slurm.exclude_file or Path(self.config.run_dir) / EXCLUDE_NODES)
        return path.expanduser().absolute()


def batch_script(job: RunJob, *, excluded: Sequence[str] = ()) -> str:
    """Text of the sbatch file; raises ConfigError if a value has a control character, such as a newline."""
    options = [*_options(job), *([f"exclude={','.join(excluded)}"] if excluded else [])]
    lines = directives([*(f"--{option}" for option in options), *job.slurm.extra_options])
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
    named = {name: getattr(slurm, name) for name in ("partition", "account", "qos", "constraint")}
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
        **{name: value for name, value in named.items() if value},
    }
    asks_for_gpus = any(option.startswith(("--gpus", "--gres")) for option in slurm.extra_options)
    if not slurm.cpu_nodes and not asks_for_gpus:
        options["gpus-per-node"] = config.gpus_per_node
    if slurm.cpus_per_task:
        options["cpus-per-task"] = slurm.cpus_per_task
    if slurm.nice:
        options["nice"] = slurm.nice
    if slurm.exclusive:
        options["mem"] = 0  # all memory; an exclusive job may otherwise get that of one core
    if is_array:
        options["array"] = f"1-{slurm.num_jobs}%1"
    flags = ["requeue" if slurm.requeue else "no-requeue", *(["exclusive"] if slurm.exclusive else [])]
    return [f"{name}={value}" for name, value in options.items()] + flags


def checked_line(text: str) -> str:
    """Returns `text`, or raises ConfigError on control characters, which unchecked paths may contain."""
    if not is_one_line(text):
        raise ConfigError([problem("sbatch file", text, NOT_ONE_LINE_RULE, "rename the file or folder")])
    return text


def _shell(text: object) -> str:
    return shlex.quote(checked_line(str(text)))


def directives(options: Iterable[str]) -> list[str]:
    """`#SBATCH` lines for options --name=value, quoted for sbatch. The last of repeated options applies."""
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
