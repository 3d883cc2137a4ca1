"""`moe-exp watch preflight`, `blame` and `exclude`: which node it is."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from moe_exp.config import Config

# The library is imported by the commands that use it: `moe-exp --help` answers at once.


# Settings of the launch, and those that say what to check.
LAUNCH_SETTINGS = (
    "preset", "master_addr", "master_port", "nnodes", "node_rank", "gpus_per_node", "threads_per_rank", "dtype", "run_dir",
    "preflight_timeout", "preflight_slow",
)  # fmt: skip


def add_launch_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of LAUNCH_SETTINGS."""
    for name in LAUNCH_SETTINGS:
        parser.add_argument(f"--{name.replace('_', '-')}", dest=name, metavar=name.upper(), help=Config.model_fields[name].description)


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds them to `moe-exp watch`."""
    _add_preflight(commands)
    _add_exclude(commands)
    _add_blame(commands)


def _add_preflight(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "preflight",
        help="check the nodes of a job before it starts; call it on every node with the settings of the launch",
        description="Checks every node: arithmetic, memory, links, disks, clocks, versions. Exit code 1: a node fails.",
        allow_abbrev=False,
    )
    add_launch_arguments(parser)
    parser.add_argument(
        "--hosts", default="", metavar="LIST", help="names of the nodes by NODE_RANK, as a[1-3],b (default: SLURM_JOB_NODELIST)"
    )
    parser.add_argument("--exclude-file", type=Path, metavar="FILE", help="add bad nodes to it (default: RUN_DIR/exclude_nodes.txt)")
    parser.add_argument("--no-exclude", action="store_true", help="add no nodes to the list")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.set_defaults(run=_preflight)


def _preflight(arguments: argparse.Namespace) -> int:
    from moe_exp.config import load_config
    from moe_exp.launch.preflight.node import preflight
    from moe_exp.launch.preflight.report import add_to_list, findings_lines, print_report
    from moe_exp.watch.nodes.exclude import EXCLUDE_NODES

    flags = {name: getattr(arguments, name) for name in LAUNCH_SETTINGS}
    config = load_config(flags)
    verdict = preflight(config, flags, hosts=arguments.hosts)
    path = arguments.exclude_file or Path(config.run_dir).expanduser() / EXCLUDE_NODES
    added = [] if arguments.no_exclude or config.node_rank else add_to_list(verdict, path)
    if config.node_rank == 0 and arguments.json:
        print(json.dumps(verdict.as_json(), ensure_ascii=False))
    elif config.node_rank == 0:
        print_report(verdict, num_ranks=config.world_size)
        print(*(f"{path}: added {host}" for host in added), sep="\n", end="\n" if added else "", flush=True)
    elif verdict.grade == "failed":
        print(*findings_lines(verdict), sep="\n", file=sys.stderr, flush=True)
    return int(verdict.grade == "failed")


def _add_exclude(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("exclude", help="the list of nodes that no job should get: show it, add to it, take out of it")
    parser.add_argument("file", type=Path, metavar="FILE", help="the list, RUN_DIR/exclude_nodes.txt of your runs")
    parser.add_argument("--slurm", action="store_true", help="print --exclude=a,b for sbatch, or nothing")
    parser.add_argument("--add", nargs="+", default=[], metavar="HOST", help="put hosts on it")
    parser.add_argument("--reason", default="by hand", help="of --add")
    parser.add_argument("--remove", nargs="+", default=[], metavar="HOST", help="take hosts off it")
    parser.set_defaults(run=_exclude)


def _exclude(arguments: argparse.Namespace) -> None:
    from moe_exp.watch.nodes.exclude import exclude, read_excluded, read_reasons, readmit, slurm_name, slurm_option

    for host in map(slurm_name, [*arguments.add, *arguments.remove]):
        if host in arguments.add and host in arguments.remove:
            raise ValueError(f"--add {host}: --remove names it, too. Fix: name it once.")
    for host in arguments.add:
        exclude(arguments.file, host, arguments.reason)
    gone = readmit(arguments.file, arguments.remove)
    for host in map(slurm_name, arguments.remove):
        if host not in gone:
            print(f"moe-exp watch: --remove={host}: is not in {arguments.file}. Fix: look for its name there.", file=sys.stderr)
    if arguments.slurm:
        if option := slurm_option(read_excluded(arguments.file)):
            print(option)
        return
    for host, reason in read_reasons(arguments.file).items():
        print(f"{host:<24}  {reason}")


def _add_blame(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("blame", help="which node, rank and device the errors in logs come from, and what to do")
    parser.add_argument("logs", nargs="+", type=Path, metavar="LOG", help="logs of ranks, srun or the kernel, or the folder of a run")
    parser.add_argument("--exclude", type=Path, metavar="FILE", help="add hosts whose hardware, driver or link fails to this list")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.set_defaults(run=_blame)


def _blame(arguments: argparse.Namespace) -> None:
    from moe_exp.watch.nodes.blame import blame, blame_as_json, hosts_to_exclude, log_files, print_blame, told_by_runs
    from moe_exp.watch.nodes.exclude import exclude

    found = blame(log_files(arguments.logs))
    bad = hosts_to_exclude(found)
    added = [host for host, reason in bad.items() if arguments.exclude and exclude(arguments.exclude, host, f"blame: {reason}")]
    told = told_by_runs(arguments.logs)
    if arguments.json:
        print(json.dumps({"faults": blame_as_json(found), "exclude": list(bad), "added": added, "events": told}, ensure_ascii=False))
        return
    print_blame(found)
    print(*told, sep="\n", end="\n" if told else "")
    for host, reason in bad.items():
        print(f"{host} should get no jobs: {reason}" + (f"; added to {arguments.exclude}" if host in added else ""))
