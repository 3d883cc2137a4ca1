"""`moe-exp data mix`."""

from __future__ import annotations

import argparse
import os
import shlex
from pathlib import Path

from moe_exp.commands.data_steps.shared import add_execution, execution_of, memory_bytes, under_way
from moe_exp.commands.guard import UNDER_WAY


def add_commands(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds this file's command."""
    parser = subparsers.add_parser(
        "mix",
        help="prepare and tokenize the sources of a mixture, with weights and a datasheet",
        description=(
            "Downloads, filters, shuffles and tokenizes every source of a mixture.yaml (docs/corpus.md),"
            " computes their weights, and writes DATA_DIR/NAME with token files and datasheet.md. Called"
            f" again, it resumes where it stopped. Exit code {UNDER_WAY}: SLURM jobs are under way."
        ),
    )
    add = parser.add_argument
    add("mixture", type=Path, help="mixture.yaml")
    add("--name", help="of the mixture (default: the file's name)")
    add("--data-dir", type=Path, default=Path("data"), metavar="FOLDER", help="(default: data)")
    add("--start-over", action="store_true", help="make everything again but the downloads")
    about = "make this source again; may be repeated"
    add("--start-over-source", action="append", default=[], metavar="NAME", help=about)
    add("--download-again", action="store_true", help="fetch the files again too")
    add("--dry-run", action="store_true", help="print files, disk and time of each source, and write nothing")
    about = "of a task of the shuffle, as in 8GB (default: a quarter of what is left for all of them)"
    add("--memory", type=memory_bytes, metavar="SIZE", help=about)
    group = parser.add_argument_group("where the tasks run")
    add_execution(group, "number of chunks of a source (default: one per input file, at most 64)")
    about = "tasks of a shuffle (default: 1; on SLURM and Ray as many as chunks if over 50 GB)"
    group.add_argument("--shuffle-tasks", type=int, metavar="N", help=about)
    parser.set_defaults(run=_mix)


def _mix(arguments: argparse.Namespace) -> int:
    from moe_exp.data.mixture.mix import Mixing, mix, plan_mixture
    from moe_exp.data.mixture.settings import read_mixture

    names = ("data_dir", "tasks", "shuffle_tasks", "start_over", "download_again")
    mixing = Mixing(
        arguments.name or arguments.mixture.stem,
        read_mixture(arguments.mixture),
        execution=execution_of(arguments),
        shuffle={"memory_bytes": arguments.memory},
        start_over_sources=tuple(arguments.start_over_source),
        workers=arguments.workers or os.cpu_count() or 1,
        **{name: getattr(arguments, name) for name in names},
    )
    if arguments.dry_run:
        plan_mixture(mixing)
        return 0
    facts = mix(mixing)
    if facts is None:
        return under_way()
    print(f"datasheet: {mixing.folder / 'datasheet.md'}")
    for_training = ("train_data", "valid_data", "vocab_size", "tokenizer")
    print(*(f"{name.upper()}={shlex.quote(str(facts[name]))}" for name in for_training))
    return 0
