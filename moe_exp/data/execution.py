"""Tools to run datatrove pipelines: executor settings, passes, progress files and atomic outputs."""

import glob
import importlib.util
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from moe_exp.data.kinds import input_error
from moe_exp.host.devices import num_cores

EXECUTORS = ("local", "slurm", "ray")
_REPORT_BYTES = 2**20


@dataclass(frozen=True)
class Execution:
    """Executor and resources of the tasks; these settings do not affect the results."""

    executor: str = "local"  # or slurm or ray
    workers: int | None = None  # default: all cores available to this process; unlimited for SLURM and Ray
    partition: str | None = None  # sbatch option for the SLURM jobs, like the next two
    time_limit: str = "24:00:00"
    qos: str | None = None
    cpus_per_task: int = 1  # for SLURM and Ray
    mem_per_cpu_gb: int = 4
    max_array_size: int = 1001  # the SLURM cluster's MaxArraySize; more tasks are split into several arrays
    sbatch: tuple[str, ...] = ()  # more sbatch options, such as `account=x`
    finish_command: tuple[str, ...] = ()  # run by the last SLURM job: this command with --finish

    def __post_init__(self) -> None:
        given = f"executor={self.executor}"
        if self.executor not in EXECUTORS:
            raise input_error(given, f"must be one of {', '.join(EXECUTORS)}", "choose one")
        if self.workers is not None and self.workers < 1:
            fix = "omit it, or give a positive number of processes"
            raise input_error(f"workers={self.workers}", "must be at least 1", fix)
        if self.executor == "slurm" and not self.partition:
            fix = "set --partition; `sinfo` lists the partitions"
            raise input_error("partition=", "required by executor=slurm", fix)
        # inside a job sbatch is not needed, and compute nodes may lack it
        if self.executor == "slurm" and not shutil.which("sbatch") and "SLURM_JOB_ID" not in os.environ:
            raise input_error(given, "sbatch not found", "run the command on a login node of the cluster")
        if self.executor == "ray" and importlib.util.find_spec("ray") is None:
            raise input_error(given, "requires the package ray", "pip install ray")
        for option in self.sbatch:
            if "=" not in option:
                raise input_error(f"sbatch={option}", "must be NAME=VALUE", "write, for example, account=x")


@dataclass(frozen=True)
class Pass:
    """One datatrove pipeline over all tasks. A task is done when it has a file in `completions/`."""

    pipeline: Sequence[Any]
    num_tasks: int
    folder: Path
    through: Path | None = None  # progress of the tasks (`Through`), if they read the inputs of the stage

    def left(self) -> list[int]:
        done = self.folder / "completions"
        return [task for task in range(self.num_tasks) if not (done / f"{task:05d}").is_file()]


def task_stats(name: str) -> Any:
    """datatrove's statistics object for a step."""
    from datatrove.utils.stats import Stats

    return Stats(name)


@dataclass
class Step:
    """Step of a datatrove pipeline. `run` takes documents, rank and world size; it returns statistics."""

    run: Callable[[Any, int, int], Any]
    stats: Any = None

    def __call__(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        self.stats = self.run(data, rank, world_size)


def count_units(name: str, unit: str, run: Callable[[int], int], data: Any, rank: int, _: int) -> Any:
    """Processes task `rank` with `run`; returns statistics with the number of processed units."""
    stats = task_stats(name)
    stats[unit].update(run(rank))
    return stats


def _check_complete(before: Pass, *_: Any) -> Any:
    if left := before.left():
        log = f"{before.folder}/logs/task_{left[0]:05d}.log"
        rule = f"{len(left)} tasks of the previous pass are not complete (first: task {left[0]})"
        raise ValueError(f"{rule}. Fix: see {log}, and repeat the command.")
    return task_stats("⏳ - AFTER")


def in_turn(passes: Sequence[Pass]) -> list[Pass]:
    """Makes each pass start with a step that checks whether all tasks of the previous pass are complete.

    SLURM needs this: if a pass has several job arrays, the next pass waits only for the last array, and thus
    starts even if an earlier array has failed.
    """
    # the check is pickled with every task: without the pipeline of the pass it refers to
    after = []
    for before, one in pairwise(passes):
        check = Step(partial(_check_complete, replace(before, pipeline=())))
        after.append(replace(one, pipeline=[check, *one.pipeline]))
    return [passes[0], *after]


def num_workers(execution: Execution) -> int:
    return execution.workers or num_cores()


class Through:
    """Publishes a task's progress (bytes) in an 8-byte file in `folder`."""

    def __init__(self, folder: Path, rank: int):
        self._ended = self._bytes = self._reported = 0.0
        folder.mkdir(parents=True, exist_ok=True)
        self._file = os.open(folder / f"{rank:05d}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)

    def advance(self, num_bytes: float) -> None:
        """Counts `num_bytes` more bytes of the current file as read."""
        self._bytes += num_bytes
        if self._bytes - self._reported > _REPORT_BYTES:
            self._write()

    def end_file(self, num_bytes: int) -> None:
        """Ends the current file: from now on, it counts with its full size `num_bytes`."""
        self._ended += num_bytes
        self._bytes = self._ended
        self._write()

    def _write(self) -> None:
        # 8 bytes in one call: a reader never sees a partial number
        self._reported = self._bytes
        os.pwrite(self._file, int(self._bytes).to_bytes(8, "little"), 0)

    def __del__(self) -> None:
        if hasattr(self, "_file"):  # not if the disk is full
            os.close(self._file)


def bytes_through(folders: Iterable[Path]) -> int:
    """Sum of the progress, in bytes, that all tasks have published in these folders (see `Through`)."""
    return sum(int.from_bytes(path.read_bytes(), "little") for folder in folders for path in folder.glob("*"))


@contextmanager
def complete_files(paths: Sequence[Path], *, is_durable: bool = True) -> Iterator[list[Path]]:
    """Yields temporary paths to write to. When the `with` block ends without an error, renames the files to
    `paths`.

    With `is_durable`, flushes each file to disk before renaming it. Flushing is unnecessary if a later
    check would detect lost data.
    """
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        # left over from a killed process
        for old in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
            old.unlink(missing_ok=True)
    # unique names: the process of a task that was given up may still be running, and writing
    temporary = [path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp") for path in paths]
    try:
        yield temporary
        for path, written in zip(paths, temporary, strict=True):
            if is_durable:
                with written.open("rb") as file:
                    os.fsync(file.fileno())
            written.replace(path)
    finally:
        for written in temporary:
            written.unlink(missing_ok=True)
