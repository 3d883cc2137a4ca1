"""Exit codes of a job, and how ranks and their launcher exchange them."""

import os
import re
import sys
from contextlib import suppress
from pathlib import Path

# Exit codes of a job: TRAIN_ITERS reached; failed; invalid settings; saved, and the same command resumes.
FINISHED, FAILED, BAD_INPUT, TO_BE_CONTINUED = 0, 1, 2, 75

# From ranks to their launcher: restart the ranks; not a failure.
START_AGAIN = 76

# Environment of the ranks, set by the launcher.
EXIT_CODE_FILE = "MOE_EXP_EXIT_CODE_FILE"  # where ranks write the exit code of the job
HEARTBEATS = "MOE_EXP_HEARTBEATS"  # this node's folder for the ranks' heartbeats
METRICS_FILE = "MOE_EXP_METRICS_FILE"  # the run's metrics.jsonl
LAUNCH_TIME = "MOE_EXP_LAUNCH_TIME"  # from `time.monotonic`
PREPARED_TEXT = "MOE_EXP_PREPARED_TEXT"  # token files and tokenizer made of TRAIN_DATA's text, as JSON
RENDEZVOUS_KEY = "MOE_EXP_RENDEZVOUS_KEY"  # prefix of names in the job's stores, see launch/rendezvous.py
REASONS_FILE = "MOE_EXP_REASONS_FILE"  # by `moe_exp.train`: where ranks write the lines with which they end

# Messages of torch.distributed on healthy ranks when another rank has died.
CAUSED_BY_ANOTHER = (
    "Connection closed by peer", "Connection reset by peer", "Broken pipe", "NCCL", "Timed out waiting",
    "ProcessGroup",
)  # fmt: skip


def report_exit_code(code: int, *, by_any_rank: bool = False) -> bool:
    """Reports the exit code of the job to this node's launcher, by the first local rank; False without one.

    torchrun knows only 0 and failure: ranks that have reported exit with 0, whatever the code.
    """
    path = os.environ.get(EXIT_CODE_FILE)
    if path and (by_any_rank or os.environ.get("LOCAL_RANK", "0") == "0"):
        try:
            Path(path).write_text(str(code))
        except FileNotFoundError:  # the launcher has ended, and deleted the folder
            return False
    return bool(path)


def report_first(code: int) -> bool:
    """`report_exit_code` by any rank; False if another rank of this node did: a reason appears once."""
    try:
        path = Path(os.environ[EXIT_CODE_FILE])
        # a link fails if the name is taken: of several ranks that end at once one is the first
        own = path.with_name(f"{path.name}.{os.getpid()}")
        own.write_text(str(code))
        os.link(own, path)  # whole at once: the agent reads it as soon as any rank has ended
    except FileExistsError:
        return False
    except (KeyError, OSError):  # no launcher, or one that has ended; a full disk
        pass
    return True


def reported_exit_code() -> int | None:
    """The code that a rank of this node reported with `report_exit_code`."""
    try:
        text = Path(os.environ.get(EXIT_CODE_FILE) or "none").read_text()
    except FileNotFoundError:
        return None
    return int(text) if text else None


def alive_file(exit_code_file: str) -> Path:
    """File that the agent touches regularly, next to the exit code's."""
    return Path(exit_code_file).with_name("agent_alive")


def settings_file(exit_code_file: str) -> Path:
    """File with the settings that the launcher has resolved and checked for its ranks, next to it, too."""
    return Path(exit_code_file).with_name("settings.json")


def show_alive() -> None:
    """Shows the launcher that this agent is not stuck."""
    if path := os.environ.get(EXIT_CODE_FILE):
        with suppress(OSError):  # the launcher has ended, or the disk is full
            alive_file(path).touch()


def leave_reasons(*lines: str) -> None:
    """Appends the reasons why this rank ends to the file of `moe_exp.train`, if it started the job."""
    if path := os.environ.get(REASONS_FILE):
        with suppress(OSError), Path(path).open("a", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in lines)


_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def printable(text: str) -> str:
    """Text for a terminal, with control characters (e.g. from file names) escaped as Python does."""
    return _UNPRINTABLE.sub(lambda match: repr(match[0])[1:-1], text)


def complain(*lines: str) -> None:
    """Prints lines to stderr, ignoring errors such as a full disk."""
    with suppress(OSError):
        print(*(f"moe-exp: {printable(line)}" for line in lines), sep="\n", file=sys.stderr, flush=True)
