"""`moe-exp watch ...`: what keeps a run alive that nobody looks at, and finds out what went wrong."""

from __future__ import annotations

import argparse
import importlib

# Modules of moe_exp.commands that add commands of `moe-exp watch` by `add_commands(subparsers)`; each sets `run`.
_MODULES = ("watching_nodes", "watching_runs", "watching_stacks", "watching_state")


def add_commands(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `moe-exp watch` and its commands."""
    parser = subparsers.add_parser(
        "watch", help="long runs: who hangs, which node is slow, whether a job is there at all", allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="watch_command", metavar="command", required=True)
    for name in _MODULES:
        importlib.import_module(f"moe_exp.commands.{name}").add_commands(commands)
