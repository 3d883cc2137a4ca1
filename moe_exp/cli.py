"""The `moe-exp` command. Each subcommand is a few lines that call the library."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import logging
import sys
from collections.abc import Sequence

from moe_exp.commands.data_commands import add_data_commands, run_data_command
from moe_exp.commands.guard import ended_quietly, guarded
from moe_exp.config import add_arguments

# Modules of moe_exp.commands that add commands by `add_commands(subparsers)`; each sets `run`, a function of the arguments.
OTHER_COMMANDS: tuple[str, ...] = (
    "checkpoints", "comparing", "converting", "planning", "reporting", "submitting", "sweeping", "using", "watching",
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `moe-exp` with the arguments `argv` (default: the command line) and returns its exit code."""
    return ended_quietly(lambda: _main(sys.argv[1:] if argv is None else list(argv)))


def _main(arguments: list[str]) -> int:
    parser = _parser(arguments[0] if arguments else "")
    args = parser.parse_args(arguments)
    if args.command is None:
        parser.print_help()
        return 0
    logging.basicConfig(format="%(message)s")
    logging.getLogger("moe_exp").setLevel(logging.INFO)
    if args.command == "data":
        return run_data_command(args)
    if args.command not in ("train", "doctor"):
        return guarded(lambda: args.run(args), f"moe-exp {args.command}")
    settings = {name: value for name, value in vars(args).items() if name not in ("command", "dry_run")}
    try:
        return _train(settings, args.dry_run) if args.command == "train" else _doctor()
    except KeyboardInterrupt:
        return 130


def _parser(command: str) -> argparse.ArgumentParser:
    """Of all commands; the steps of `data`, which load numpy, are filled in for that command alone."""
    parser = argparse.ArgumentParser(prog="moe-exp", description="Mixture-of-Experts training on Megatron-Core")
    parser.add_argument("--version", action="version", version=f"moe-exp {_version()}")
    commands = parser.add_subparsers(dest="command", metavar="command")
    train = commands.add_parser(
        "train",
        help="train a model, or resume the run of the same settings",
        description="Trains a model. Every flag is also an environment variable: --num-experts is NUM_EXPERTS.",
        allow_abbrev=False,
    )
    train.add_argument("--dry-run", action="store_true", help="print settings, torchrun command and parameter report, start nothing")
    add_arguments(train)
    data = commands.add_parser("data", help="from a dataset's name to token files, step by step; `moe-exp data --help` lists the steps")
    if command == "data":
        add_data_commands(data)
    for name in OTHER_COMMANDS:
        importlib.import_module(f"moe_exp.commands.{name}").add_commands(commands)
    commands.add_parser("doctor", help="versions, devices, what is missing and what that costs")
    return parser


def _version() -> str:
    try:
        return importlib.metadata.version("moe-exp")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


def _train(settings: dict[str, str | None], dry_run: bool) -> int:
    from moe_exp.launch.launch import train

    return train(settings, dry_run=dry_run)


def _doctor() -> int:
    from moe_exp.doctor import main as doctor

    return doctor()
