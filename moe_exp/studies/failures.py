"""Why a run has failed, from what it has printed. No torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from moe_exp.host.exit_codes import CAUSED_BY_ANOTHER

# Messages of torch's allocators, of the C++ and Python ones, and of SLURM.
_OOM = re.compile(
    r"OutOfMemoryError|out of memory|DefaultCPUAllocator: (can't|not enough)|cannot allocate"
    r" memory|\bMemoryError\b|std::bad_alloc"
    r"|oom[-_]kill",
    re.IGNORECASE,
)
# What torchrun says of a rank that the kernel has killed: signal 9 to the first rank that ended.
_KILLED = re.compile(r"exitcode\s*:\s*-9\b|Signal 9 \(SIGKILL\)")
_SIGNAL = re.compile(r"Signal \d+ \(SIG\w+\) received by PID")
_ERROR = re.compile(
    r"^\s*(\[rank\d+\]:\s*)?([\w.]+(Error|Exception|Interrupt)\b.*|(srun|slurmstepd): error:.*|Fatal Python"
    r" error.*)"
)
LONGEST = 300  # characters of a reason


def why_it_failed(text: str, code: int | None) -> tuple[Literal["failed", "oom"], str]:
    """Whether a run that failed ran out of memory, and the line of its log that says most.

    A rank that was killed counts as out of memory, as that is how the kernel ends a process when memory is
    short; where a rank has named another error, that is the reason, and the kill is torchrun's.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if out_of_memory := [line for line in lines if _OOM.search(line)]:
        return "oom", _short(_most_useful(out_of_memory))
    if (hung := [line for line in lines if line.startswith("moe-exp: the run hangs: ")]) and not _by_rank(
        lines
    ):
        return "failed", _short(hung[-1])  # the launcher has killed its ranks
    useful = _most_useful(lines)
    killed = next((line for line in _root_cause(lines) if _KILLED.search(line)), "")
    if (killed or code in (137, -9)) and not _by_rank(lines):
        return "oom", _short(
            f"a process was killed, as the kernel does when memory is short: {killed or useful}"
        )
    return "failed", _short(useful or f"exit code {code}, and nothing was printed")


def _by_rank(lines: Sequence[str]) -> list[str]:
    """What ranks say of errors of their own."""
    named = [line for line in lines if re.match(r"moe-exp: rank \d+ on .* failed: ", line)]
    return [line for line in named if not any(text in line for text in CAUSED_BY_ANOTHER)]


def _root_cause(lines: Sequence[str]) -> Sequence[str]:
    """What torchrun says of the rank that ended first: the others it ends itself, by SIGTERM and after a
    while by SIGKILL.
    """
    start = next(
        (
            number
            for number, line in enumerate(lines)
            if line.startswith("Root Cause (first observed failure)")
        ),
        0,
    )
    return lines[start:]


def _most_useful(lines: Sequence[str]) -> str:
    """The first of: the error as a rank names it, the signal that ended one, a complaint of ours, the last
    error, the last line.
    """
    signals = [line for line in _root_cause(lines) if _SIGNAL.search(line)]
    ours = [
        line
        for line in lines
        if re.match(r"moe-exp: (?!warning|stopping|rank \d+ on .* has failed|the ranks )", line)
    ]
    errors = [line for line in lines if _ERROR.match(line) and "ChildFailedError" not in line]
    for found in (_by_rank(lines)[:1], signals[:1], ours[-1:], errors[-1:], lines[-1:]):
        if found:
            return found[0]
    return ""


def last_line(text: str) -> str:
    """The last line that is not blank."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "none")


def _short(line: str) -> str:
    return re.sub(r"^(moe-exp: |traceback\s*: )", "", line)[:LONGEST]
