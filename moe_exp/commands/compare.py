"""Arguments of `moe-exp compare`."""

from __future__ import annotations

import argparse
import os

from moe_exp.config import add_arguments

_NUMBERS = ("repeats", "seconds", "timeout")


def add_commands(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command."""
    parser = subparsers.add_parser(
        "compare",
        help="train dense and MoE models under the same budget, and write a report",
        description=(
            "Trains models one after another under the same budget, and writes what each has come to. The"
            " dense model gets the MLP width that matches the MoE. The same command again continues with what"
            " is left; RUN_NAME names the comparison."
        ),
        allow_abbrev=False,
    )
    add = parser.add_argument
    about = (
        "moe (capacity), dmoe (dropless), dense, with commas (default: dmoe,dense; none with two --variant)"
    )
    add("--runs", default="", help=about)
    about = "another model, with settings of its own: fine:NUM_EXPERTS=64,TOPK=4; may be given more than once"
    add("--variant", action="append", default=[], metavar="NAME:SETTING=VALUE,...", help=about)
    match = (
        "what is the same for all: flops, active-params (both per token, for the same tokens), or time"
        " (default: flops)"
    )
    add("--match", default="flops", help=match)
    about = "runs of each with seeds SEED, SEED+1, ..., for an idea of noise (default: 1)"
    add("--repeats", default="1", help=about)
    seconds = "with --match time: training time of each (default: what the MoE takes for TRAIN_ITERS)"
    add("--seconds", default="0", help=seconds)
    about = "seconds after which a run is ended, and the next begins (default: none)"
    add("--timeout", default="0", help=about)
    about = "print the models, their sizes and the expected time, start and write nothing"
    add("--dry-run", action="store_true", help=about)
    add_arguments(parser)
    parser.set_defaults(run=_compare)


def _compare(arguments: argparse.Namespace) -> int:
    from moe_exp.config.misspelt import warn_of_misspelt
    from moe_exp.studies.child_runs import numbers_in
    from moe_exp.studies.compare.back_to_back import check_planned_files, dry_run, run_comparison
    from moe_exp.studies.compare.comparison import Comparison, Options

    warn_of_misspelt()
    others = {"command", "run", "dry_run", "runs", "variant", "match", *_NUMBERS}
    flags = {name: value for name, value in vars(arguments).items() if name not in others}
    numbers = numbers_in({name: getattr(arguments, name) for name in _NUMBERS})
    options = Options(arguments.runs, tuple(arguments.variant), arguments.match, **numbers)
    comparison = Comparison.of(options, flags, os.environ)
    if arguments.dry_run:
        print(dry_run(comparison), flush=True)
        check_planned_files(comparison)
        return 0
    return run_comparison(comparison)
