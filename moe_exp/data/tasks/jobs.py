"""Runs the tasks of a datatrove pipeline by its executors: here, as SLURM jobs, or on a Ray cluster.

On this machine each worker process gets its tasks one by one, so that the task of one that is killed is
known at once: the pool of LocalPipelineExecutor.run waits for it forever. What has a file in `completions/`
is done, wherever it ran.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from moe_exp.data.stage import MAKE_AGAIN, Stage
from moe_exp.data.tasks.execution import Execution, Pass, bytes_through, in_turn, num_workers
from moe_exp.data.tasks.slurm_jobs import submit
from moe_exp.host.files import read_json
from moe_exp.host.processes import worker_context
from moe_exp.host.progress import progress_of

_AGAIN = "call the same command again, it continues with the tasks that are left"


def run_passes(passes: Sequence[Pass], execution: Execution, *, name: str, follows: bool = False) -> bool:
    """Runs what is left of the passes, one after the other.

    Args:
        passes: the last is the one that makes the output.
        execution: where.
        name: of the jobs.
        follows: see `submit`.

    Returns:
        Whether all is done; False if SLURM jobs have been submitted, or are still there.

    Raises:
        ValueError: a task failed, with what it raised; its log says more.
        ChildProcessError: a task's process died.
    """
    if not any(one.left() for one in passes):
        return True
    passes = in_turn(passes)
    if execution.executor == "slurm":
        submit(passes, execution, name, follows=follows)
        return False
    if execution.executor == "local":
        _run_local(passes, num_workers(execution))
    else:
        for one in passes:
            _run_ray(one, execution)
    return True


def run_stage_passes(
    passes: Sequence[Pass], execution: Execution, stage: Stage, verb: str, through: Sequence[Path]
) -> bool:
    """Runs the passes of a stage that follows others, with a progress bar where its tasks end here.

    Args:
        passes, execution: as of `run_passes`, whose result it returns.
        stage: whose inputs each pass goes through.
        verb: for the bar.
        through: folders of each pass, in which tasks say how far they are.
    """
    name = stage.output.name
    if execution.executor == "slurm":
        return run_passes(passes, execution, name=name, follows=True)
    total = len(through) * sum(path.stat().st_size for path in stage.inputs)
    with progress_of(lambda: bytes_through(through), f"{verb} {name}", total):
        return run_passes(passes, execution, name=name, follows=True)


# On this machine


def _run_local(passes: Sequence[Pass], workers: int) -> None:
    from datatrove.executor import LocalPipelineExecutor

    executors = []
    for one in passes:
        executor = LocalPipelineExecutor(
            list(one.pipeline), tasks=one.num_tasks, workers=workers, logging_dir=str(one.folder)
        )
        executor.save_executor_as_json()
        executors.append(executor)
    with _Workers(executors, min(workers, max(len(one.left()) for one in passes))) as pool:
        for index, one in enumerate(passes):
            if left := one.left():
                pool.run(index, left)
                merge_stats(one)


def _run_task(executor: Any, task: int) -> None:
    """Runs a task in this process. Its log is in logs/; datatrove's copy on stderr is left out."""
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


def _work(executors: Sequence[Any], orders: Connection) -> None:
    """A worker process: runs the tasks of passes that it is sent, and answers each with None or what it
    raised.
    """
    threading.Thread(target=_end_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, which ends us
    while (order := orders.recv()) is not None:
        index, task = order
        try:
            _run_task(deepcopy(executors[index]), task)
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

    def send(self, order: tuple[int, int] | None) -> None:
        self.task = order and order[1]
        with contextlib.suppress(BrokenPipeError):  # it has died since it answered: the next check finds out
            self.orders.send(order)


class _Workers:
    """Processes that run the tasks of all passes, or this one if one is enough; for a `with` statement."""

    def __init__(self, executors: Sequence[Any], number: int):
        self.executors = executors
        self.workers = [self._start() for _ in range(number)] if number > 1 else []

    def _start(self) -> _Worker:
        context = worker_context("datatrove.executor")
        ours, theirs = context.Pipe()
        process = context.Process(target=_work, args=(self.executors, theirs), daemon=True)
        process.start()
        theirs.close()  # else its end would not be seen
        return _Worker(process, ours)

    def run(self, index: int, tasks: Sequence[int]) -> None:
        """Runs tasks of a pass; what one raises is raised here."""
        executor = self.executors[index]
        if not self.workers:
            for task in tasks:
                _run_task(deepcopy(executor), task)
            return
        waiting, free = list(reversed(tasks)), list(self.workers)
        busy: dict[Any, _Worker] = {}
        while waiting or busy:
            while waiting and free:
                worker = free.pop()
                worker.send((index, waiting.pop()))
                busy[worker.orders] = worker
            for orders in wait(list(busy)):
                worker = busy.pop(orders)
                _check_answer(worker, executor)
                free.append(worker)

    def __enter__(self) -> _Workers:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        for worker in self.workers:
            worker.process.terminate() if kind else worker.send(None)
        for worker in self.workers:
            worker.process.join(5)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
            worker.orders.close()


def _check_answer(worker: _Worker, executor: Any) -> None:
    try:
        error = worker.orders.recv()
    except (EOFError, ConnectionResetError):
        worker.process.join()
        code = worker.process.exitcode or 0
        log = executor.logging_dir.resolve_paths(f"logs/task_{worker.task:05d}.log")
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        rule = f"{how}; SIGKILL may be the kernel's, when memory is short"
        fix = f"{_AGAIN}; fewer --workers need less memory. Log: {log}"
        raise ChildProcessError(f"task {worker.task} of {executor.world_size} {rule}. Fix: {fix}.") from None
    if error is not None:
        raise error


def merge_stats(one: Pass) -> None:
    """Writes stats.json from those of the tasks."""
    from datatrove.utils.stats import PipelineStats

    paths = [one.folder / "stats" / f"{task:05d}.json" for task in range(one.num_tasks)]
    parts = [read_json(path, fix=MAKE_AGAIN) for path in paths]
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
        rule = f"task {left[0]} of {one.num_tasks} failed or was lost, {len(left)} in all"
        log = f"{one.folder}/logs/task_{left[0]:05d}.log"
        raise ChildProcessError(f"{rule}. Fix: see {log}, and {_AGAIN}.")


def ray_executor(one: Pass, execution: Execution) -> Any:
    """datatrove's RayPipelineExecutor for a pass, on the cluster of RAY_ADDRESS or one that Ray starts."""
    from datatrove.executor.ray import RayPipelineExecutor

    return RayPipelineExecutor(
        list(one.pipeline),
        tasks=one.num_tasks,
        workers=execution.workers or -1,
        logging_dir=str(one.folder),
        cpus_per_task=execution.cpus_per_task,
        mem_per_cpu_gb=execution.mem_per_cpu_gb,
    )
