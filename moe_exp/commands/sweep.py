"""Arguments of `moe-exp sweep`."""

from __future__ import annotations

import argparse
import os

from moe_exp.config import add_arguments
from moe_exp.studies.sweep.settings import SweepSettings


def add_commands(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "sweep",
        help="run a few iterations of many layouts, and write a table of memory and time",
        description=(
            "Runs the layouts of the lists (TPS, PPS, EPS, MBSZS, GPUS, ...), and writes what was measured"
            " beside what was predicted. Every flag is also an environment variable: --tps is TPS. The same"
            " command again continues with what is left."
        ),
    )
    add = parser.add_argument
    about = "print the cases with what is predicted, start and write nothing"
    add("--dry-run", action="store_true", help=about)
    about = "run those, too, that have failed, run out of memory or of time before"
    add("--retry-failed", action="store_true", help=about)
    add_arguments(parser, SweepSettings)
    add_arguments(parser)
    parser.set_defaults(run=_sweep)


def _sweep(arguments: argparse.Namespace) -> int:
    from moe_exp.config.settings_file import warn_of_misspelt
    from moe_exp.studies.sweep.driver import Sweep, dry_run_text, run_sweep

    warn_of_misspelt(SweepSettings.model_fields)
    others = ("command", "run", "dry_run", "retry_failed")
    flags = {name: value for name, value in vars(arguments).items() if name not in others}
    sweep = Sweep.of(flags, os.environ)
    if arguments.dry_run:
        print(dry_run_text(sweep, retry_failed=arguments.retry_failed))
        return 0
    return run_sweep(sweep, retry_failed=arguments.retry_failed)
