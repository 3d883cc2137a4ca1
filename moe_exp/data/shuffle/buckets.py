"""The order of a shuffle, and its two passes: documents to buckets by key, then buckets in key order.

Every document gets a 64-bit key from the seed and its place among all documents that were read. The shuffled
order is the order of the keys, so it is the same however many buckets there are and however much memory. Keys
differ: splitmix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014) is a
bijection of its counter.

A bucket is a range of keys: a file with lines, and one with a record (key, choice, bytes) per line. One that
turns out too large for the memory is dealt in pieces, each a smaller range of keys, whose lines alone are
read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from moe_exp.data.documents import Tally
from moe_exp.data.shuffle.blocks import DIGEST_BYTES, DocumentBlocks, Documents, sum_digests, write_all
from moe_exp.data.shuffle.line_buffer import LineBuffer

RECORD = np.dtype([("key", "<u8"), ("choice", "<u8"), ("num_bytes", "<u8")])
# Of memory per document while a piece is dealt: its record, three places, its part of the sort, and a slice
# of the buffer now and then.
DOCUMENT_BYTES = 96
NUM_KEYS = 2**64

_GAMMA = 0x9E3779B97F4A7C15
_RECORDS_AT_ONCE = 2**13
_FINE_RANGES = 4096
Keys = NDArray[np.uint64]


def mix(values: Keys) -> Keys:
    """splitmix64's output function: a bijection of 64 bits in which every bit depends on every other."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def document_keys(seed: int, first: int, count: int) -> Keys:
    """Keys of documents `first`, `first + 1`, ...: splitmix64's outputs from a hash of the seed."""
    start = xxhash.xxh3_64_intdigest(f"order {seed}".encode()) + _GAMMA * (first + 1)
    return mix(np.uint64(start % NUM_KEYS) + np.arange(count, dtype=np.uint64) * np.uint64(_GAMMA))


def text_choices(seed: int, text_digests: bytes) -> Keys:
    """A number for each text that depends on it and the seed alone: the smallest ones are for validation."""
    start = xxhash.xxh3_64_intdigest(f"validation {seed}".encode())
    return mix(np.frombuffer(text_digests, dtype=">u8")[::2].astype(np.uint64) ^ np.uint64(start))


@dataclass
class ValidTally:
    """Counts the documents with a choice under `threshold`, or if there are none, with the smallest one.

    Args:
        threshold: the wanted fraction of 2**64.
        below: documents under it.
        smallest: the smallest choice so far.
        at_smallest: documents that have it: one text and its duplicates.
    """

    threshold: int
    below: Tally = field(default_factory=Tally)
    smallest: int = NUM_KEYS
    at_smallest: Tally = field(default_factory=Tally)

    def add(self, choices: Keys, documents: Documents) -> None:
        """Counts the documents of a block."""
        if not len(choices):
            return
        smallest = int(choices.min())
        if smallest < self.smallest:
            self.smallest, self.at_smallest = smallest, Tally()
        if smallest == self.smallest:
            self.at_smallest += _tally_where(choices == np.uint64(smallest), documents)
        if smallest < self.threshold:
            self.below += _tally_where(choices < np.uint64(self.threshold), documents)

    def limit(self) -> int:
        """Documents with a smaller choice are for validation."""
        return self.threshold if self.below.num_documents else self.smallest + 1

    def __iadd__(self, other: ValidTally) -> ValidTally:
        self.below += other.below
        if other.smallest < self.smallest:
            self.smallest, self.at_smallest = other.smallest, Tally()
        if other.smallest == self.smallest:
            self.at_smallest += other.at_smallest
        return self

    def to_json(self) -> dict[str, Any]:
        """JSON values for a file."""
        return vars(self) | {
            "below": self.below.to_json(),
            "at_smallest": self.at_smallest.to_json(),
        }

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> ValidTally:
        """The other way round."""
        tallies = {name: Tally.from_json(content[name]) for name in ("below", "at_smallest")}
        return cls(**content | tallies)

    def total(self) -> Tally:
        """Counts of the validation documents."""
        return self.below if self.below.num_documents else self.at_smallest


def _tally_where(chosen: NDArray[np.bool_], documents: Documents) -> Tally:
    digests = np.frombuffer(documents.text_digests, dtype=f"V{DIGEST_BYTES}")[chosen]
    return Tally(int(chosen.sum()), int(documents.text_bytes[chosen].sum()), sum_digests(digests.tobytes()))


@dataclass
class State:
    """How far a shuffle is, in JSON values: what is on disk beyond it is cut off when it continues.

    Args:
        num_buckets: ranges of keys, of the same width.
        valid: validation documents so far.
        input, start, num_lines: index of the file to read on with, and what was read of it, in decompressed
            bytes and lines.
        read: documents so far.
        line_hash: sum of the XXH3-128 of their lines.
        bucket_sizes: bytes of the lines and of the records of each bucket.
        is_spread: whether the first pass is done.
        dealt_key: the first key that is not dealt yet.
        num_dealt: training documents that are dealt.
        output_sizes: bytes of the validation file and of each shard.
    """

    num_buckets: int
    valid: ValidTally
    input: int = 0
    start: int = 0
    num_lines: int = 0
    read: Tally = field(default_factory=Tally)
    line_hash: int = 0
    bucket_sizes: list[list[int]] = field(default_factory=list)
    is_spread: bool = False
    dealt_key: int = 0
    num_dealt: int = 0
    output_sizes: list[int] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """JSON values for a file."""
        return vars(self) | {"read": self.read.to_json(), "valid": self.valid.to_json()}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> State:
        """The other way round."""
        valid, read = ValidTally.from_json(content["valid"]), Tally.from_json(content["read"])
        return cls(**content | {"read": read, "valid": valid})


def bucket_paths(folder: Path, bucket: int) -> tuple[Path, Path]:
    """Files with the lines and the records of a bucket."""
    return folder / f"bucket.{bucket:04d}.lines", folder / f"bucket.{bucket:04d}.records"


def first_key(bucket: int, num_buckets: int) -> int:
    """The smallest key of a bucket; of the one after the last, 2**64."""
    return -(-bucket * NUM_KEYS // num_buckets)


def bucket_bounds(num_buckets: int) -> Keys:
    """The smallest key of each bucket."""
    return np.array([first_key(bucket, num_buckets) for bucket in range(num_buckets)], dtype=np.uint64)


def restore(path: Path, num_bytes: int) -> None:
    """Makes a file of which `num_bytes` count; what was written after them is cut off.

    Raises:
        ValueError: it is shorter, as after a power cut.
    """
    with path.open("ab") as file:
        if file.tell() < num_bytes:
            rule = f"has {file.tell()} bytes, but had {num_bytes} when the step was interrupted"
            raise ValueError(f"{path}: {rule}. Fix: give --start-over.")
        file.truncate(num_bytes)


def spread(
    state: State,
    inputs: Sequence[Path],
    folder: Path,
    reader: DocumentBlocks,
    *,
    seed: int,
    save: Callable[[], None],
    save_bytes: int,
) -> Iterator[int]:
    """First pass: every document goes to the bucket of its key. Yields the decompressed bytes just read.

    Args:
        state: where to continue; it is kept up to date.
        inputs: files to read.
        folder: of the buckets.
        reader: reads the documents; it counts what it skips into `state.read`.
        seed: of the keys and choices.
        save: saves the state.
        save_bytes: that are read between two calls of `save`.
    """
    bounds = bucket_bounds(state.num_buckets)
    state.bucket_sizes = state.bucket_sizes or [[0, 0] for _ in bounds]
    unsaved_bytes = 0
    with ExitStack() as stack:
        files = []
        for bucket, sizes in enumerate(state.bucket_sizes):
            paths = bucket_paths(folder, bucket)
            for path, size in zip(paths, sizes, strict=True):
                restore(path, size)
            opened = [stack.enter_context(path.open("ab", buffering=0)) for path in paths]
            files.append([(path, file.fileno()) for path, file in zip(paths, opened, strict=True)])
        while state.input < len(inputs):
            for documents in reader.read(inputs[state.input], start=state.start, num_lines=state.num_lines):
                records = _records(state, seed, documents)
                _append(records, documents, reader.lines.view, bounds, files, state.bucket_sizes)
                state.start += documents.num_bytes
                state.num_lines += documents.num_lines
                unsaved_bytes += documents.num_bytes
                if unsaved_bytes >= save_bytes:
                    save()
                    unsaved_bytes = 0
                yield documents.num_bytes
            state.input, state.start, state.num_lines = state.input + 1, 0, 0
    state.is_spread = True
    save()


def _records(state: State, seed: int, documents: Documents) -> NDArray[Any]:
    records = np.empty(len(documents.ends), dtype=RECORD)
    records["key"] = document_keys(seed, state.read.num_documents, len(records))
    records["choice"] = text_choices(seed, documents.text_digests)
    records["num_bytes"] = documents.ends - documents.begins
    state.valid.add(records["choice"], documents)
    state.read += documents.tally()
    state.line_hash = (state.line_hash + sum_digests(documents.line_digests)) % 2**128
    return records


def _append(
    records: NDArray[Any],
    documents: Documents,
    view: memoryview,
    bounds: Keys,
    files: Sequence[Sequence[tuple[Path, int]]],
    sizes: list[list[int]],
) -> None:
    """Appends the lines of a block and their records to the buckets, with one call per bucket."""
    buckets = np.searchsorted(bounds, records["key"], side="right") - 1
    order = np.argsort(buckets, kind="stable")
    begins, ends, records = documents.begins[order].tolist(), documents.ends[order].tolist(), records[order]
    first = 0
    for bucket, count in enumerate(np.bincount(buckets, minlength=len(bounds)).tolist()):
        if not count:
            continue
        last = first + count
        slices = [view[begin:end] for begin, end in zip(begins[first:last], ends[first:last], strict=True)]
        (lines_path, lines_file), (records_path, records_file) = files[bucket]
        sizes[bucket][0] += write_all(lines_file, slices, lines_path)
        sizes[bucket][1] += write_all(records_file, [records[first:last].tobytes()], records_path)
        first = last


def pieces(path: Path, low: int, end: int, memory_bytes: int) -> Iterator[tuple[int, int]]:
    """Yields the ranges of keys (low, end), in order, whose documents fit the memory, from a file of records.

    A single document is a piece, however large it is.
    """
    width = -(-(end - low) // _FINE_RANGES)
    costs = np.zeros(_FINE_RANGES, dtype=np.int64)
    counts = np.zeros(_FINE_RANGES, dtype=np.int64)
    for records, _ in _read_records(path, low, end):
        ranges = ((records["key"] - np.uint64(low)) // np.uint64(width)).astype(np.int64)
        np.add.at(costs, ranges, records["num_bytes"].astype(np.int64) + DOCUMENT_BYTES)
        np.add.at(counts, ranges, 1)
    first, cost = low, 0
    for index in np.flatnonzero(counts).tolist():
        range_low, range_end = low + index * width, min(end, low + (index + 1) * width)
        if cost and cost + costs[index] > memory_bytes:
            yield first, range_low
            first, cost = range_low, 0
        if costs[index] > memory_bytes and counts[index] > 1:
            yield from pieces(path, range_low, range_end, memory_bytes)
            first = range_end
        else:
            cost += int(costs[index])
    if cost:
        yield first, end


def _read_records(path: Path, low: int, end: int) -> Iterator[tuple[NDArray[Any], NDArray[np.int64]]]:
    """Yields the records with a key in [low, end), and where their lines begin in the other file."""
    begin = 0
    with path.open("rb") as file:
        while len(records := np.fromfile(file, dtype=RECORD, count=_RECORDS_AT_ONCE)):
            ends = begin + np.cumsum(records["num_bytes"].astype(np.int64))
            begins = ends - records["num_bytes"].astype(np.int64)
            begin = int(ends[-1])
            inside = (records["key"] >= np.uint64(low)) & (records["key"] <= np.uint64(end - 1))
            yield records[inside], begins[inside]


class Dealer:
    """Second pass: reads the buckets piece by piece and writes their documents in the order of the keys.

    Args:
        state: where to continue; it is kept up to date.
        folder: of the buckets.
        outputs: the validation file and the shards.
        memory_bytes: for the lines of a piece and what belongs to them.
        save: saves the state.
    """

    def __init__(
        self, state: State, folder: Path, outputs: Sequence[Path], memory_bytes: int, save: Callable[[], None]
    ):
        self.state, self.folder, self.outputs = state, folder, outputs
        self.memory_bytes, self.save = memory_bytes, save
        self.num_train = state.read.num_documents - state.valid.total().num_documents
        self.num_shards = len(outputs) - 1
        self.lines = LineBuffer()

    def shard_start(self, shard: int) -> int:
        """Rank of a shard's first training document: shards differ by one document at most."""
        return shard * self.num_train // self.num_shards

    def deal(self) -> Iterator[int]:
        """Yields the bytes written since it last did."""
        state = self.state
        state.output_sizes = state.output_sizes or [0] * len(self.outputs)
        for path, size in zip(self.outputs, state.output_sizes, strict=True):
            restore(path, size)
        for bucket, sizes in enumerate(state.bucket_sizes):
            lines_path, records_path = bucket_paths(self.folder, bucket)
            low, end = (first_key(number, state.num_buckets) for number in (bucket, bucket + 1))
            if state.dealt_key < end:
                for path, size in zip((lines_path, records_path), sizes, strict=True):
                    restore(path, size)
                first = max(low, state.dealt_key)
                for piece_low, piece_end in pieces(records_path, first, end, self.memory_bytes):
                    yield self._deal_piece(lines_path, records_path, piece_low, piece_end)
                    state.dealt_key = piece_end
                    self.save()
                if state.dealt_key < end:
                    state.dealt_key = end
                    self.save()
            lines_path.unlink(missing_ok=True)
            records_path.unlink(missing_ok=True)

    def _deal_piece(self, lines_path: Path, records_path: Path, low: int, end: int) -> int:
        parts, num_documents = [], 0
        for part in _read_records(records_path, low, end):
            parts.append(part)
            num_documents += len(part[0])
            if self.lines.num_bytes + num_documents * DOCUMENT_BYTES > self.memory_bytes:
                self.lines.free()  # of a piece with fewer and longer documents
        records, places = (np.concatenate([part[index] for part in parts]) for index in (0, 1))
        del parts
        ends = np.cumsum(records["num_bytes"].astype(np.int64))
        begins = ends - records["num_bytes"].astype(np.int64)
        self.lines.allocate(int(ends[-1]))
        self.lines.read(lines_path, places, begins, ends)
        order = np.argsort(records["key"])
        # limit() is at most 2**64, which no uint64 holds
        is_valid = records["choice"][order] <= np.uint64(self.state.valid.limit() - 1)
        self._write(0, begins, ends, order[is_valid])
        order = order[~is_valid]
        while len(order):
            dealt = self.state.num_dealt
            shard = next(one for one in range(self.num_shards) if self.shard_start(one + 1) > dealt)
            count = self.shard_start(shard + 1) - dealt
            self._write(shard + 1, begins, ends, order[:count])
            self.state.num_dealt += len(order[:count])
            order = order[count:]
        return int(ends[-1])

    def _write(
        self, output: int, begins: NDArray[np.int64], ends: NDArray[np.int64], order: NDArray[np.int64]
    ) -> None:
        self.state.output_sizes[output] += self.lines.append_to(self.outputs[output], begins, ends, order)
