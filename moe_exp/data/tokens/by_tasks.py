"""Tokenization with datatrove's executors, on one or many machines. The output is identical, byte for byte,
to that of one process. Until the files are published, the tokens are stored on disk twice.
Each part has three files, and each task has two:

    part.000012.bin  .lengths  .json        made/00003.json        joined/00003.json
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from shutil import rmtree
from typing import Any, NamedTuple

import xxhash

from moe_exp.data.execution import Execution, Through
from moe_exp.data.jobs import check_no_jobs, run_stage_passes
from moe_exp.data.shuffle.blocks import write_all
from moe_exp.data.stage import MAKE_AGAIN, CorpusStage
from moe_exp.data.tokens.encoders import one_thread
from moe_exp.data.tokens.parts import CHECKED_BYTES, NOT_WRITTEN, Part, PartEncoder, PartSettings, is_complete
from moe_exp.host.files import BlockHash, read_json, write_json

TASKS = "tasks.json"  # how many tasks make and join the parts
PASSES = ("made", "joined")
_COPY_BYTES = 2**22
BLOCK_BYTES = 2**30


@dataclass(frozen=True)
class TaskTokens:
    """A tokenization in two passes of `num_tasks` tasks; each task receives a pickled copy of this object."""

    folder: Path
    bin_path: Path
    parts: list[Part] = field(repr=False)
    settings: PartSettings
    backend: str
    num_tasks: int
    block_bytes: int

    def begin(self, jobs_folder: Path) -> None:
        """Records the number of tasks and the block size. If the old record differs, all tasks run again."""
        path, facts = self.folder / TASKS, {"tasks": self.num_tasks, "block_bytes": self.block_bytes}
        if path.exists() and read_json(path, fix=MAKE_AGAIN) != facts:
            check_no_jobs(jobs_folder)
            for folder in ("datatrove", *PASSES):
                rmtree(self.folder / folder, ignore_errors=True)
        write_json(path, facts)

    def place(self, folder: str, task: int) -> Path:
        return self.folder / folder / f"{task:05d}.json"

    def facts(self, folder: str) -> list[Any]:
        return [read_json(self.place(folder, task), fix=MAKE_AGAIN) for task in range(self.num_tasks)]

    def range_of(self, task: int, number: int) -> tuple[int, int]:
        """Range [first, end) of the items that a task gets when all tasks share `number` items."""
        return task * number // self.num_tasks, (task + 1) * number // self.num_tasks


def make_parts(job: TaskTokens, rank: int) -> int:
    """First pass: makes a task's missing parts and returns their number."""
    encoder, num_made = PartEncoder(job.settings, job.backend), 0
    through = Through(job.folder / "made" / "through", rank)  # in input bytes
    # In a subfolder, because a call that checks the SLURM jobs removes *.json.*.tmp from the stage's folder.
    making = job.folder / "making"
    making.mkdir(exist_ok=True)
    made = []
    with one_thread():
        for part in job.parts[slice(*job.range_of(rank, len(job.parts)))]:
            if not is_complete(part, job.folder):
                encoder.encode(part, making, through.advance)
                for suffix in (".bin", ".lengths", ".json"):
                    name = f"{part.stem}{suffix}"
                    (making / name).replace(job.folder / name)
                num_made += 1
            through.end_file(part.num_bytes)
            counts = read_json(job.folder / f"{part.stem}.json", fix=MAKE_AGAIN)
            num_bytes = counts["num_tokens"] * job.settings.dtype.itemsize
            made.append([num_bytes, counts.get("block_hashes", [])])  # older parts have no hashes
    write_json(job.place("made", rank), made)
    return num_made


class _Placed(NamedTuple):
    part: Part
    task: int  # that made it
    hashes: list[str]  # of its blocks
    start: int  # byte range in the .bin
    end: int


def join_parts(job: TaskTokens, rank: int) -> int:
    """Second pass: checks parts and copies them to a task's blocks of the .bin; returns the byte count."""
    made = [(task, *one) for task, done in enumerate(job.facts("made")) for one in done]
    bounds = pairwise(accumulate((num_bytes for _, num_bytes, _ in made), initial=0))
    found = zip(job.parts, made, bounds, strict=True)
    placed = [_Placed(part, task, hashes, *place) for part, (task, _, hashes), place in found]
    num_bytes = placed[-1].end if placed else 0
    # Tasks write whole blocks of the .bin, so that each can hash its own.
    blocks = job.range_of(rank, -(-num_bytes // job.block_bytes))
    low, end = (min(num_bytes, block * job.block_bytes) for block in blocks)
    share = sum(part.num_bytes for part in job.parts) / max(1, num_bytes)
    through = Through(job.folder / "joined" / "through", rank)
    blocks_hash = BlockHash(job.block_bytes)
    job.bin_path.touch()
    # Not "wb", which would empty the file: other tasks write to it.
    with job.bin_path.open("rb+", buffering=0) as file:
        file.seek(low)
        for one in placed if low < end else []:
            if one.start < end and low < one.end:
                for chunk in _chunks(job, one, low, end):
                    low += write_all(file.fileno(), [chunk], job.bin_path)
                    blocks_hash.update(chunk)
                    through.advance(len(chunk) * share)
        os.fsync(file.fileno())
    through.end_file(round(blocks_hash.num_bytes * share))
    write_json(job.place("joined", rank), [digest.hex() for digest in blocks_hash.digests()])
    return blocks_hash.num_bytes


def _chunks(job: TaskTokens, one: _Placed, low: int, end: int) -> Iterator[memoryview]:
    """Yields the bytes of a part that belong in the range [low, end) of the .bin."""
    path = job.folder / f"{one.part.stem}.bin"
    low, end = max(one.start, low) - one.start, min(one.end, end) - one.start
    with path.open("rb", buffering=0) as file:
        # Hashes cover whole blocks, so read those even if only a part is needed.
        for block in range(low // CHECKED_BYTES, -(-end // CHECKED_BYTES)):
            place, digest = block * CHECKED_BYTES, xxhash.xxh3_128()
            block_end = place + CHECKED_BYTES
            file.seek(place)
            while chunk := memoryview(file.read(min(_COPY_BYTES, block_end - place))):
                digest.update(chunk)
                if some := chunk[max(0, low - place) : max(0, end - place)]:
                    yield some
                place += len(chunk)
            # Also differs for parts of earlier versions, which have no hashes.
            if [digest.hexdigest()] != one.hashes[block : block + 1]:
                # Mark the part's task as not done, so that the next call makes the part again.
                done = job.folder / "datatrove" / PASSES[0] / "completions" / f"{one.task:05d}"
                for forgotten in (done, job.place("made", one.task), job.folder / f"{one.part.stem}.json"):
                    forgotten.unlink(missing_ok=True)
                raise ValueError(f"{path}: {NOT_WRITTEN}")


def run_tasks(job: TaskTokens, execution: Execution, stage: CorpusStage) -> str | None:
    """Makes and joins the parts; returns the hash of the .bin, or None while SLURM jobs are running."""
    made = "🔤 - TOKENIZE: parts", "parts", partial(make_parts, job), job.num_tasks
    joined = "🧩 - TOKENIZE: join", "bytes", partial(join_parts, job), job.num_tasks
    passes = dict(zip(PASSES, (made, joined), strict=True))
    if not run_stage_passes(passes, execution, stage, "tokenize", job.folder):
        return None
    digests = [bytes.fromhex(digest) for done in job.facts("joined") for digest in done]
    return BlockHash.of_all(digests, job.block_bytes)
