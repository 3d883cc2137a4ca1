"""Shared arguments and errors of `moe-exp data` commands; `main` runs one command as a standalone program."""

import argparse
import importlib
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from moe_exp.commands.guard import UNDER_WAY, ended_quietly, guarded
from moe_exp.commands.parsers import Argument, ExactParser, Kind, add_parser, arg, command, memory_bytes

# Declared without its subcommands, which import numpy.
command("data", "download, shuffle, tokenize and inspect training data")


def declare_steps() -> None:
    """Declares the subcommands of `moe-exp data`, in the order of its help."""
    for module in ("data_documents", "data_tokens"):
        importlib.import_module(f"moe_exp.commands.{module}")


def either(words: str, about: str, kind: Kind | None = None, /, **options: Any) -> Argument:
    """Returns an option whose name may also be written with underscores instead of hyphens."""
    name = words.split()[0]
    other = f"--{name[2:].replace('-', '_')}"
    return arg(words if name == other else words.replace(name, f"{name} {other}"), about, kind, **options)


TEXT_DOCUMENTS = arg(  # same as the setting TEXT_DOCUMENTS
    "--text-documents",
    "unit that forms a document in text files; file: whole file; block: text between blank lines",
    choices=("file", "block"),
    default="file",
)

# of `prepare` and `mix`
DATA_DIR = either("--data-dir FOLDER", "folder for all outputs (default: data)", Path, default=Path("data"))
DOWNLOAD_AGAIN = either("--download-again", "download, convert and shuffle again", action="store_true")
MEMORY = either(
    "--memory SIZE",
    "memory limit per shuffle task, such as 8GB (default: tasks share a quarter of the free memory)",
    memory_bytes,
)
SHUFFLE_TASKS = either(
    "--shuffle-tasks N",
    "tasks per shuffle (default: 1; for more than 50 GB on SLURM or Ray: one per chunk file)",
    int,
)


def execution(what_tasks: str) -> tuple[Argument, ...]:
    """Returns the options that `execution_of` reads; `what_tasks` is the help text of --tasks."""
    return (
        either("--executor NAME", "where tasks run: local, slurm or ray", default="local"),
        either("--tasks N", what_tasks, int),
        either("--workers N", "concurrent tasks (default: number of cores; unlimited on SLURM and Ray)", int),
        either("--partition", "partition of the SLURM jobs"),
        either("--time", "time limit of each SLURM job", default="24:00:00"),
        either("--qos", "quality of service (QOS) of the SLURM jobs"),
        either("--cpus-per-task N", "CPUs per SLURM job or Ray task", default=1),
        either(
            "--mem-per-cpu GB", "memory per CPU of each SLURM job or Ray task (GB; default: 4)", default=4
        ),
        either("--max-array-size N", "the SLURM cluster's MaxArraySize", default=1001),
        either("--sbatch NAME=VALUE", "additional sbatch option (repeatable)", action="append", default=[]),
    )


def execution_of(arguments: argparse.Namespace) -> Any:
    """Returns the `Execution` that the arguments describe."""
    from moe_exp.data.execution import Execution

    names = ("executor", "workers", "partition", "qos", "cpus_per_task", "max_array_size")
    given = {name: getattr(arguments, name) for name in names}
    given |= {"time_limit": arguments.time, "mem_per_cpu_gb": arguments.mem_per_cpu}
    # the last SLURM job repeats this command, which continues from the finished chunks
    again = {"--start-over", "--start_over", "--download-again", "--download_again"}
    words = [os.path.abspath(sys.argv[0]), *(word for word in sys.argv[1:] if word not in again)]  # noqa: PTH100
    return Execution(**given, sbatch=tuple(arguments.sbatch), finish_command=(sys.executable, *words))


def under_way(what: str = "") -> int:
    """Prints that SLURM jobs are still creating the output; returns the exit code UNDER_WAY."""
    about = "SLURM jobs are under way; `squeue --me` lists them. Repeat the command to see their progress."
    print(f"{what}: {about}" if what else about)
    return UNDER_WAY


def data_guarded(work: Callable[[], int | None]) -> int:
    """Runs a `moe-exp data` subcommand with `guarded`, and adds a fix to errors about invalid documents."""
    from moe_exp.data.kinds import BadDocument

    def explained() -> int | None:
        try:
            return work()
        except BadDocument as error:
            fix = error.fix
            if "file is damaged" in error.reason:
                fix = "download or create the file again; --skip-bad only skips invalid lines"
            elif not fix:
                fix = "correct the line, or use --skip-bad (in a mixture skip_bad: true) to skip and count"
                fix += " invalid lines"
            raise ValueError(f"{error}. Fix: {fix}.") from None

    full_disk = "free some space and repeat the command to resume"
    return guarded(explained, "moe-exp data", extras="data,fast", full_disk=full_disk)


def main(command: str, argv: Sequence[str] | None = None, *, prog: str | None = None) -> int:
    """Runs one of the subcommands as a standalone program."""
    logging.basicConfig(format="%(message)s")
    logging.getLogger("moe_exp").setLevel(logging.INFO)

    def work() -> int | None:
        declare_steps()
        commands = argparse.ArgumentParser().add_subparsers(parser_class=ExactParser)
        chosen = add_parser(commands, f"data {command}")
        chosen.prog = prog or chosen.prog
        arguments = chosen.parse_args(argv)
        return arguments.run(arguments)

    return ended_quietly(lambda: data_guarded(work))
