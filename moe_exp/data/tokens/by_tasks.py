"""Tokenizing by the tasks of datatrove's executors: the bytes that one process makes, on as many machines as
there are.

Two passes: `MakeParts` makes the parts (parts.py), `JoinParts` copies them to their places in the .bin, each
task to a range of blocks, and hashes the blocks. A pass begins when the one before is done, a part that is
done is not made again, a task that was killed while it joined begins anew. Until the files are published the
disk holds the tokens twice.

    part.000012.bin  .lengths  .json        made/00003.json        joined/00003.json
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from shutil import rmtree
from typing import Any, NamedTuple

import xxhash

from moe_exp.config import setting_error
from moe_exp.data.stage import MAKE_AGAIN, run_stage
from moe_exp.data.tasks.execution import Execution, Pass, Through, num_workers, task_stats
from moe_exp.data.tasks.jobs import run_stage_passes
from moe_exp.data.tasks.slurm_jobs import check_no_jobs
from moe_exp.data.tokens.encoders import Encoders, Probe, one_thread, probe_backend
from moe_exp.data.tokens.joined_parts import JOINED, TASKS, JoinedParts
from moe_exp.data.tokens.parts import (
    Part,
    PartEncoder,
    PartSettings,
    default_part_bytes,
    is_complete,
    plan_parts,
)
from moe_exp.data.tokens.preprocess import (
    check_backend,
    pinned_backend,
    publish,
    stage_settings,
    tokenize_files,
)
from moe_exp.host.files import BlockHash, read_json, write_json

logger = logging.getLogger(__name__)

_PASSES = ("made", "joined")
_COPY_BYTES = 2**22
_CHECKED_BYTES = 2**26  # of a part, in blocks that are checked one by one
_CHANGED = "is not what was written. Fix: check the disk, and call it again: the part is made again."
_BLOCK_BYTES = 2**30


def tokenize_documents(
    inputs: Sequence[Path],
    output: Path,
    settings: PartSettings,
    *,
    tasks: int | None = None,
    execution: Execution | None = None,
    **options: Any,
) -> dict[str, Any] | None:
    """Tokenizes by processes of this machine, or if there are tasks, by `tokenize_by_tasks`."""
    execution = execution or Execution()
    if execution.executor == "local" and tasks is None:
        _check_no_jobs(output)
        return tokenize_files(inputs, output, settings, workers=num_workers(execution), **options)
    if tasks is None:
        fix = "give --tasks, as many as cores are to work on it"
        raise setting_error("executor", execution.executor, "needs a number of tasks", fix)
    return tokenize_by_tasks(inputs, output, settings, tasks=tasks, execution=execution, **options)


def tokenize_by_tasks(
    inputs: Sequence[Path],
    output: Path,
    settings: PartSettings,
    *,
    tasks: int,
    execution: Execution | None = None,
    backend: str = "auto",
    start_over: bool = False,
    part_bytes: int | None = None,
    block_bytes: int = _BLOCK_BYTES,
) -> dict[str, Any] | None:
    """Makes the files of `tokenize_files` by tasks, and returns the manifest.

    A part that is not what its task wrote is an error; the next call has it made again.

    Args:
        tasks: that make parts. A call that resumes may give another number.
        execution: where the tasks run; default: this machine.
        block_bytes: of the .bin, that one task copies and hashes. The manifest has a hash of the hashes of
            all blocks, unless there is one alone.
        inputs, output, settings, backend, start_over, part_bytes: as of `tokenize_files`.

    Returns:
        The manifest; None while SLURM jobs are under way. Call again to see how far they are, and to publish
        what they have made.

    Raises:
        ValueError: as of `tokenize_files`; a part is damaged.
        ChildProcessError: a task's process died.
    """
    if tasks < 1:
        raise setting_error("tasks", tasks, "must be at least 1", "give the number of cores")
    check_backend(backend)
    execution, part_bytes = execution or Execution(), part_bytes or default_part_bytes(inputs)
    if start_over or execution.executor != "slurm":
        _check_no_jobs(output)
    what: dict[str, Any] = {"settings": stage_settings(settings, part_bytes), "inputs": inputs}
    what |= {"is_folder": False, "suffixes": (".bin", ".idx"), "start_over": start_over}
    with run_stage("tokenize", output, **what) as stage:
        if stage.was_done:
            return stage.manifest or {}
        parts = plan_parts(stage.inputs, part_bytes)
        joined = JoinedParts(stage.folder, output.name, settings)
        chosen = pinned_backend(
            stage, partial(_probed, settings, backend), backend, inputs, settings, len(parts)
        )
        sizes = tasks, block_bytes, sum(path.stat().st_size for path in stage.inputs)
        job = TaskTokens(stage.folder, joined.bin_path, parts, settings, chosen, *sizes)
        passes = [
            Pass([step], tasks, stage.folder / "datatrove" / name)
            for step, name in zip((MakeParts(job), JoinParts(job)), _PASSES, strict=True)
        ]
        _begin(job, output)
        if all(job.place("joined", task).exists() for task in range(tasks)):
            joined.take_back(output.with_name(f"{output.name}.bin"))
        through = [stage.folder / folder / "through" for folder in _PASSES]
        if not run_stage_passes(passes, execution, stage, "tokenize", through):
            return None
        joined.add_all(parts)
        hashes = {joined.bin_path: _whole_hash(job)}
        return publish(stage, joined, parts, backend=chosen, hashes=hashes)


def _probed(settings: PartSettings, backend: str, sample: Sequence[str]) -> Probe:
    with one_thread():
        return probe_backend(Encoders(settings.tokenizer), backend, sample)


def _check_no_jobs(output: Path) -> None:
    check_no_jobs(output.with_name(f"{output.name}.partial") / "datatrove" / _PASSES[-1])


@dataclass(frozen=True)
class TaskTokens:
    """Tokenizing by tasks; it travels to them by pickle.

    Args:
        folder: of the stage.
        bin_path: what the parts are joined into.
        parts: of all tasks.
        settings, backend: how parts are made.
        num_tasks: of each pass.
        block_bytes: as of `tokenize_by_tasks`.
        num_input_bytes: of all inputs.
    """

    folder: Path
    bin_path: Path
    parts: list[Part] = field(repr=False)
    settings: PartSettings
    backend: str
    num_tasks: int
    block_bytes: int
    num_input_bytes: int

    def place(self, folder: str, task: int) -> Path:
        """File with what a task has done."""
        return self.folder / folder / f"{task:05d}.json"

    def facts(self, folder: str) -> list[Any]:
        """Contents of the files of all tasks."""
        return [read_json(self.place(folder, task), fix=MAKE_AGAIN) for task in range(self.num_tasks)]

    def range_of(self, task: int, number: int) -> tuple[int, int]:
        """First and end of what a task has of a number of things."""
        return task * number // self.num_tasks, (task + 1) * number // self.num_tasks

    def parts_of(self, task: int) -> list[Part]:
        """Parts that a task makes."""
        return self.parts[slice(*self.range_of(task, len(self.parts)))]

    def through(self, folder: str, task: int) -> Through:
        """How far a task is, in bytes of the inputs."""
        return Through(str(self.folder / folder / "through"), task)


def _begin(job: TaskTokens, output: Path) -> None:
    """Keeps what made and joined the parts; if it is another number of tasks, all run again."""
    if (job.folder / JOINED).exists():
        rule, fix = f"{output} was begun by one process", "leave --tasks away, or give --start-over"
        raise setting_error("tasks", job.num_tasks, rule, fix)
    path, facts = job.folder / TASKS, {"tasks": job.num_tasks, "block_bytes": job.block_bytes}
    if path.exists() and read_json(path, fix=MAKE_AGAIN) != facts:
        _check_no_jobs(output)
        for folder in ("datatrove", *_PASSES):
            rmtree(job.folder / folder, ignore_errors=True)
    write_json(path, facts)


@dataclass
class MakeParts:
    """First pass: makes the parts of a task that are not there."""

    job: TaskTokens
    stats: Any = None

    def __call__(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        self.stats, job = task_stats("🔤 - TOKENIZE: parts"), self.job
        encoder, through = PartEncoder(job.settings, job.backend), job.through("made", rank)
        making = (
            job.folder / "making"
        )  # a call that asks how far SLURM's tasks are removes *.json.*.tmp above
        making.mkdir(exist_ok=True)
        made = []
        with one_thread():
            for part in job.parts_of(rank):
                if not is_complete(part, job.folder) or (hashes := self._hashes(part)) is None:
                    encoder.encode(part, making, through.advance)
                    for suffix in (".bin", ".lengths", ".json"):
                        name = f"{part.stem}{suffix}"
                        (making / name).replace(job.folder / name)
                    self.stats["parts"].update(1)
                    if (hashes := self._hashes(part)) is None:
                        raise ValueError(f"{job.folder / part.stem}.bin: {_CHANGED}")
                through.end_file(part.num_bytes)
                made.append([(job.folder / f"{part.stem}.bin").stat().st_size, hashes])
        job.place("made", rank).parent.mkdir(exist_ok=True)
        write_json(job.place("made", rank), made)

    def _hashes(self, part: Part) -> list[str] | None:
        """Hashes of blocks of a part as it is on the disk; None if it is not what was made."""
        counts = read_json(self.job.folder / f"{part.stem}.json", fix=MAKE_AGAIN)
        whole, blocks = xxhash.xxh3_128(), BlockHash(_CHECKED_BYTES)
        with (self.job.folder / f"{part.stem}.bin").open("rb", buffering=0) as file:
            while chunk := memoryview(file.read(_COPY_BYTES)):
                whole.update(chunk)
                blocks.update(chunk)
        return [one.hex() for one in blocks.digests()] if whole.hexdigest() == counts["token_hash"] else None


class _Placed(NamedTuple):
    """A part, the task that made it, hashes of its blocks, and where it begins and ends in the .bin."""

    part: Part
    task: int
    hashes: list[str]
    start: int
    end: int


def _placed(job: TaskTokens) -> list[_Placed]:
    made = [(task, *one) for task, done in enumerate(job.facts("made")) for one in done]
    bounds = pairwise(accumulate((num_bytes for _, num_bytes, _ in made), initial=0))
    found = zip(job.parts, made, bounds, strict=True)
    return [_Placed(part, task, hashes, *place) for part, (task, _, hashes), place in found]


@dataclass
class JoinParts:
    """Second pass: copies what lies in a task's blocks of the .bin there, and checks every part it reads."""

    job: TaskTokens
    stats: Any = None

    def __call__(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        self.stats, job, placed = task_stats("🧩 - TOKENIZE: join"), self.job, _placed(self.job)
        num_bytes = placed[-1].end if placed else 0
        blocks = job.range_of(rank, -(-num_bytes // job.block_bytes))
        low, end = (min(num_bytes, block * job.block_bytes) for block in blocks)
        share = job.num_input_bytes / max(1, num_bytes)
        through, blocks_hash = job.through("joined", rank), BlockHash(job.block_bytes)
        descriptor = os.open(job.bin_path, os.O_WRONLY | os.O_CREAT, 0o666)
        try:
            for one in placed if low < end else []:
                if one.start < end and low < one.end:
                    for chunk in self._chunks(one, low, end):
                        low += _write_at(descriptor, chunk, low)
                        blocks_hash.update(chunk)
                        through.advance(len(chunk) * share)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        self.stats["bytes"].update(blocks_hash.num_bytes)
        through.end_file(round(blocks_hash.num_bytes * share))
        job.place("joined", rank).parent.mkdir(exist_ok=True)
        write_json(job.place("joined", rank), [digest.hex() for digest in blocks_hash.digests()])

    def _chunks(self, one: _Placed, low: int, end: int) -> Iterator[memoryview]:
        """What of a part lies in [low, end) of the .bin; every block that it reads is checked."""
        path = self.job.folder / f"{one.part.stem}.bin"
        low, end = max(one.start, low) - one.start, min(one.end, end) - one.start
        with path.open("rb", buffering=0) as file:
            for block in range(low // _CHECKED_BYTES, -(-end // _CHECKED_BYTES)):
                place, digest = block * _CHECKED_BYTES, xxhash.xxh3_128()
                block_end = place + _CHECKED_BYTES
                file.seek(place)
                while chunk := memoryview(file.read(min(_COPY_BYTES, block_end - place))):
                    digest.update(chunk)
                    if some := chunk[max(0, low - place) : max(0, end - place)]:
                        yield some
                    place += len(chunk)
                if digest.hexdigest() != one.hashes[block]:
                    self._forget(one)
                    raise ValueError(f"{path}: {_CHANGED}")

    def _forget(self, one: _Placed) -> None:
        folder = self.job.folder
        done = folder / "datatrove" / _PASSES[0] / "completions" / f"{one.task:05d}"
        for path in (done, self.job.place("made", one.task), folder / f"{one.part.stem}.json"):
            path.unlink(missing_ok=True)


def _write_at(descriptor: int, content: memoryview, place: int) -> int:
    written = 0
    while written < len(content):
        written += os.pwrite(descriptor, content[written:], place + written)
    return written


def _whole_hash(job: TaskTokens) -> str:
    digests = [bytes.fromhex(digest) for done in job.facts("joined") for digest in done]
    return BlockHash.of_all(digests, job.block_bytes)
