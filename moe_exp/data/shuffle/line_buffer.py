"""A buffer for lines that are read from one place and written in another order."""

from __future__ import annotations

import mmap
import os
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moe_exp.data.shuffle.blocks import write_all

_LINES_AT_ONCE = 4096
_READ_BYTES = 2**30
Places = NDArray[np.int64]


class LineBuffer:
    """Memory for the lines of a piece, which the next piece uses again."""

    def __init__(self) -> None:
        self.view = memoryview(b"")

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return len(self.view)

    def free(self) -> None:
        """Gives the memory back."""
        self.view = memoryview(b"")

    def allocate(self, num_bytes: int) -> None:
        """Makes it at least `num_bytes` large; its content is lost."""
        if self.num_bytes >= num_bytes:
            return
        self.free()  # so that there are not two
        # Not a bytearray, which would write zeros first; the memory comes when it is written to.
        buffer = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux: 500 times fewer page faults
            with suppress(OSError):  # a kernel without them
                buffer.madvise(mmap.MADV_HUGEPAGE)
        self.view = memoryview(buffer)

    def read(self, path: Path, places: Places, begins: Places, ends: Places) -> None:
        """Reads lines at `places` of a file to [begins, ends) of the buffer, neighbours with one call.

        Raises:
            ValueError: the file is too short.
        """
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

    def append_to(self, path: Path, begins: Places, ends: Places, order: Places) -> int:
        """Appends the lines at [begins, ends) of the buffer, in `order`, to a file; returns their bytes."""
        num_bytes = 0
        with path.open("ab", buffering=0) as file:
            for first in range(0, len(order), _LINES_AT_ONCE):
                some = order[first : first + _LINES_AT_ONCE]
                places = zip(begins[some].tolist(), ends[some].tolist(), strict=True)
                num_bytes += write_all(file.fileno(), [self.view[begin:end] for begin, end in places], path)
        return num_bytes
