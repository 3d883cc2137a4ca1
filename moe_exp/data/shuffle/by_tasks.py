"""A shuffle by many tasks of datatrove's executors: the bytes that one process makes, on as many machines as
there are.

Three passes: index, scatter (scatter.py) and write. In the last, each task makes some of the output files: it
reads their range of the order bucket by bucket, and reads back what it has written. A pass begins when the
one before is done, a task that was killed begins anew, one that is done is not run again. On the disk are at
most the inputs, the scattered lines and the outputs.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from shutil import rmtree
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moe_exp.data.documents import estimate_line_bytes, find_inputs
from moe_exp.data.kinds import FILES, TextRule
from moe_exp.data.shuffle.line_buffer import LineBuffer
from moe_exp.data.shuffle.outputs import Shard, check_split, finish, output_paths, stage_settings
from moe_exp.data.shuffle.scatter import (
    TEMPORARY,
    IndexDocuments,
    Indexed,
    Placed,
    ScatterDocuments,
    Scattered,
    TaskShuffle,
    check_size,
    most_buckets,
)
from moe_exp.data.shuffle.shuffle import (
    DEFAULT_VALID_FRACTION,
    TASKS,
    Memory,
    check_shuffle,
    checked_memory,
    shuffle,
)
from moe_exp.data.shuffle.slices import cut_inputs
from moe_exp.data.stage import MAKE_AGAIN, Stage, check_free_disk, run_stage
from moe_exp.data.tasks.execution import (
    Execution,
    Pass,
    Through,
    complete_files,
    num_workers,
    task_stats,
)
from moe_exp.data.tasks.jobs import run_stage_passes
from moe_exp.data.tasks.slurm_jobs import check_no_jobs
from moe_exp.host.files import read_json, write_json
from moe_exp.host.memory import available_memory_bytes

logger = logging.getLogger(__name__)

_PASSES = ("indexed", "scattered", "written")
_BYTES_PER_WORKER = 2**29  # two seconds of work, a process takes 0.6 s to start
_MEMORY_SHARE = 0.75  # of what a SLURM job or Ray task has


def shuffle_documents(
    inputs: Sequence[Path],
    output: Path,
    *,
    tasks: int | None = None,
    execution: Execution | None = None,
    **options: Any,
) -> dict[str, Any] | None:
    """Shuffles by this process, or if there are tasks or workers for more, by `shuffle_by_tasks`."""
    execution = execution or Execution()
    if tasks is None:
        tasks = execution.workers or 1 if execution.executor == "local" else 1
    if tasks == 1 and execution.executor == "local":
        _check_no_jobs(output)
        manifest = shuffle(inputs, output, **options)
        _clean(output)  # of tasks that were killed at their very end
        return manifest
    return shuffle_by_tasks(inputs, output, tasks=tasks, execution=execution, **options)


def _check_no_jobs(output: Path) -> None:
    check_no_jobs(output.with_name(f"{output.name}.partial") / "datatrove" / _PASSES[-1])


def disk_bytes(inputs: Sequence[Path]) -> int:
    """About what a shuffle by tasks needs: lines, their records and index (a few percent), outputs."""
    return int(2.1 * estimate_line_bytes(find_inputs(inputs)))


def shuffle_by_tasks(
    inputs: Sequence[Path],
    output: Path,
    *,
    name: str,
    tasks: int,
    execution: Execution | None = None,
    seed: int = 0,
    num_shards: int = 32,
    valid_fraction: float = DEFAULT_VALID_FRACTION,
    memory_bytes: int | None = None,
    text_field: str = "text",
    skip_bad: bool = False,
    start_over: bool = False,
    rule: TextRule = FILES,
) -> dict[str, Any] | None:
    """Shuffles as `shuffle` does, to the same bytes, and returns its manifest.

    Args:
        tasks: that read; those that write are as many, but at most one per output file. A call that resumes
            needs the same number.
        execution: where the tasks run; default: this machine.
        memory_bytes: budget of each task.
        inputs, output, name, seed, num_shards, valid_fraction, text_field, skip_bad, start_over, rule: as of
            `shuffle`.

    Returns:
        The manifest; None while SLURM jobs are under way. Call again to see how far they are, and to publish
        what they have made.

    Raises:
        ValueError: as of `shuffle`; `tasks` or the output was begun in another way.
        ChildProcessError: a task's process died.
    """
    if tasks < 1:
        raise ValueError(f"tasks={tasks}: must be at least 1. Fix: give the number of cores.")
    sizes = {"num_shards": num_shards, "valid_fraction": valid_fraction, "memory_bytes": memory_bytes}
    inputs = check_shuffle(inputs, output, text_field=text_field, name=name, **sizes)
    execution = _worth_starting(execution or Execution(), inputs)
    memory = Memory.of(checked_memory(memory_bytes or _default_memory(execution, tasks)))
    if start_over or execution.executor != "slurm":
        _check_no_jobs(output)
    settings = stage_settings(name, seed, num_shards, valid_fraction, text_field, skip_bad, rule)
    with run_stage("shuffle", output, settings=settings, inputs=inputs, start_over=start_over) as stage:
        if stage.was_done:
            _clean(stage.output)
            return stage.manifest or {}
        begun = _begin(stage, tasks, memory)
        slices, buffers = cut_inputs(inputs, tasks), (memory.longest_bytes, memory.piece_bytes)
        limits = begun["bucket_bytes"], begun["most_buckets"]
        job = TaskShuffle(stage.folder, settings, rule, inputs[0], slices, *buffers, *limits)
        num_writing = min(tasks, num_shards + 1)
        steps = [IndexDocuments(job), ScatterDocuments(job), WriteShards(job, num_writing)]
        passes = [
            Pass([step], num, stage.folder / "datatrove" / folder)
            for step, num, folder in zip(steps, (tasks, tasks, num_writing), _PASSES, strict=True)
        ]
        needed_bytes = disk_bytes(inputs) - _bytes_below(stage.folder)
        check_free_disk(stage.folder, needed_bytes, "the shuffle by tasks")
        through = [job.temporary / folder / "through" for folder in _PASSES]
        if not run_stage_passes(passes, execution, stage, "shuffle", through):
            return None
        manifest = _publish(job, stage, num_writing)
        _clean(stage.output)
        return manifest


def _worth_starting(execution: Execution, inputs: Sequence[Path]) -> Execution:
    """Where the number of processes is not given: at most one per `_BYTES_PER_WORKER`."""
    if execution.executor != "local" or execution.workers:
        return execution
    worth = 1 + sum(path.stat().st_size for path in inputs) // _BYTES_PER_WORKER
    return replace(execution, workers=min(worth, num_workers(execution)))


def _default_memory(execution: Execution, tasks: int) -> int:
    """Budget of a task: a quarter of what this machine has left for all, or most of what its job has."""
    if execution.executor == "local":
        return available_memory_bytes() // 4 // min(tasks, num_workers(execution))
    return int(_MEMORY_SHARE * execution.mem_per_cpu_gb * execution.cpus_per_task * 2**30)


def _begin(stage: Stage, tasks: int, memory: Memory) -> dict[str, int]:
    """Number of tasks, size and number of buckets, which a call that resumes keeps, whatever its memory."""
    path, most = stage.folder / TASKS, most_buckets(memory.longest_bytes)
    if (stage.folder / "state.json").exists():
        rule, fix = "was begun by one process", "leave --tasks (in prepare: --shuffle-tasks) away"
        raise ValueError(f"tasks={tasks}: {stage.output} {rule}. Fix: {fix}, or give --start-over.")
    if not path.exists():
        write_json(path, {"tasks": tasks, "bucket_bytes": memory.piece_bytes, "most_buckets": most})
    # without most_buckets: begun by an earlier version
    begun: dict[str, int] = {"most_buckets": most} | read_json(path, fix=MAKE_AGAIN)
    if begun["tasks"] != tasks:
        rule = f"{stage.output} was begun by {begun['tasks']} tasks"
        fix = f"give --tasks {begun['tasks']} (in prepare: --shuffle-tasks), or --start-over"
        raise ValueError(f"tasks={tasks}: {rule}. Fix: {fix}.")
    return begun


def _bytes_below(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _publish(job: TaskShuffle, stage: Stage, num_writing: int) -> dict[str, Any]:
    indexed, shards = Indexed(job), list[Shard]()
    for task in range(num_writing):
        for name, facts in read_json(job.place("written", task), fix=MAKE_AGAIN).items():
            path = stage.folder / name
            check_size(path, facts["bytes"])
            shards.append(Shard(path, facts["num_documents"], facts["hash"], int(facts["line_hash"], 16)))
    return finish(stage, shards, indexed.read, indexed.valid.total(), indexed.line_hash)


def _clean(output: Path) -> None:
    """Removes what was needed until the output was published, so that a crash before that loses nothing."""
    rmtree(output / TEMPORARY, ignore_errors=True)
    (output / TASKS).unlink(missing_ok=True)


class _Output(NamedTuple):
    """An output file and the ranks of its first document and of the one after its last."""

    path: Path
    first: int
    end: int
    is_valid: bool


@dataclass
class WriteShards:
    """Last pass: makes a range of the output files; the validation file is the first of all.

    Args:
        job: the shuffle, all of whose documents are scattered.
        num_tasks: of this pass.
    """

    job: TaskShuffle
    num_tasks: int
    stats: Any = None

    def __call__(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        self.stats = task_stats("💾 - SHUFFLE: write")
        scattered = Scattered(self.job)
        outputs = self._outputs(scattered)
        bounds = (task * len(outputs) // self.num_tasks for task in (rank, rank + 1))
        outputs = outputs[slice(*bounds)]
        with complete_files([one.path for one in outputs]) as paths:
            for path in paths:
                path.touch()
            writer = _Writer(scattered, self.job, self.job.through("written", rank))
            under_way = [one._replace(path=path) for one, path in zip(outputs, paths, strict=True)]
            for is_valid in (True, False):
                writer.write([one for one in under_way if one.is_valid == is_valid])
            made = [_facts(one, Shard.read_back(one.path, one.end - one.first)) for one in under_way]
        self.stats["documents"].update(sum(one.end - one.first for one in outputs))
        names = [one.path.name for one in outputs]
        write_json(self.job.place("written", rank), dict(zip(names, made, strict=True)))

    def _outputs(self, scattered: Scattered) -> list[_Output]:
        settings, read, valid = self.job.settings, scattered.indexed.read, scattered.indexed.valid.total()
        check_split(self.job.first_input, settings, read, valid)
        num_train, num_shards = read.num_documents - valid.num_documents, settings["num_shards"]
        starts = [shard * num_train // num_shards for shard in range(num_shards + 1)]
        valid_path, *paths = output_paths(self.job.folder, settings["name"], num_shards)
        shards = zip(paths, pairwise(starts), strict=True)
        outputs = [_Output(valid_path, 0, valid.num_documents, is_valid=True)]
        return outputs + [_Output(path, first, end, is_valid=False) for path, (first, end) in shards]


def _facts(output: _Output, shard: Shard) -> dict[str, Any]:
    facts = {"num_documents": shard.num_documents, "bytes": output.path.stat().st_size}
    return facts | {"hash": shard.hash, "line_hash": f"{shard.line_hash:032x}"}


class _Writer:
    """Writes files, each of which is a range of the order."""

    def __init__(self, scattered: Scattered, job: TaskShuffle, through: Through):
        self.scattered, self.job, self.through = scattered, job, through
        self.lines = LineBuffer()
        self.input_bytes = sum(one.num_bytes for slices in job.slices for one in slices)

    def write(self, outputs: Sequence[_Output]) -> None:
        """Writes files that follow one another in the order."""
        if not outputs:
            return
        first, end, is_valid = outputs[0].first, outputs[-1].end, outputs[0].is_valid
        rank = 0
        for bucket in self.scattered.buckets(is_valid=is_valid):
            count, _ = self.scattered.sizes[bucket]
            if first < rank + count and rank < end:
                self._write_bucket(bucket, rank, outputs)
            rank += count

    def _write_bucket(self, bucket: int, rank: int, outputs: Sequence[_Output]) -> None:
        """Writes the documents of a bucket, whose first has the rank, that belong to the outputs."""
        first, end = outputs[0].first, outputs[-1].end
        for low, after in self.scattered.parts(bucket, self.job.piece_bytes):
            placed = self.scattered.documents(bucket, low, after)
            order = np.argsort(placed.records["key"])[max(0, first - rank) : max(0, end - rank)]
            if len(order):
                chosen = np.sort(order)
                of_chosen = np.searchsorted(chosen, order)
                self._write_piece(placed.take(chosen), of_chosen, max(first, rank), outputs)
            rank += len(placed.records)

    def _write_piece(
        self, placed: Placed, order: NDArray[np.int64], rank: int, outputs: Sequence[_Output]
    ) -> None:
        """Reads lines, which are as they are in the files, and writes them in `order`.

        Args:
            placed: the documents.
            order: of them.
            rank: of the first one in the order of all.
            outputs: of which a part begins or ends here, or lies around it.
        """
        ends = np.cumsum(placed.records["num_bytes"].astype(np.int64))
        begins = ends - placed.records["num_bytes"].astype(np.int64)
        self.lines.allocate(int(ends[-1]))
        of_tasks = np.searchsorted(placed.tasks, np.arange(self.job.num_tasks + 1)).tolist()
        for task, (low, high) in enumerate(pairwise(of_tasks)):
            if low < high:  # neighbours in a file are read with one call
                path = self.job.place("scattered", task, ".lines")
                self.lines.read(path, placed.places[low:high], begins[low:high], ends[low:high])
        for one in outputs:
            some = order[max(0, one.first - rank) : max(0, one.end - rank)]
            if len(some):
                self.lines.append_to(one.path, begins, ends, some)
        self.through.advance(int(ends[-1]) * self.input_bytes / self.scattered.indexed.num_bytes)
