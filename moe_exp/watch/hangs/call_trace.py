"""With TRACE_CALLS_FROM, traces a rank's latest function calls in a memory-mapped file that survives kill -9.

Each call is one line of fixed length: number of the call, time on the host's monotonic clock in seconds,
function. In a full file, each new line overwrites the oldest; `sort -n` restores the order. Only Python
functions of chosen packages (TRACE_CALLS_IN) are recorded. A recorded call costs one or two microseconds,
any other call far less.
"""

import logging
import mmap
import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from moe_exp.config import Config
from moe_exp.runs.run_folder import RunFolder
from moe_exp.watch.hangs.heartbeat import rank_file

logger = logging.getLogger(__name__)

_LINE_BYTES = 128
_NAME_BYTES = _LINE_BYTES - 12 - 1 - 14 - 1 - 1


class CallTrace:
    """Records calls to `modules` in all threads until `stop`. The file has up to `size_mb` million bytes."""

    def __init__(self, path: Path, *, size_mb: int, modules: Sequence[str]):
        path.parent.mkdir(parents=True, exist_ok=True)
        # the previous start's trace may explain why this one was needed
        if path.exists():
            path.replace(path.with_suffix(".before.txt"))
        self._num_lines = max(1, size_mb * 1_000_000 // _LINE_BYTES)
        with path.open("w+b") as file:
            # not truncate: on a full disk, writing to an unallocated page would kill the process (SIGBUS)
            file.write(bytes(self._num_lines * _LINE_BYTES))
            file.flush()
            self._map = mmap.mmap(file.fileno(), 0)
        self._modules = tuple(modules)
        self._names: dict[CodeType, bytes | None] = {}  # None: the function is not traced
        self._count = 0
        os.register_at_fork(after_in_child=self.stop)  # a child would write to the same pages
        threading.setprofile(self._called)
        sys.setprofile(self._called)

    def stop(self) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def _called(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "call":
            return
        code = frame.f_code
        # cheaper than `get`, as the name is nearly always cached
        try:
            name = self._names[code]
        except KeyError:
            module, name = str(frame.f_globals.get("__name__", "")), None
            if any(module == wanted or module.startswith(f"{wanted}.") for wanted in self._modules):
                # Python 3.11+: includes the class
                function = getattr(code, "co_qualname", code.co_name)
                text = f"{module}.{function}:{code.co_firstlineno}"[-_NAME_BYTES:]
                name = text.encode("ascii", "replace").ljust(_NAME_BYTES) + b"\n"
            self._names[code] = name
        if name is None:
            return
        count, self._count = self._count, self._count + 1
        place = count % self._num_lines * _LINE_BYTES
        self._map[place : place + _LINE_BYTES] = b"%012d %14.6f %s" % (count, time.monotonic(), name)


def latest_calls(path: Path, number: int) -> list[str]:
    """Last `number` calls in a file (time and function), oldest first. [] if the file does not exist."""
    if not path.exists():
        return []
    data = path.read_bytes()
    places = range(0, len(data) - _LINE_BYTES + 1, _LINE_BYTES)
    lines = (data[place : place + _LINE_BYTES] for place in places)
    # unwritten lines are zeros; a line cut off by the end of the process has no newline
    written = sorted(line for line in lines if line[:1] != b"\0" and line.endswith(b"\n"))
    return [line[13:].decode("ascii", "replace").strip() for line in written[-number:]]


_has_started = False


def trace_calls(config: Config, run: RunFolder, rank: int, iteration: int) -> None:
    """Starts the trace of this rank's calls when `iteration` first reaches or exceeds TRACE_CALLS_FROM."""
    global _has_started
    if not _has_started and 0 < config.trace_calls_from <= iteration:
        _has_started = True
        modules = [name.strip() for name in config.trace_calls_in.split(",") if name.strip()]
        path = rank_file(run.path / "hang" / "calls", rank, "txt")
        try:
            CallTrace(path, size_mb=config.trace_calls_mb, modules=modules)  # sys.setprofile keeps it alive
        except OSError as error:  # no reason to end a run
            logger.warning("cannot write call trace %s: %s", path, error.strerror or error)
