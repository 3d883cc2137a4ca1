"""Exit codes of a job, and their exchange between ranks and launcher."""

import os
import re
import sys
from contextlib import suppress
from pathlib import Path

# Exit codes of a job: TRAIN_ITERS reached; failed; invalid settings; failed, and a restart would fail in the
# same way; stopped, and the same command resumes.
FINISHED, FAILED, BAD_INPUT, WOULD_REPEAT, TO_BE_CONTINUED = 0, 1, 2, 3, 75

# From ranks to their launcher: restart the ranks, without counting a failure.
START_AGAIN = 76

# Environment variables that the launcher sets for the ranks.
EXIT_CODE_FILE = "MOE_EXP_EXIT_CODE_FILE"  # where ranks write the exit code of the job
HEARTBEATS = "MOE_EXP_HEARTBEATS"  # this node's folder for the ranks' heartbeats
METRICS_FILE = "MOE_EXP_METRICS_FILE"  # the run's metrics.jsonl
EXCLUDE_FILE = "MOE_EXP_EXCLUDE_FILE"  # list of nodes that the next jobs must avoid
LAUNCH_TIME = "MOE_EXP_LAUNCH_TIME"  # from `time.monotonic`
PREPARED_TEXT = "MOE_EXP_PREPARED_TEXT"  # token files and tokenizer prepared from TRAIN_DATA's text, as JSON
RENDEZVOUS_KEY = "MOE_EXP_RENDEZVOUS_KEY"  # prefix of names in the job's stores, see launch/rendezvous.py
STANDS_BY = "MOE_EXP_STANDS_BY"  # file descriptor, in a process that takes a rank's place if it restarts
REASONS_FILE = "MOE_EXP_REASONS_FILE"  # set by `moe_exp.train`: where ranks write their final error lines

# Files beside the exit code file.
AGENT_ALIVE = "agent_alive"  # touched regularly by the agent
RESOLVED_SETTINGS = "settings.json"  # from the launcher, for its ranks

# Parts of torch.distributed's errors on healthy ranks after another rank has died.
CAUSED_BY_ANOTHER = (
    "Connection closed by peer", "Connection reset by peer", "Broken pipe", "NCCL", "Timed out waiting",
    "ProcessGroup",
)  # fmt: skip


def report_exit_code(code: int, *, by_any_rank: bool = False) -> bool:
    """Reports `code` to the launcher, by default only from local rank 0. Returns False without a launcher."""
    # torchrun only distinguishes 0 and failure, so ranks that have reported a code exit with 0
    path = os.environ.get(EXIT_CODE_FILE)
    if path and (by_any_rank or os.environ.get("LOCAL_RANK", "0") == "0"):
        try:
            Path(path).write_text(str(code))
        except FileNotFoundError:  # the launcher has ended and deleted the folder
            return False
    return bool(path)


def report_first(code: int) -> bool:
    """Reports `code` to the launcher, from any rank. Returns False if another rank of this node was first."""
    try:
        path = Path(os.environ[EXIT_CODE_FILE])
        # A link fails if the name exists, so exactly one of several ranks is first. It is also atomic: the
        # agent reads the file as soon as any rank has ended.
        own = path.with_name(f"{path.name}.{os.getpid()}")
        own.write_text(str(code))
        os.link(own, path)
    except FileExistsError:
        return False
    except (KeyError, OSError):  # no launcher, or it has ended, or the disk is full
        pass
    return True


def reported_exit_code() -> int | None:
    """Exit code that a rank of this node has reported; None if no rank has."""
    try:
        text = Path(os.environ.get(EXIT_CODE_FILE) or "none").read_text()
    except FileNotFoundError:
        return None
    return int(text) if text else None


def show_alive() -> None:
    """Shows the launcher that this agent (launch/agent.py) is not stuck."""
    if path := os.environ.get(EXIT_CODE_FILE):
        with suppress(OSError):  # the launcher has ended, or the disk is full
            Path(path).with_name(AGENT_ALIVE).touch()


def leave_reasons(*lines: str) -> None:
    """If `moe_exp.train` started the job, appends this rank's final error lines to the file REASONS_FILE."""
    if path := os.environ.get(REASONS_FILE):
        with suppress(OSError), Path(path).open("a", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in lines)


_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def printable(text: str) -> str:
    """Escapes control characters in `text`, e.g. from file names, in the same way as `repr`."""
    return _UNPRINTABLE.sub(lambda match: repr(match[0])[1:-1], text)


def complain(*lines: str) -> None:
    """Prints error lines to stderr; ignores write errors such as a full disk."""
    with suppress(OSError):
        print(*(f"moe-exp: {printable(line)}" for line in lines), sep="\n", file=sys.stderr, flush=True)
