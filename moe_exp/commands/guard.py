"""Shared by all commands: exact flags, one-line errors for what a user can fix, and unread output."""

from __future__ import annotations

import argparse
import difflib
import errno
import json
import os
import re
import select
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from moe_exp.host.exit_codes import printable

# exit code, EX_TEMPFAIL of sysexits.h: nothing is wrong, and the output is not there yet, as SLURM jobs make
# it
UNDER_WAY = 75


class ExactParser(argparse.ArgumentParser):
    """Takes no flag by its first letters alone: what looks for a flag in a command finds it by its name."""

    def __init__(self, **options: Any):
        super().__init__(**{**options, "allow_abbrev": False})

    def error(self, message: str) -> NoReturn:
        """Prints one line, with the nearest choice and the command that shows the help."""
        if found := _INVALID_CHOICE.search(message):
            near = difflib.get_close_matches(found[1], re.findall(r"[^', ]+", found[2]), 1)
            message += f"; did you mean {near[0]}?" if near else ""
        self.exit(
            2, f"{self.prog}: error: {printable(message)}. Help: {self.prog} --help\n".replace("?.", "?")
        )


_INVALID_CHOICE = re.compile(r"invalid choice: '([^']*)' \(choose from (.*)\)")


def add_subcommands(parser: argparse.ArgumentParser, command: str) -> Any:
    """Adds the commands of `moe-exp COMMAND`; what is chosen is `COMMAND_command` of the arguments."""
    return parser.add_subparsers(
        dest=f"{command}_command", metavar="command", required=True, parser_class=ExactParser
    )


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """`parser.parse_args`, but the error about an unknown flag names the nearest flag of the command."""
    args, unknown = parser.parse_known_args(arguments)
    if unknown:
        _refuse_unknown(parser, arguments, unknown)
    return args


def _refuse_unknown(
    parser: argparse.ArgumentParser, arguments: Sequence[str], unknown: Sequence[str]
) -> NoReturn:
    for word in arguments:  # the parser of the command that was called
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction) and word in action.choices:
                parser = action.choices[word]
                break
    name = unknown[0].partition("=")[0]
    near = difflib.get_close_matches(name, parser._option_string_actions, 1)
    parser.error(
        f"unrecognized arguments: {' '.join(unknown)}" + (f"; did you mean {near[0]}?" if near else "")
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """Adds --json, for commands that print with `print_json`."""
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def print_json(value: object) -> None:
    """Prints one JSON object; what JSON has no form for, such as paths, as text."""
    print(json.dumps(value, ensure_ascii=False, default=str))


def guarded(
    work: Callable[[], int | None],
    prog: str,
    *,
    extras: str = "",
    full_disk: str = "free some, and call it again",
) -> int:
    """Runs a command; returns its exit code, or 1 after a line about what a user can fix.

    Args:
        work: the command.
        prog: its name, put before the line.
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
        if error.name is None or error.name.startswith("moe_exp"):
            raise
        what = f'".[{extras}]"' if extras else "."
        fix = (
            f"pip install -c constraints.txt -e {what} in the checkout of moe_exp, or activate the"
            " environment that has it"
        )
        return fail(f"the package {error.name} is not installed. Fix: {fix}.")
    except ValueError as error:
        return fail(str(error))
    except OSError as error:
        if error.errno == errno.EPIPE and _is_unread():
            raise
        if error.errno == errno.ENOSPC:
            return fail(f"{error.filename or 'the disk'}: no space left. Fix: {full_disk}.")
        return fail(f"{error.filename or ''}: {error.strerror or error}".lstrip(": "))
    except KeyboardInterrupt:
        return 130


_UNREAD = 141  # as a shell has it for a program that SIGPIPE ended


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
        return _UNREAD


def _is_unread() -> bool:
    """Whether standard output is a pipe whose reader has gone."""
    try:
        descriptor = sys.stdout.fileno()
    except (OSError, ValueError):  # no file at all
        return False
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
