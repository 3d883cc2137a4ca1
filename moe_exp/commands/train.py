"""`moe-exp train`."""

from __future__ import annotations

import argparse

from moe_exp.config import Config, add_arguments

_EXAMPLES = """examples:
  moe-exp train                                              the small model on its own corpus
  moe-exp train --dry-run --preset olmoe-1b-7b --ep 8        settings, command, parameters; no training
  moe-exp train --train-data data/x_text_document --lr 3e-4  the same command again resumes the run
"""


def add_commands(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `moe-exp train`."""
    parser = subparsers.add_parser(
        "train",
        help="train a model, or resume the run of the same settings",
        description=(
            "Trains a model. Every flag is also an environment variable: --num-experts is NUM_EXPERTS."
        ),
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    about = "print settings, torchrun command and parameter report, start nothing"
    parser.add_argument("--dry-run", action="store_true", help=about)
    add_arguments(parser)
    parser.set_defaults(run=_train)


def _train(arguments: argparse.Namespace) -> int:
    from moe_exp.launch.launch import train

    return train({name: getattr(arguments, name) for name in Config.model_fields}, dry_run=arguments.dry_run)
