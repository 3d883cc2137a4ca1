"""Tasks as SLURM job arrays by datatrove's SlurmPipelineExecutor, and a last job that publishes."""

from __future__ import annotations

import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moe_exp.data.tasks.execution import Execution, Pass
from moe_exp.host.files import read_json, write_json
from moe_exp.host.slurm_queue import job_environment, still_there

logger = logging.getLogger(__name__)

_JOBS = "slurm_jobs.json"
_REMOVE = "see with squeue that none of its jobs is left, and remove it"
_LAUNCHER = "launch_pickled_pipeline"


def check_no_jobs(folder: Path) -> None:
    """Whether SLURM jobs still work in a folder that is to be thrown away, or worked in from here.

    Raises:
        ValueError: they do.
    """
    if there := _jobs_there(folder):
        fix = f"scancel {' '.join(there)}, or wait for them"
        raise ValueError(f"{folder}: SLURM jobs still work in it. Fix: {fix}.")


def _jobs_there(folder: Path) -> list[str]:
    jobs_file = folder / _JOBS
    return still_there(read_json(jobs_file, fix=_REMOVE)) if jobs_file.exists() else []


def submit(passes: Sequence[Pass], execution: Execution, name: str, *, follows: bool = False) -> None:
    """Submits what is left of the passes, each after the one before it, unless earlier jobs are still there.

    Args:
        passes, execution, name: as of `run_passes`.
        follows: the step follows another, whose last job may submit it, once.

    Raises:
        ValueError: sbatch refuses, squeue does not answer, or this is a job itself.
    """
    jobs_file = passes[-1].folder / _JOBS
    if there := _jobs_there(passes[-1].folder):
        num_left = sum(len(one.left()) for one in passes)
        what = "%s: %d tasks are left; SLURM jobs %s are queued or running"
        logger.info(what, name, num_left, ", ".join(there))
        return
    if "SLURM_JOB_ID" in os.environ and (jobs_file.exists() or not follows):
        left = passes[-1].left()
        first = f"the first is {left[0]}, see {passes[-1].folder}/logs"
        fix = "call the same command on a login node, it submits what is left"
        rule = f"inside a job, and {len(left)} tasks are not complete ({first})"
        raise ValueError(f"executor=slurm: {rule}. Fix: {fix}.")
    if not shutil.which(_LAUNCHER, path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"):
        fix = "add the folder where pip puts programs"
        raise ValueError(f"executor=slurm: datatrove's program {_LAUNCHER} is not in PATH. Fix: {fix}.")
    ids: list[str] = []
    executor: Any = None

    def keep_id(printed: str) -> str:  # datatrove forgets that of its last job, which merges stats
        found = re.search(r"\d+", printed)
        if not found:
            fix = "if sbatch is a wrapper, make it print sbatch's own output"
            raise ValueError(f"sbatch: printed no job id: {printed!r}. Fix: {fix}.")
        ids.append(found[0])
        return found[0]

    try:
        for one in passes:
            executor = slurm_executor(one, execution, name, keep_id, executor)
            executor.launch_job()
        if execution.finish_command:
            # One more job behind the last, in datatrove's way: it counts, publishes and shuffles.
            from datatrove.executor.slurm import launch_slurm_job

            options = {key: value for key, value in executor.get_sbatch_args().items() if key != "array"}
            options |= {"job-name": f"{executor.job_name}_finish", "dependency": "afterok:" + ":".join(ids)}
            script = executor.get_launch_file_contents(options, shlex.join(execution.finish_command))
            launch_slurm_job(script, keep_id)
    except subprocess.CalledProcessError as error:
        submitted = f", submitted are {' '.join(ids)}" if ids else ""
        rule = f"exit code {error.returncode}, its message is above{submitted}"
        raise ValueError(f"sbatch: {rule}. Fix: change what it names.") from error
    finally:
        jobs_file.parent.mkdir(parents=True, exist_ok=True)
        write_json(jobs_file, ids)
    logger.info("%s: submitted SLURM jobs %s; `squeue --me` shows them", name, ", ".join(ids))


def slurm_executor(
    one: Pass, execution: Execution, name: str, job_ids: Any = None, depends: Any = None
) -> Any:
    """datatrove's SlurmPipelineExecutor for a pass; jobs find the Python and the packages of this process."""
    from datatrove.executor import SlurmPipelineExecutor

    # else what depends on a failed job waits in the queue forever
    options = {"kill-on-invalid-dep": "yes", **dict(text.partition("=")[::2] for text in execution.sbatch)}
    return SlurmPipelineExecutor(
        list(one.pipeline),
        tasks=one.num_tasks,
        time=execution.time_limit,
        partition=execution.partition,
        cpus_per_task=execution.cpus_per_task,
        mem_per_cpu_gb=execution.mem_per_cpu_gb,
        workers=execution.workers or -1,
        job_name=name,
        qos=execution.qos,
        env_command=job_environment(),
        sbatch_args=options,
        max_array_size=execution.max_array_size,
        depends=depends,
        job_id_retriever=job_ids,
        logging_dir=str(one.folder),
    )
