"""Last pass of a shuffle: each task writes some of the output files and reads them back."""

import logging
import math
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from moe_exp.data.execution import Through, complete_files
from moe_exp.data.shuffle import scatter
from moe_exp.data.shuffle.blocks import LineBlocks, sum_digests, write_all
from moe_exp.data.shuffle.scatter import BUCKET_FILL, DOCUMENT_BYTES, RECORD, TaskShuffle, first_key
from moe_exp.data.stage import MAKE_AGAIN
from moe_exp.host.files import read_json, write_json

logger = logging.getLogger(__name__)

_LINES_AT_ONCE = 4096
_READ_BACK_BYTES = 2**18
_READ_BYTES = 2**30
Places = NDArray[np.int64]


class _Output(NamedTuple):
    path: Path
    first: int  # ranks [first, end) of its documents in the shuffled order
    end: int
    is_valid: bool


def write(job: TaskShuffle, num_tasks: int, rank: int) -> int:
    """Writes the output files of task `rank` of `num_tasks`; returns the number of documents."""
    scattered = Scattered(job)
    outputs = _outputs(scattered)
    outputs = outputs[slice(*(task * len(outputs) // num_tasks for task in (rank, rank + 1)))]
    # A single task publishes right after this pass; waiting for the disk would cost a tenth of its CPU time.
    with complete_files([one.path for one in outputs], is_durable=job.num_tasks > 1) as paths:
        for path in paths:
            path.touch()
        writer = _Writer(scattered, job.through("written", rank))
        under_way = [one._replace(path=path) for one, path in zip(outputs, paths, strict=True)]
        for _, some in groupby(under_way, key=lambda one: one.is_valid):
            writer.write(list(some))
        made = [_read_back(one) for one in under_way]
    write_json(job.place("written", rank), dict(zip([one.path.name for one in outputs], made, strict=True)))
    return sum(one.end - one.first for one in outputs)


def _outputs(scattered: "Scattered") -> list[_Output]:
    """The validation file and the shards; raises ValueError if no documents are left for training."""
    job, read, valid = scattered.job, scattered.indexed.read, scattered.indexed.valid.total()
    name, num_shards = job.settings["name"], job.settings["num_shards"]
    if not read.num_documents:
        raise ValueError(f"input={job.first_input}: has no documents. Fix: set another input.")
    num_train = read.num_documents - valid.num_documents
    if not num_train:
        rule = f"all {read.num_documents} documents are held out for validation, leaving none for training"
        fix = "set a smaller fraction, or add documents with different texts"
        raise ValueError(f"valid_fraction={job.settings['valid_fraction']}: {rule}. Fix: {fix}.")
    if valid.num_documents == 1:
        what = "%s: only 1 of %d documents is held out, so the validation loss will be unreliable"
        logger.warning(what, name, read.num_documents)
    if num_train < num_shards:
        logger.warning("%d training documents for %d shards: some shards are empty", num_train, num_shards)
    outputs = [_Output(job.folder / f"{name}.val.jsonl", 0, valid.num_documents, is_valid=True)]
    width = max(2, len(str(num_shards - 1)))
    # Shards differ by at most one document.
    starts = [shard * num_train // num_shards for shard in range(num_shards + 1)]
    for shard, (first, end) in enumerate(pairwise(starts)):
        path = job.folder / f"{name}.chunk.{shard:0{width}d}.jsonl"
        outputs.append(_Output(path, first, end, is_valid=False))
    return outputs


def _read_back(output: _Output) -> dict[str, Any]:
    """Reads a written file, and returns its counts and hashes for the manifest."""
    num_bytes = output.path.stat().st_size
    lines = LineBlocks(_READ_BACK_BYTES, num_bytes + 1)
    whole, digest, num_lines, line_hash = xxhash.xxh3_128(), xxhash.xxh3_128_digest, 0, 0
    for begin, end in lines.read(output.path):
        whole.update(lines.view[:end])
        find, view, digests = lines.buffer.find, lines.view, []
        while begin < end:
            line_end = find(b"\n", begin)
            digests.append(digest(view[begin:line_end]))
            begin = line_end + 1
        num_lines, line_hash = num_lines + len(digests), line_hash + sum_digests(b"".join(digests))
    facts = {"num_documents": num_lines, "bytes": num_bytes, "hash": whole.hexdigest()}
    # A sum of hashes, because it is compared with the inputs, whose lines are in another order.
    return facts | {"line_hash": f"{line_hash % 2**128:032x}"}


class Placed(NamedTuple):
    """Records of documents, with each document's task and the offset of its line in that task's file."""

    records: NDArray[Any]
    tasks: NDArray[np.int32]
    places: NDArray[np.int64]


class Scattered:
    """Files that all tasks wrote in the second pass; raises ValueError if a file has the wrong size."""

    def __init__(self, job: TaskShuffle):
        self.job, self.indexed = job, scatter.Indexed(job)
        total = np.zeros((self.indexed.buckets.number, 2), dtype=np.int64)
        for task in range(job.num_tasks):
            sizes = np.array(read_json(job.place("scattered", task), fix=MAKE_AGAIN), dtype=np.int64)
            num_documents, num_bytes = sizes.sum(axis=0).tolist()
            scatter.check_size(job.place("scattered", task, ".lines"), num_bytes)
            scatter.check_size(job.place("scattered", task, ".records"), num_documents * RECORD.itemsize)
            total += sizes
        self.sizes: list[tuple[int, int]] = [(count, num_bytes) for count, num_bytes in total.tolist()]

    def pieces(self, bucket: int) -> Iterator[Placed]:
        """Yields the documents of a bucket in consecutive key ranges that fit in memory.

        A document that is too large for the memory is yielded alone.
        """
        buckets, memory_bytes = self.indexed.buckets, self.job.piece_bytes
        is_valid = bucket >= buckets.num_train
        number = bucket - is_valid * buckets.num_train
        count = buckets.num_valid if is_valid else buckets.num_train
        num_documents, num_bytes = self.sizes[bucket]
        needed = num_bytes + DOCUMENT_BYTES * num_documents
        num_parts = 1 if needed <= memory_bytes else math.ceil(needed / (BUCKET_FILL * memory_bytes))
        bounds = [first_key(number * num_parts + part, count * num_parts) for part in range(num_parts + 1)]
        ranges = list(pairwise(bounds))[::-1]
        while ranges:
            low, end = ranges.pop()
            placed = self._documents(bucket, low, end)
            needed = int(placed.records["num_bytes"].sum()) + DOCUMENT_BYTES * len(placed.records)
            if needed > memory_bytes and len(placed.records) > 1:
                middle = (low + end) // 2
                ranges += [(middle, end), (low, middle)]
            else:
                yield placed

    def _documents(self, bucket: int, low: int, end: int) -> Placed:
        """A bucket's documents with keys in [low, end)."""
        parts = [Placed(np.empty(0, RECORD), np.empty(0, np.int32), np.empty(0, np.int64))]
        for task in range(self.job.num_tasks):
            path = self.job.place("scattered", task, ".index")
            if not path.stat().st_size:  # a task without documents: an empty file cannot be mapped
                continue
            index = np.memmap(path, dtype=np.int64, mode="r").reshape(-1, self.indexed.buckets.number, 4)
            # per block: first record, number of records, first byte and number of bytes of the bucket
            segments: NDArray[np.int64] = np.array(index[:, bucket])
            with self.job.place("scattered", task, ".records").open("rb") as file:
                for place, count, begin, _ in segments[segments[:, 1] > 0].tolist():
                    file.seek(place * RECORD.itemsize)
                    records = np.fromfile(file, dtype=RECORD, count=count)
                    sizes = records["num_bytes"].astype(np.int64)
                    begins = begin + np.cumsum(sizes) - sizes
                    # `end` may be 2**64, which does not fit in uint64.
                    inside = (records["key"] >= np.uint64(low)) & (records["key"] <= np.uint64(end - 1))
                    found = records[inside]
                    parts.append(Placed(found, np.full(len(found), task, dtype=np.int32), begins[inside]))
        return Placed(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


class _Writer:
    """Writes output files, each of which is a range of the shuffled order."""

    def __init__(self, scattered: Scattered, through: Through):
        self.scattered, self.job, self.through = scattered, scattered.job, through
        self.lines = LineBuffer()
        self.input_bytes = sum(one.num_bytes for slices in self.job.slices for one in slices)

    def write(self, outputs: Sequence[_Output]) -> None:
        """Writes files that are consecutive in the shuffled order."""
        first, end, is_valid = outputs[0].first, outputs[-1].end, outputs[0].is_valid
        buckets, rank = self.scattered.indexed.buckets, 0  # rank: of the next document in the shuffled order
        # The validation buckets follow the training buckets.
        numbers = range(buckets.num_train, buckets.number) if is_valid else range(buckets.num_train)
        for bucket in numbers:
            count, _ = self.scattered.sizes[bucket]
            if first >= rank + count or rank >= end:  # written by other tasks
                rank += count
                continue
            for placed in self.scattered.pieces(bucket):
                count = len(placed.records)
                order = np.argsort(placed.records["key"])[max(0, first - rank) : max(0, end - rank)]
                if len(order) < count:  # the others belong to other tasks
                    chosen = np.sort(order)
                    placed = Placed._make(column[chosen] for column in placed)
                    order = np.searchsorted(chosen, order)
                if len(order):
                    self._write_piece(placed, order, max(first, rank), outputs)
                rank += count

    def _write_piece(
        self, placed: Placed, order: NDArray[np.int64], rank: int, outputs: Sequence[_Output]
    ) -> None:
        # `rank`: of the first document of `order`
        ends = np.cumsum(placed.records["num_bytes"].astype(np.int64))
        begins = ends - placed.records["num_bytes"].astype(np.int64)
        if len(self.lines.view) + DOCUMENT_BYTES * len(ends) > self.job.piece_bytes:
            self.lines = LineBuffer()  # the old buffer, from a piece with fewer documents, is too large
        self.lines.allocate(int(ends[-1]))
        of_tasks = np.searchsorted(placed.tasks, np.arange(self.job.num_tasks + 1)).tolist()
        for task, (low, high) in enumerate(pairwise(of_tasks)):
            if low < high:
                path = self.job.place("scattered", task, ".lines")
                self.lines.read(path, placed.places[low:high], begins[low:high], ends[low:high])
        for one in outputs:
            some = order[max(0, one.first - rank) : max(0, one.end - rank)]
            if len(some):
                self.lines.append_to(one.path, begins, ends, some)
        self.through.advance(int(ends[-1]) * self.input_bytes / self.scattered.indexed.num_bytes)


class LineBuffer:
    """Reusable buffer for the lines of the documents that are sorted at the same time."""

    view = memoryview(b"")

    def allocate(self, num_bytes: int) -> None:
        """Grows the buffer to at least `num_bytes`; the old content is lost."""
        if len(self.view) >= num_bytes:
            return
        self.view = memoryview(b"")  # free the old buffer before allocating the new one
        # Not a bytearray, which would be filled with zeros first; mmap allocates pages on the first write.
        buffer = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux: 500 times fewer page faults
            with suppress(OSError):  # kernel without huge pages
                buffer.madvise(mmap.MADV_HUGEPAGE)
        self.view = memoryview(buffer)

    def read(self, path: Path, places: Places, begins: Places, ends: Places) -> None:
        """Reads the lines at offsets `places` of a file into ranges [begins, ends) of the buffer."""
        # Lines adjacent in both the file and the buffer have the same offset difference: one read per run.
        is_first = np.diff(places - begins, prepend=0) != 0
        is_first[0] = True
        firsts = np.flatnonzero(is_first)
        run_ends = np.append(begins[firsts[1:]], ends[-1])
        with path.open("rb", buffering=0) as file:
            for first in range(0, len(firsts), _LINES_AT_ONCE):
                some = firsts[first : first + _LINES_AT_ONCE]
                some_ends = run_ends[first : first + _LINES_AT_ONCE].tolist()
                runs = zip(places[some].tolist(), begins[some].tolist(), some_ends, strict=True)
                for place, begin, end in runs:
                    while begin < end:  # Linux reads at most 2 GB at once
                        some_bytes = self.view[begin : min(end, begin + _READ_BYTES)]
                        num_bytes = os.preadv(file.fileno(), [some_bytes], place)
                        if not num_bytes:
                            raise ValueError(f"{path}: is truncated. Fix: add --start-over.")
                        begin, place = begin + num_bytes, place + num_bytes

    def append_to(self, path: Path, begins: Places, ends: Places, order: Places) -> None:
        """Appends line [begins[i], ends[i]) of the buffer to a file, for each index i in `order`."""
        with path.open("ab", buffering=0) as file:
            for first in range(0, len(order), _LINES_AT_ONCE):
                some = order[first : first + _LINES_AT_ONCE]
                places = zip(begins[some].tolist(), ends[some].tolist(), strict=True)
                write_all(file.fileno(), [self.view[begin:end] for begin, end in places], path)
