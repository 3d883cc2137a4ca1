"""First two passes of a shuffle by tasks: find the documents, then put them into files sorted by bucket.

A key depends on how many documents there are before, so `IndexDocuments` finds, checks and hashes them first.
`ScatterDocuments` then copies lines: it reads a block of its inputs, and appends the lines, sorted by bucket,
to one file, and their records to a second. A bucket is a range of keys, of training or of validation
documents; `Scattered` finds one in the files of all tasks. So a task has two files open, however many buckets
there are.

    indexed/      00003.documents   00003.json
    scattered/    00003.lines       00003.records   00003.index   00003.json
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moe_exp.data.documents import Tally
from moe_exp.data.kinds import TextRule
from moe_exp.data.shuffle.blocks import LINE_BYTES, DocumentBlocks, LineBlocks, sum_digests, write_all
from moe_exp.data.shuffle.buckets import (
    DOCUMENT_BYTES,
    NUM_KEYS,
    Keys,
    ValidTally,
    bucket_bounds,
    document_keys,
    first_key,
    text_choices,
)
from moe_exp.data.shuffle.slices import Slice, read_slice
from moe_exp.data.stage import MAKE_AGAIN
from moe_exp.data.tasks.execution import Through, complete_files, task_stats
from moe_exp.host.files import read_json, write_json

TEMPORARY = "temporary"

_DOCUMENT = np.dtype([("begin", "<u8"), ("num_bytes", "<u8"), ("choice", "<u8")])
_RECORD = np.dtype([("key", "<u8"), ("num_bytes", "<u8")])
BUCKET_FILL = 0.85  # random keys: buckets differ
_FEW_BUCKETS = 256
_BLOCK_BYTES = 2**21  # small enough for a core's cache
_BYTES_PER_SEGMENT = 2**15  # of a bucket in a block, on average
_LF = 10


def most_buckets(longest_bytes: int) -> int:
    """As many as a buffer of this size can be sorted into, in pieces that are worth a read."""
    return max(_FEW_BUCKETS, longest_bytes // _BYTES_PER_SEGMENT)


@dataclass(frozen=True)
class TaskShuffle:
    """A shuffle by tasks; it travels to them by pickle.

    Args:
        folder: of the stage.
        settings: as `shuffle` has them: name, seed, num_shards, valid_fraction, text_field, skip_bad.
        rule: what a document of a text file is.
        first_input: for errors.
        slices: what each task reads.
        longest_bytes: of a line, and of the buffer that a task reads into.
        piece_bytes: of the documents that a task puts in order at once.
        bucket_bytes: that a bucket may have on average, unless there would be more than `most_buckets`.
        most_buckets: of training documents, and of validation documents.
    """

    folder: Path
    settings: dict[str, Any]
    rule: TextRule
    first_input: Path
    slices: list[list[Slice]] = field(repr=False)
    longest_bytes: int
    piece_bytes: int
    bucket_bytes: int
    most_buckets: int

    @property
    def num_tasks(self) -> int:
        """Tasks of the first two passes."""
        return len(self.slices)

    @property
    def threshold(self) -> int:
        """Documents with a smaller choice are for validation, if there are any."""
        return int(self.settings["valid_fraction"] * NUM_KEYS)

    @property
    def temporary(self) -> Path:
        """Folder of everything that is not published."""
        return self.folder / TEMPORARY

    def place(self, folder: str, task: int, suffix: str = ".json") -> Path:
        """File of a task."""
        return self.temporary / folder / f"{task:05d}{suffix}"

    def through(self, folder: str, task: int) -> Through:
        """How far a task is."""
        return Through(str(self.temporary / folder / "through"), task)

    def lines(self, block_bytes: int) -> LineBlocks:
        """Reads blocks of lines."""
        how = {"text_field": self.settings["text_field"], "rule": self.rule}
        return LineBlocks(block_bytes, self.longest_bytes, **how)


@dataclass
class IndexDocuments:
    """First pass: where each document of a task's slices is, and its choice; counts and hashes of all."""

    job: TaskShuffle
    stats: Any = None

    def __call__(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        self.stats = task_stats("🔢 - SHUFFLE: index")
        job, settings = self.job, self.job.settings
        read, valid = Tally(), ValidTally(job.threshold)
        line_hash, num_bytes, counts, through = 0, 0, list[int](), job.through("indexed", rank)
        most_lines = max(1, 2 * job.longest_bytes // LINE_BYTES)
        options = {name: settings[name] for name in ("text_field", "skip_bad")}
        reader = DocumentBlocks(job.lines(_BLOCK_BYTES), read, **options, most_lines=most_lines)
        with complete_files([job.place("indexed", rank, ".documents")]) as (path,), path.open("wb") as file:
            for one in job.slices[rank]:
                before = read.num_documents
                for documents in read_slice(one, reader):
                    found = np.empty(len(documents.ends), dtype=_DOCUMENT)
                    found["begin"] = documents.begins + documents.start
                    found["num_bytes"] = documents.ends - documents.begins
                    found["choice"] = text_choices(settings["seed"], documents.text_digests)
                    file.write(found.tobytes())
                    valid.add(found["choice"], documents)
                    read += documents.tally()
                    line_hash += sum_digests(documents.line_digests)
                    num_bytes += int(found["num_bytes"].sum())
                    through.advance(documents.num_bytes)
                through.end_file(one.num_bytes)
                counts.append(read.num_documents - before)
        self.stats["documents"].update(read.num_documents)
        facts = {"slices": counts, "num_bytes": num_bytes, "read": read.to_json(), "valid": valid.to_json()}
        write_json(job.place("indexed", rank), facts | {"line_hash": f"{line_hash % 2**128:032x}"})


class Indexed:
    """The documents that the first pass has found, in all tasks.

    Args:
        job: the shuffle.
    """

    def __init__(self, job: TaskShuffle):
        self.read, self.valid, self.line_hash, self.num_bytes = Tally(), ValidTally(job.threshold), 0, 0
        self.firsts = [0]  # documents before those of each task
        for task in range(job.num_tasks):
            facts = read_json(job.place("indexed", task), fix=MAKE_AGAIN)
            self.read += Tally.from_json(facts["read"])
            self.valid += ValidTally.from_json(facts["valid"])
            self.line_hash = (self.line_hash + int(facts["line_hash"], 16)) % 2**128
            self.num_bytes += facts["num_bytes"]
            self.firsts.append(self.firsts[-1] + sum(facts["slices"]))
        needed_bytes = self.num_bytes + DOCUMENT_BYTES * self.firsts[-1]
        num_full = needed_bytes / (BUCKET_FILL * job.bucket_bytes)
        self.num_train_buckets = min(job.most_buckets, max(1, math.ceil(num_full)))
        valid = self.valid.total()
        share = valid.num_documents / max(1, self.read.num_documents)
        share = max(share, valid.num_text_bytes / max(1, self.read.num_text_bytes))
        self.num_valid_buckets = min(job.most_buckets, max(1, math.ceil(share * num_full)))

    @property
    def num_buckets(self) -> int:
        """Number of buckets; those of training come first."""
        return self.num_train_buckets + self.num_valid_buckets

    @cached_property
    def _bounds(self) -> tuple[Keys, Keys]:
        return bucket_bounds(self.num_train_buckets), bucket_bounds(self.num_valid_buckets)

    def buckets_of(self, keys: Keys, choices: Keys) -> NDArray[np.int64]:
        """Bucket of each document."""
        train, valid = (np.searchsorted(bounds, keys, side="right") - 1 for bounds in self._bounds)
        # limit() is at most 2**64, which no uint64 holds
        is_valid = choices <= np.uint64(self.valid.limit() - 1)
        return np.where(is_valid, self.num_train_buckets + valid, train)


@dataclass
class ScatterDocuments:
    """Second pass: copies the lines of a task's slices in blocks, each sorted by bucket."""

    job: TaskShuffle
    stats: Any = None

    def __call__(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        self.stats = task_stats("🪣 - SHUFFLE: scatter")
        job, indexed = self.job, Indexed(self.job)
        first, written = indexed.firsts[rank], np.zeros(2, dtype=np.int64)
        block_bytes = min(job.longest_bytes, max(_BLOCK_BYTES, _BYTES_PER_SEGMENT * indexed.num_buckets))
        paths = [job.place("scattered", rank, suffix) for suffix in (".lines", ".records", ".index")]
        total = np.zeros((indexed.num_buckets, 2), dtype=np.int64)
        with (
            complete_files(paths, is_durable=False) as (lines_path, records_path, index_path),
            lines_path.open("wb", buffering=0) as lines,
            records_path.open("wb", buffering=0) as rest,
            index_path.open("wb") as index,
        ):
            for found, begins, view in self._blocks(rank, block_bytes):
                records = np.empty(len(found), dtype=_RECORD)
                records["key"] = document_keys(job.settings["seed"], first, len(found))
                records["num_bytes"] = found["num_bytes"]
                buckets = indexed.buckets_of(records["key"], found["choice"])
                order = np.argsort(buckets, kind="stable")
                ends = (begins + records["num_bytes"].astype(np.int64))[order].tolist()
                places = zip(begins[order].tolist(), ends, strict=True)
                write_all(lines.fileno(), [view[begin:end] for begin, end in places], lines_path)
                write_all(rest.fileno(), [records[order].tobytes()], records_path)
                sizes = _sizes(buckets, records["num_bytes"], indexed.num_buckets)
                after = written + sizes.cumsum(axis=0)
                index.write(np.stack([after - sizes, sizes], axis=-1).tobytes())
                written, total = after[-1], total + sizes
                first += len(found)
        self.stats["documents"].update(first - indexed.firsts[rank])
        write_json(job.place("scattered", rank), total.tolist())

    def _blocks(
        self, rank: int, block_bytes: int
    ) -> Iterator[tuple[NDArray[Any], NDArray[np.int64], memoryview]]:
        """Yields the documents of each block, where their lines begin in the buffer, and the buffer."""
        job, lines, through = self.job, self.job.lines(block_bytes), self.job.through("scattered", rank)
        counts = read_json(job.place("indexed", rank), fix=MAKE_AGAIN)["slices"]
        path, most = job.place("indexed", rank, ".documents"), max(1, 2 * job.longest_bytes // LINE_BYTES)
        check_size(path, sum(counts) * _DOCUMENT.itemsize)
        with path.open("rb") as file:
            for one, count in zip(job.slices[rank], counts, strict=True):
                start, end = one.bounds()
                left = np.empty(0, dtype=_DOCUMENT)
                for _, lines_end in lines.read(one.path, start=start, end=end):
                    bytes_of = np.frombuffer(lines.buffer, dtype=np.uint8)
                    while True:
                        if not len(left) and count:
                            left = np.fromfile(file, dtype=_DOCUMENT, count=min(most, count))
                            count -= len(left)
                        found = left[: np.searchsorted(left["begin"], np.uint64(start + lines_end))]
                        if not len(found):
                            break
                        begins = found["begin"].astype(np.int64) - start
                        # there may be a CR, as in the index
                        bytes_of[begins + found["num_bytes"].astype(np.int64) - 1] = _LF
                        yield found, begins, lines.view
                        left = left[len(found) :]
                    del bytes_of  # of a buffer that may grow
                    start += lines_end
                    through.advance(lines_end)
                if count or len(left):
                    fix = "leave it alone, and give --start-over"
                    raise ValueError(f"{one.path}: changed while shuffle read it. Fix: {fix}.")
                through.end_file(one.num_bytes)


def _sizes(buckets: NDArray[np.int64], num_bytes: Keys, num_buckets: int) -> NDArray[np.int64]:
    """Documents and bytes of a block in each bucket, (num_buckets, 2)."""
    counts = np.bincount(buckets, minlength=num_buckets)
    sums = np.zeros(num_buckets, dtype=np.int64)
    np.add.at(sums, buckets, num_bytes.astype(np.int64))
    return np.stack([counts, sums], axis=1)


class Placed(NamedTuple):
    """Records, the task that each document comes from, and where its line is in the task's file."""

    records: NDArray[Any]
    tasks: NDArray[np.int32]
    places: NDArray[np.int64]

    def take(self, chosen: NDArray[np.int64]) -> Placed:
        """Some of them."""
        return Placed(self.records[chosen], self.tasks[chosen], self.places[chosen])


class Scattered:
    """The files that the second pass has written, of all tasks.

    Args:
        job: the shuffle.

    Raises:
        ValueError: a file is not as long as when it was written.
    """

    def __init__(self, job: TaskShuffle):
        self.job, self.indexed = job, Indexed(job)
        total = np.zeros((self.indexed.num_buckets, 2), dtype=np.int64)
        for task in range(job.num_tasks):
            sizes = np.array(read_json(job.place("scattered", task), fix=MAKE_AGAIN), dtype=np.int64)
            num_documents, num_bytes = sizes.sum(axis=0).tolist()
            check_size(job.place("scattered", task, ".lines"), num_bytes)
            check_size(job.place("scattered", task, ".records"), num_documents * _RECORD.itemsize)
            total += sizes
        self.sizes: list[tuple[int, int]] = [(count, num_bytes) for count, num_bytes in total.tolist()]

    def buckets(self, *, is_valid: bool) -> list[int]:
        """Buckets of validation, or training, documents in the order of the keys."""
        first = self.indexed.num_train_buckets
        return list(range(first, self.indexed.num_buckets) if is_valid else range(first))

    def parts(self, bucket: int, memory_bytes: int) -> list[tuple[int, int]]:
        """Ranges of keys (low, end) that a bucket is cut into, whose documents fit the memory."""
        first = self.indexed.num_train_buckets
        number, count = bucket, first
        if bucket >= first:
            number, count = bucket - first, self.indexed.num_valid_buckets
        num_documents, num_bytes = self.sizes[bucket]
        needed = num_bytes + DOCUMENT_BYTES * num_documents
        num_parts = 1 if needed <= memory_bytes else math.ceil(needed / (BUCKET_FILL * memory_bytes))
        bounds = [first_key(number * num_parts + part, count * num_parts) for part in range(num_parts + 1)]
        return list(pairwise(bounds))

    def documents(self, bucket: int, low: int, end: int) -> Placed:
        """Documents of a bucket with a key in [low, end)."""
        parts = [Placed(np.empty(0, _RECORD), np.empty(0, np.int32), np.empty(0, np.int64))]
        for task in range(self.job.num_tasks):
            with self.job.place("scattered", task, ".records").open("rb") as file:
                for place, count, begin, _ in self._segments(task, bucket):
                    file.seek(place * _RECORD.itemsize)
                    records = np.fromfile(file, dtype=_RECORD, count=count)
                    sizes = records["num_bytes"].astype(np.int64)
                    begins = begin + np.cumsum(sizes) - sizes
                    inside = (records["key"] >= np.uint64(low)) & (records["key"] <= np.uint64(end - 1))
                    found = records[inside]
                    parts.append(Placed(found, np.full(len(found), task, dtype=np.int32), begins[inside]))
        return Placed(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))

    def _segments(self, task: int, bucket: int) -> list[list[int]]:
        """First record, records, first byte and bytes of a bucket in each block that has some."""
        path = self.job.place("scattered", task, ".index")
        if not path.stat().st_size:  # a task without documents
            return []
        index = np.memmap(path, dtype=np.int64, mode="r").reshape(-1, self.indexed.num_buckets, 4)
        of_bucket = np.array(index[:, bucket])
        segments: list[list[int]] = of_bucket[of_bucket[:, 1] > 0].tolist()
        return segments


def check_size(path: Path, num_bytes: int) -> None:
    """Checks that a file is as long as when a task wrote it.

    Raises:
        ValueError: it is not.
    """
    found = path.stat().st_size if path.exists() else 0
    if found != num_bytes:
        raise ValueError(f"{path}: has {found} bytes, but had {num_bytes}. Fix: give --start-over.")
