"""`moe-exp watch stacks`: where the ranks of a run are."""

from __future__ import annotations

import argparse
from pathlib import Path

# The library is imported by the commands that use it: `moe-exp --help` answers at once.


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds them to `moe-exp watch`."""
    _add_stacks(commands)


def _add_stacks(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    stacks = commands.add_parser(
        "stacks",
        help="where every rank of a run is, and which are not where the others are",
        description="Asks the launchers of a run for the stacks of all ranks, from any node that sees the run folder; the run goes on. "
        "Of a folder in RUN/hang, prints the summary of the stacks that are there.",
        allow_abbrev=False,
    )
    stacks.add_argument("folder", type=Path, metavar="RUN|DIR", help="run folder, or a folder in RUN/hang")
    stacks.add_argument("--full", action="store_true", help="with the stacks of every group of ranks")
    stacks.set_defaults(run=_stacks)


def _stacks(arguments: argparse.Namespace) -> int:
    from moe_exp.watch.hangs.stacks import stacks_of

    summary, folder = stacks_of(arguments.folder)
    print(summary.whole if arguments.full else summary.short)
    print(f"all stacks: {folder}")
    return 0
