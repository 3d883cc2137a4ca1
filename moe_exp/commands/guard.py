"""Handles errors of commands: an error that a user can fix prints one line, a closed pipe prints nothing."""

import errno
import os
import select
import sys
from collections.abc import Callable

from moe_exp.commands.doctor import install_command
from moe_exp.host.exit_codes import printable

UNDER_WAY = 75  # exit code while SLURM jobs create the output (EX_TEMPFAIL of sysexits.h): not an error


def guarded(
    work: Callable[[], int | None], prog: str, *, extras: str = "",
    full_disk: str = "free some space and repeat the command",
) -> int:  # fmt: skip
    """Runs a command; returns its exit code. For an error that a user can fix, prints one line and returns 1.

    Args:
        prog: name of the command, printed before the error.
        extras: extras of this package that the command requires.
        full_disk: suggested fix, printed if the disk is full.

    Raises:
        BrokenPipeError: if nothing reads standard output any more; `ended_quietly` handles it.
    """

    def fail(message: str) -> int:
        print(f"{prog}: {printable(message)}", file=sys.stderr, flush=True)
        return 1

    try:
        return work() or 0
    except ModuleNotFoundError as error:
        # a missing module of our own is a bug, not something to install
        if error.name is None or error.name.startswith("moe_exp"):
            raise
        fix = f"{install_command(extras or 'train')}, or activate the environment that has it"
        return fail(f"the package {error.name} is not installed. Fix: {fix}.")
    except ValueError as error:
        return fail(str(error))
    except OSError as error:
        if error.errno == errno.EPIPE and _is_unread():
            raise
        if error.errno == errno.ENOSPC:
            return fail(f"{error.filename or 'the disk'}: no space left. Fix: {full_disk}.")
        return fail(f"{error.filename or ''}: {error.strerror or error}".lstrip(": "))
    except RuntimeError as error:
        if not str(error).startswith("Symlink loop from "):  # of Path.resolve, before Python 3.13
            raise
        return fail(f"{error}. Fix: specify another path.")
    except KeyboardInterrupt:
        return 130


def ended_quietly(work: Callable[[], int]) -> int:
    """Returns the exit code of `work`, or 141 if its output pipe was closed (`moe-exp ... | head`)."""
    try:
        try:
            return work()
        finally:
            if sys.stdout:  # None after `>&-`
                sys.stdout.flush()  # an error at interpreter exit could not be caught
    except BrokenPipeError:
        if not _is_unread():
            raise
        # discard buffered output, or the flush at interpreter exit would fail as well
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # as a shell reports a program terminated by SIGPIPE


def _is_unread() -> bool:
    """Whether standard output is a pipe without a reader."""
    try:
        descriptor = sys.stdout.fileno()
    except (OSError, ValueError):  # not a file
        return False
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
