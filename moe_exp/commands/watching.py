"""`moe-exp watch ...`: what keeps a run alive that nobody looks at, and finds out what went wrong."""

from __future__ import annotations

import argparse

# The library is imported by the commands that use it: `moe-exp --help` answers at once.


def add_commands(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `moe-exp watch` and its commands."""
    parser = subparsers.add_parser(
        "watch", help="long runs: who hangs, which node is slow, whether a job is there at all", allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="watch_command", metavar="command", required=True)
    del commands
