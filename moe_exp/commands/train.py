"""`moe-exp train`."""

from __future__ import annotations

import argparse
import os
import shlex
import sys

from moe_exp.config import Config, add_arguments


def add_commands(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "train",
        help="train a model, or resume a run",
        description=(
            "Trains a model. The same command again resumes the run. Every setting is a flag and an"
            " environment variable: --num-experts is NUM_EXPERTS."
        ),
    )
    about = "print settings, torchrun command and parameter report, start nothing"
    parser.add_argument("--dry-run", action="store_true", help=about)
    about = "continue this run with its own settings; a flag beside it changes one of them"
    parser.add_argument("--resume", default="", metavar="RUN_FOLDER", help=about)
    add_arguments(parser)
    parser.set_defaults(run=_train)


def _train(arguments: argparse.Namespace) -> int:
    from moe_exp.host.processes import own_command
    from moe_exp.launch.launch import train

    flags = {name: getattr(arguments, name) for name in ("config", *Config.model_fields)}
    # The script of this name sets the variable to its own command line.
    command = os.environ.get("MOE_EXP_COMMAND") or shlex.join([*own_command(), *sys.argv[1:]])
    return train(flags, resume=arguments.resume, dry_run=arguments.dry_run, command=command)
