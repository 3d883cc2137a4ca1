"""Arguments of the commands whose tasks datatrove's executors run."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any


def add(parser: Any, flag: str, **options: Any) -> None:
    """Adds an argument that may be written with underscores, too."""
    parser.add_argument(flag, *{flag.replace("-", "_").replace("__", "--", 1)} - {flag}, **options)


def add_execution(group: Any, what_tasks: str) -> None:
    """Adds the arguments of `execution_of`, and --tasks."""
    add(group, "--executor", default="local", metavar="NAME", help="local, slurm or ray (default: local)")
    add(group, "--tasks", type=int, metavar="N", help=what_tasks)
    about = "tasks at a time (default: the cores here; no limit elsewhere)"
    add(group, "--workers", type=int, metavar="N", help=about)
    add(group, "--partition", help="of the SLURM jobs")
    add(group, "--time", default="24:00:00", help="limit of a SLURM job (default: 24:00:00)")
    add(group, "--qos", help="of the SLURM jobs")
    about = "of a SLURM job or Ray task (default: 1)"
    add(group, "--cpus-per-task", type=int, default=1, metavar="N", help=about)
    about = "of a SLURM job or Ray task (default: 4)"
    add(group, "--mem-per-cpu", type=int, default=4, metavar="GB", help=about)
    about = "the cluster's MaxArraySize (default: 1001)"
    add(group, "--max-array-size", type=int, default=1001, metavar="N", help=about)
    about = "another option of sbatch; may be repeated"
    add(group, "--sbatch", action="append", default=[], metavar="NAME=VALUE", help=about)


def execution_of(arguments: argparse.Namespace) -> Any:
    """`Execution` of the arguments."""
    from moe_exp.data.tasks.execution import Execution

    names = ("executor", "workers", "partition", "qos", "cpus_per_task", "max_array_size")
    given = {name: getattr(arguments, name) for name in names}
    given |= {"time_limit": arguments.time, "mem_per_cpu_gb": arguments.mem_per_cpu}
    return Execution(**given, sbatch=tuple(arguments.sbatch), finish_command=_finish_command())


def _finish_command() -> tuple[str, ...]:
    """This command once more, for the last SLURM job: then it continues from the chunks."""
    again = {"--start-over", "--start_over", "--download-again", "--download_again"}
    program = os.path.abspath(sys.argv[0])  # noqa: PTH100
    return (sys.executable, program, *(word for word in sys.argv[1:] if word not in again))
