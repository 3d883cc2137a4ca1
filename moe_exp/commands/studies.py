"""Arguments of `moe-exp compare` and `moe-exp ladder`."""

from __future__ import annotations

import argparse
import os
import shlex
from typing import Any

from moe_exp.config import Config, ConfigError, add_arguments

_VARIANT = "another model, with settings of its own: fine:NUM_EXPERTS=64,TOPK=4; may be given more than once"


def add_commands(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "compare",
        help="train dense and MoE models under the same budget, and write a report",
        description=(
            "Trains models one after another under the same budget, and writes what each has come to. The"
            " dense model gets the MLP width that matches the MoE. The same command again continues with what"
            " is left; RUN_NAME names the comparison."
        ),
    )
    add = parser.add_argument
    about = (
        "moe (capacity), dmoe (dropless), dense, with commas (default: dmoe,dense; none with two --variant)"
    )
    add("--runs", default="", help=about)
    add("--variant", action="append", default=[], metavar="NAME:SETTING=VALUE,...", help=_VARIANT)
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
    parser = subparsers.add_parser(
        "ladder",
        help="train dense and MoE models at several sizes, fit scaling laws, and predict the largest",
        description=(
            "Trains variants at several sizes with equal FLOPs per rung, fits the loss over compute of each,"
            " and reports the effective speedup over the baseline with intervals. The last rung is predicted"
            " before it runs. The same command again continues with what is left; RUN_NAME names the ladder."
        ),
    )
    add = parser.add_argument
    about = "YAML file with the rungs, or a name of the package's own (default: --sizes)"
    add("definition", nargs="?", help=about)
    about = "HIDDEN_SIZE of each rung, such as 16,24,32,48; depth, tokens and LR follow by a rule"
    add("--sizes", help=about)
    add("--runs", help="moe (capacity), dmoe (dropless), dense, with commas (default: dmoe,dense)")
    add("--variant", action="append", metavar="NAME:SETTING=VALUE,...", help=_VARIANT)
    add("--baseline", help="the variant that the others are compared with (default: dense)")
    add("--repeats", help="runs of each with seeds SEED, SEED+1, ... (default: 3)")
    about = "loss that no compute removes, nats per token, the same for all (default: fitted)"
    add("--asymptote", help=about)
    add("--executor", help="local, or slurm for a job per run (default: $EXECUTOR, or local)")
    add("--sbatch", help="options of the SLURM jobs, such as '--partition=gpu' (default: $SBATCH)")
    add("--timeout", default="0", help="seconds after which a run is ended (default: none)")
    add("--dry-run", action="store_true", help="print the rungs, start and write nothing")
    add_arguments(parser)
    parser.set_defaults(run=_ladder)


def _read(arguments: argparse.Namespace, *numbers: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Flags of training settings, and the values of options that are numbers."""
    from moe_exp.config.settings_file import warn_of_misspelt
    from moe_exp.studies.child_runs import numbers_in

    warn_of_misspelt()
    values = numbers_in({name: getattr(arguments, name) for name in numbers})
    return {name: getattr(arguments, name) for name in ("config", *Config.model_fields)}, values


def _compare(arguments: argparse.Namespace) -> int:
    from moe_exp.studies.compare.back_to_back import check_planned_files, dry_run, run_comparison
    from moe_exp.studies.compare.comparison import Comparison, Options

    flags, numbers = _read(arguments, "repeats", "seconds", "timeout")
    options = Options(arguments.runs, tuple(arguments.variant), arguments.match, **numbers)
    comparison = Comparison.of(options, flags, os.environ)
    if arguments.dry_run:
        print(dry_run(comparison), flush=True)
        check_planned_files(comparison)
        return 0
    return run_comparison(comparison)


def _ladder(arguments: argparse.Namespace) -> int:
    from moe_exp.studies.ladder.climb import Executor, dry_run, run_ladder
    from moe_exp.studies.ladder.ladder import Definition, Ladder, with_options

    flags, given = _read(arguments, "sizes", "repeats", "asymptote", "timeout")
    name = arguments.executor or os.environ.get("EXECUTOR") or "local"
    sbatch = shlex.split(arguments.sbatch or os.environ.get("SBATCH", ""))
    executor = Executor(name, tuple(sbatch), given.pop("timeout"))
    if problems := executor.problems():
        raise ConfigError(problems)
    given |= {"runs": arguments.runs, "baseline": arguments.baseline}
    given["variants"] = tuple(arguments.variant) if arguments.variant else None
    definition = Definition.read(arguments.definition) if arguments.definition else Definition()
    chosen = with_options(definition, **given)
    ladder = Ladder.of(chosen, flags, os.environ, executor.timeout, executor=executor.name)
    if arguments.dry_run:
        print(dry_run(ladder), flush=True)
        return 0
    return run_ladder(ladder, executor)
