"""Why a run failed, from its output. No torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from moe_exp.host.exit_codes import CAUSED_BY_ANOTHER

# Messages of torch's allocators, C++, Python and SLURM.
_OOM = re.compile(
    r"OutOfMemoryError|out of memory|DefaultCPUAllocator: (can't|not enough)|cannot allocate"
    r" memory|\bMemoryError\b|std::bad_alloc"
    r"|oom[-_]kill",
    re.IGNORECASE,
)
# torchrun's message if the kernel killed the first rank that ended.
_KILLED = re.compile(r"exitcode\s*:\s*-9\b|Signal 9 \(SIGKILL\)")
_SIGNAL = re.compile(r"Signal \d+ \(SIG\w+\) received by PID")
_ERROR = re.compile(
    r"^\s*(\[rank\d+\]:\s*)?([\w.]+(Error|Exception|Interrupt)\b.*|(srun|slurmstepd): error:.*|Fatal Python"
    r" error.*)"
)
LONGEST = 300  # characters of a reason


def why_it_failed(text: str, code: int | None) -> tuple[Literal["failed", "oom"], str]:
    """Whether a failed run ran out of memory, and the most useful line of its log.

    A killed rank counts as out of memory, as the kernel does this when memory is short. If a rank reported
    another error, that is the reason, and torchrun did the killing.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if out_of_memory := [line for line in lines if _OOM.search(line)]:
        return "oom", _short(_most_useful(out_of_memory))
    hung, by_rank = [line for line in lines if line.startswith("moe-exp: the run hangs: ")], _by_rank(lines)
    if hung and not by_rank:
        return "failed", _short(hung[-1])  # the launcher has killed its ranks
    useful = _most_useful(lines)
    killed = next((line for line in _root_cause(lines) if _KILLED.search(line)), "")
    if (killed or code in (137, -9)) and not by_rank:
        said = killed or useful
        return "oom", _short(f"a process was killed, as the kernel does when memory is short: {said}")
    return "failed", _short(useful or f"exit code {code}, and nothing was printed")


def _by_rank(lines: Sequence[str]) -> list[str]:
    """Errors that ranks report as their own."""
    named = [line for line in lines if re.match(r"moe-exp: rank \d+ on .* failed: ", line)]
    return [line for line in named if not any(text in line for text in CAUSED_BY_ANOTHER)]


def _root_cause(lines: Sequence[str]) -> Sequence[str]:
    """torchrun's report on the rank that ended first; it ends the others by SIGTERM, then SIGKILL."""
    head = "Root Cause (first observed failure)"
    return lines[next((number for number, line in enumerate(lines) if line.startswith(head)), 0) :]


def _most_useful(lines: Sequence[str]) -> str:
    """First of: error by rank, signal that ended one, our own message, last error, last line."""
    signals = [line for line in _root_cause(lines) if _SIGNAL.search(line)]
    of_ours = re.compile(r"moe-exp: (?!warning|stopping|rank \d+ on .* has failed|the ranks )")
    ours = [line for line in lines if of_ours.match(line)]
    errors = [line for line in lines if _ERROR.match(line) and "ChildFailedError" not in line]
    for found in (_by_rank(lines)[:1], signals[:1], ours[-1:], errors[-1:], lines[-1:]):
        if found:
            return found[0]
    return ""


def last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "none")


def _short(line: str) -> str:
    return re.sub(r"^(moe-exp: |traceback\s*: )", "", line)[:LONGEST]
