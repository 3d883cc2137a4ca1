"""Runs each case as a SLURM job, one launcher per node.

Jobs outlive the sweep: repeating its command collects their results. No torch.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from moe_exp.host.files import write_atomically
from moe_exp.host.slurm_queue import job_environment, still_there
from moe_exp.launch.slurm.batch_script import quoted_option
from moe_exp.launch.slurm.submission import sbatch_environment
from moe_exp.studies.child_runs import train_command
from moe_exp.studies.sweep.cases import Case

logger = logging.getLogger(__name__)

POLL_SECONDS = 10.0
_PATIENCE_SECONDS = 900.0  # with a SLURM that does not answer
_FIRST_PORT, _NUM_PORTS = 20000, 10000  # a port derived from the job id, as jobs may share a node


@dataclass(frozen=True)
class JobFiles:
    """Files of a case's job, in the folder of the sweep."""

    script: Path
    job_id: Path
    code: Path

    @classmethod
    def of(cls, jobs: Path, case: str) -> JobFiles:
        return cls(jobs / f"{case}.sh", jobs / f"{case}.id", jobs / f"{case}.code")

    def exit_code(self) -> int | None:
        """Exit code of the launchers; None before the job's end."""
        return int(self.code.read_text()) if self.code.exists() else None

    def forget(self) -> None:
        """Deletes files of an earlier attempt."""
        for path in (self.job_id, self.code):
            path.unlink(missing_ok=True)


@dataclass(frozen=True)
class JobOptions:
    """sbatch options of all jobs of a sweep.

    Attributes:
        sbatch: the user's options.
        on_gpus: whether to request a GPU per rank, unless `sbatch` has such an option.
    """

    sbatch: Sequence[str]
    time_limit_seconds: int
    on_gpus: bool

    def gpus(self, number: int) -> dict[str, int]:
        """The option that requests GPUs."""
        is_asked = any(option.startswith(("--gpus", "--gres", "-G")) for option in self.sbatch)
        return {"gpus-per-node": number} if self.on_gpus and not is_asked else {}


def submit(case: Case, files: JobFiles, log: Path, options: JobOptions) -> str:
    """Submits the job of a case; returns its id. ValueError if sbatch is missing, or refuses."""
    files.script.parent.mkdir(parents=True, exist_ok=True)
    log.parent.mkdir(parents=True, exist_ok=True)
    files.forget()
    write_atomically(files.script, batch_script(case, files, log, options))
    try:
        environ = sbatch_environment(os.environ)
        done = subprocess.run(["sbatch", str(files.script)], capture_output=True, text=True, env=environ)
    except FileNotFoundError:
        raise ValueError(
            "EXECUTOR=slurm: there is no sbatch here. Fix: call it on a login node, or set EXECUTOR=local."
        ) from None
    found = re.search(r"\d+", done.stdout)
    if done.returncode or not found:
        said = " ".join((done.stderr or done.stdout).split())
        raise ValueError(
            f"sbatch: exit code {done.returncode}: {said}. Fix: change SBATCH={shlex.join(options.sbatch)},"
            " or what it names."
        )
    write_atomically(files.job_id, found[0])
    return found[0]


def batch_script(case: Case, files: JobFiles, log: Path, options: JobOptions) -> str:
    """The sbatch script: environment, first node as master, a launcher per node, exit code in a file."""
    # a single node takes a free one
    port = f"$(({_FIRST_PORT} + SLURM_JOB_ID % {_NUM_PORTS}))" if case.config.nnodes > 1 else "0"
    launcher = shlex.join(train_command(_fixed(case.flags)))
    launcher += ' --node-rank="${SLURM_NODEID:-0}" --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT"'
    settings = {
        "job-name": case.name, "nodes": case.config.nnodes, "ntasks-per-node": 1,
        "time": -(-options.time_limit_seconds // 60), "output": log.resolve(), "chdir": Path.cwd(),
        **options.gpus(case.config.gpus_per_node), "mem": 0,
    }  # fmt: skip
    # Whole nodes: by default a task has one core, and other jobs take time.
    own = [*(f"--{name}={value}" for name, value in settings.items()), "--exclusive"]
    code = shlex.quote(str(files.code.resolve()))
    return "\n".join(
        [
            "#!/bin/bash",
            # sbatch uses the last of duplicates
            *(f"#SBATCH {quoted_option(option)}" for option in [*own, *options.sbatch]),
            job_environment(),
            'MASTER_ADDR="$(scontrol show hostnames "${SLURM_JOB_NODELIST:-$SLURM_NODELIST}" | head -n 1)"',
            f'MASTER_PORT="{port}"',
            "export MASTER_ADDR MASTER_PORT",
            (
                f"srun --nodes={case.config.nnodes} --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=1"
                f" bash -c {shlex.quote('exec ' + launcher)}"
            ),
            f"echo $? >{code}.partial && mv {code}.partial {code}",
            "",
        ]
    )


def _fixed(flags: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in flags.items()
        if name not in ("node_rank", "master_addr", "master_port")
    }


def ended_jobs(waiting: Mapping[str, str]) -> Iterator[str]:
    """Yields cases as their jobs end, from case to job id; ValueError if squeue does not answer for long."""
    left, answered = dict(waiting), time.monotonic()
    while left:
        try:
            there, answered = set(still_there(list(left.values()))), time.monotonic()
        except ValueError as error:
            if time.monotonic() - answered > _PATIENCE_SECONDS:
                raise
            logger.warning("%s It is asked again.", error)
            there = set(left.values())
        for name in [name for name, job in left.items() if job not in there]:
            del left[name]
            yield name
        if left:
            time.sleep(POLL_SECONDS)
