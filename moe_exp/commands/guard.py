"""What all commands share: flags by their whole names, and errors that a user can mend as one line."""

from __future__ import annotations

import argparse
import errno
import sys
from collections.abc import Callable
from typing import Any


class ExactParser(argparse.ArgumentParser):
    """Takes no flag by its first letters alone: what looks for a flag in a command finds it by its name."""

    def __init__(self, **options: Any):
        super().__init__(**options, allow_abbrev=False)


def guarded(work: Callable[[], int | None], prog: str, *, extras: str = "", full_disk: str = "free some, and call it again") -> int:
    """Runs a command; returns its exit code, or 1 after a line about what a user can mend.

    Args:
        work: the command.
        prog: its name, put before the line.
        extras: of this package, which the command needs installed.
        full_disk: what to do where the disk is full.
    """

    def fail(message: str) -> int:
        print(f"{prog}: {message}", file=sys.stderr, flush=True)
        return 1

    try:
        return work() or 0
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("moe_exp"):
            raise
        what = f'".[{extras}]"' if extras else "."
        fix = f"pip install -c constraints.txt -e {what} in the checkout of moe_exp, or activate the environment that has it"
        return fail(f"the package {error.name} is not installed. Fix: {fix}.")
    except ValueError as error:
        return fail(str(error))
    except OSError as error:
        if error.errno == errno.ENOSPC:
            return fail(f"{error.filename or 'the disk'}: no space left. Fix: {full_disk}.")
        return fail(f"{error.filename or ''}: {error.strerror or error}".lstrip(": "))
    except KeyboardInterrupt:
        return 130
