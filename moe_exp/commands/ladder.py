"""Arguments of `moe-exp ladder`."""

from __future__ import annotations

import argparse
import os
import shlex

from moe_exp.config import ConfigError, add_arguments

_NUMBERS = ("sizes", "repeats", "asymptote", "timeout")
_OTHERS = ("definition", "runs", "variant", "baseline", "executor", "sbatch")


def add_commands(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command."""
    parser = subparsers.add_parser(
        "ladder",
        help="train dense and MoE models at several sizes, fit scaling laws, and predict the largest",
        description=(
            "Trains variants at several sizes with equal FLOPs per rung, fits the loss over compute of each,"
            " and reports the effective speedup over the baseline with intervals. The last rung is predicted"
            " before it runs. The same command again continues with what is left; RUN_NAME names the ladder."
        ),
        allow_abbrev=False,
    )
    add = parser.add_argument
    about = "YAML file with the rungs, or a name of the package's own (default: --sizes)"
    add("definition", nargs="?", help=about)
    about = "HIDDEN_SIZE of each rung, such as 16,24,32,48; depth, tokens and LR follow by a rule"
    add("--sizes", help=about)
    add("--runs", help="moe (capacity), dmoe (dropless), dense, with commas (default: dmoe,dense)")
    about = "another model, with settings of its own: fine:NUM_EXPERTS=64,TOPK=4; may be given more than once"
    add("--variant", action="append", metavar="NAME:SETTING=VALUE,...", help=about)
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


def _ladder(arguments: argparse.Namespace) -> int:
    from moe_exp.config.misspelt import warn_of_misspelt
    from moe_exp.studies.child_runs import numbers_in
    from moe_exp.studies.ladder.climb import Executor, dry_run, run_ladder
    from moe_exp.studies.ladder.ladder import Definition, Ladder, with_options

    warn_of_misspelt()
    given = numbers_in({name: getattr(arguments, name) for name in _NUMBERS})
    timeout = given.pop("timeout")
    given |= {"runs": arguments.runs, "baseline": arguments.baseline}
    given["variants"] = tuple(arguments.variant) if arguments.variant else None
    definition = Definition.read(arguments.definition) if arguments.definition else Definition()
    chosen = with_options(definition, **given)
    sbatch = shlex.split(arguments.sbatch or os.environ.get("SBATCH", ""))
    name = arguments.executor or os.environ.get("EXECUTOR") or "local"
    executor = Executor(name, tuple(sbatch), timeout)
    if problems := executor.problems():
        raise ConfigError(problems)
    others = {"command", "run", "dry_run", *_NUMBERS, *_OTHERS}
    flags = {name: value for name, value in vars(arguments).items() if name not in others}
    ladder = Ladder.of(chosen, flags, os.environ, executor.timeout, executor=executor.name)
    if arguments.dry_run:
        print(dry_run(ladder), flush=True)
        return 0
    return run_ladder(ladder, executor)
