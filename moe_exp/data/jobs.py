"""Runs the tasks of datatrove pipelines on this machine, a SLURM cluster or a Ray cluster.

Local tasks run in WorkerPool, because LocalPipelineExecutor.run waits forever for a killed worker. A task
with a file in `completions/` is done, no matter where it ran.
"""

import contextlib
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import partial
from itertools import islice
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

from moe_exp.data.execution import Execution, Pass, Step, bytes_through, count_units, in_turn, num_workers
from moe_exp.data.kinds import total_bytes
from moe_exp.data.stage import MAKE_AGAIN, CorpusStage
from moe_exp.host.files import read_json, write_json
from moe_exp.host.processes import worker_context
from moe_exp.host.progress import progress_of
from moe_exp.host.slurm_queue import job_environment, still_there

logger = logging.getLogger(__name__)

AGAIN = "repeat the command to run the remaining tasks"
T = TypeVar("T")
_JOBS = "slurm_jobs.json"
_LAUNCHER = "launch_pickled_pipeline"
# Title, unit, function that processes a task and returns how many units it processed, and number of tasks.
CountingStep = tuple[str, str, Callable[[int], int], int]


def run_passes(
    passes: Sequence[Pass], execution: Execution, stage: CorpusStage, verb: str, *, follows: bool = False
) -> bool:
    """Runs the unfinished tasks of all passes; the last pass creates the output.

    Args:
        verb: what the tasks do, shown in the progress bar (SLURM jobs have no progress bar).
        follows: see `submit`.

    Returns:
        True if all tasks are done, False if SLURM jobs still have tasks to run.

    Raises:
        ValueError: a task failed; details are in its log.
        ChildProcessError: a task's process died.
    """
    name, is_done = stage.output.name, not any(one.left() for one in passes)
    passes = in_turn(passes)
    if execution.executor == "slurm":
        if not is_done:
            submit(passes, execution, name, follows=follows)
        return is_done
    through = [one.through for one in passes if one.through]
    total = len(through) * total_bytes(stage.inputs)  # approximate: later passes may read filtered files
    with progress_of(lambda: bytes_through(through), f"{verb} {name}", total):
        if not is_done:
            (_run_on_ray if execution.executor == "ray" else _run_here)(passes, execution)
    return True


def _run_on_ray(passes: Sequence[Pass], execution: Execution) -> None:
    for one in passes:
        if one.left():
            ray_executor(one, execution).run()
        if left := one.left():  # RayPipelineExecutor.run does not report failed tasks
            rule = f"{len(left)} of {one.num_tasks} tasks failed or were lost (first: task {left[0]})"
            log = f"{one.folder}/logs/task_{left[0]:05d}.log"
            raise ChildProcessError(f"{rule}. Fix: see {log}, and {AGAIN}.")


def _run_here(passes: Sequence[Pass], execution: Execution) -> None:
    from datatrove.executor import LocalPipelineExecutor

    workers, executors = num_workers(execution), list[Any]()
    for one in passes:
        options: dict[str, Any] = {"tasks": one.num_tasks, "workers": workers, "logging_dir": str(one.folder)}
        executors.append(LocalPipelineExecutor(list(one.pipeline), **options))
        executors[-1].save_executor_as_json()

    def describe(call: tuple[int, int]) -> tuple[str, str]:
        executor, task = executors[call[0]], call[1]
        log = executor.logging_dir.resolve_paths(f"logs/task_{task:05d}.log")
        return f"task {task} of {executor.world_size}", f". Log: {log}"

    # all passes share the worker processes, because each process must import datatrove first
    number, run = min(workers, max(len(one.left()) for one in passes)), partial(_run_task, executors)
    with WorkerPool(run, number, preload="datatrove.executor", describe=describe) as pool:
        for index, one in enumerate(passes):
            if left := one.left():
                for _ in pool.run([(index, task) for task in left]):
                    pass
                merge_stats(one)


def run_stage_passes(
    steps: Mapping[str, CountingStep], execution: Execution, stage: CorpusStage, verb: str, working: Path
) -> bool:
    """Runs the steps of a stage that follows another stage. Each step is one pass for `run_passes`.

    Args:
        steps: maps the name of each step to its `CountingStep`. Every step reads all inputs of the stage.
        working: folder for progress; the tasks of step NAME write their progress to `working`/NAME/through.
    """
    logs, passes = stage.folder / "datatrove", list[Pass]()
    for key, (name, unit, run, num_tasks) in steps.items():
        step = Step(partial(count_units, name, unit, run))
        passes.append(Pass([step], num_tasks, logs / key, working / key / "through"))
    return run_passes(passes, execution, stage, verb, follows=True)


def _run_task(executors: Sequence[Any], call: tuple[int, int]) -> None:
    from datatrove.utils.logging import logger as datatrove_logger

    # steps accumulate counts: each task needs a fresh copy
    executor, task = deepcopy(executors[call[0]]), call[1]
    # datatrove also prints its log, which is in logs/ already
    with Path(os.devnull).open("w") as devnull, contextlib.redirect_stderr(devnull):
        try:
            executor._run_for_rank(task, local_rank=1)
        except (ValueError, OSError):  # their messages are meant for users
            raise
        except Exception as error:
            log = executor.logging_dir.resolve_paths(f"logs/task_{task:05d}.log")
            raise RuntimeError(f"task {task} of {executor.world_size}: {error!r}. Log: {log}.") from error
        finally:
            datatrove_logger.remove()


def merge_stats(one: Pass) -> None:
    """Merges the tasks' statistics into stats.json."""
    from datatrove.utils.stats import PipelineStats

    paths = [one.folder / "stats" / f"{task:05d}.json" for task in range(one.num_tasks)]
    parts = [read_json(path, fix=MAKE_AGAIN) for path in paths]
    merged = sum((PipelineStats.from_json(part) for part in parts), start=PipelineStats())
    with (one.folder / "stats.json").open("w") as file:
        merged.save_to_disk(file)


def ray_executor(one: Pass, execution: Execution) -> Any:
    """RayPipelineExecutor for a pass, on the cluster at RAY_ADDRESS or on a local cluster that Ray starts."""
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


def check_no_jobs(folder: Path) -> None:
    """Raises ValueError if SLURM jobs still use a folder that is about to be deleted or resumed."""
    if there := _jobs_there(folder):
        fix = f"scancel {' '.join(there)}, or wait for them"
        raise ValueError(f"{folder}: SLURM jobs are still using it. Fix: {fix}.")


def _jobs_there(folder: Path) -> list[str]:
    jobs_file = folder / _JOBS
    fix = "check with squeue that no job of this step remains, then remove the file"
    return still_there(read_json(jobs_file, fix=fix)) if jobs_file.exists() else []


def submit(passes: Sequence[Pass], execution: Execution, name: str, *, follows: bool = False) -> None:
    """Submits SLURM jobs for the remaining tasks; they run the passes in order. Does nothing while earlier
    jobs are active. If `follows`, the previous stage's last SLURM job may submit this stage, but only once.

    Raises:
        ValueError: sbatch fails, squeue does not answer, or this process runs in a SLURM job that may not
            submit this stage (see `follows`).
    """
    jobs_file = passes[-1].folder / _JOBS
    if there := _jobs_there(passes[-1].folder):
        num_left = sum(len(one.left()) for one in passes)
        what = "%s: %d tasks remaining; SLURM jobs %s are queued or running"
        logger.info(what, name, num_left, ", ".join(there))
        return
    # a failing job would resubmit itself forever
    if "SLURM_JOB_ID" in os.environ and (jobs_file.exists() or not follows):
        left = passes[-1].left()
        rule = f"a job cannot resubmit its {len(left)} remaining tasks (the first is {left[0]}, see"
        fix = "repeat the command on a login node to submit them"
        raise ValueError(f"executor=slurm: {rule} {passes[-1].folder}/logs). Fix: {fix}.")
    if not shutil.which(_LAUNCHER, path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"):
        fix = "add to PATH the folder where pip installs programs"
        raise ValueError(f"executor=slurm: datatrove's {_LAUNCHER} not found in PATH. Fix: {fix}.")
    ids: list[str] = []
    # each executor depends on the previous one, so SLURM starts the passes in order
    executor: Any = None

    def keep_id(printed: str) -> str:  # datatrove does not keep the id of its last job, which merges stats
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
            # One more job after the last, launched like datatrove's: it counts, publishes and shuffles.
            from datatrove.executor.slurm import launch_slurm_job

            options = {key: value for key, value in executor.get_sbatch_args().items() if key != "array"}
            options |= {"job-name": f"{executor.job_name}_finish", "dependency": "afterok:" + ":".join(ids)}
            script = executor.get_launch_file_contents(options, shlex.join(execution.finish_command))
            launch_slurm_job(script, keep_id)
    except subprocess.CalledProcessError as error:
        submitted = f"; already submitted: {' '.join(ids)}" if ids else ""
        rule = f"failed with exit code {error.returncode}, see its message above{submitted}"
        raise ValueError(f"sbatch: {rule}. Fix: correct the option that sbatch rejects.") from error
    finally:
        # after a failed sbatch as well: the jobs submitted before it are in the queue
        jobs_file.parent.mkdir(parents=True, exist_ok=True)
        write_json(jobs_file, ids)
    logger.info("%s: submitted SLURM jobs %s; `squeue --me` shows them", name, ", ".join(ids))


def slurm_executor(one: Pass, execution: Execution, name: str, job_ids: Any, depends: Any) -> Any:
    """SlurmPipelineExecutor for a pass. Its jobs use the Python and packages of this process."""
    from datatrove.executor import SlurmPipelineExecutor

    # otherwise the jobs that depend on a failed one stay in the queue forever
    options = {"kill-on-invalid-dep": "yes", **dict(text.partition("=")[::2] for text in execution.sbatch)}
    return SlurmPipelineExecutor(
        list(one.pipeline), tasks=one.num_tasks, time=execution.time_limit, partition=execution.partition,
        cpus_per_task=execution.cpus_per_task, mem_per_cpu_gb=execution.mem_per_cpu_gb,
        workers=execution.workers or -1, job_name=name, qos=execution.qos, env_command=job_environment(),
        sbatch_args=options, max_array_size=execution.max_array_size, depends=depends,
        job_id_retriever=job_ids, logging_dir=str(one.folder),
    )  # fmt: skip


# Worker processes. Each gets one call at a time, so the failed call is known when a worker is killed.


class WorkerPool:
    """Context manager for worker processes that call a function.

    Args:
        function: picklable function that takes a call as its only argument.
        number: number of processes; with 1, the calls run in this process.
        preload: module to import in the workers, see `worker_context`.
        describe: maps a call to two texts for error messages: its name, and an addition to the suggested fix.
    """

    def __init__(
        self, function: Callable[[Any], object], number: int, *, preload: str,
        describe: Callable[[Any], tuple[str, str]],
    ):  # fmt: skip
        self._function, self._describe = function, describe
        self._workers = [_Worker(function, preload) for _ in range(number)] if number > 1 else []

    def run(self, calls: Sequence[T]) -> Iterator[T]:
        """Yields finished calls. Raises the error of a failed call, or ChildProcessError if a worker dies."""
        if not self._workers:
            for call in calls:
                self._function(call)
                yield call
            return
        left, free = iter(calls), list(self._workers)
        busy: dict[Any, _Worker] = {}
        done: list[T] = []
        while True:
            for call in islice(left, len(free)):
                worker = free.pop()
                worker.call = call
                worker.send((call,))
                busy[worker.pipe] = worker
            # only after the free workers have work, because the caller may be slow to process results
            yield from done
            if not busy:
                return
            ended = [busy.pop(pipe) for pipe in wait(list(busy))]
            done = [worker.end(self._describe) for worker in ended]
            free += ended

    def __enter__(self) -> "WorkerPool":
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        for worker in self._workers:
            # after an error the other calls are useless; otherwise None lets the worker exit
            worker.process.terminate() if kind else worker.send(None)
        for worker in self._workers:
            worker.process.join(5)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
            worker.pipe.close()


class _Worker:
    def __init__(self, function: Callable[[Any], object], preload: str):
        context = worker_context(preload)
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(function, theirs), daemon=True)
        self.process.start()
        theirs.close()  # otherwise recv would not notice that the process died
        self.call: Any = None

    def send(self, message: Any) -> None:
        with contextlib.suppress(BrokenPipeError):  # the worker died after its last answer: `end` reports it
            self.pipe.send(message)

    def end(self, describe: Callable[[Any], tuple[str, str]]) -> Any:
        try:
            error = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            self.process.join()
            code = self.process.exitcode or 0
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
            name, hint = describe(self.call)
            rule = f"{name} {how}; the kernel sends SIGKILL when memory runs out"
            fix = f"{AGAIN}; fewer --workers need less memory{hint}"
            raise ChildProcessError(f"{rule}. Fix: {fix}.") from None
        if error is not None:
            raise error
        return self.call


def _work(function: Callable[[Any], object], pipe: Connection) -> None:
    """Runs calls in a worker process. After each call, sends None or the exception that it raised."""

    # a killed parent cannot terminate its workers
    def end_with_parent() -> None:
        if (parent := multiprocessing.parent_process()) is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and terminates us
    while (message := pipe.recv()) is not None:
        try:
            function(*message)
            pipe.send(None)
        except BaseException as error:
            try:
                pipe.send(error)
            except Exception:  # not picklable
                pipe.send(RuntimeError(repr(error)))
