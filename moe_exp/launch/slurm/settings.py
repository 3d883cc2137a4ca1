"""What a run's SLURM jobs are submitted with. No torch.

Resolved as the settings of a run are: default < environment < command line. NNODES and GPUS_PER_NODE are
settings of the run itself.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from moe_exp.config import ConfigError, problem
from moe_exp.config.setting_types import ONE_LINE_FIX, NonNegative, PathText, Positive, one_line

# What --export names of the submitter's environment: enough to find programs and the home folder, nothing
# that changes what is computed.
PASSED_ALWAYS = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG")
# Options that the sbatch file has for reasons of its own: another value would break the chain.
_OURS = (
    "array", "dependency", "error", "exclude", "export", "job-name", "nodes", "no-requeue", "ntasks",
    "ntasks-per-node", "open-mode", "output", "parsable", "requeue", "signal", "time", "wrap",
)  # fmt: skip
_LARGEST_ARRAY = 1000  # SLURM's MaxArraySize is 1001 where nobody has changed it
_LONGEST_WARNING = 65535  # seconds, of sbatch's --signal


class SlurmSettings(BaseModel):
    """Settings of the jobs. The environment variable of a field is its name in capitals."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    _one_line = field_validator("*", mode="before")(one_line)

    num_jobs: Positive = Field(
        1, le=10_000, description="jobs, one after another; what a finished run leaves of them is cancelled"
    )
    chain: Literal["array", "dependency"] = Field(
        "array", description="how they follow: a job array with %1, or each after the one before it"
    )
    after: str = Field(
        "", description="ids of jobs to wait for, as in '123 124': lengthens a chain that is queued"
    )
    time_limit: str = Field(
        "24:00:00",
        description=(
            "of each job, as SLURM has it: MINUTES, HOURS:MINUTES:SECONDS or DAYS-HOURS:MINUTES:SECONDS"
        ),
    )
    signal_seconds: Positive = Field(
        600, description="so long before its end a job saves and makes room for the next"
    )
    job_name: str = Field("", description="name in the queue; empty: RUN_NAME")
    partition: str = Field("", description="partition, or several with commas")
    account: str = Field("", description="account to charge")
    qos: str = Field("", description="quality of service")
    constraint: str = Field("", description="features that nodes must have, as in 'h100&ib'")
    nice: NonNegative = Field(0, description="lowers the priority by so much")
    exclusive: bool = Field(True, description="whole nodes with all of their memory")
    cpus_per_task: NonNegative = Field(
        0, description="cores of a node for the launcher and its ranks; 0: all that the job has"
    )
    cpu_nodes: bool = Field(
        False, description="nodes without GPUs: GPUS_PER_NODE counts processes, and no GPUs are asked for"
    )
    exclude_file: PathText = Field(
        "", description="nodes that no job gets, one a line, # for comments; empty: RUN_DIR/exclude_nodes.txt"
    )
    requeue: bool = Field(True, description="a job that fails, or whose node fails, goes back into the queue")
    max_failures: Positive = Field(
        3, description="so many failures in a row without a new checkpoint end the chain"
    )
    retry_seconds: NonNegative = Field(
        60, description="wait after a failure, times the failures in a row: a file server may be away"
    )
    modules: str = Field("", description="environment modules to load, as in 'cuda/12.6 nccl'")
    setup: PathText = Field("", description="file that the batch script sources before it starts the run")
    container: str = Field("", description="image: a name for pyxis and enroot, or an apptainer file")
    container_runtime: Literal["auto", "pyxis", "apptainer"] = Field(
        "auto", description="auto: apptainer for a .sif file, else pyxis"
    )
    container_mounts: str = Field(
        "", description="more folders that the container sees, with commas, as in '/data,/scratch:/scratch'"
    )
    container_python: str = Field("python3", description="Python inside of the container")
    pass_env: str = Field(
        "",
        description=(
            "variables whose values jobs get from this shell, as in 'WANDB_API_KEY NCCL_DEBUG'; not in any"
            " file"
        ),
    )
    extra_sbatch: str = Field(
        "", description="more options of sbatch, as in '--reservation=x --mail-type=FAIL'"
    )

    @property
    def extra_options(self) -> list[str]:
        """EXTRA_SBATCH, option by option."""
        return shlex.split(self.extra_sbatch)

    @property
    def passed(self) -> list[str]:
        """PASS_ENV, name by name."""
        return self.pass_env.replace(",", " ").split()

    @property
    def jobs_before(self) -> list[str]:
        """AFTER, id by id."""
        return self.after.replace(",", " ").split()

    @property
    def runtime(self) -> Literal["", "pyxis", "apptainer"]:
        """What runs CONTAINER; empty without one."""
        if not self.container:
            return ""
        if self.container_runtime != "auto":
            return self.container_runtime
        return "apptainer" if self.container.endswith(".sif") else "pyxis"


def load_slurm_settings(flags: Mapping[str, Any], environ: Mapping[str, str]) -> SlurmSettings:
    """Resolves default < environment < `flags`, and checks every value.

    Raises:
        ConfigError: with every value that cannot be, all at once.
    """
    given: dict[str, Any] = {
        name: environ[name.upper()] for name in SlurmSettings.model_fields if environ.get(name.upper())
    }
    given |= {name: value for name, value in flags.items() if value is not None}
    try:
        settings = SlurmSettings(**given)
    except ValidationError as error:
        wrong = {str(one["loc"][0]) for one in error.errors()}
        rest = SlurmSettings(**{name: value for name, value in given.items() if name not in wrong})
        # a rule with one of these would judge its default
        named = re.compile(rf"\b({'|'.join(name.upper() for name in wrong)})\b")
        others = [line for line in _problems(rest, environ) if not named.search(line)]
        raise ConfigError([*(_line(one, given) for one in error.errors()), *others]) from None
    if problems := list(_problems(settings, environ)):
        raise ConfigError(problems)
    return settings


def time_limit_seconds(text: str) -> int | None:
    """Seconds of a time as SLURM writes and reads it: M, M:S, H:M:S, D-H, D-H:M or D-H:M:S; None for anything
    else.
    """
    match = re.fullmatch(r"(?:(\d{1,9})-)?(\d{1,9})(?::(\d{1,9}))?(?::(\d{1,9}))?", text)
    if not match:
        return None
    days, *parts = (None if part is None else int(part) for part in match.groups())
    numbers = [part for part in parts if part is not None]
    if days is not None:
        hours, minutes, seconds = (*numbers, 0, 0)[:3]
        return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if len(numbers) == 3:
        return (numbers[0] * 60 + numbers[1]) * 60 + numbers[2]
    minutes, seconds = (*numbers, 0)[:2]
    return minutes * 60 + seconds


def _line(error: Any, given: Mapping[str, Any]) -> str:
    name = str(error["loc"][0])
    rule = error["msg"].removeprefix("Value error, ").partition(", unable to")[0]
    rule = rule.replace("Input should", "must")
    fix = ONE_LINE_FIX if error["type"] == "one_line" else f"give {name.upper()}, {_description(name)}"
    return problem(name, given[name], rule, fix)


def _description(name: str) -> str:
    return str(SlurmSettings.model_fields[name].description).replace("%%", "%")


def _problems(settings: SlurmSettings, environ: Mapping[str, str]) -> Iterator[str]:
    yield from _time_problems(settings)
    yield from _chain_problems(settings)
    yield from _option_problems(settings)
    yield from _place_problems(settings, environ)


def _time_problems(settings: SlurmSettings) -> Iterator[str]:
    limit = time_limit_seconds(settings.time_limit)
    if not limit:
        fix = "give MINUTES, HOURS:MINUTES:SECONDS, DAYS-HOURS or DAYS-HOURS:MINUTES:SECONDS"
        yield problem("time_limit", settings.time_limit, "is no time limit of SLURM's", fix)
    elif settings.signal_seconds >= min(limit, _LONGEST_WARNING + 1):
        rule = f"must be shorter than TIME_LIMIT={settings.time_limit}, and at most {_LONGEST_WARNING}"
        yield problem(
            "signal_seconds", settings.signal_seconds, rule, "give twice the time that a checkpoint takes"
        )


def _chain_problems(settings: SlurmSettings) -> Iterator[str]:
    if settings.chain == "array" and settings.num_jobs > _LARGEST_ARRAY:
        rule = f"a job array has at most {_LARGEST_ARRAY} jobs"
        yield problem(
            "num_jobs", settings.num_jobs, rule, f"set CHAIN=dependency, or at most {_LARGEST_ARRAY}"
        )
    if not all(job.isdecimal() for job in settings.jobs_before):
        yield problem(
            "after", settings.after, "is no list of job ids", "give the numbers that sbatch has printed"
        )
    if settings.job_name and not re.fullmatch(r"[\w.+=-]+", settings.job_name, re.ASCII):
        yield problem(
            "job_name",
            settings.job_name,
            "has characters that squeue cannot look for",
            "use letters, digits and . _ + = -",
        )


def _option_problems(settings: SlurmSettings) -> Iterator[str]:
    try:
        options = settings.extra_options
    except ValueError as error:
        yield problem(
            "extra_sbatch", settings.extra_sbatch, f"cannot be taken apart ({error})", "quote as in a shell"
        )
        return
    for option in options:
        name = option.removeprefix("--").partition("=")[0]
        if not re.match(r"--[a-z]", option):
            yield problem(
                "extra_sbatch",
                option,
                "is no option of the form --name=value",
                "write '-p x' as --partition=x",
            )
        elif name in _OURS:
            fix = (
                "put the nodes into EXCLUDE_FILE"
                if name == "exclude"
                else "use the setting of that name, or leave it out"
            )
            yield problem("extra_sbatch", option, f"--{name} is set by this command", fix)


def _place_problems(settings: SlurmSettings, environ: Mapping[str, str]) -> Iterator[str]:
    if settings.setup and not os.access(settings.setup, os.R_OK):
        yield problem("setup", settings.setup, "cannot be read", "name a file that the jobs can read, too")
    if (
        settings.runtime == "apptainer"
        and "://" not in settings.container
        and not Path(settings.container).exists()
    ):
        yield problem(
            "container",
            settings.container,
            "does not exist",
            "name the image file, or set CONTAINER_RUNTIME=pyxis",
        )
    if settings.exclude_file and Path(settings.exclude_file).is_dir():
        yield problem(
            "exclude_file", settings.exclude_file, "is a folder", "name a file; it need not exist yet"
        )
    if settings.container_mounts and not settings.container:
        yield problem(
            "container_mounts",
            settings.container_mounts,
            "has no effect without CONTAINER",
            "set CONTAINER, or leave it out",
        )
    for name in settings.passed:
        if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            rule = "is no name of a variable; values are taken from this shell"
            yield problem("pass_env", name, rule, "give names alone, as in 'WANDB_API_KEY NCCL_DEBUG'")
        elif name not in environ:
            yield problem("pass_env", name, "is not set in this shell", f"export {name}, or leave it out")
