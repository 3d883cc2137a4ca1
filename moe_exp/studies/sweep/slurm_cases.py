"""Runs each case as a SLURM job, one launcher per node.

Jobs outlive the sweep or ladder: repeating its command collects their results. No torch.
"""

import logging
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from moe_exp.host.files import write_atomically
from moe_exp.host.slurm_queue import job_environment, still_there
from moe_exp.launch.slurm.batch_script import directives
from moe_exp.launch.slurm.submission import sbatch
from moe_exp.studies.child_runs import Case, train_command

logger = logging.getLogger(__name__)

POLL_SECONDS = 10.0
_PATIENCE_SECONDS = 900.0  # with a SLURM that does not answer


@dataclass(frozen=True)
class JobOptions:
    """sbatch options of all jobs of a study."""

    sbatch: Sequence[str]  # the user's options
    time_limit_seconds: int
    on_gpus: bool  # whether to request a GPU per rank, unless `sbatch` has such an option


def run_jobs(
    cases: Mapping[str, Case],
    jobs: Path,
    options: JobOptions,
    prepare: Callable[[Case], None] = lambda case: None,
) -> Iterator[tuple[Case, int | None]]:
    """Submits all cases without a job from an earlier call, and yields them as their jobs end, each with the
    exit code of its launchers: None if the job ended without one.

    Args:
        cases: by name of their jobs.
        jobs: folder of NAME.sh, the script, NAME.id, the job id, and NAME.code, the exit code.
        prepare: called before a case is submitted.
    """
    waiting = {}
    for name, case in cases.items():
        id_file = jobs / f"{name}.id"
        if not id_file.exists():
            prepare(case)
            submit(name, case, jobs, options)
        waiting[name] = id_file.read_text()
    for name in ended_jobs(waiting):
        code = jobs / f"{name}.code"
        yield cases[name], int(code.read_text()) if code.exists() else None
        _forget(jobs, name)


def submit(name: str, case: Case, jobs: Path, options: JobOptions) -> None:
    """Submits the job of a case, and keeps its id; ValueError if sbatch is missing, or refuses."""
    script = jobs / f"{name}.sh"
    for path in (script, case.log):
        path.parent.mkdir(parents=True, exist_ok=True)
    _forget(jobs, name)
    write_atomically(script, batch_script(name, case, jobs, options))
    missing = "EXECUTOR=slurm: there is no sbatch here. Fix: call it on a login node, or set EXECUTOR=local."
    fix = f"change SBATCH={shlex.join(options.sbatch)}, or what it names"
    write_atomically(jobs / f"{name}.id", sbatch(["sbatch", "--parsable", str(script)], missing, fix))


def _forget(jobs: Path, name: str) -> None:
    for suffix in ("id", "code"):
        (jobs / f"{name}.{suffix}").unlink(missing_ok=True)


def batch_script(name: str, case: Case, jobs: Path, options: JobOptions) -> str:
    """The sbatch script: environment, first node as master, a launcher per node, exit code in a file."""
    num_nodes = case.config.nnodes
    # derived from the job id, as jobs may share a node; a single node takes a free one
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
    # Whole nodes: by default a task has one core, and other jobs take time.
    own = [*(f"--{key}={value}" for key, value in settings.items()), "--exclusive"]
    code = shlex.quote(str((jobs / f"{name}.code").resolve()))
    srun = f"srun --nodes={num_nodes} --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=1"
    return "\n".join(
        [
            "#!/bin/bash",
            *directives([*own, *options.sbatch]),
            job_environment(),
            'MASTER_ADDR="$(scontrol show hostnames "${SLURM_JOB_NODELIST:-$SLURM_NODELIST}" | head -n 1)"',
            f'MASTER_PORT="{port}"',
            "export MASTER_ADDR MASTER_PORT",
            f"{srun} bash -c {shlex.quote('exec ' + launcher)}",
            f"echo $? >{code}.partial && mv {code}.partial {code}",
            "",
        ]
    )


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
