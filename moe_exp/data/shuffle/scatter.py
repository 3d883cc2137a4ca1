"""First two passes of a shuffle: index the documents, and sort them into buckets.

Every document gets a 64-bit key, computed from the seed and the document's number among all input documents.
The shuffled order is the order of the keys, so it does not depend on buckets or memory. No two keys are
equal, because splitmix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014)
maps different document numbers to different keys.

A document's key depends on how many documents precede it, so `index` first finds, checks and hashes all
documents. `scatter` then reads the inputs in blocks, sorts the lines of each block by bucket, and appends the
lines to one file and their records (keys and sizes) to another. A bucket holds either training or validation
documents, with keys from one range. A shuffle with only one task does both passes at
once (`index_and_scatter`).

    indexed/      00003.documents   00003.json
    scattered/    00003.lines       00003.records   00003.index   00003.json
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from moe_exp.data.documents import Counted, Tally
from moe_exp.data.execution import Through, complete_files
from moe_exp.data.kinds import TextRule
from moe_exp.data.shuffle.blocks import (
    LINE_BYTES,
    DocumentBlocks,
    Documents,
    LineBlocks,
    Slice,
    read_slice,
    sum_digests,
    write_all,
)
from moe_exp.data.stage import MAKE_AGAIN
from moe_exp.host.files import read_json, write_json

NUM_KEYS = 2**64
_GAMMA = 0x9E3779B97F4A7C15
TEMPORARY = "temporary"
# Memory per document while a piece is sorted: its record, three offsets, its share of the sort and of the
# buffer slices.
DOCUMENT_BYTES = 96
BUCKET_FILL = 0.85  # target fill: keys are random, so bucket sizes vary

_DOCUMENT = np.dtype([("begin", "<u8"), ("num_bytes", "<u8"), ("choice", "<u8")])
RECORD = np.dtype([("key", "<u8"), ("num_bytes", "<u8")])
_FEW_BUCKETS = 256
_BLOCK_BYTES = 2**21  # small enough for a core's cache
_BYTES_PER_SEGMENT = 2**15  # average size of a bucket in a block
_LF = 10

Keys = NDArray[np.uint64]
# Documents of a block (_DOCUMENT), offsets of their lines in the buffer, and the buffer.
_Block = tuple[NDArray[Any], NDArray[np.int64], memoryview]


def mix(values: Keys) -> Keys:
    """splitmix64's output function, a bijection of 64-bit words."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def document_keys(seed: int, first: int, count: int) -> Keys:
    """Keys of `count` documents, starting at document `first`: splitmix64 seeded with a hash of `seed`."""
    # A counter with increment _GAMMA, so that any key can be computed without the preceding ones.
    start = xxhash.xxh3_64_intdigest(f"order {seed}".encode()) + _GAMMA * (first + 1)
    return mix(np.uint64(start % NUM_KEYS) + np.arange(count, dtype=np.uint64) * np.uint64(_GAMMA))


def text_choices(seed: int, text_digests: bytes) -> Keys:
    """A number for each text, from its digest and `seed`; texts with the smallest numbers are held out."""
    start = xxhash.xxh3_64_intdigest(f"validation {seed}".encode())
    return mix(np.frombuffer(text_digests, dtype=">u8")[::2].astype(np.uint64) ^ np.uint64(start))


@dataclass
class ValidTally(Counted):
    """Counts the documents with `text_choices` below `threshold`. If no choice is below `threshold`, counts
    the documents with the smallest choice.
    """

    threshold: int  # validation fraction times 2**64
    below: Tally = field(default_factory=Tally)
    smallest: int = NUM_KEYS  # smallest choice so far
    at_smallest: Tally = field(default_factory=Tally)  # one text and its duplicates

    def add(self, choices: Keys, documents: Documents) -> None:
        if len(choices):
            smallest, below = choices.min(), documents.tally(choices < np.uint64(self.threshold))
            at_smallest = documents.tally(choices == smallest)
            self.__iadd__(ValidTally(self.threshold, below, int(smallest), at_smallest))

    def limit(self) -> int:
        """Validation documents are those with `text_choices` below this limit."""
        return self.threshold if self.below.num_documents else self.smallest + 1

    def __iadd__(self, other: "ValidTally") -> "ValidTally":
        self.below += other.below
        if other.smallest < self.smallest:
            self.smallest, self.at_smallest = other.smallest, Tally()
        if other.smallest == self.smallest:
            self.at_smallest += other.at_smallest
        return self

    def total(self) -> Tally:
        return self.below if self.below.num_documents else self.at_smallest


def first_key(bucket: int, num_buckets: int) -> int:
    """Smallest key of a bucket; 2**64 for `bucket` = `num_buckets`."""
    # Rounded up, so that the ranges neither overlap nor leave gaps.
    return -(-bucket * NUM_KEYS // num_buckets)


def most_buckets(longest_bytes: int) -> int:
    """Maximum number of buckets; beyond it, a bucket's part of a block is too small for a separate read."""
    return max(_FEW_BUCKETS, longest_bytes // _BYTES_PER_SEGMENT)


@dataclass(frozen=True)
class TaskShuffle:
    """A shuffle that runs in tasks; each task receives a pickled copy of this object."""

    folder: Path  # of the stage
    settings: dict[str, Any]  # of `shuffle`: name, seed, num_shards, valid_fraction, text_field, skip_bad
    rule: TextRule
    first_input: Path  # for errors
    slices: list[list[Slice]] = field(repr=False)  # of each task
    longest_bytes: int  # maximum line size, and size of a task's read buffer
    piece_bytes: int  # size of the documents that a task sorts at once
    bucket_bytes: int  # average bucket size, unless limited by `most_buckets`
    most_buckets: int  # limit for training and for validation buckets
    num_buckets: tuple[int, int] | None = None  # both, if fixed before the documents are counted

    @property
    def num_tasks(self) -> int:
        return len(self.slices)

    @property
    def threshold(self) -> int:
        # Documents with a smaller choice, if any exist, are held out for validation.
        return int(self.settings["valid_fraction"] * NUM_KEYS)

    @property
    def most_lines(self) -> int:
        # Limits the per-line memory of a block of short lines to two buffers.
        return max(1, 2 * self.longest_bytes // LINE_BYTES)

    @property
    def temporary(self) -> Path:
        return self.folder / TEMPORARY

    def place(self, folder: str, task: int, suffix: str = ".json") -> Path:
        return self.temporary / folder / f"{task:05d}{suffix}"

    def through(self, folder: str, task: int) -> Through:
        return Through(self.temporary / folder / "through", task)

    def lines(self, block_bytes: int) -> LineBlocks:
        how = {"text_field": self.settings["text_field"], "rule": self.rule}
        return LineBlocks(block_bytes, self.longest_bytes, **how)

    def buckets_for(self, num_bytes: float, valid_share: float) -> tuple[int, int]:
        """Numbers of training and validation buckets for documents that take `num_bytes` of memory.
        `valid_share`: fraction of validation documents.
        """
        num_full = num_bytes / (BUCKET_FILL * self.bucket_bytes)
        train, valid = (max(1, math.ceil(share * num_full)) for share in (1, valid_share))
        return min(self.most_buckets, train), min(self.most_buckets, valid)


@dataclass(frozen=True)
class Buckets:
    """Bucket counts; training buckets precede validation buckets. `limit`: see `ValidTally.limit`."""

    num_train: int
    num_valid: int
    limit: int

    @property
    def number(self) -> int:
        return self.num_train + self.num_valid

    def block_bytes(self, longest_bytes: int) -> int:
        # large enough that a bucket's segment in a block is worth a read
        return min(longest_bytes, max(_BLOCK_BYTES, _BYTES_PER_SEGMENT * self.number))

    @cached_property
    def _bounds(self) -> tuple[Keys, Keys]:
        train, valid = (
            np.array([first_key(bucket, number) for bucket in range(number)], dtype=np.uint64)
            for number in (self.num_train, self.num_valid)
        )
        return train, valid

    def of(self, keys: Keys, choices: Keys) -> NDArray[np.int64]:
        """Bucket of each document."""
        train, valid = (np.searchsorted(bounds, keys, side="right") - 1 for bounds in self._bounds)
        # `limit` may be 2**64, which does not fit in uint64.
        return np.where(choices <= np.uint64(self.limit - 1), self.num_train + valid, train)


class _Found:
    """Document counts and hashes for a task's slices. `blocks` updates them as it yields the documents."""

    def __init__(self, job: TaskShuffle, rank: int):
        self.job, self.rank = job, rank
        self.read, self.valid = Tally(), ValidTally(job.threshold)
        self.line_hash, self.num_bytes, self.of_slices = 0, 0, list[int]()

    def blocks(self, block_bytes: int) -> Iterator[_Block]:
        settings, through = self.job.settings, self.job.through("indexed", self.rank)
        lines, how = self.job.lines(block_bytes), {"skip_bad": settings["skip_bad"]}
        reader = DocumentBlocks(lines, self.read, **how, most_lines=self.job.most_lines)
        for one in self.job.slices[self.rank]:
            before = self.read.num_documents
            for documents in read_slice(one, reader):
                found = np.empty(len(documents.ends), dtype=_DOCUMENT)
                found["begin"] = documents.begins + documents.start
                found["num_bytes"] = documents.ends - documents.begins
                found["choice"] = text_choices(settings["seed"], documents.text_digests)
                self.valid.add(found["choice"], documents)
                self.read += documents.tally()
                self.line_hash += sum_digests(documents.line_digests)
                self.num_bytes += int(found["num_bytes"].sum())
                yield found, documents.begins, lines.view
                through.advance(documents.num_bytes)
            through.end_file(one.num_bytes)
            self.of_slices.append(self.read.num_documents - before)

    def save(self) -> None:
        # read by `Indexed` and `_indexed_blocks`
        facts = {"slices": self.of_slices, "num_bytes": self.num_bytes, "read": self.read.to_json()}
        facts |= {"valid": self.valid.to_json(), "line_hash": f"{self.line_hash % 2**128:032x}"}
        write_json(self.job.place("indexed", self.rank), facts)


def index(job: TaskShuffle, rank: int) -> int:
    """First pass: records position and `text_choices` of a task's documents; returns the document count."""
    found = _Found(job, rank)
    with complete_files([job.place("indexed", rank, ".documents")]) as (path,), path.open("wb") as file:
        for documents, _, _ in found.blocks(_BLOCK_BYTES):
            file.write(documents.tobytes())
    found.save()
    return found.read.num_documents


class Indexed:
    """Results of the first pass of all tasks."""

    def __init__(self, job: TaskShuffle):
        self.read, self.valid, self.line_hash, self.num_bytes = Tally(), ValidTally(job.threshold), 0, 0
        self.firsts = [0]  # number of the first document of each task
        for task in range(job.num_tasks):
            facts = read_json(job.place("indexed", task), fix=MAKE_AGAIN)
            self.read += Tally.from_json(facts["read"])
            self.valid += ValidTally.from_json(facts["valid"])
            self.line_hash = (self.line_hash + int(facts["line_hash"], 16)) % 2**128
            self.num_bytes += facts["num_bytes"]
            self.firsts.append(self.firsts[-1] + sum(facts["slices"]))
        valid = self.valid.total()
        share = valid.num_documents / max(1, self.read.num_documents)
        share = max(share, valid.num_text_bytes / max(1, self.read.num_text_bytes))
        numbers = job.num_buckets or job.buckets_for(self.num_bytes + DOCUMENT_BYTES * self.firsts[-1], share)
        self.buckets = Buckets(*numbers, self.valid.limit())


def scatter(job: TaskShuffle, rank: int) -> int:
    """Second pass: copies the lines of a task in blocks, and sorts each block by bucket."""
    indexed = Indexed(job)
    blocks = _indexed_blocks(job, rank, indexed.buckets.block_bytes(job.longest_bytes))
    return _scatter(job, rank, indexed.firsts[rank], indexed.buckets, blocks)


def index_and_scatter(job: TaskShuffle) -> int:
    """Runs both passes of a one-task shuffle at once: parses and copies each line while it is in cache."""
    assert job.num_buckets is not None
    limit, is_known = max(1, job.threshold), False
    while not is_known:
        found, buckets = _Found(job, 0), Buckets(*job.num_buckets, limit)
        num_documents = _scatter(job, 0, 0, buckets, found.blocks(buckets.block_bytes(job.longest_bytes)))
        # If no choice is below the threshold, the smallest one is used, which is known after the first try.
        is_known = not num_documents or found.valid.limit() == limit
        limit = found.valid.limit()
    found.save()
    return num_documents


def _scatter(job: TaskShuffle, rank: int, first: int, buckets: Buckets, blocks: Iterator[_Block]) -> int:
    """Sorts each block by bucket and writes the result. `first`: how many documents precede the `blocks`."""
    num_documents, written = 0, np.zeros(2, dtype=np.int64)
    paths = [job.place("scattered", rank, suffix) for suffix in (".lines", ".records", ".index")]
    total = np.zeros((buckets.number, 2), dtype=np.int64)
    with (
        complete_files(paths, is_durable=False) as (lines_path, records_path, index_path),
        lines_path.open("wb", buffering=0) as lines,
        records_path.open("wb", buffering=0) as rest,
        index_path.open("wb") as index,
    ):
        for found, begins, view in blocks:
            records = np.empty(len(found), dtype=RECORD)
            records["key"] = document_keys(job.settings["seed"], first + num_documents, len(found))
            records["num_bytes"] = found["num_bytes"]
            of_bucket = buckets.of(records["key"], found["choice"])
            # Stable: within a bucket the documents stay in input order.
            order = np.argsort(of_bucket, kind="stable")
            ends = (begins + records["num_bytes"].astype(np.int64))[order].tolist()
            places = zip(begins[order].tolist(), ends, strict=True)
            write_all(lines.fileno(), [view[begin:end] for begin, end in places], lines_path)
            write_all(rest.fileno(), [records[order].tobytes()], records_path)
            counts = np.bincount(of_bucket, minlength=buckets.number)
            sizes = np.stack([counts, np.zeros_like(counts)], axis=1)  # documents and bytes per bucket
            np.add.at(sizes[:, 1], of_bucket, records["num_bytes"].astype(np.int64))
            after = written + sizes.cumsum(axis=0)
            index.write(np.stack([after - sizes, sizes], axis=-1).tobytes())
            written, total = after[-1], total + sizes
            num_documents += len(found)
    write_json(job.place("scattered", rank), total.tolist())
    return num_documents


def _indexed_blocks(job: TaskShuffle, rank: int, block_bytes: int) -> Iterator[_Block]:
    """Yields blocks of the documents recorded by `index`."""
    lines, through = job.lines(block_bytes), job.through("scattered", rank)
    counts = read_json(job.place("indexed", rank), fix=MAKE_AGAIN)["slices"]
    path = job.place("indexed", rank, ".documents")
    check_size(path, sum(counts) * _DOCUMENT.itemsize)
    with path.open("rb") as file:
        for one, count in zip(job.slices[rank], counts, strict=True):
            start, end = one.bounds()
            left = np.empty(0, dtype=_DOCUMENT)
            for _, lines_end in lines.read(one.path, start=start, end=end):
                bytes_of = np.frombuffer(lines.buffer, dtype=np.uint8)
                while True:
                    if not len(left) and count:
                        left = np.fromfile(file, dtype=_DOCUMENT, count=min(job.most_lines, count))
                        count -= len(left)
                    found = left[: np.searchsorted(left["begin"], np.uint64(start + lines_end))]
                    if not len(found):
                        break
                    begins = found["begin"].astype(np.int64) - start
                    # The index excludes a CR before the LF: overwrite it, so that the line ends in LF.
                    bytes_of[begins + found["num_bytes"].astype(np.int64) - 1] = _LF
                    yield found, begins, lines.view
                    left = left[len(found) :]
                del bytes_of  # the buffer cannot be replaced while it is referenced
                start += lines_end
                through.advance(lines_end)
            if count or len(left):
                fix = "add --start-over, and do not change the file during the shuffle"
                raise ValueError(f"{one.path}: changed during the shuffle. Fix: {fix}.")
            through.end_file(one.num_bytes)


def check_size(path: Path, num_bytes: int) -> None:
    """Raises ValueError unless the file has `num_bytes` bytes, as recorded by the task that wrote it."""
    found = path.stat().st_size if path.exists() else 0
    if found != num_bytes:
        raise ValueError(f"{path}: has {found} bytes instead of {num_bytes}. Fix: add --start-over.")
