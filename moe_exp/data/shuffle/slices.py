"""Inputs cut into as many slices as there are tasks, each of about the same number of bytes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from moe_exp.data.documents import lines_before
from moe_exp.data.kinds import BadDocument, is_stream
from moe_exp.data.shuffle.blocks import DocumentBlocks, Documents

_SEARCH_BYTES = 2**16


@dataclass(frozen=True)
class Slice:
    """Lines that start at `start` or later and before `end` (None: all of a stream, see kinds.py)."""

    path: Path
    start: int
    end: int | None

    @property
    def num_bytes(self) -> int:
        """Size in the file, compressed or not."""
        return self.path.stat().st_size if self.end is None else self.end - self.start

    def bounds(self) -> tuple[int, int | None]:
        """Where its first line starts, and where its last one ends (None: with the file)."""
        if self.end is None:
            return 0, None
        return _line_start(self.path, self.start), _line_start(self.path, self.end)


def cut_inputs(paths: Sequence[Path], num_tasks: int) -> list[list[Slice]]:
    """The slices of each task, in the order of the inputs.

    Plain JSONL is cut at any byte, compressed files and tables are not cut, so some tasks may have none.
    """
    sizes = [path.stat().st_size for path in paths]
    bounds = [task * sum(sizes) // num_tasks for task in range(num_tasks + 1)]
    slices: list[list[Slice]] = [[] for _ in range(num_tasks)]
    first = 0
    for path, size in zip(paths, sizes, strict=True):
        task = min(bisect_right(bounds, first), num_tasks) - 1
        if is_stream(path):
            slices[task].append(Slice(path, 0, None))
        while not is_stream(path) and task < num_tasks and bounds[task] < first + size:
            start, end = max(0, bounds[task] - first), min(size, bounds[task + 1] - first)
            if start < end:
                slices[task].append(Slice(path, start, end))
            task += 1
        first += size
    return slices


def read_slice(one: Slice, reader: DocumentBlocks) -> Iterator[Documents]:
    """Yields the documents of each block.

    Raises:
        BadDocument, ValueError: as of `DocumentBlocks.read`.
    """
    start, end = one.bounds()
    try:
        yield from reader.read(one.path, start=start, end=end)
    except BadDocument as error:
        number = error.line_number + lines_before(one.path, start)
        raise BadDocument(one.path, number, error.reason) from error


def _line_start(path: Path, place: int) -> int:
    """Where the first line starts that does so at `place` or later, in bytes."""
    if not place:
        return 0
    with path.open("rb", buffering=0) as file:
        position = file.seek(place - 1)
        while chunk := file.read(_SEARCH_BYTES):
            if (found := chunk.find(b"\n")) >= 0:
                return position + found + 1
            position += len(chunk)
    return position
