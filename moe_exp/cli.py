"""The `moe-exp` command. Each subcommand is a few lines that call the library."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import logging
import re
import sys
from collections.abc import Sequence

from moe_exp.commands.data import add_steps, run_data_command
from moe_exp.commands.guard import ExactParser, ended_quietly, guarded
from moe_exp.commands.help_text import add_help

# The commands of each module of moe_exp.commands, which it adds by `add_commands(subparsers)`; each sets
# `run`, a function of the arguments.
COMMANDS = {
    "train": ("train",),
    "data": ("data",),
    "ckpt": ("ckpt",),
    "studies": ("compare", "ladder"),
    "mup": ("mup",),
    "convert": ("convert",),
    "plan": ("plan",),
    "report": ("report",),
    "slurm": ("slurm",),
    "sweep": ("sweep",),
    "infer": ("score", "eval", "generate"),
    "watch": ("watch",),
    "doctor": ("doctor",),
}
UNGUARDED = ("train", "doctor")  # they say themselves what is wrong, with exit codes of their own


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `moe-exp` with the arguments `argv` (default: the command line) and returns its exit code."""
    return ended_quietly(lambda: _main(sys.argv[1:] if argv is None else list(argv)))


def _main(arguments: list[str]) -> int:
    parser = _parser(*arguments[:1])
    for flag in (argument[:-3] for argument in arguments if re.fullmatch("--[a-z-]+=--", argument)):
        parser.error(f"argument {flag}: expected one argument")  # argparse would fail to unpack it
    args, unknown = parser.parse_known_args(arguments)
    if unknown:
        _chosen(parser, args).refuse_unknown(unknown)
    if args.command is None:
        parser.print_help()
        return 0
    logging.basicConfig(format="%(message)s")
    logging.getLogger("moe_exp").setLevel(logging.INFO)
    if args.command == "data":
        return run_data_command(args)
    if args.command not in UNGUARDED:
        return guarded(lambda: args.run(args), f"moe-exp {args.command}")
    try:
        return int(args.run(args))
    except KeyboardInterrupt:
        return 130


def _chosen(parser: ExactParser, args: argparse.Namespace) -> ExactParser:
    """The parser of the command, or of its command, that `args` name."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction) and getattr(args, action.dest, None):
            return _chosen(action.choices[getattr(args, action.dest)], args)
    return parser


def _parser(*names: str) -> ExactParser:
    """Builds the parser of the commands `names`, or of all; steps of `data`, which load numpy, if named."""
    parser = ExactParser(prog="moe-exp", description="Mixture-of-Experts training on Megatron-Core")
    parser.add_argument("--version", action="version", version=f"moe-exp {_version()}")
    commands = parser.add_subparsers(dest="command", metavar="command")
    for module in [key for key, own in COMMANDS.items() if not set(own).isdisjoint(names)] or COMMANDS:
        importlib.import_module(f"moe_exp.commands.{module}").add_commands(commands)
    if "data" in names:
        add_steps(commands.choices["data"])
    add_help(parser)
    return parser


def _version() -> str:
    try:
        return importlib.metadata.version("moe-exp")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"
