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

from moe_exp.commands.doctor import install_command
from moe_exp.host.exit_codes import printable

# exit code, EX_TEMPFAIL of sysexits.h: nothing is wrong, and the output is not there yet, as SLURM jobs make
# it
UNDER_WAY = 75


class ExactParser(argparse.ArgumentParser):
    """Takes no flag by its first letters alone. An error is one line with the nearest word and the help."""

    def __init__(self, **options: Any):
        super().__init__(**{**options, "allow_abbrev": False})

    def error(self, message: str) -> NoReturn:
        """Exits with 2 after the message; names the nearest command or value for one that does not exist."""
        found = re.fullmatch(r"argument (.+): invalid choice: '(.+)' \(choose from (.+)\)", message)
        if found and (near := difflib.get_close_matches(found[2], re.findall(r"[\w.-]+", found[3]), n=1)):
            message = f"argument {found[1]}: invalid choice: '{found[2]}', did you mean {near[0]}?"
        end = "" if message.endswith("?") else "."
        self.exit(2, f"{self.prog}: error: {printable(message)}{end} Help: {self.prog} --help\n")

    def refuse_unknown(self, arguments: Sequence[str]) -> NoReturn:
        """The error for arguments that parsing has left over."""
        from moe_exp.config.settings_file import similar_settings

        flags = [one[2:].replace("-", "_") for one in self._option_string_actions if one.startswith("--")]
        lines = []
        for flag in (one.partition("=")[0] for one in arguments if one.startswith("--")):
            near = [f"--{one.replace('_', '-')}" for one in similar_settings(flag, flags)]
            lines.append(f"{flag} does not exist" + (f", did you mean {' or '.join(near)}?" if near else ""))
        self.error("; ".join(lines) or f"unrecognized arguments: {' '.join(arguments)}")


def add_subcommands(parser: argparse.ArgumentParser, command: str) -> Any:
    """Adds the commands of `moe-exp COMMAND`; what is chosen is `COMMAND_command` of the arguments."""
    return parser.add_subparsers(dest=f"{command}_command", metavar="command", required=True)


def add_command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int | None], about: str, **options: Any
) -> argparse.ArgumentParser:
    """Adds the parser of a command that is run by `run`, with a line of help and options of the parser."""
    parser: argparse.ArgumentParser = commands.add_parser(name, help=about, **options)
    parser.set_defaults(run=run)
    return parser


def add_json(parser: argparse.ArgumentParser) -> None:
    """Adds --json, for commands that print with `print_json`."""
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def positive_options(arguments: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Options of these names that are given; ConfigError unless each is a positive number."""
    from moe_exp.config import setting_error

    given = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    for name, value in given.items():
        if not 0 < value < float("inf"):
            raise setting_error(name, f"{value:g}", "must be a positive number", "give one, or leave it out")
    return given


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
