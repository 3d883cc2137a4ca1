"""`moe-exp data ...`, and the scripts of moe_exp/scripts that are one of its commands under another name."""

from __future__ import annotations

import argparse
import importlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

from moe_exp.commands.guard import ExactParser, add_subcommands, ended_quietly, guarded

# Modules of commands/data_steps that add commands by `add_commands(subparsers)`; each sets `run`, a function
# of the arguments.
STEPS = ("prepare", "tokenize", "finished")


def add_commands(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `moe-exp data`, without its steps: they load numpy."""
    subparsers.add_parser("data", help="download, shuffle, tokenize and inspect training data")


def add_steps(parser: argparse.ArgumentParser) -> None:
    """Adds the commands of `moe-exp data`."""
    _add_to(add_subcommands(parser, "data"))


def _add_to(subparsers: Any) -> None:
    for name in STEPS:
        importlib.import_module(f"moe_exp.commands.data_steps.{name}").add_commands(subparsers)


def run_data_command(arguments: argparse.Namespace) -> int:
    """Runs what `add_steps` has parsed; what a user can fix is one line and exit code 1."""
    return _data_guard(lambda: arguments.run(arguments))


def _data_guard(work: Callable[[], int | None]) -> int:
    from moe_exp.data.kinds import BadDocument

    def explained() -> int | None:
        try:
            return work()
        except BadDocument as error:
            fix = error.fix
            if "file is damaged" in error.reason:
                fix = "fetch or make the file again; --skip-bad skips lines, not files"
            elif not fix:
                fix = "correct the line; or give --skip-bad (in a mixture skip_bad: true), which skips and"
                fix += " counts such lines and continues"
            raise ValueError(f"{error}. Fix: {fix}.") from None

    full_disk = "free some, and call it again: it resumes where it stopped"
    return guarded(explained, "moe-exp data", extras="data,fast", full_disk=full_disk)


def main(command: str, argv: Sequence[str] | None = None, *, prog: str | None = None) -> int:
    """One of the commands as a program of its own."""
    logging.basicConfig(format="%(message)s")
    logging.getLogger("moe_exp").setLevel(logging.INFO)

    def work() -> int | None:
        subparsers = argparse.ArgumentParser().add_subparsers(parser_class=ExactParser)
        _add_to(subparsers)
        chosen = subparsers.choices[command]
        chosen.prog = prog or chosen.prog
        arguments = chosen.parse_args(argv)
        result: int | None = arguments.run(arguments)
        return result

    return ended_quietly(lambda: _data_guard(work))
