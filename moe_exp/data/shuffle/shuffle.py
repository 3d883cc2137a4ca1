"""Global shuffle: JSONL files -> shards in random order and a validation file, within a memory budget.

The order depends on the seed and on each document's place in the inputs, in their order, and on nothing else:
the same bytes for every memory budget, by one process or by many tasks, on every machine, after any
interruption. Shards are ranges of that order; they differ by one document at most. A document is for
validation if a hash of seed and text is under the wanted fraction, or, if that holds for none, smallest:
duplicates stay together, and there is always one. Lines are written as they were read, without BOM and CR,
each with an LF.

    <name>.chunk.00.jsonl ... <name>.chunk.31.jsonl   <name>.val.jsonl   manifest.json

Three passes: index, scatter (scatter.py) and write (write.py), by tasks of datatrove's executors; one process
is one task, which does the first two at once. The disk holds at most inputs, scattered lines and outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from shutil import rmtree
from typing import Any, NamedTuple

from moe_exp.data.documents import Tally, check_apart, estimate_line_bytes, find_inputs
from moe_exp.data.execution import Execution, Step, bytes_through, num_workers
from moe_exp.data.jobs import check_no_jobs, run_stage_passes
from moe_exp.data.kinds import FILES, TextRule, total_bytes
from moe_exp.data.shuffle.blocks import cut_inputs
from moe_exp.data.shuffle.scatter import (
    BUCKET_FILL,
    TEMPORARY,
    Indexed,
    TaskShuffle,
    check_size,
    index,
    index_and_scatter,
    most_buckets,
    scatter,
)
from moe_exp.data.shuffle.write import write
from moe_exp.data.stage import MAKE_AGAIN, CorpusStage, check_free_disk, run_stage
from moe_exp.host.devices import available_memory_bytes
from moe_exp.host.files import bytes_text, read_json, write_json
from moe_exp.host.progress import progress_of

TASKS = "tasks.json"  # in the working folder
SMALLEST_MEMORY_BYTES = 16 * 2**20
DEFAULT_VALID_FRACTION = 0.005
_FIXED_BYTES = 2**22  # of small objects, and of what the allocator keeps: the same for every budget
_BYTES_PER_SECOND = 120e6  # one core of 2023, a disk that keeps up
_PASSES = ("indexed", "scattered", "written")
_BYTES_PER_WORKER = 2**29  # two seconds of work, a process takes 0.6 s to start
_MEMORY_SHARE = 0.75  # of what a SLURM job or Ray task has


class Memory(NamedTuple):
    """Division of a budget: `longest_bytes` of a line, and of the buffer that inputs are read into (parsing
    takes six times that), `piece_bytes` of the documents that are put in order at once. The interpreter and
    its packages (about 45 MB) come on top.
    """

    budget_bytes: int
    longest_bytes: int
    piece_bytes: int

    @classmethod
    def of(cls, budget_bytes: int) -> Memory:
        """The usual division; ValueError if the budget is too small."""
        if budget_bytes < SMALLEST_MEMORY_BYTES:
            size = f"{budget_bytes / 2**20:g}MB"
            raise ValueError(f"memory={size}: must be at least 16 MB. Fix: give 256MB or more.")
        return cls(budget_bytes, budget_bytes // 8, (budget_bytes - _FIXED_BYTES) * 3 // 4)


def shuffle(inputs: Sequence[Path], output: Path, **options: Any) -> dict[str, Any]:
    """Shuffles in this process; arguments, result and errors as of `shuffle_documents`."""
    manifest = shuffle_documents(inputs, output, **options, tasks=1)
    assert manifest is not None  # no SLURM jobs
    return manifest


def shuffle_documents(
    inputs: Sequence[Path],
    output: Path,
    *,
    name: str,
    tasks: int | None = None,
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
    """Shuffles the documents of files into shards and a validation file, and returns the manifest.

    An interrupted call continues with the pass and the tasks where it was when it is made again, with another
    budget too.

    Args:
        inputs: files of the kinds of `moe_exp.data.kinds`, and folders of them. Their order counts.
        output: folder to make.
        name: what the names of the files in it begin with.
        tasks: that read; those that write are as many, but at most one per output file. A call that resumes
            needs the same number. Default: as many as `execution` has workers here, else one, which is this
            process.
        execution: where the tasks run; default: this machine.
        seed: of the order and of the choice of validation documents.
        num_shards: training files. If there are fewer documents, some are empty.
        valid_fraction: of the distinct texts, for validation; at least one.
        memory_bytes: budget of each task; by default they have a quarter of what the machine, or the
            container, has left, or most of what a job has.
        skip_bad: skip and count lines that are no documents instead of stopping at the first.
        start_over: see `run_stage`.
        rule: what a document of a text file is.

    Returns:
        The manifest; None while SLURM jobs are under way: call again to publish what they have made.

    Raises:
        ValueError: a setting or an input cannot be used, too little disk, no document is left for training;
            the output was begun with another number of tasks; see `run_stage`, `LineBlocks`.
        BadDocument: a line is no document, or a compressed file is damaged.
        ChildProcessError: a task's process died.
    """
    execution = execution or Execution()
    is_local = execution.executor == "local"
    if tasks is None:
        tasks = execution.workers or 1 if is_local else 1
    if tasks < 1:
        raise ValueError(f"tasks={tasks}: must be at least 1. Fix: give the number of cores.")
    sizes = {"num_shards": num_shards, "valid_fraction": valid_fraction, "memory_bytes": memory_bytes}
    inputs = check_shuffle(inputs, output, text_field=text_field, name=name, **sizes)
    if is_local and not execution.workers:
        worth = 1 + total_bytes(inputs) // _BYTES_PER_WORKER
        # of small inputs fewer processes are faster
        execution = replace(execution, workers=min(worth, num_workers(execution)))
    memory = Memory.of(memory_bytes or _default_memory(execution, tasks))
    if start_over or is_local:
        check_no_jobs(output.with_name(f"{output.name}.partial") / "datatrove" / _PASSES[-1])
    settings: dict[str, Any] = {"name": name, "seed": seed, "num_shards": num_shards}
    settings |= {"valid_fraction": valid_fraction, "text_field": text_field, "skip_bad": skip_bad}
    settings |= rule.facts()
    with run_stage("shuffle", output, settings=settings, inputs=inputs, start_over=start_over) as stage:
        if stage.was_done:
            _clean(stage.output)
            return stage.manifest or {}
        job = _begin(stage, settings, rule, inputs, tasks, memory, is_alone=is_local and tasks == 1)
        needed_bytes = disk_bytes(inputs)
        needed_bytes -= sum(path.stat().st_size for path in stage.folder.rglob("*") if path.is_file())
        check_free_disk(stage.folder, needed_bytes, "the shuffle")
        num_writing = min(tasks, num_shards + 1)
        if not _run(job, execution, stage, num_writing):
            return None
        manifest = _publish(job, stage, num_writing)
        _clean(stage.output)
        return manifest


def _default_memory(execution: Execution, tasks: int) -> int:
    """Budget of a task: a quarter of what this machine has left for all, or most of what its job has."""
    if execution.executor == "local":
        all_bytes = available_memory_bytes() // 4
        return max(SMALLEST_MEMORY_BYTES, all_bytes // min(tasks, num_workers(execution)))
    return int(_MEMORY_SHARE * execution.mem_per_cpu_gb * execution.cpus_per_task * 2**30)


def _begin(
    stage: CorpusStage,
    settings: dict[str, Any],
    rule: TextRule,
    inputs: Sequence[Path],
    tasks: int,
    memory: Memory,
    *,
    is_alone: bool,
) -> TaskShuffle:
    """The shuffle, with the number of tasks and of buckets that it was begun with, whatever its memory."""
    path, most = stage.folder / TASKS, most_buckets(memory.longest_bytes)
    if (stage.folder / "state.json").exists():
        rule_text = "was begun by one process of an earlier version of moe_exp"
        raise ValueError(f"tasks={tasks}: {stage.output} {rule_text}. Fix: give --start-over.")
    # without most_buckets: begun by an earlier version
    begun: dict[str, Any] = {"most_buckets": most}
    begun |= read_json(path, fix=MAKE_AGAIN) if path.exists() else {"tasks": tasks}
    if begun["tasks"] != tasks:
        rule_text = f"{stage.output} was begun by {begun['tasks']} tasks"
        fix = f"give --tasks {begun['tasks']} (in prepare: --shuffle-tasks), or --start-over"
        raise ValueError(f"tasks={tasks}: {rule_text}. Fix: {fix}.")
    # kept, as the scattered files of the first call were sorted by it
    begun.setdefault("bucket_bytes", memory.piece_bytes)
    cut, limits = cut_inputs(inputs, tasks), (begun["bucket_bytes"], begun["most_buckets"])
    buffers = memory.longest_bytes, memory.piece_bytes
    job = TaskShuffle(
        stage.folder, settings, rule, inputs[0], cut, *buffers, *limits, begun.get("num_buckets")
    )
    if not path.exists():
        if is_alone:
            # by an estimate: documents are not counted before they are scattered
            numbers = job.buckets_for(estimate_line_bytes(inputs), settings["valid_fraction"])
            begun["num_buckets"], job = numbers, replace(job, num_buckets=numbers)
        write_json(path, begun)
    return job


def _run(job: TaskShuffle, execution: Execution, stage: CorpusStage, num_writing: int) -> bool:
    """Runs all tasks; whether they are done."""
    # the only task in this process, which needs no datatrove
    if execution.executor == "local" and job.num_buckets:
        steps: dict[str, Callable[[], int]] = {"indexed": partial(index_and_scatter, job)}
        steps["written"] = partial(write, job, 1, 0)
        through = [job.temporary / folder / "through" for folder in steps]
        total = len(steps) * sum(one.num_bytes for one in job.slices[0])
        with progress_of(lambda: bytes_through(through), f"shuffle {job.settings['name']}", total):
            for folder, step in steps.items():
                # else an earlier call has done it
                if not job.place(folder, 0).exists():
                    step()
        return True
    passes = [
        (Step("🔢 - SHUFFLE: index", "documents", partial(index, job)), job.num_tasks),
        (Step("🪣 - SHUFFLE: scatter", "documents", partial(scatter, job)), job.num_tasks),
        (Step("💾 - SHUFFLE: write", "documents", partial(write, job, num_writing)), num_writing),
    ]
    by_pass = dict(zip(_PASSES, passes, strict=True))
    return run_stage_passes(by_pass, execution, stage, "shuffle", job.temporary)


def _publish(job: TaskShuffle, stage: CorpusStage, num_writing: int) -> dict[str, Any]:
    """Publishes the validation file and the shards, and returns the manifest."""
    indexed, made = Indexed(job), dict[str, dict[str, Any]]()  # made: by name, the validation file first
    for task in range(num_writing):
        made |= read_json(job.place("written", task), fix=MAKE_AGAIN)
    for name, facts in made.items():
        check_size(stage.folder / name, facts["bytes"])
    if sum(int(facts["line_hash"], 16) for facts in made.values()) % 2**128 != indexed.line_hash:
        rule = "the lines that were read back are not those of the input"
        what = "The disk, or another program, has changed it"
        raise ValueError(f"{stage.folder}: {rule}. {what}. Fix: give --start-over.")
    read, valid = indexed.read, indexed.valid.total()
    num_train, num_text_bytes = (
        getattr(read, name) - getattr(valid, name) for name in ("num_documents", "num_text_bytes")
    )
    train = Tally(num_train, num_text_bytes, (read.text_hash - valid.text_hash) % 2**128)
    return stage.finish_folder(
        [stage.folder / name for name in made],
        hashes={stage.folder / name: facts["hash"] for name, facts in made.items()},
        read=read.to_json(),
        train=train.to_json(),
        valid=valid.to_json(),
        line_hash=f"{indexed.line_hash:032x}",
        valid_file=next(iter(made)),
        num_documents={name: facts["num_documents"] for name, facts in made.items()},
    )


def _clean(output: Path) -> None:
    # not before the output is published, so that a crash loses nothing
    rmtree(output / TEMPORARY, ignore_errors=True)
    (output / TASKS).unlink(missing_ok=True)


def disk_bytes(inputs: Sequence[Path]) -> int:
    """About what a shuffle needs: lines, their records and index (a few percent), outputs."""
    return int(2.1 * estimate_line_bytes(find_inputs(inputs)))


def estimate_shuffle(inputs: Sequence[Path], memory_bytes: int | None = None) -> dict[str, int]:
    """input_bytes, line_bytes (decompressed, roughly), memory_bytes, num_buckets, disk_bytes and seconds."""
    memory = Memory.of(memory_bytes or _default_memory(Execution(), 1))
    sizes = {path: path.stat().st_size for path in find_inputs(inputs)}
    line_bytes = estimate_line_bytes(sizes)
    return {
        "input_bytes": sum(sizes.values()),
        "line_bytes": line_bytes,
        "memory_bytes": memory.budget_bytes,
        "num_buckets": max(1, math.ceil(line_bytes / (BUCKET_FILL * memory.piece_bytes))),
        "disk_bytes": disk_bytes(inputs),
        "seconds": math.ceil(line_bytes / _BYTES_PER_SECOND),
    }


def check_shuffle(
    inputs: Iterable[Path], output: Path, *, text_field: str = "text", **settings: Any
) -> list[Path]:
    """Checks the arguments of a shuffle (`settings`: of `check_settings`), and returns its input files."""
    files = find_inputs(inputs, text_field=text_field)
    check_settings(**settings)
    check_apart(files, output)
    return files


def check_settings(
    *,
    name: str,
    num_shards: int = 32,
    valid_fraction: float = DEFAULT_VALID_FRACTION,
    memory_bytes: int | None = None,
) -> None:
    """Checks what can be checked of a shuffle whose inputs are not there yet; arguments as of `shuffle`."""
    if memory_bytes is not None:
        Memory.of(memory_bytes)
    if not name or Path(name).name != name:
        raise ValueError(f"name={name}: must be a file name without folders. Fix: another name.")
    if num_shards < 1:
        raise ValueError(f"num_shards={num_shards}: must be at least 1. Fix: give 32.")
    if not 0 < valid_fraction < 1:
        rule = "must be between 0 and 1"
        raise ValueError(f"valid_fraction={valid_fraction}: {rule}. Fix: give {DEFAULT_VALID_FRACTION}.")


def shuffle_summary(manifest: Mapping[str, Any]) -> dict[str, object]:
    train, valid = manifest["train"], manifest["valid"]
    rows: dict[str, object] = {"training documents": train["num_documents"]}
    rows |= {"validation documents": valid["num_documents"]}
    rows |= {f"skipped: {reason}": count for reason, count in manifest["read"]["skipped"].items()}
    rows |= {"training text": bytes_text(train["num_text_bytes"])}
    rows |= {"validation text": bytes_text(valid["num_text_bytes"])}
    return rows | {"shards": len(manifest["outputs"]) - 1, "seconds": manifest["seconds"]}
