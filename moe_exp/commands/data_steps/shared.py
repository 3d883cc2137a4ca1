"""Arguments that several commands of `moe-exp data` take: how texts are read, and where tasks run."""

from __future__ import annotations

import argparse
import os
import re
import sys
from typing import Any

from moe_exp.commands.guard import UNDER_WAY

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def add(parser: Any, flag: str, **options: Any) -> None:
    """Adds an argument that may be written with underscores, too."""
    parser.add_argument(flag, *{flag.replace("-", "_").replace("__", "--", 1)} - {flag}, **options)


def add_text_documents(parser: Any) -> None:
    """Adds --text-documents, as TEXT_DOCUMENTS of the training."""
    about = "what a document of a text file is: the file, or each block between blank lines"
    parser.add_argument("--text-documents", choices=("file", "block"), default="file", help=about)


def memory_bytes(text: str) -> int:
    """Bytes from `256MB`, `8GB`, `8GiB` or a plain number."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Z]*)", text.strip().upper())
    if not match or match[2] not in _UNITS or len(match[1]) > 20:
        rule = "must be a number with KB, MB, GB, MiB or GiB. Fix: give 256MB"
        raise argparse.ArgumentTypeError(f"memory={text}: {rule}.")
    return int(float(match[1]) * _UNITS[match[2]])


def add_execution(group: Any, what_tasks: str) -> None:
    """Adds the arguments of `execution_of`, and --tasks."""
    add(group, "--executor", default="local", metavar="NAME", help="local, slurm or ray (default: local)")
    number: Any = {"type": int, "metavar": "N"}
    add(group, "--tasks", **number, help=what_tasks)
    add(group, "--workers", **number, help="tasks at a time (default: the cores here; no limit elsewhere)")
    add(group, "--partition", help="of the SLURM jobs")
    add(group, "--time", default="24:00:00", help="limit of a SLURM job (default: 24:00:00)")
    add(group, "--qos", help="of the SLURM jobs")
    add(group, "--cpus-per-task", default=1, **number, help="of a SLURM job or Ray task (default: 1)")
    about = "of a SLURM job or Ray task (default: 4)"
    add(group, "--mem-per-cpu", type=int, default=4, metavar="GB", help=about)
    add(group, "--max-array-size", default=1001, **number, help="the cluster's MaxArraySize (default: 1001)")
    about = "another option of sbatch; may be repeated"
    add(group, "--sbatch", action="append", default=[], metavar="NAME=VALUE", help=about)


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
