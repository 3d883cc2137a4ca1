"""`moe-exp train`."""

from __future__ import annotations

import argparse

from moe_exp.config import Config, add_arguments


def add_commands(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `moe-exp train`."""
    parser = subparsers.add_parser(
        "train",
        help="train a model, or resume a run",
        description=(
            "Trains a model. The same command again resumes the run. Every setting is a flag and an"
            " environment variable: --num-experts is NUM_EXPERTS."
        ),
        allow_abbrev=False,
    )
    about = "print settings, torchrun command and parameter report, start nothing"
    parser.add_argument("--dry-run", action="store_true", help=about)
    about = "continue this run with its own settings; a flag beside it changes one of them"
    parser.add_argument("--resume", default="", metavar="RUN_FOLDER", help=about)
    add_arguments(parser)
    parser.set_defaults(run=_train)


def _train(arguments: argparse.Namespace) -> int:
    from moe_exp.launch.launch import train

    flags = {name: getattr(arguments, name) for name in ("config", *Config.model_fields)}
    return train(flags, resume=arguments.resume, dry_run=arguments.dry_run)
