"""Reads, checks and counts documents like `documents.read_documents`, but in blocks, using far less CPU time.

All blocks are read into one reused buffer, so that its pages stay in cache and no line is copied. For each
line, the reader only finds its end, parses it once and hashes it twice; all other work is vectorized over a
block.
"""

import os
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import orjson
import xxhash
from numpy.typing import NDArray

from moe_exp.data.documents import Tally, skip_or_raise, text_of
from moe_exp.data.kinds import BOM, DAMAGE, FILES, BadDocument, TextRule, damaged, is_stream, read_chunks

DIGEST_BYTES = 16
# Memory per line of a block, besides the line itself: two digests, offsets as Python and numpy integers, a
# slice.
LINE_BYTES = 512
_MOST_LINES = 2**14
# XXH3-128 digests as big-endian words
_DIGEST_WORDS = np.dtype(">u4")
_BUFFERS_PER_CALL = 1024  # IOV_MAX of Linux and macOS
# For larger writes Linux allocates larger pages. A virtual machine gets those from its host at five times the
# CPU cost of the copy.
_BYTES_PER_CALL = 2**20
_SEARCH_BYTES, _COUNTED_BYTES = 2**16, 2**22
_LF, _CR = 10, 13


class LineBlocks:
    """Reads files into `buffer` in blocks of whole lines; each block overwrites the previous one. If a line
    does not fit, the buffer grows to at most `longest_bytes`.
    """

    def __init__(
        self, block_bytes: int, longest_bytes: int, *, text_field: str = "text", rule: TextRule = FILES
    ):
        self.longest_bytes, self.text_field, self.rule = longest_bytes, text_field, rule
        self._allocate(min(block_bytes, longest_bytes))

    def _allocate(self, block_bytes: int) -> None:
        self.buffer = bytearray(block_bytes + 1)  # one extra byte: the last line may lack its LF
        self.view = memoryview(self.buffer)

    def read(self, path: Path, *, start: int = 0, end: int | None = None) -> Iterator[tuple[int, int]]:
        """Yields offsets in `buffer` where a block's lines begin (after a BOM) and end (after the last LF).
        `start`, `end`: byte range to read; both are line boundaries. Streams can only be read whole.

        Raises:
            ValueError: if a line is longer than `longest_bytes`.
            An exception in `kinds.DAMAGE`: if a compressed file is damaged or truncated.
        """
        kept, at_start, left = 0, start == 0, sys.maxsize if end is None else end - start
        with _open(path, start, self.text_field, self.rule) as readinto:
            while True:
                # Fill the buffer after the last block's partial line; a stream may return less than free.
                free, num_bytes = self.view[kept:-1][:left], 0
                while num_bytes < len(free) and (count := readinto(free[num_bytes:])):
                    num_bytes += count
                if not num_bytes:
                    break
                left -= num_bytes
                filled = kept + num_bytes
                lines_end = self.buffer.rfind(b"\n", kept, filled) + 1
                if lines_end:
                    yield self._after_bom(at_start), lines_end
                    at_start = False
                    self.view[: filled - lines_end] = self.view[lines_end:filled].tobytes()
                kept = filled - lines_end
                if kept == len(self.buffer) - 1:  # the buffer is full without a line end
                    if kept >= self.longest_bytes:
                        rule = f"a line exceeds the buffer of {kept} bytes"
                        raise ValueError(f"{path}: {rule}. Fix: raise the memory limit, or remove this line.")
                    full = self.view
                    self._allocate(min(2 * kept, self.longest_bytes))
                    self.view[:kept] = full[:-1]
                    del full, free  # they keep the old buffer in memory
        if kept:
            self.buffer[kept] = _LF
            yield self._after_bom(at_start), kept + 1

    def _after_bom(self, at_start: bool) -> int:
        return len(BOM) if at_start and self.buffer.startswith(BOM) else 0


@contextmanager
def _open(path: Path, start: int, text_field: str, rule: TextRule) -> Iterator[Callable[[memoryview], int]]:
    """Yields a function that reads like `io.RawIOBase.readinto`."""
    if not is_stream(path):
        with path.open("rb", buffering=0) as file:
            file.seek(start)
            yield file.readinto
        return
    chunks, rest = read_chunks(path, text_field=text_field, rule=rule), memoryview(b"")

    def readinto(view: memoryview) -> int:
        nonlocal rest
        if not rest:
            rest = memoryview(next(filter(None, chunks), b""))
        num_bytes = min(len(rest), len(view))
        view[:num_bytes], rest = rest[:num_bytes], rest[num_bytes:]
        return num_bytes

    yield readinto


@dataclass
class Documents:
    """The documents of a block."""

    begins: NDArray[np.int64]  # offsets of their lines in the buffer, after a BOM
    ends: NDArray[np.int64]  # after the LF; a CR is removed
    text_digests: bytes  # XXH3-128
    line_digests: bytes  # of lines without LF
    text_bytes: NDArray[np.int64]  # UTF-8
    num_bytes: int  # size of the block in the decompressed file, including invalid lines
    num_lines: int
    start: int = 0  # offset of the buffer in the decompressed file

    def tally(self, chosen: NDArray[np.bool_] | slice = slice(None)) -> Tally:
        """Tally of the chosen documents (default: all documents)."""
        digests = np.frombuffer(self.text_digests, dtype=f"V{DIGEST_BYTES}")[chosen]
        return Tally(len(digests), int(self.text_bytes[chosen].sum()), sum_digests(digests.tobytes()))


class DocumentBlocks:
    """Reads documents block by block and counts skipped lines in `tally`. `most_lines` limits the memory of
    blocks with many short lines.
    """

    def __init__(
        self, lines: LineBlocks, tally: Tally, *, skip_bad: bool = False, most_lines: int = _MOST_LINES
    ):
        self.lines, self.tally, self.skip_bad, self.most_lines = lines, tally, skip_bad, most_lines

    def read(self, path: Path, *, start: int = 0, end: int | None = None) -> Iterator[Documents]:
        """Yields the documents of the blocks from `LineBlocks.read`, at most `most_lines` lines at a time.

        Raises:
            BadDocument: if a line is invalid, or a compressed file is damaged.
        """
        num_lines = 0
        try:
            for begin, lines_end in self.lines.read(path, start=start, end=end):
                position = 0  # not `begin`: a BOM before it counts as read
                while position < lines_end:
                    documents = self._parse(path, max(begin, position), lines_end, num_lines)
                    documents.start = start
                    documents.num_bytes -= position
                    num_lines, position = num_lines + documents.num_lines, position + documents.num_bytes
                    yield documents
                start += lines_end
        except DAMAGE as error:
            raise damaged(path, num_lines + 1, error) from error

    def _parse(self, path: Path, begin: int, end: int, num_lines: int) -> Documents:
        """Parses lines of the buffer. This is the hot loop, so all names are local."""
        buffer, view, text_field = self.lines.buffer, self.lines.view, self.lines.text_field
        find, loads, digest = buffer.find, orjson.loads, xxhash.xxh3_128_digest
        begins, ends, text_bytes = list[int](), list[int](), list[int]()
        text_digests, line_digests = list[bytes](), list[bytes]()
        # Search the whole block once: most have no CR, and a check per line would cost more than parsing.
        has_cr = find(b"\r", begin, end) >= 0
        position, number, last_number = begin, num_lines, num_lines + self.most_lines
        while position < end and number < last_number:
            line_end = find(b"\n", position)
            following = line_end + 1
            number += 1
            if has_cr and line_end > position and buffer[line_end - 1] == _CR:
                line_end -= 1
                buffer[line_end] = _LF
            line = view[position:line_end]
            try:
                text = loads(line)[text_field].encode()
            except (ValueError, TypeError, KeyError, AttributeError):
                text = b""
            if not text:
                try:  # the slow parser, whose error names the reason
                    text = text_of(bytes(line), text_field).encode()
                except ValueError as error:
                    skip_or_raise(path, number, str(error), self.tally, skip_bad=self.skip_bad)
                    position = following
                    continue
            text_digests.append(digest(text))
            line_digests.append(digest(line))
            text_bytes.append(len(text))
            begins.append(position)
            ends.append(line_end + 1)
            position = following
        sizes = [np.array(values, dtype=np.int64) for values in (begins, ends, text_bytes)]
        digests = b"".join(text_digests), b"".join(line_digests)
        return Documents(sizes[0], sizes[1], *digests, sizes[2], position, number - num_lines)


def sum_digests(digests: bytes) -> int:
    """Sum of XXH3-128 digests modulo 2**128, as in `documents.Tally`."""
    words = np.frombuffer(digests, dtype=_DIGEST_WORDS).reshape(-1, 4).sum(axis=0, dtype=np.uint64).tolist()
    return sum(word << shift for word, shift in zip(words, (96, 64, 32, 0), strict=True)) % 2**128


def write_all(descriptor: int, buffers: Sequence[bytes] | Sequence[memoryview], path: Path) -> int:
    """Writes buffers to the open file `path` without joining them, and returns the number of bytes."""
    total_bytes = sum(map(len, buffers))
    step = min(_BUFFERS_PER_CALL, 1 + _BYTES_PER_CALL * len(buffers) // max(1, total_bytes))
    try:
        for first in range(0, len(buffers), step):
            some = buffers[first : first + step]
            num_bytes = sum(map(len, some))
            written = os.writev(descriptor, some)
            if written < num_bytes:  # the disk is almost full, or Linux's limit of 2 GB per call
                rest = memoryview(b"".join(some))
                while written < num_bytes:
                    written += os.write(descriptor, rest[written:])
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    return total_bytes


# Slices of the inputs


@dataclass(frozen=True)
class Slice:
    """The lines of a file that start in the bytes [start, end); for a whole stream, `end` is None."""

    path: Path
    start: int
    end: int | None

    @property
    def num_bytes(self) -> int:
        """Size of the slice in the file, in bytes; for a compressed file, the compressed size."""
        return self.path.stat().st_size if self.end is None else self.end - self.start

    def bounds(self) -> tuple[int, int | None]:
        """Byte offsets where the first line starts and the last line ends (None: the end of the file)."""
        if self.end is None:
            return 0, None
        return _line_start(self.path, self.start), _line_start(self.path, self.end)

    def line_number(self, number: int) -> int:
        """Converts a line number in the slice to one in the file, by counting the lines before the slice."""
        # an LF at start - 1 begins the line at `start`, which is not counted
        left = self.start - 1
        number += self.start > 0
        with self.path.open("rb") as file:
            while left > 0 and (chunk := file.read(min(_COUNTED_BYTES, left))):
                number += chunk.count(b"\n")
                left -= len(chunk)
        return number

    @contextmanager
    def numbered_errors(self) -> Iterator[None]:
        """Context manager that converts an error's line number in the slice to one in the whole file."""
        try:
            yield
        except BadDocument as error:
            raise BadDocument(self.path, self.line_number(error.line_number), error.reason) from error


def cut_inputs(paths: Sequence[Path], num_tasks: int) -> list[list[Slice]]:
    """Divides the inputs among tasks, in order. Only plain JSONL files are cut. A task may get no slice."""
    sizes = [path.stat().st_size for path in paths]
    bounds = [task * sum(sizes) // num_tasks for task in range(num_tasks + 1)]
    # A cut may be inside a line, which belongs to the task where it starts (`_line_start`).
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
    """Yields the documents of each block; errors give the line number in the whole file."""
    start, end = one.bounds()
    with one.numbered_errors():
        yield from reader.read(one.path, start=start, end=end)


def _line_start(path: Path, place: int) -> int:
    """Byte offset where the first line at or after `place` starts."""
    if not place:
        return 0
    with path.open("rb") as file:
        # Search from the preceding byte: if it is an LF, a line starts at `place` itself.
        file.seek(place - 1)
        while (chunk := file.readline(_SEARCH_BYTES)) and not chunk.endswith(b"\n"):
            continue
        return file.tell()
