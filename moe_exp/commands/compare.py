"""Arguments of `moe-exp compare`."""

from __future__ import annotations

import argparse
import os
import sys

from moe_exp.config import add_arguments

_OPTIONS = ("runs", "match", "repeats", "seconds", "timeout")


def add_commands(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command."""
    parser = subparsers.add_parser(
        "compare",
        help="train dense and MoE models one after another under the same budget, and write the report",
        description=(
            "Trains models one after another under the same budget, and writes what each has come to. The"
            " dense model gets the MLP width that matches the MoE. The same command again goes on with what"
            " is left; RUN_NAME names the comparison."
        ),
        allow_abbrev=False,
    )
    parser.add_argument(
        "--runs",
        default="",
        help=(
            "what to compare: moe (capacity), dmoe (dropless), dense, with commas (default: dmoe,dense; none"
            " with two of --variant)"
        ),
    )
    parser.add_argument(
        "--variant",
        action="append",
        default=[],
        metavar="NAME:SETTING=VALUE,...",
        help=(
            "another model, with settings of its own: fine:NUM_EXPERTS=16,TOPK=2; may be given more than once"
        ),
    )
    match = (
        "what is the same for all: flops, active-params (both per token, for the same tokens), or time"
        " (default: flops)"
    )
    parser.add_argument("--match", default="flops", help=match)
    parser.add_argument(
        "--repeats",
        default="1",
        help="runs of each with seeds SEED, SEED+1, ..., for an idea of noise (default: 1)",
    )
    seconds = "with --match time: training time of each (default: what the MoE takes for TRAIN_ITERS)"
    parser.add_argument("--seconds", default="0", help=seconds)
    parser.add_argument(
        "--timeout",
        default="0",
        help="seconds after which a run is ended, and the next begins (default: none)",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print the models, their sizes and the expected time, start and write nothing",
    )
    add_arguments(parser.add_argument_group("settings of the runs, as in moe-exp train"))
    parser.set_defaults(run=_compare)


def _compare(arguments: argparse.Namespace) -> int:
    from moe_exp.config.misspelt import unknown_variables
    from moe_exp.studies.compare.back_to_back import dry_run, run_comparison
    from moe_exp.studies.compare.comparison import Comparison, Options

    for name, near in unknown_variables(os.environ):
        print(
            f"moe-exp compare: warning: {name} is not a setting; did you mean {near}?",
            file=sys.stderr,
            flush=True,
        )
    given = {name: getattr(arguments, name) for name in _OPTIONS}
    others = {"command", "run", "dry_run", "variant", *_OPTIONS}
    flags = {name: value for name, value in vars(arguments).items() if name not in others}
    comparison = Comparison.of(Options.of(given, arguments.variant), flags, os.environ)
    if arguments.dry_run:
        print(dry_run(comparison))
        return 0
    return run_comparison(comparison)
