"""Last pass of a shuffle: each task makes some of the output files, and reads back what it has written."""

import logging
import mmap
import os
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from moe_exp.data.shuffle.blocks import LineBlocks, sum_digests, write_all
from moe_exp.data.shuffle.scatter import DOCUMENT_BYTES, Placed, Scattered, TaskShuffle
from moe_exp.data.tasks.execution import Through, complete_files
from moe_exp.host.files import write_json

logger = logging.getLogger(__name__)

_LINES_AT_ONCE = 4096
_READ_BACK_BYTES = 2**18
_READ_BYTES = 2**30
Places = NDArray[np.int64]


class _Output(NamedTuple):
    """An output file and the ranks of its first document and of the one after its last."""

    path: Path
    first: int
    end: int
    is_valid: bool


def write(job: TaskShuffle, num_tasks: int, rank: int) -> int:
    """Makes a range of the output files, of which the validation file is the first; returns their documents.

    All documents are scattered. `rank` is one of `num_tasks` of this pass.
    """
    scattered = Scattered(job)
    outputs = _outputs(scattered)
    outputs = outputs[slice(*(task * len(outputs) // num_tasks for task in (rank, rank + 1)))]
    # a task that is alone publishes them at once; to wait for the disk would take a tenth of its CPU
    with complete_files([one.path for one in outputs], is_durable=job.num_tasks > 1) as paths:
        for path in paths:
            path.touch()
        writer = _Writer(scattered, job.through("written", rank))
        under_way = [one._replace(path=path) for one, path in zip(outputs, paths, strict=True)]
        for is_valid in (True, False):
            writer.write([one for one in under_way if one.is_valid == is_valid])
        made = [_read_back(one) for one in under_way]
    names = [one.path.name for one in outputs]
    write_json(job.place("written", rank), dict(zip(names, made, strict=True)))
    return sum(one.end - one.first for one in outputs)


def _outputs(scattered: Scattered) -> list[_Output]:
    """The validation file and the shards; ValueError if there are no documents for training."""
    job, read, valid = scattered.job, scattered.indexed.read, scattered.indexed.valid.total()
    name, num_shards = job.settings["name"], job.settings["num_shards"]
    if not read.num_documents:
        raise ValueError(f"input={job.first_input}: there is no document in the input. Fix: another input.")
    num_train = read.num_documents - valid.num_documents
    if not num_train:
        rule = f"all {read.num_documents} documents are for validation, none is left for training"
        fix = "give a smaller fraction, or more documents with different texts"
        raise ValueError(f"valid_fraction={job.settings['valid_fraction']}: {rule}. Fix: {fix}.")
    if valid.num_documents == 1:
        what = "%s: 1 of %d documents is for validation: its loss says little about other texts"
        logger.warning(what, name, read.num_documents)
    if num_train < num_shards:
        what = "%d documents for training in %d shards: some are empty"
        logger.warning(what, num_train, num_shards)
    outputs = [_Output(job.folder / f"{name}.val.jsonl", 0, valid.num_documents, is_valid=True)]
    width = max(2, len(str(num_shards - 1)))
    # shards differ by one document at most
    starts = [shard * num_train // num_shards for shard in range(num_shards + 1)]
    for shard, (first, end) in enumerate(pairwise(starts)):
        path = job.folder / f"{name}.chunk.{shard:0{width}d}.jsonl"
        outputs.append(_Output(path, first, end, is_valid=False))
    return outputs


def _read_back(output: _Output) -> dict[str, Any]:
    """num_documents, bytes, hash (as `file_hash` gives it) of a file that was written, and line_hash, the sum
    of the XXH3-128 of its lines modulo 2**128.
    """
    num_bytes = output.path.stat().st_size
    # What is kept of a line is gone with its block.
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
    return facts | {"line_hash": f"{line_hash % 2**128:032x}"}


class _Writer:
    """Writes files, each of which is a range of the order."""

    def __init__(self, scattered: Scattered, through: Through):
        self.scattered, self.job, self.through = scattered, scattered.job, through
        self.lines = LineBuffer()
        self.input_bytes = sum(one.num_bytes for slices in self.job.slices for one in slices)

    def write(self, outputs: Sequence[_Output]) -> None:
        """Writes files that follow one another in the order."""
        if not outputs:
            return
        first, end, is_valid = outputs[0].first, outputs[-1].end, outputs[0].is_valid
        buckets, rank = self.scattered.indexed.buckets, 0
        # those of validation documents are the last
        numbers = range(buckets.num_train, buckets.number) if is_valid else range(buckets.num_train)
        for bucket in numbers:
            count, _ = self.scattered.sizes[bucket]
            if first < rank + count and rank < end:
                self._write_bucket(bucket, rank, outputs)
            rank += count

    def _write_bucket(self, bucket: int, rank: int, outputs: Sequence[_Output]) -> None:
        """Writes the documents of a bucket, whose first has the rank, that belong to the outputs."""
        first, end = outputs[0].first, outputs[-1].end
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
        """Reads the lines and writes them in `order`; `rank`: of the first one in the order of all."""
        ends = np.cumsum(placed.records["num_bytes"].astype(np.int64))
        begins = ends - placed.records["num_bytes"].astype(np.int64)
        if len(self.lines.view) + DOCUMENT_BYTES * len(ends) > self.job.piece_bytes:
            self.lines = LineBuffer()  # the old one is of a piece with fewer and longer documents
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


class LineBuffer:
    """Memory for the lines of a piece, which the next piece uses again."""

    def __init__(self) -> None:
        self.view = memoryview(b"")

    def allocate(self, num_bytes: int) -> None:
        """Makes it at least `num_bytes` large; its content is lost."""
        if len(self.view) >= num_bytes:
            return
        self.view = memoryview(b"")  # so that there are not two
        # Not a bytearray, which would write zeros first; the memory comes when it is written to.
        buffer = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux: 500 times fewer page faults
            with suppress(OSError):  # a kernel without them
                buffer.madvise(mmap.MADV_HUGEPAGE)
        self.view = memoryview(buffer)

    def read(self, path: Path, places: Places, begins: Places, ends: Places) -> None:
        """Reads lines at `places` of a file to [begins, ends) of the buffer, neighbours with one call."""
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
                    self._read_run(file.fileno(), path, place, begin, end)

    def _read_run(self, descriptor: int, path: Path, place: int, begin: int, end: int) -> None:
        while begin < end:
            num_bytes = os.preadv(descriptor, [self.view[begin : min(end, begin + _READ_BYTES)]], place)
            if not num_bytes:
                raise ValueError(f"{path}: ends before its last line. Fix: give --start-over.")
            begin, place = begin + num_bytes, place + num_bytes

    def append_to(self, path: Path, begins: Places, ends: Places, order: Places) -> None:
        """Appends the lines at [begins, ends) of the buffer, in `order`, to a file."""
        with path.open("ab", buffering=0) as file:
            for first in range(0, len(order), _LINES_AT_ONCE):
                some = order[first : first + _LINES_AT_ONCE]
                places = zip(begins[some].tolist(), ends[some].tolist(), strict=True)
                write_all(file.fileno(), [self.view[begin:end] for begin, end in places], path)
