"""Settings of a run's SLURM jobs, except NNODES and GPUS_PER_NODE, which belong to the run. No torch.

The command line overrides environment variables, which override the defaults, as for the run's settings.
"""

import os
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from moe_exp.config import ConfigError, problem, raise_for
from moe_exp.config.loading import explain, given_values
from moe_exp.config.setting_types import NonNegative, PathText, Positive, one_line, shown
from moe_exp.host.slurm_queue import slurm_seconds

# Environment variables for --export, to find programs and the home folder; they do not affect results.
PASSED_ALWAYS = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG")
# Prefixes of variables that jobs get from the submitting shell: communication libraries and Hugging Face.
PASSED_PREFIXES = ("NCCL_", "GLOO_", "UCX_", "FI_", "HF_")
_SECRET = re.compile("TOKEN|KEY|SECRET|PASS|CREDENTIAL|AUTH")
# Options that the sbatch file sets; other values would break the chain.
_OURS = (
    "array", "dependency", "error", "exclude", "export", "job-name", "nodes", "no-requeue", "ntasks",
    "ntasks-per-node", "open-mode", "output", "parsable", "requeue", "signal", "time", "wrap",
)  # fmt: skip
NOT_SOUGHT = "has characters that squeue --name does not support"
_LARGEST_ARRAY = 1000  # SLURM's default MaxArraySize is 1001
_LONGEST_WARNING = 65535  # seconds; limit of sbatch's --signal


def _field(default: object, description: str, **rules: Any) -> Any:
    return Field(default, description=description, **rules)


class SlurmSettings(BaseModel):
    """Settings of the jobs. A field's environment variable is its name in upper case."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    _one_line = field_validator("*", mode="before")(one_line)

    num_jobs: Positive = _field(
        1, "number of consecutive jobs; unused jobs are canceled when the run finishes", le=10_000
    )
    chain: Literal["array", "dependency"] = _field(
        "array", "array: a job array, one job at a time; dependency: each job waits for the previous job"
    )
    after: str = _field("", "job ids to wait for, such as '123 124'; extends a queued chain of jobs")
    time_limit: str = _field("24:00:00", "time limit of each job: MINUTES or [DAYS-]HOURS:MINUTES:SECONDS")
    signal_seconds: Positive = _field(600, "time reserved before TIME_LIMIT to save a checkpoint (seconds)")
    job_name: str = _field("", "job name in the queue; empty: RUN_NAME")
    partition: str = _field("", "partition, or several partitions separated by commas")
    account: str = _field("", "account to charge")
    qos: str = _field("", "quality of service")
    constraint: str = _field("", "required node features, such as 'h100&ib'")
    nice: NonNegative = _field(0, "reduction of the job priority")
    exclusive: bool = _field(True, "allocate whole nodes with all of their memory")
    cpus_per_task: NonNegative = _field(0, "cores per node for the launcher and its ranks; 0: all cores")
    cpu_nodes: bool = _field(False, "use nodes without GPUs, with GPUS_PER_NODE processes per node")
    exclude_file: PathText = _field(
        "", "file of nodes to avoid, one per line; empty: RUN_DIR/exclude_nodes.txt"
    )
    requeue: bool = _field(True, "requeue a job if the job or its node fails")
    max_failures: Positive = _field(3, "consecutive failures without a new checkpoint before the chain ends")
    retry_seconds: NonNegative = _field(
        60, "delay before a retry (seconds), multiplied by the number of consecutive failures"
    )
    modules: str = _field("", "environment modules to load, such as 'cuda/12.6 nccl'")
    setup: PathText = _field("", "shell script that the batch script sources before the run starts")
    container: str = _field("", "container image: a name for pyxis and enroot, or an apptainer file")
    container_runtime: Literal["auto", "pyxis", "apptainer"] = _field(
        "auto", "container runtime; auto: apptainer for a .sif file, else pyxis"
    )
    container_mounts: str = _field("", "additional folders to mount, such as '/data,/scratch:/scratch'")
    container_python: str = _field("python3", "Python command inside the container")
    pass_env: str = _field(
        "",
        "variables to pass from this shell to jobs, such as 'WANDB_API_KEY WANDB_ENTITY', in addition to "
        + ", ".join(f"{prefix}*" for prefix in PASSED_PREFIXES)
        + "; the values are not written to any file",
    )
    extra_sbatch: str = _field("", "additional sbatch options, such as '--reservation=x --mail-type=FAIL'")

    @property
    def extra_options(self) -> list[str]:
        return shlex.split(self.extra_sbatch)

    @property
    def passed(self) -> list[str]:
        return self.pass_env.replace(",", " ").split()

    def passed_variables(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Variables that jobs get from the submitting shell, with printable values (secrets are hidden)."""
        names = [name for name in sorted(environ) if re.fullmatch(r"\w+", name, re.ASCII)]
        names = [name for name in names if name.startswith(PASSED_PREFIXES) and name not in self.passed]
        passed = {name: "(not shown)" if _SECRET.search(name) else shown(environ[name]) for name in names}
        return passed | dict.fromkeys(self.passed, "(not shown)")

    @property
    def jobs_before(self) -> list[str]:
        return self.after.replace(",", " ").split()

    @property
    def runtime(self) -> Literal["", "pyxis", "apptainer"]:
        """Container runtime; empty if CONTAINER is not set."""
        if not self.container:
            return ""
        if self.container_runtime != "auto":
            return self.container_runtime
        return "apptainer" if self.container.endswith(".sif") else "pyxis"


def load_slurm_settings(flags: Mapping[str, Any], environ: Mapping[str, str]) -> SlurmSettings:
    """Settings from `flags`, else `environ`, else defaults. Raises ConfigError with all invalid values."""
    given = given_values(flags, environ, SlurmSettings)
    try:
        settings = SlurmSettings(**given)
    except ValidationError as error:
        wrong = {str(one["loc"][0]) for one in error.errors()}
        rest = SlurmSettings(**{name: value for name, value in given.items() if name not in wrong})
        # omit rules that mention an invalid setting: they were checked with its default
        named = re.compile(rf"\b({'|'.join(name.upper() for name in wrong)})\b")
        others = [line for line in _problems(rest, environ) if not named.search(line)]
        raise ConfigError([*explain(error, SlurmSettings), *others]) from None
    raise_for(_problems(settings, environ))
    return settings


def _problems(settings: SlurmSettings, environ: Mapping[str, str]) -> Iterator[str]:
    if not (limit := slurm_seconds(settings.time_limit)):
        fix = "write MINUTES, HOURS:MINUTES:SECONDS, DAYS-HOURS or DAYS-HOURS:MINUTES:SECONDS"
        yield problem("time_limit", settings.time_limit, "must be a SLURM time limit", fix)
    # otherwise each job of the chain would get the signal at its start, save and exit without training
    elif settings.signal_seconds >= min(limit, _LONGEST_WARNING + 1):
        rule = f"must be shorter than TIME_LIMIT={settings.time_limit}, and at most {_LONGEST_WARNING}"
        fix = "set it to twice the time that saving a checkpoint takes"
        yield problem("signal_seconds", settings.signal_seconds, rule, fix)
    if settings.chain == "array" and settings.num_jobs > _LARGEST_ARRAY:
        rule = f"must be at most {_LARGEST_ARRAY} for a job array"
        fix = f"set CHAIN=dependency, or NUM_JOBS to at most {_LARGEST_ARRAY}"
        yield problem("num_jobs", settings.num_jobs, rule, fix)
    if not all(job.isdecimal() for job in settings.jobs_before):
        rule = "must be a list of job ids"
        yield problem("after", settings.after, rule, "use the numbers that sbatch printed")
    if settings.job_name and not re.fullmatch(r"[\w.+=-]+", settings.job_name, re.ASCII):
        yield problem("job_name", settings.job_name, NOT_SOUGHT, "use letters, digits and . _ + = -")
    try:
        options = settings.extra_options
    except ValueError as error:
        rule, options = f"cannot be split into options ({error})", []
        yield problem("extra_sbatch", settings.extra_sbatch, rule, "quote options as in a shell")
    for option in options:
        name = option.removeprefix("--").partition("=")[0]
        if not re.match(r"--[a-z]", option):
            rule = "must have the form --name=value"
            yield problem("extra_sbatch", option, rule, "write '-p x' as --partition=x")
        elif name in _OURS:
            fix = "use the corresponding setting, or omit the option"
            if name == "exclude":
                fix = "list the nodes in EXCLUDE_FILE"
            yield problem("extra_sbatch", option, f"--{name} is set by this command", fix)
    yield from _place_problems(settings, environ)


def _place_problems(settings: SlurmSettings, environ: Mapping[str, str]) -> Iterator[str]:
    if settings.setup and not os.access(settings.setup, os.R_OK):
        yield problem("setup", settings.setup, "cannot be read", "specify a file that jobs can read")
    image = settings.container
    if settings.runtime == "apptainer" and "://" not in image and not Path(image).exists():
        fix = "specify an image file, or set CONTAINER_RUNTIME=pyxis"
        yield problem("container", image, "not found", fix)
    if settings.exclude_file and Path(settings.exclude_file).is_dir():
        fix = "specify a file (it need not exist yet)"
        yield problem("exclude_file", settings.exclude_file, "is a folder", fix)
    if settings.container_mounts and not settings.container:
        rule, fix = "has no effect without CONTAINER", "set CONTAINER or omit CONTAINER_MOUNTS"
        yield problem("container_mounts", settings.container_mounts, rule, fix)
    for name in settings.passed:
        if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            rule = "must be a variable name; the variable's value comes from this shell"
            yield problem("pass_env", name, rule, "list only names, such as 'WANDB_API_KEY WANDB_ENTITY'")
        elif name not in environ:
            fix = f"export {name}, or remove it from PASS_ENV"
            yield problem("pass_env", name, "is not set in this shell", fix)
