"""Runs the tasks of a datatrove pipeline by datatrove's executors: on this machine, as SLURM jobs, or on a Ray cluster.

On this machine each worker process is told its tasks one by one, so that the task of one that is killed is known at once: the pool of
LocalPipelineExecutor.run waits for it forever. What has a file in `completions/` is done, wherever it ran.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import multiprocessing
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from moe_exp.data.stage import write_json

logger = logging.getLogger(__name__)

EXECUTORS = ("local", "slurm", "ray")

_JOBS = "slurm_jobs.json"
_LAUNCHER = "launch_pickled_pipeline"


@dataclass(frozen=True)
class Execution:
    """Where and how wide a conversion runs. Nothing of it changes what is made.

    Args:
        executor: local, slurm or ray.
        workers: tasks at a time; default: the cores that this process may use, for SLURM and Ray no limit.
        partition, time_limit, qos: of the SLURM jobs, as sbatch takes them.
        cpus_per_task: of a SLURM job or Ray task.
        mem_per_cpu_gb: of a SLURM job or Ray task, GB.
        max_array_size: the SLURM cluster's MaxArraySize: more tasks become more job arrays.
        sbatch: other options of sbatch, `account=x`.
        finish_command: what the last SLURM job runs: the same command with --finish.
    """

    executor: str = "local"
    workers: int | None = None
    partition: str | None = None
    time_limit: str = "24:00:00"
    qos: str | None = None
    cpus_per_task: int = 1
    mem_per_cpu_gb: int = 4
    max_array_size: int = 1001
    sbatch: tuple[str, ...] = ()
    finish_command: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.executor not in EXECUTORS:
            raise ValueError(f"executor={self.executor}: must be one of {', '.join(EXECUTORS)}. Fix: choose one.")
        if self.workers is not None and self.workers < 1:
            raise ValueError(f"workers={self.workers}: must be at least 1. Fix: leave it away, or give a number of processes.")
        if self.executor == "slurm" and not self.partition:
            raise ValueError("partition=: executor=slurm needs the partition of the jobs. Fix: give --partition; `sinfo` lists them.")
        if self.executor == "slurm" and not shutil.which("sbatch") and "SLURM_JOB_ID" not in os.environ:  # compute nodes may lack it
            raise ValueError("executor=slurm: there is no command sbatch here. Fix: call it on a login node of the cluster.")
        if self.executor == "ray" and importlib.util.find_spec("ray") is None:
            raise ValueError("executor=ray: the package ray is not installed. Fix: pip install ray.")
        if wrong := next((option for option in self.sbatch if "=" not in option), None):
            raise ValueError(f"sbatch={wrong}: must be NAME=VALUE, as in account=x. Fix: write it so.")


@dataclass(frozen=True)
class Pass:
    """One pipeline over all tasks; its steps are those of `moe_exp.data.datatrove_steps`."""

    pipeline: Sequence[Any]
    num_tasks: int
    folder: Path

    def left(self) -> list[int]:
        """Tasks that are not complete."""
        return [task for task in range(self.num_tasks) if not (self.folder / "completions" / f"{task:05d}").is_file()]


def run_passes(passes: Sequence[Pass], execution: Execution, *, name: str) -> bool:
    """Runs what is left of the passes, one after the other.

    Args:
        passes: the last is the one that makes the output.
        execution: where.
        name: of the jobs.

    Returns:
        Whether all is done; False where SLURM jobs have been submitted, or are still there.

    Raises:
        ValueError: a task failed, with what it raised; its log says more.
        ChildProcessError: a task's process died.
    """
    if not any(one.left() for one in passes):
        return True
    if execution.executor == "slurm":
        _submit(passes, execution, name)
        return False
    for one in passes:
        if execution.executor == "local":
            _run_local(one, num_workers(execution))
        else:
            _run_ray(one, execution)
    return True


# On this machine


def num_workers(execution: Execution) -> int:
    """Tasks at a time on this machine."""
    return execution.workers or (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def _run_local(one: Pass, workers: int) -> None:
    left = one.left()
    if not left:
        return
    from datatrove.executor import LocalPipelineExecutor

    executor = LocalPipelineExecutor(list(one.pipeline), tasks=one.num_tasks, workers=workers, logging_dir=str(one.folder))
    executor.save_executor_as_json()
    if workers == 1 or len(left) == 1:
        for task in left:
            _run_task(deepcopy(executor), task)
    else:
        _run_processes(executor, left, workers)
    merge_stats(one)


def _run_task(executor: Any, task: int) -> None:
    """A task in this process. Its log, with the traceback if it fails, is in logs/; datatrove's copy on stderr is left out."""
    from datatrove.utils.logging import logger as datatrove_logger

    with Path(os.devnull).open("w") as devnull, contextlib.redirect_stderr(devnull):
        try:
            executor._run_for_rank(task, local_rank=1)
        except (ValueError, OSError):  # they say themselves what is wrong
            raise
        except Exception as error:
            log = executor.logging_dir.resolve_paths(f"logs/task_{task:05d}.log")
            raise RuntimeError(f"task {task} of {executor.world_size}: {error!r}. Log: {log}.") from error
        finally:
            datatrove_logger.remove()


def _work(executor: Any, orders: Connection) -> None:
    """A worker process: runs the tasks that it is sent, and answers each with None or what it raised."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, which ends us
    while (task := orders.recv()) is not None:
        try:
            _run_task(deepcopy(executor), task)
            orders.send(None)
        except BaseException as error:
            try:
                orders.send(error)
            except Exception:  # what cannot be pickled
                orders.send(RuntimeError(repr(error)))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


@dataclass
class _Worker:
    process: BaseProcess
    orders: Connection
    task: int | None = None

    def take(self, task: int | None) -> None:
        self.task = task
        with contextlib.suppress(BrokenPipeError):  # it has died since it answered: the next look at it tells
            self.orders.send(task)


def _run_processes(executor: Any, tasks: list[int], num_workers: int) -> None:
    waiting = list(reversed(tasks))
    workers: dict[Any, _Worker] = {}
    try:
        for _ in range(min(num_workers, len(tasks))):
            worker = _start_worker(executor)
            workers[worker.orders] = worker
            worker.take(waiting.pop())
        while busy := [orders for orders, worker in workers.items() if worker.task is not None]:
            for orders in wait(busy):
                _check_answer(workers[orders], executor)
                workers[orders].take(waiting.pop() if waiting else None)
    except BaseException:
        for worker in workers.values():
            worker.process.terminate()
        raise
    finally:
        for worker in workers.values():
            _end(worker)


def _start_worker(executor: Any) -> _Worker:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(executor, theirs), daemon=True)
    process.start()
    theirs.close()  # else its end would not be seen
    return _Worker(process, ours)


def _check_answer(worker: _Worker, executor: Any) -> None:
    try:
        error = worker.orders.recv()
    except (EOFError, ConnectionResetError):
        worker.process.join()
        code, log = worker.process.exitcode or 0, executor.logging_dir.resolve_paths(f"logs/task_{worker.task:05d}.log")
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        raise ChildProcessError(
            f"task {worker.task} of {executor.world_size} {how}; SIGKILL may be the kernel's, when memory is short. "
            "Fix: call the same command again, it goes on with the tasks that are left; fewer --workers need less memory. "
            f"Log: {log}."
        ) from None
    if error is not None:
        raise error


def _end(worker: _Worker) -> None:
    worker.process.join(5)
    if worker.process.is_alive():
        worker.process.kill()
        worker.process.join()
    worker.orders.close()


def merge_stats(one: Pass) -> None:
    """Writes stats.json from those of the tasks."""
    from datatrove.utils.stats import PipelineStats

    parts = [json.loads((one.folder / "stats" / f"{task:05d}.json").read_text()) for task in range(one.num_tasks)]
    merged = sum((PipelineStats.from_json(part) for part in parts), start=PipelineStats())
    with (one.folder / "stats.json").open("w") as file:
        merged.save_to_disk(file)


# Ray


def _run_ray(one: Pass, execution: Execution) -> None:
    if not one.left():
        return
    ray_executor(one, execution).run()
    if left := one.left():
        # RayPipelineExecutor.run returns without an error then
        raise ChildProcessError(
            f"task {left[0]} of {one.num_tasks} failed or was lost, {len(left)} in all. Fix: see {one.folder}/logs/task_{left[0]:05d}.log, "
            "and call the same command again: it goes on with the tasks that are left."
        )


def ray_executor(one: Pass, execution: Execution) -> Any:
    """datatrove's RayPipelineExecutor for a pass. The cluster is RAY_ADDRESS's, or one that Ray starts here."""
    from datatrove.executor.ray import RayPipelineExecutor

    return RayPipelineExecutor(
        list(one.pipeline),
        tasks=one.num_tasks,
        workers=execution.workers or -1,
        logging_dir=str(one.folder),
        cpus_per_task=execution.cpus_per_task,
        mem_per_cpu_gb=execution.mem_per_cpu_gb,
    )


# SLURM


class _JobIds:
    """Takes the id from what sbatch prints, and keeps it: datatrove forgets that of the job that merges the stats, which is the last."""

    def __init__(self) -> None:
        self.ids: list[str] = []

    def __call__(self, printed: str) -> str:
        found = re.search(r"\d+", printed)
        if not found:
            raise ValueError(f"sbatch: printed {printed!r}, which has no job id. Fix: take a wrapper away that hides it.")
        self.ids.append(found[0])
        return self.ids[-1]


def check_no_jobs(folder: Path) -> None:
    """Whether SLURM jobs still work in a folder that is to be thrown away, or worked in from here.

    Raises:
        ValueError: they do.
    """
    jobs_file = folder / _JOBS
    if jobs_file.exists() and (there := _still_there(json.loads(jobs_file.read_text()))):
        raise ValueError(f"{folder}: SLURM jobs still work in it. Fix: scancel {' '.join(there)}, or wait for them.")


def _submit(passes: Sequence[Pass], execution: Execution, name: str) -> None:
    jobs_file = passes[-1].folder / _JOBS
    if jobs_file.exists() and (there := _still_there(json.loads(jobs_file.read_text()))):
        num_left = sum(len(one.left()) for one in passes)
        logger.info("%s: %d tasks are left; SLURM jobs %s are queued or running", name, num_left, ", ".join(there))
        return
    if "SLURM_JOB_ID" in os.environ:
        left = passes[-1].left()
        raise ValueError(
            f"executor=slurm: inside a job, and {len(left)} tasks are not complete (the first is {left[0]}, see {passes[-1].folder}/logs). "
            "Fix: call the same command on a login node, it submits what is left."
        )
    if not shutil.which(_LAUNCHER, path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"):
        raise ValueError(f"executor=slurm: datatrove's program {_LAUNCHER} is not in PATH. Fix: add the folder where pip puts programs.")
    job_ids, executor = _JobIds(), None
    try:
        for one in passes:
            executor = slurm_executor(one, execution, name, job_ids, executor)
            executor.launch_job()
        if execution.finish_command:
            _submit_finish(executor, execution, job_ids)
    except subprocess.CalledProcessError as error:
        submitted = f", submitted are {' '.join(job_ids.ids)}" if job_ids.ids else ""
        raise ValueError(f"sbatch: exit code {error.returncode}, its message is above{submitted}. Fix: change what it names.") from error
    finally:
        jobs_file.parent.mkdir(parents=True, exist_ok=True)
        write_json(jobs_file, job_ids.ids)
    logger.info("%s: submitted SLURM jobs %s; `squeue --me` shows them", name, ", ".join(job_ids.ids))


def slurm_executor(one: Pass, execution: Execution, name: str, job_ids: Any = None, depends: Any = None) -> Any:
    """datatrove's SlurmPipelineExecutor for a pass; jobs find the Python and the packages of this process."""
    from datatrove.executor import SlurmPipelineExecutor

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
        env_command=_environment(),
        sbatch_args=_sbatch_options(execution),
        max_array_size=execution.max_array_size,
        depends=depends,
        job_id_retriever=job_ids,
        logging_dir=str(one.folder),
    )


def _sbatch_options(execution: Execution) -> dict[str, str]:
    options = dict(option.partition("=")[::2] for option in execution.sbatch)
    return {"kill-on-invalid-dep": "yes", **options}  # else what depends on a failed job waits in the queue forever


def _environment() -> str:
    package_root = Path(__file__).resolve().parents[2]
    paths = {"PATH": Path(sys.executable).parent, "PYTHONPATH": package_root}
    return "; ".join(f'export {name}={shlex.quote(str(path))}"${{{name}:+:${name}}}"' for name, path in paths.items())


def _submit_finish(executor: Any, execution: Execution, job_ids: _JobIds) -> None:
    """One more job behind the last, which counts, publishes and shuffles. datatrove submits its merging of stats in this way."""
    from datatrove.executor.slurm import launch_slurm_job

    options = {name: value for name, value in executor.get_sbatch_args().items() if name != "array"}
    options |= {"job-name": f"{executor.job_name}_finish", "dependency": "afterok:" + ":".join(job_ids.ids)}
    script = executor.get_launch_file_contents(options, shlex.join(execution.finish_command))
    launch_slurm_job(script, job_ids)


def _still_there(job_ids: list[str]) -> list[str]:
    """Those of the jobs that SLURM has not ended, this one left out."""
    if not job_ids:
        return []
    if not shutil.which("squeue"):
        raise ValueError(f"squeue: is not here to tell of the SLURM jobs {' '.join(job_ids)}. Fix: call it on a login node of the cluster.")
    found = subprocess.run(["squeue", "--noheader", "--format=%F", "--jobs", ",".join(job_ids)], capture_output=True, text=True)
    if found.returncode != 0 and "invalid job id" not in found.stderr.lower():  # what it says when it has forgotten them
        raise ValueError(f"squeue: exit code {found.returncode}: {found.stderr.strip()}. Fix: call it again when SLURM answers.")
    known = set(found.stdout.split())
    return [job for job in job_ids if job in known and job != os.environ.get("SLURM_JOB_ID")]
