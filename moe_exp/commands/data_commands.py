"""`moe-exp data ...`, and the scripts of moe_exp/scripts that are one of its commands under another name."""

from __future__ import annotations

import argparse
import errno
import importlib
import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any

# Modules of this package that add commands by `add_commands(subparsers)`; each sets `run`, a function of the arguments.
COMMANDS = ("corpus", "shards", "tokenizing", "inspecting")

UNDER_WAY = 75  # exit code, EX_TEMPFAIL of sysexits.h: nothing is wrong, and the output is not there yet, as SLURM jobs make it


class _ExactParser(argparse.ArgumentParser):
    """Takes no flag by its first letters alone: what looks for a flag in a command finds it by its name."""

    def __init__(self, **options: Any):
        super().__init__(**options, allow_abbrev=False)


def add_data_commands(parser: argparse.ArgumentParser) -> None:
    """Adds the commands of `moe-exp data`."""
    subparsers = parser.add_subparsers(dest="data_command", metavar="command", required=True, parser_class=_ExactParser)
    for name in COMMANDS:
        importlib.import_module(f"moe_exp.commands.{name}").add_commands(subparsers)


def run_data_command(arguments: argparse.Namespace) -> int:
    """Runs what `add_data_commands` has parsed; what a user can mend is one line and exit code 1."""
    return _guarded(lambda: arguments.run(arguments))


def _guarded(work: Callable[[], int | None]) -> int:
    try:
        return work() or 0
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("moe_exp"):
            raise
        fix = 'pip install -c constraints.txt -e ".[data,fast]" in the checkout of moe_exp, or activate the environment that has it'
        return _fail(f"the package {error.name} is not installed. Fix: {fix}.")
    except ValueError as error:
        return _fail(str(error) if "Fix:" in str(error) else f"{error}. {_fix_of(error)}".strip())
    except OSError as error:
        if error.errno == errno.ENOSPC:
            return _fail(f"{error.filename or 'the disk'}: no space left. Fix: free some, and call it again: it goes on where it stopped.")
        return _fail(f"{error.filename or ''}: {error.strerror or error}".lstrip(": "))
    except KeyboardInterrupt:
        return 130


def _fix_of(error: ValueError) -> str:
    from moe_exp.data.documents import BadDocument

    if not isinstance(error, BadDocument):
        return ""
    if "file is damaged" in error.reason:
        return "Fix: fetch or make the file again; --skip-bad skips lines, not files."
    return "Fix: mend the line; or give --skip-bad (and --start-over where it was begun without), which skips and counts such lines."


def _fail(message: str) -> int:
    print(f"moe-exp data: {message}", file=sys.stderr, flush=True)
    return 1


def main(command: str, argv: Sequence[str] | None = None, *, prog: str | None = None) -> int:
    """One of the commands as a program of its own."""
    logging.basicConfig(format="%(message)s")
    logging.getLogger("moe_exp").setLevel(logging.INFO)

    def work() -> int | None:
        subparsers = argparse.ArgumentParser().add_subparsers(parser_class=_ExactParser)
        for name in COMMANDS:
            importlib.import_module(f"moe_exp.commands.{name}").add_commands(subparsers)
        chosen = subparsers.choices[command]
        chosen.prog = prog or chosen.prog
        arguments = chosen.parse_args(argv)
        result: int | None = arguments.run(arguments)
        return result

    return _guarded(work)
