"""Exit codes of a job, and what ranks and their launcher hand each other about them."""

from __future__ import annotations

import os
import re
import sys
from contextlib import suppress
from pathlib import Path

# Exit codes of a job: it has come to TRAIN_ITERS; it failed; its settings cannot run; it has saved, and the
# same command goes on.
FINISHED, FAILED, BAD_INPUT, TO_BE_CONTINUED = 0, 1, 2, 75

# From ranks to their launcher: start the ranks again, which is no failure.
START_AGAIN = 76

# Variable that the launcher sets: where ranks write the exit code of the job.
EXIT_CODE_FILE = "MOE_EXP_EXIT_CODE_FILE"

# Variable that the launcher sets: the folder of this node where ranks keep their heartbeats.
HEARTBEATS = "MOE_EXP_HEARTBEATS"

# Others that it sets: the metrics.jsonl of the run; the time of the launch, of the clock that
# `time.monotonic` reads.
METRICS_FILE = "MOE_EXP_METRICS_FILE"

LAUNCH_TIME = "MOE_EXP_LAUNCH_TIME"

# What torch.distributed says on the ranks that did nothing wrong, when another rank has died.
CAUSED_BY_ANOTHER = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "NCCL",
    "Timed out waiting",
    "ProcessGroup",
)


def tell_launcher(code: int, *, by_any_rank: bool = False) -> bool:
    """Leaves the exit code of the job for the launcher of this node, by its first rank; False where there is
    none to tell.

    torchrun knows 0 and failures alone: ranks that have told end with 0, whatever they have told.
    """
    told = os.environ.get(EXIT_CODE_FILE)
    if told and (by_any_rank or os.environ.get("LOCAL_RANK", "0") == "0"):
        try:
            Path(told).write_text(str(code))
        except FileNotFoundError:  # the launcher has ended, and has taken the folder with it
            return False
    return bool(told)


def told_exit_code() -> int | None:
    """What a rank of this node has told by `tell_launcher`."""
    try:
        text = Path(os.environ.get(EXIT_CODE_FILE) or "none").read_text()
    except FileNotFoundError:
        return None
    return int(text) if text else None


_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def printable(text: str) -> str:
    """Lines for a terminal, with control characters, as a file name may have them, written as Python does."""
    return _UNPRINTABLE.sub(lambda match: repr(match[0])[1:-1], text)


def complain(*lines: str) -> None:
    """Lines about the job on stderr. That may be a log on a full disk, which is no reason not to do what they
    are about.
    """
    with suppress(OSError):
        print(*(f"moe-exp: {printable(line)}" for line in lines), sep="\n", file=sys.stderr, flush=True)
