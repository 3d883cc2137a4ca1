"""Around every command: one-line errors for what a user can fix, and output that nobody reads."""

import errno
import os
import select
import sys
from collections.abc import Callable

from moe_exp.commands.doctor import install_command
from moe_exp.host.exit_codes import printable

# exit code, EX_TEMPFAIL of sysexits.h: nothing is wrong, and the output is not there yet, as SLURM jobs make
# it
UNDER_WAY = 75


def guarded(
    work: Callable[[], int | None],
    prog: str,
    *,
    extras: str = "",
    full_disk: str = "free some, and call it again",
) -> int:
    """Runs a command; returns its exit code, or 1 after a line about what a user can fix.

    Args:
        prog: the command's name, put before the line.
        extras: of this package, which the command needs installed.
        full_disk: what to do if the disk is full.

    Raises:
        BrokenPipeError: nobody reads standard output any more, see `ended_quietly`.
    """

    def fail(message: str) -> int:
        print(f"{prog}: {printable(message)}", file=sys.stderr, flush=True)
        return 1

    try:
        return work() or 0
    except ModuleNotFoundError as error:
        # our own module that is missing is a defect, not something to install
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
        return fail(f"{error}. Fix: name another path.")
    except KeyboardInterrupt:
        return 130


def ended_quietly(work: Callable[[], int]) -> int:
    """Runs a program to its exit code; silently 141 if its output is no longer read: `moe-exp ... | head`."""
    try:
        try:
            return work()
        finally:
            if sys.stdout:  # `>&-` leaves none
                sys.stdout.flush()  # here, as at the interpreter's end it could not be caught
    except BrokenPipeError:
        if not _is_unread():
            raise
        # what is still kept is lost, at the interpreter's end too
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # as a shell has it for a program that SIGPIPE ended


def _is_unread() -> bool:
    """Whether standard output is a pipe whose reader has gone."""
    try:
        descriptor = sys.stdout.fileno()
    except (OSError, ValueError):  # no file at all
        return False
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
