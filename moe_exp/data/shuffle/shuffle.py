"""Shuffles the documents of all inputs into shards and a validation file, within a memory budget.

The output bytes depend only on the seed, the inputs and their order, not on memory, number of tasks, machine
or interruptions. Shards are ranges of the shuffled order and differ in size by at most one document.
Documents are held out for validation if their hash is below the requested fraction. The hash depends only on
text and seed, so documents with the same text stay together. If no hash is below the fraction, the text with
the smallest hash is held out. Lines are written with LF line endings and without a BOM.

    <name>.chunk.00.jsonl ... <name>.chunk.31.jsonl   <name>.val.jsonl   manifest.json

Tasks of datatrove's executors run three passes: index, scatter (scatter.py) and write (write.py). A single
task runs the first two passes as one. At its peak, a shuffle needs disk space for inputs, scattered lines
and outputs.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from shutil import rmtree
from typing import Any, NamedTuple

from moe_exp.data.documents import TALLIED, Tally, check_apart, estimate_line_bytes, find_inputs
from moe_exp.data.execution import Execution, bytes_through, num_workers
from moe_exp.data.jobs import check_no_jobs, run_stage_passes
from moe_exp.data.kinds import FILES, TextRule, input_error, total_bytes
from moe_exp.data.shuffle import scatter
from moe_exp.data.shuffle.blocks import cut_inputs
from moe_exp.data.shuffle.write import write
from moe_exp.data.stage import MAKE_AGAIN, CorpusStage, check_free_disk, run_stage
from moe_exp.host.devices import available_memory_bytes
from moe_exp.host.files import bytes_text, read_json, write_json
from moe_exp.host.progress import progress_of

TASKS = "tasks.json"  # in the working folder
SMALLEST_MEMORY_BYTES = 16 * 2**20
DEFAULT_VALID_FRACTION = 0.005
_DISK_RATIO = 2.1  # scattered lines, outputs, a few percent for records and index
_FIXED_BYTES = 2**22  # small objects and allocator overhead, independent of the budget
_BYTES_PER_SECOND = 120e6  # one core of 2023, with a fast enough disk
_LAST_PASS = "written"
_BYTES_PER_WORKER = 2**29  # two seconds of work; a process takes 0.6 s to start
_MEMORY_SHARE = 0.75  # of the memory of a SLURM job or Ray task


class Memory(NamedTuple):
    """A divided memory budget. `longest_bytes` limits the read buffer and the length of a line; parsing
    takes six times that length. `piece_bytes` limits the total size of the documents sorted at once.
    The budget does not include the interpreter (about 45 MB).
    """

    longest_bytes: int
    piece_bytes: int

    @classmethod
    def of(cls, budget_bytes: int) -> "Memory":
        """Divides a budget in the default way; raises ValueError if it is too small."""
        if budget_bytes < SMALLEST_MEMORY_BYTES:
            given = f"memory={budget_bytes / 2**20:g}MB"
            raise input_error(given, "must be at least 16 MB", "set 256MB or more")
        return cls(budget_bytes // 8, (budget_bytes - _FIXED_BYTES) * 3 // 4)


def shuffle_documents(
    inputs: Sequence[Path], output: Path, *, name: str, tasks: int | None = None,
    execution: Execution | None = None, seed: int = 0, num_shards: int = 32,
    valid_fraction: float = DEFAULT_VALID_FRACTION, memory_bytes: int | None = None, text_field: str = "text",
    skip_bad: bool = False, start_over: bool = False, rule: TextRule = FILES,
) -> dict[str, Any] | None:  # fmt: skip
    """Shuffles documents into shards and a validation file, and returns the manifest.

    To resume an interrupted shuffle, repeat the call: only unfinished tasks run. `memory_bytes` may differ.

    Args:
        inputs: files of a kind listed in `moe_exp.data.kinds`, or folders of such files. The result depends
            on their order.
        name: prefix of the output file names.
        tasks: number of tasks in each pass; the last pass has at most one task per output file. A resumed
            shuffle requires the same number. Default: the number of local workers of `execution`, or 1 (in
            this process).
        execution: where the tasks run (default: this machine).
        seed: random seed that determines the order and the validation documents.
        num_shards: number of training files; some are empty if there are fewer documents than files.
        valid_fraction: fraction of distinct texts held out for validation (at least one text).
        memory_bytes: memory budget of each task. Default: on this machine (or container), the tasks share a
            quarter of the free memory; on a cluster, a task gets most of its job's memory.
        skip_bad: whether to skip and count invalid lines; otherwise, the first invalid line raises an error.
        start_over: see `run_stage`.

    Returns:
        The manifest, or None while SLURM jobs are running. After the jobs end, repeat the call to publish the
        files.

    Raises:
        ValueError: if a setting or an input is invalid, there is too little free space, no document is left
            for training, or the number of tasks has changed; see also `run_stage` and `LineBlocks`.
        BadDocument: if a line is invalid, or a compressed file is damaged.
        ChildProcessError: if a task's process died.
    """
    execution = execution or Execution()
    is_local = execution.executor == "local"
    if tasks is None:
        tasks = execution.workers or 1 if is_local else 1
    if tasks < 1:
        raise input_error(f"tasks={tasks}", "must be at least 1", "set the number of cores")
    sizes = {"num_shards": num_shards, "valid_fraction": valid_fraction, "memory_bytes": memory_bytes}
    inputs = check_shuffle(inputs, output, text_field=text_field, name=name, **sizes)
    if is_local and not execution.workers:
        worth = 1 + total_bytes(inputs) // _BYTES_PER_WORKER
        # For small inputs, starting processes would take longer than the work.
        execution = replace(execution, workers=min(worth, num_workers(execution)))
    memory = Memory.of(memory_bytes or _default_memory(execution, tasks))
    if start_over or is_local:
        check_no_jobs(output.with_name(f"{output.name}.partial") / "datatrove" / _LAST_PASS)
    settings: dict[str, Any] = {"name": name, "seed": seed, "num_shards": num_shards}
    settings |= {"valid_fraction": valid_fraction, "text_field": text_field, "skip_bad": skip_bad}
    settings |= rule.facts()
    with run_stage("shuffle", output, settings=settings, inputs=inputs, start_over=start_over) as stage:
        if stage.manifest is None:
            job = _begin(stage, settings, rule, inputs, tasks, memory, is_alone=is_local and tasks == 1)
            needed_bytes = int(_DISK_RATIO * estimate_line_bytes(inputs))
            needed_bytes -= sum(path.stat().st_size for path in stage.folder.rglob("*") if path.is_file())
            check_free_disk(stage.folder, needed_bytes, "the shuffle")
            num_writing = min(tasks, num_shards + 1)
            if not _run(job, execution, stage, num_writing):
                return None
            _publish(job, stage, num_writing)
        # Only after publishing, so that a crash loses nothing.
        rmtree(stage.output / scatter.TEMPORARY, ignore_errors=True)
        (stage.output / TASKS).unlink(missing_ok=True)
        return stage.manifest


def _default_memory(execution: Execution, tasks: int) -> int:
    """Memory budget of a task: a share of this machine's free memory, or of the cluster job's memory."""
    if execution.executor == "local":
        all_bytes = available_memory_bytes() // 4
        return max(SMALLEST_MEMORY_BYTES, all_bytes // min(tasks, num_workers(execution)))
    return int(_MEMORY_SHARE * execution.mem_per_cpu_gb * execution.cpus_per_task * 2**30)


def _begin(
    stage: CorpusStage, settings: dict[str, Any], rule: TextRule, inputs: Sequence[Path], tasks: int,
    memory: Memory, *, is_alone: bool,
) -> scatter.TaskShuffle:  # fmt: skip
    """Creates the shuffle. A resumed shuffle keeps its tasks and buckets, regardless of the memory budget."""
    path, most = stage.folder / TASKS, scatter.most_buckets(memory.longest_bytes)
    if (stage.folder / "state.json").exists():
        what = f"{stage.output} was started by an earlier version of moe_exp and cannot be resumed"
        raise input_error(f"tasks={tasks}", what, "add --start-over")
    # Earlier versions did not store most_buckets.
    begun: dict[str, Any] = {"most_buckets": most}
    begun |= read_json(path, fix=MAKE_AGAIN) if path.exists() else {"tasks": tasks}
    if begun["tasks"] != tasks:
        fix = f"set --tasks {begun['tasks']} (in prepare: --shuffle-tasks), or add --start-over"
        must = f"must be {begun['tasks']}, because {stage.output} was started with {begun['tasks']} tasks"
        raise input_error(f"tasks={tasks}", must, fix)
    # Not from this call's budget: the scattered files of the first call were sorted by these buckets.
    begun.setdefault("bucket_bytes", memory.piece_bytes)
    limits = *memory, begun["bucket_bytes"], begun["most_buckets"], begun.get("num_buckets")
    job = scatter.TaskShuffle(stage.folder, settings, rule, inputs[0], cut_inputs(inputs, tasks), *limits)
    if not path.exists():
        if is_alone:
            # An estimate: a single task does not count the documents before it scatters them.
            numbers = job.buckets_for(estimate_line_bytes(inputs), settings["valid_fraction"])
            begun["num_buckets"], job = numbers, replace(job, num_buckets=numbers)
        write_json(path, begun)
    return job


def _run(job: scatter.TaskShuffle, execution: Execution, stage: CorpusStage, num_writing: int) -> bool:
    """Runs all tasks and returns whether they are complete."""
    # A single task runs in this process, without datatrove.
    if execution.executor == "local" and job.num_buckets:
        steps: dict[str, Callable[[], int]] = {"indexed": partial(scatter.index_and_scatter, job)}
        steps["written"] = partial(write, job, 1, 0)
        through = [job.temporary / folder / "through" for folder in steps]
        total = len(steps) * sum(one.num_bytes for one in job.slices[0])
        with progress_of(lambda: bytes_through(through), f"shuffle {job.settings['name']}", total):
            for folder, step in steps.items():
                # An interrupted call may have completed it.
                if not job.place(folder, 0).exists():
                    step()
        return True
    tasks = job.num_tasks
    passes = {
        "indexed": ("🔢 - SHUFFLE: index", "documents", partial(scatter.index, job), tasks),
        "scattered": ("🪣 - SHUFFLE: scatter", "documents", partial(scatter.scatter, job), tasks),
        _LAST_PASS: ("💾 - SHUFFLE: write", "documents", partial(write, job, num_writing), num_writing),
    }
    return run_stage_passes(passes, execution, stage, "shuffle", job.temporary)


def _publish(job: scatter.TaskShuffle, stage: CorpusStage, num_writing: int) -> None:
    """Publishes the validation file and the shards."""
    indexed, made = scatter.Indexed(job), dict[str, dict[str, Any]]()  # made: by file name, validation first
    for task in range(num_writing):
        made |= read_json(job.place("written", task), fix=MAKE_AGAIN)
    for name, facts in made.items():
        scatter.check_size(stage.folder / name, facts["bytes"])
    if sum(int(facts["line_hash"], 16) for facts in made.values()) % 2**128 != indexed.line_hash:
        rule = "the lines read back differ from the inputs; the disk or another program has changed the files"
        raise ValueError(f"{stage.folder}: {rule}. Fix: add --start-over.")
    read, valid = indexed.read, indexed.valid.total()
    num_train, num_text_bytes, text_hash = (getattr(read, name) - getattr(valid, name) for name in TALLIED)
    train = Tally(num_train, num_text_bytes, text_hash % 2**128)
    stage.finish(
        [stage.folder / name for name in made],
        hashes={stage.folder / name: facts["hash"] for name, facts in made.items()}, read=read.to_json(),
        train=train.to_json(), valid=valid.to_json(), line_hash=f"{indexed.line_hash:032x}",
        valid_file=next(iter(made)),
        num_documents={name: facts["num_documents"] for name, facts in made.items()},
    )  # fmt: skip


def estimate_shuffle(inputs: Sequence[Path], memory_bytes: int | None = None) -> dict[str, int]:
    """Estimates a shuffle's sizes, buckets and seconds. `line_bytes` is the size of decompressed inputs."""
    memory_bytes = memory_bytes or _default_memory(Execution(), 1)
    piece_bytes = Memory.of(memory_bytes).piece_bytes
    line_bytes = estimate_line_bytes(inputs)
    return {
        "input_bytes": total_bytes(inputs),
        "line_bytes": line_bytes,
        "memory_bytes": memory_bytes,
        "num_buckets": max(1, math.ceil(line_bytes / (scatter.BUCKET_FILL * piece_bytes))),
        "disk_bytes": int(_DISK_RATIO * line_bytes),
        "seconds": math.ceil(line_bytes / _BYTES_PER_SECOND),
    }


def check_shuffle(inputs: Iterable[Path], output: Path, *, text_field: str, **settings: Any) -> list[Path]:
    """Checks a shuffle's arguments and returns its input files. For `settings`, see `check_settings`."""
    files = find_inputs(inputs, text_field=text_field)
    check_settings(**settings)
    check_apart(files, output)
    return files


def check_settings(
    *, name: str, num_shards: int = 32, valid_fraction: float = DEFAULT_VALID_FRACTION,
    memory_bytes: int | None = None,
) -> None:  # fmt: skip
    """Checks the arguments of `shuffle_documents` that do not depend on the inputs."""
    if memory_bytes is not None:
        Memory.of(memory_bytes)
    if not name or Path(name).name != name:
        raise input_error(f"name={name}", "must be a file name without folders", "set another name")
    if num_shards < 1:
        raise input_error(f"num_shards={num_shards}", "must be at least 1", "set 32")
    if not 0 < valid_fraction < 1:
        fix = f"set {DEFAULT_VALID_FRACTION}"
        raise input_error(f"valid_fraction={valid_fraction}", "must be between 0 and 1", fix)


def shuffle_summary(manifest: Mapping[str, Any]) -> dict[str, object]:
    train, valid = manifest["train"], manifest["valid"]
    rows: dict[str, object] = {"training documents": train["num_documents"]}
    rows |= {"validation documents": valid["num_documents"]}
    rows |= {f"skipped: {reason}": count for reason, count in manifest["read"]["skipped"].items()}
    rows |= {"training text": bytes_text(train["num_text_bytes"])}
    rows |= {"validation text": bytes_text(valid["num_text_bytes"])}
    return rows | {"shards": len(manifest["outputs"]) - 1, "seconds": manifest["seconds"]}
