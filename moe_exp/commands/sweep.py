"""Arguments of `moe-exp sweep`."""

from __future__ import annotations

import argparse
import os
import sys

from moe_exp.config import add_arguments
from moe_exp.studies.sweep.settings import SweepSettings


def add_commands(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command."""
    parser = subparsers.add_parser(
        "sweep",
        help="run a few iterations of each of many layouts, and make the table of memory and time",
        description=(
            "Runs the layouts of the lists (TPS, PPS, EPS, MBSZS, GPUS, ...), and writes what was measured"
            " beside what was predicted. Every flag is also an environment variable: --tps is TPS. The same"
            " command again goes on with what is left."
        ),
        allow_abbrev=False,
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print the cases with what is predicted, start and write nothing",
    )
    parser.add_argument(
        "--retry-failed",
        action="store_true",
        help="run those, too, that have failed, run out of memory or of time before",
    )
    for name, field in SweepSettings.model_fields.items():
        default = "" if field.default in ("", ()) else f" (default: {str(field.default).lower()})"
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            dest=name,
            metavar=name.upper(),
            help=f"{field.description}{default}",
        )
    add_arguments(
        parser.add_argument_group(
            "settings of the runs, as in moe-exp train; a list stands above its setting"
        )
    )
    parser.set_defaults(run=_sweep)


def _sweep(arguments: argparse.Namespace) -> int:
    from moe_exp.config.misspelt import unknown_variables
    from moe_exp.studies.sweep.driver import Sweep, dry_run_text, run_sweep

    for name, near in unknown_variables(os.environ, [name.upper() for name in SweepSettings.model_fields]):
        print(
            f"moe-exp sweep: warning: {name} is not a setting; did you mean {near}?",
            file=sys.stderr,
            flush=True,
        )
    flags = {
        name: value
        for name, value in vars(arguments).items()
        if name not in ("command", "run", "dry_run", "retry_failed")
    }
    sweep = Sweep.of(flags, os.environ)
    if arguments.dry_run:
        print(dry_run_text(sweep, retry_failed=arguments.retry_failed))
        return 0
    return run_sweep(sweep, retry_failed=arguments.retry_failed)
