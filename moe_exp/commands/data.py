"""`moe-exp data ...`: what its commands share, and `main` of the scripts that are one of them."""

import argparse
import importlib
import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from moe_exp.commands.guard import UNDER_WAY, ended_quietly, guarded
from moe_exp.commands.parsers import Argument, ExactParser, Kind, add_parser, arg, command

# Declared without its commands: they load numpy.
command("data", "download, shuffle, tokenize and inspect training data")


def declare_steps() -> None:
    """Declares the commands of `moe-exp data`, in the order of its help."""
    for module in ("data_documents", "data_tokens"):
        importlib.import_module(f"moe_exp.commands.{module}")


def either(words: str, about: str, kind: Kind | None = None, /, **options: Any) -> Argument:
    """An option that may be written with underscores, too."""
    name = words.split()[0]
    other = f"--{name[2:].replace('-', '_')}"
    return arg(words if name == other else words.replace(name, f"{name} {other}"), about, kind, **options)


TEXT_DOCUMENTS = arg(  # as TEXT_DOCUMENTS of the training
    "--text-documents",
    "what a document of a text file is: the file, or each block between blank lines",
    choices=("file", "block"),
    default="file",
)


def execution(what_tasks: str) -> tuple[Argument, ...]:
    """The arguments of `execution_of`, and --tasks."""
    return (
        either("--executor NAME", "local, slurm or ray (default: local)", default="local"),
        either("--tasks N", what_tasks, int),
        either("--workers N", "tasks at a time (default: the cores here; no limit elsewhere)", int),
        either("--partition", "of the SLURM jobs"),
        either("--time", "limit of a SLURM job (default: 24:00:00)", default="24:00:00"),
        either("--qos", "of the SLURM jobs"),
        either("--cpus-per-task N", "of a SLURM job or Ray task (default: 1)", default=1),
        either("--mem-per-cpu GB", "of a SLURM job or Ray task (default: 4)", default=4),
        either("--max-array-size N", "the cluster's MaxArraySize (default: 1001)", default=1001),
        either(
            "--sbatch NAME=VALUE", "another option of sbatch; may be repeated", action="append", default=[]
        ),
    )


def execution_of(arguments: argparse.Namespace) -> Any:
    """`Execution` of the arguments."""
    from moe_exp.data.execution import Execution

    names = ("executor", "workers", "partition", "qos", "cpus_per_task", "max_array_size")
    given = {name: getattr(arguments, name) for name in names}
    given |= {"time_limit": arguments.time, "mem_per_cpu_gb": arguments.mem_per_cpu}
    # the last SLURM job calls this command once more, which continues from the chunks
    again = {"--start-over", "--start_over", "--download-again", "--download_again"}
    words = [os.path.abspath(sys.argv[0]), *(word for word in sys.argv[1:] if word not in again)]  # noqa: PTH100
    return Execution(**given, sbatch=tuple(arguments.sbatch), finish_command=(sys.executable, *words))


def under_way(what: str = "") -> int:
    """Says that SLURM jobs make the output, and returns the exit code for it."""
    about = "SLURM jobs are under way; `squeue --me` shows them. The same command shows how far they are."
    print(f"{what}: {about}" if what else about)
    return UNDER_WAY


def run_data_command(arguments: argparse.Namespace) -> int:
    """Runs what `declare_steps` has parsed; what a user can fix is one line and exit code 1."""
    return _data_guard(lambda: arguments.run(arguments))


def _data_guard(work: Callable[[], int | None]) -> int:
    from moe_exp.data.kinds import BadDocument

    def explained() -> int | None:
        try:
            return work()
        except BadDocument as error:
            fix = error.fix
            if "file is damaged" in error.reason:
                fix = "fetch or make the file again; --skip-bad skips lines, not files"
            elif not fix:
                fix = "correct the line; or give --skip-bad (in a mixture skip_bad: true), which skips and"
                fix += " counts such lines and continues"
            raise ValueError(f"{error}. Fix: {fix}.") from None

    full_disk = "free some, and call it again: it resumes where it stopped"
    return guarded(explained, "moe-exp data", extras="data,fast", full_disk=full_disk)


def main(command: str, argv: Sequence[str] | None = None, *, prog: str | None = None) -> int:
    """One of the commands as a program of its own."""
    logging.basicConfig(format="%(message)s")
    logging.getLogger("moe_exp").setLevel(logging.INFO)

    def work() -> int | None:
        declare_steps()
        chosen = add_parser(
            argparse.ArgumentParser().add_subparsers(parser_class=ExactParser), f"data {command}"
        )
        chosen.prog = prog or chosen.prog
        arguments = chosen.parse_args(argv)
        result: int | None = arguments.run(arguments)
        return result

    return ended_quietly(lambda: _data_guard(work))
