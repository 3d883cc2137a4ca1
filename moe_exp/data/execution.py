"""Runs a datatrove pipeline on an executor; tasks without a file in `completions/` are left to do."""

import glob
import importlib.util
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from moe_exp.host.devices import num_cores

EXECUTORS = ("local", "slurm", "ray")
_REPORT_BYTES = 2**20


@dataclass(frozen=True)
class Execution:
    """Where a conversion runs, and with how many workers. Has no effect on the result."""

    executor: str = "local"  # or slurm or ray
    workers: int | None = None  # default: the cores that this process may use; for SLURM and Ray no limit
    partition: str | None = None  # of the SLURM jobs, as sbatch takes it; likewise the next two
    time_limit: str = "24:00:00"
    qos: str | None = None
    cpus_per_task: int = 1  # of a SLURM job or Ray task
    mem_per_cpu_gb: int = 4
    max_array_size: int = 1001  # the SLURM cluster's MaxArraySize: more tasks become more job arrays
    sbatch: tuple[str, ...] = ()  # other options of sbatch, `account=x`
    finish_command: tuple[str, ...] = ()  # of the last SLURM job: the same command with --finish

    def __post_init__(self) -> None:
        rule, fix = "", ""
        if self.executor not in EXECUTORS:
            rule, fix = f"executor={self.executor}: must be one of {', '.join(EXECUTORS)}", "choose one"
        elif self.workers is not None and self.workers < 1:
            rule = f"workers={self.workers}: must be at least 1"
            fix = "omit it, or give a number of processes"
        elif self.executor == "slurm" and not self.partition:
            rule = "partition=: executor=slurm needs the partition of the jobs"
            fix = "give --partition; `sinfo` lists them"
        # compute nodes may lack it
        elif self.executor == "slurm" and not shutil.which("sbatch") and "SLURM_JOB_ID" not in os.environ:
            rule = "executor=slurm: there is no command sbatch here"
            fix = "call it on a login node of the cluster"
        elif self.executor == "ray" and importlib.util.find_spec("ray") is None:
            rule, fix = "executor=ray: the package ray is not installed", "pip install ray"
        elif wrong := next((option for option in self.sbatch if "=" not in option), ""):
            rule, fix = f"sbatch={wrong}: must be NAME=VALUE, as in account=x", "write it so"
        if rule:
            raise ValueError(f"{rule}. Fix: {fix}.")


@dataclass(frozen=True)
class Pass:
    """One pipeline over all tasks; its steps are those of `moe_exp.data.convert.steps`."""

    pipeline: Sequence[Any]
    num_tasks: int
    folder: Path

    def left(self) -> list[int]:
        done = self.folder / "completions"
        return [task for task in range(self.num_tasks) if not (done / f"{task:05d}").is_file()]


def task_stats(name: str) -> Any:
    """datatrove's statistics of a step."""
    from datatrove.utils.stats import Stats

    return Stats(name)


@dataclass
class Step:
    """A pass as datatrove runs it: `run` takes a task, and returns how many units it did."""

    name: str
    unit: str
    run: Callable[[int], int]
    stats: Any = None

    def __call__(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        self.stats = task_stats(self.name)
        self.stats[self.unit].update(self.run(rank))


@dataclass
class After:
    """First step of a pipeline that reads what another one has written, of which all tasks must be complete.

    SLURM begins it when the last of several job arrays has succeeded, which says nothing about the others.
    """

    before: Pass
    stats: Any = None

    def __call__(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        self.stats = task_stats("⏳ - AFTER")
        if left := self.before.left():
            log = f"{self.before.folder}/logs/task_{left[0]:05d}.log"
            rule = f"task {left[0]} of the pass before is not complete, {len(left)} in all"
            raise ValueError(f"{rule}. Fix: see {log}, and call the same command again.")


def in_turn(passes: Sequence[Pass]) -> list[Pass]:
    """The passes, each of which checks that the one before it is complete."""
    # pickled with each task of the next pass: without its own pipeline
    after = [
        replace(one, pipeline=[After(replace(before, pipeline=())), *one.pipeline])
        for before, one in pairwise(passes)
    ]
    return [passes[0], *after]


def num_workers(execution: Execution) -> int:
    return execution.workers or num_cores()


class Through:
    """Bytes that a task is through with, in a file of 8 bytes that others read with `bytes_through`; `folder`
    is that of all tasks, "" for none.
    """

    def __init__(self, folder: str, rank: int):
        self._file = None
        self._ended = self._bytes = self._reported = 0.0
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
            self._file = os.open(Path(folder, f"{rank:05d}"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)

    def advance(self, num_bytes: float) -> None:
        """Adds bytes of the file that is being read."""
        self._bytes += num_bytes
        if self._bytes - self._reported > _REPORT_BYTES:
            self._write()

    def end_file(self, num_bytes: int) -> None:
        """Replaces what was added for a file by its size."""
        self._ended += num_bytes
        self._bytes = self._ended
        self._write()

    def _write(self) -> None:
        # 8 bytes in one call: a reader never sees a part of them
        self._reported = self._bytes
        if self._file is not None:
            os.pwrite(self._file, int(self._bytes).to_bytes(8, "little"), 0)

    def __del__(self) -> None:
        if self._file is not None:
            os.close(self._file)


def bytes_through(folders: Iterable[Path]) -> int:
    """Sum of what the tasks of `Through` with these folders are through with."""
    return sum(int.from_bytes(path.read_bytes(), "little") for folder in folders for path in folder.glob("*"))


@contextmanager
def complete_files(paths: Sequence[Path], *, is_durable: bool = True) -> Iterator[list[Path]]:
    """Yields other names to write files under, which get their own when the block is done.

    With `is_durable` that is when the disk has them: not needed where a check finds what a power cut lost.
    """
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        # of a process that was killed
        for old in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
            old.unlink(missing_ok=True)
    # new each time: should a killed task's process still run somewhere, the two do not write one file
    temporary = [path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp") for path in paths]
    yield temporary
    for path, written in zip(paths, temporary, strict=True):
        if is_durable:
            with written.open("rb") as file:
                os.fsync(file.fileno())
        written.replace(path)
