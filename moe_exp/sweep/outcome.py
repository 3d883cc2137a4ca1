"""How a case ended: from its exit code, its log and its metrics to a result, and the file that keeps it. No torch."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from moe_exp.files import write_json
from moe_exp.hosts import CAUSED_BY_ANOTHER
from moe_exp.metrics import read_metrics
from moe_exp.run_folder import RunFolder

Status = Literal["ok", "failed", "oom", "timeout"]

# Messages of torch's allocators, of the C++ and Python ones, and of SLURM.
_OOM = re.compile(
    r"OutOfMemoryError|out of memory|DefaultCPUAllocator: (can't|not enough)|cannot allocate memory|\bMemoryError\b|std::bad_alloc"
    r"|oom[-_]kill",
    re.IGNORECASE,
)
# What torchrun says of a rank that the kernel has killed: signal 9 to the first rank that ended.
_KILLED = re.compile(r"exitcode\s*:\s*-9\b|Signal 9 \(SIGKILL\)")
_SIGNAL = re.compile(r"Signal \d+ \(SIG\w+\) received by PID")
_TIME_LIMIT = re.compile(r"DUE TO TIME LIMIT", re.IGNORECASE)
_ERROR = re.compile(r"^\s*(\[rank\d+\]:\s*)?([\w.]+(Error|Exception|Interrupt)\b.*|(srun|slurmstepd): error:.*|Fatal Python error.*)")
_LONGEST = 300  # characters of a reason


@dataclass(frozen=True)
class Result:
    """What is kept of a case that has run.

    Attributes:
        status: how it ended.
        reason: for anything but ok, the last useful line of its log.
        seconds: per iteration, median after the warm-up; None: not measured.
        memory_bytes: of the rank that needed most: allocated on a GPU, resident on a CPU; None: not measured.
        device: that it ran on; empty: it did not get that far.
        flags: the settings it ran with.
    """

    status: Status
    reason: str = ""
    seconds: float | None = None
    memory_bytes: float | None = None
    device: str = ""
    flags: dict[str, str] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Writes a file that is whole or not there."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, asdict(self))

    @classmethod
    def read(cls, path: Path) -> Result:
        """Reads such a file.

        Raises:
            ValueError: it is none.
        """
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except (json.JSONDecodeError, UnicodeDecodeError, TypeError):
            raise ValueError(f"{path}: is no result of a case. Fix: remove it, the case then runs again.") from None


def result_of(
    folder: RunFolder, log: Path, flags: dict[str, str], *, code: int | None, timeout: int = 0, num_warmup: int, num_iterations: int
) -> Result:
    """The result of a case whose processes are gone.

    Args:
        folder: its run folder.
        log: what it has printed.
        flags: its settings.
        code: exit code of its launcher; None: nobody has seen it end.
        timeout: seconds after which it was ended; 0: it ended by itself.
        num_warmup: iterations at the start that are not measured.
        num_iterations: that it had to run.
    """
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    device = _device(folder)
    if timeout or (code is None and _TIME_LIMIT.search(text)):
        limit = f"CASE_TIMEOUT={timeout} s" if timeout else "the time limit of its job"
        return Result("timeout", f"had not ended after {limit}; its last line: {_last_line(text)}"[:_LONGEST], device=device, flags=flags)
    if code == 0:
        records = [record for record in _records(folder) if record["iteration"] > num_warmup]
        if len(records) == num_iterations - num_warmup:
            memory = max((record["peak_memory_bytes"] for record in records), default=None)
            seconds = statistics.median(record["elapsed_time_per_iteration_ms"] for record in records) / 1e3
            return Result("ok", seconds=seconds, memory_bytes=memory, device=device, flags=flags)
        reason = f"ended with {len(records) + num_warmup} of {num_iterations} iterations measured"
        return Result("failed", reason, device=device, flags=flags)
    status, reason = why_it_failed(text, code)
    return Result(status, reason, device=device, flags=flags)


def why_it_failed(text: str, code: int | None) -> tuple[Status, str]:
    """Whether a case that failed ran out of memory, and the line of its log that says most.

    A rank that was killed counts as out of memory, as that is how the kernel ends a process when memory is short; where a rank has named
    another error, that is the reason, and the kill is torchrun's.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if out_of_memory := [line for line in lines if _OOM.search(line)]:
        return "oom", _short(_most_useful(out_of_memory))
    useful = _most_useful(lines)
    killed = next((line for line in _root_cause(lines) if _KILLED.search(line)), "")
    if (killed or code in (137, -9)) and not _by_rank(lines):
        return "oom", _short(f"a process was killed, as the kernel does when memory is short: {killed or useful}")
    return "failed", _short(useful or f"exit code {code}, and nothing was printed")


def _by_rank(lines: Sequence[str]) -> list[str]:
    """What ranks say of errors of their own."""
    named = [line for line in lines if re.match(r"moe-exp: rank \d+ on .* failed: ", line)]
    return [line for line in named if not any(text in line for text in CAUSED_BY_ANOTHER)]


def _root_cause(lines: Sequence[str]) -> Sequence[str]:
    """What torchrun says of the rank that ended first: the others it ends itself, by SIGTERM and after a while by SIGKILL."""
    start = next((number for number, line in enumerate(lines) if line.startswith("Root Cause (first observed failure)")), 0)
    return lines[start:]


def _most_useful(lines: Sequence[str]) -> str:
    """The first of: the error as a rank names it, the signal that ended one, a complaint of ours, the last error, the last line."""
    signals = [line for line in _root_cause(lines) if _SIGNAL.search(line)]
    ours = [line for line in lines if re.match(r"moe-exp: (?!warning|stopping)", line)]
    errors = [line for line in lines if _ERROR.match(line) and "ChildFailedError" not in line]
    for found in (_by_rank(lines)[:1], signals[:1], ours[-1:], errors[-1:], lines[-1:]):
        if found:
            return found[0]
    return ""


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "none")


def _short(line: str) -> str:
    return re.sub(r"^(moe-exp: |traceback\s*: )", "", line)[:_LONGEST]


def _records(folder: RunFolder) -> list[dict[str, Any]]:
    return [record for record in read_metrics(folder.metrics) if record["kind"] == "train"] if folder.metrics.exists() else []


def _device(folder: RunFolder) -> str:
    """As the run's own node named it."""
    if not folder.provenance.exists():
        return ""
    return str(json.loads(folder.provenance.read_text(encoding="utf-8"))["starts"][-1].get("device", ""))
