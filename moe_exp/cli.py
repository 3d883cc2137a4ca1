"""The `moe-exp` command."""

import argparse
import importlib
import importlib.metadata
import logging
import re
import sys
from collections.abc import Sequence

from moe_exp.commands.data import data_guarded, declare_steps
from moe_exp.commands.guard import ended_quietly, guarded
from moe_exp.commands.parsers import ExactParser, add_parser

# Module of moe_exp.commands that declares each command, in the order of `moe-exp --help`.
COMMANDS = {
    "train": "train", "data": "data", "ckpt": "ckpt", "compare": "studies", "ladder": "studies",
    "mup": "studies", "convert": "ckpt", "plan": "plan_views", "report": "report", "slurm": "train",
    "sweep": "studies", "score": "infer", "eval": "infer", "generate": "infer", "watch": "watch",
    "doctor": "doctor",
}  # fmt: skip
UNGUARDED = ("train", "doctor")  # they handle errors themselves, with their own exit codes


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `moe-exp` with the arguments `argv` (default: the command line) and returns its exit code."""
    return ended_quietly(lambda: _main(sys.argv[1:] if argv is None else list(argv)))


def _main(arguments: list[str]) -> int:
    parser = parser_of(*arguments[:1])
    for flag in (argument[:-3] for argument in arguments if re.fullmatch("--[a-z-]+=--", argument)):
        parser.error(f"argument {flag}: expected one argument")  # argparse would raise an internal error
    args, unknown = parser.parse_known_args(arguments)
    if unknown:
        _chosen(parser, args).refuse_unknown(unknown)
    if args.command is None:
        parser.print_help()
        return 0
    logging.basicConfig(format="%(message)s")
    logging.getLogger("moe_exp").setLevel(logging.INFO)
    if args.command == "data":
        return data_guarded(lambda: args.run(args))
    if args.command not in UNGUARDED:
        return guarded(lambda: args.run(args), f"moe-exp {args.command}")
    try:
        return int(args.run(args))
    except KeyboardInterrupt:
        return 130


def _chosen(parser: ExactParser, args: argparse.Namespace) -> ExactParser:
    """Returns the parser of the command or subcommand in `args`."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction) and getattr(args, action.dest, None):
            return _chosen(action.choices[getattr(args, action.dest)], args)
    return parser


def parser_of(*names: str) -> ExactParser:
    """Parser with the commands `names` (default: all), and with data's subcommands if `data` is named."""
    try:
        version = importlib.metadata.version("moe-exp")
    except importlib.metadata.PackageNotFoundError:
        version = "(not installed)"
    parser = ExactParser(prog="moe-exp", description="Mixture-of-Experts training on Megatron-Core")
    parser.add_argument("--version", action="version", version=f"moe-exp {version}")
    commands = parser.add_subparsers(dest="command", metavar="command")
    if "data" in names:
        declare_steps()
    # import only the module of the named command, so that `moe-exp CMD --help` is fast
    for name in [name for name in COMMANDS if name in names] or COMMANDS:
        importlib.import_module(f"moe_exp.commands.{COMMANDS[name]}")
        add_parser(commands, name)
    return parser
