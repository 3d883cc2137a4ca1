"""`moe-exp watch ...`: monitors unattended runs and diagnoses failures."""

import argparse
import os
import shutil
import sys
from dataclasses import asdict, replace
from pathlib import Path

from moe_exp.commands.ckpt import check_top, show_comparison
from moe_exp.commands.parsers import (
    JSON,
    arg,
    command,
    flag,
    group,
    one_of,
    positive_options,
    print_json,
    repeated,
    string,
    takes,
)
from moe_exp.config import add_arguments

command("watch", "monitor long runs and diagnose hangs, faulty nodes and stopped jobs")

# Settings of the launch and of the preflight.
LAUNCH_SETTINGS = (
    "preset", "master_addr", "master_port", "nnodes", "node_rank", "gpus_per_node", "threads_per_rank",
    "dtype", "run_dir", "preflight_timeout", "preflight_slow",
)  # fmt: skip


@command(
    "watch preflight",
    "check the nodes of a job before the job starts (run on every node, with the settings of the job)",
)
@takes(
    lambda parser: add_arguments(parser, names=LAUNCH_SETTINGS),
    string("--hosts LIST", "node names in NODE_RANK order, such as a[1-3],b (default: $SLURM_JOB_NODELIST)"),
    arg(
        "--exclude-file FILE",
        "exclude list, to which bad nodes are added (default: RUN_DIR/exclude_nodes.txt)",
        Path,
    ),
    flag("--no-exclude", "do not add bad nodes to the exclude list"),
    JSON,
)
def run_preflight(arguments: argparse.Namespace) -> int:
    """Checks arithmetic, memory, links, disks, clocks and versions of every node. The exit code is 1 if a
    node failed.
    """
    from moe_exp.config import load_config
    from moe_exp.launch.preflight.node import preflight
    from moe_exp.launch.preflight.verdicts import add_to_list, findings_lines, print_report
    from moe_exp.watch.excluded_nodes import EXCLUDE_NODES

    flags = {name: getattr(arguments, name) for name in LAUNCH_SETTINGS}
    config = load_config(flags)
    verdict = preflight(config, hosts=arguments.hosts)
    path = arguments.exclude_file or Path(config.run_dir).expanduser() / EXCLUDE_NODES
    # all nodes reach the same verdict, so one of them records it
    added = [] if arguments.no_exclude or config.node_rank else add_to_list(verdict, path)
    if config.node_rank == 0 and arguments.json:
        print_json(verdict.as_json())
    elif config.node_rank == 0:
        print_report(verdict, num_ranks=config.world_size)
        print(*(f"{path}: added {host}" for host in added), sep="\n", end="\n" if added else "", flush=True)
    elif verdict.grade == "failed":
        print(*findings_lines(verdict), sep="\n", file=sys.stderr, flush=True)
    return int(verdict.grade == "failed")


@command("watch exclude", "show or change the list of nodes that jobs must avoid")
@takes(
    arg("file FILE", "list of excluded nodes, usually RUN_DIR/exclude_nodes.txt", Path),
    flag("--slurm", "print the excluded nodes as sbatch option --exclude=a,b (nothing if there are none)"),
    arg("--add HOST", "hosts to add to the list", nargs="+", default=[]),
    arg("--reason", "reason to store for added hosts", default="added by a user"),
    arg("--remove HOST", "hosts to remove from the list", nargs="+", default=[]),
)
def run_exclude(arguments: argparse.Namespace) -> None:
    from moe_exp.watch import excluded_nodes as nodes

    # check all names before writing anything
    for host in map(nodes.slurm_name, [*arguments.add, *arguments.remove]):
        if host in arguments.add and host in arguments.remove:
            raise ValueError(f"--add {host}: cannot be combined with --remove {host}. Fix: omit one option.")
    for host in arguments.add:
        nodes.exclude(arguments.file, host, arguments.reason)
    gone = nodes.readmit(arguments.file, arguments.remove)
    for host in map(nodes.slurm_name, arguments.remove):
        if host not in gone:
            rule = f"not found in {arguments.file}. Fix: check the name in that file"
            print(f"moe-exp watch: --remove={host}: {rule}.", file=sys.stderr)
    if arguments.slurm:
        if option := nodes.slurm_option(nodes.read_excluded(arguments.file)):
            print(option)
        return
    for host, reason in nodes.read_excluded(arguments.file).items():
        print(f"{host:<24}  {reason}")


@command("watch blame", "find the node, rank and device that caused the errors in logs")
@takes(
    arg("logs LOG", "run folders, or log files (from ranks, srun or the Linux kernel)", Path, nargs="+"),
    arg("--exclude FILE",
        "also add the hosts with hardware, driver or link faults to this exclude list",
        Path),
    JSON,
)  # fmt: skip
def run_blame(arguments: argparse.Namespace) -> None:
    from moe_exp.watch import blame
    from moe_exp.watch.excluded_nodes import exclude

    found = blame.blame(blame.log_files(arguments.logs))
    bad = blame.hosts_to_exclude(found)
    added = []
    if arguments.exclude:
        added = [host for host, why in bad.items() if exclude(arguments.exclude, host, f"blame: {why}")]
    reported = blame.reported_by_runs(arguments.logs)
    if arguments.json:
        faults = blame.blame_as_json(found)
        print_json({"faults": faults, "exclude": list(bad), "added": added, "events": reported})
        return
    blame.print_blame(found)
    print(*reported, sep="\n", end="\n" if reported else "")
    for host, reason in bad.items():
        where = f"; added to {arguments.exclude}" if host in added else ""
        print(f"{host} should get no jobs: {reason}{where}")


@command(
    "watch diagnose", "decide whether a failed job should restart: restart, exclude a node, wait or stop"
)
@takes(
    arg("logs LOG", "run folders, or log files (from ranks, srun or the Linux kernel)", Path, nargs="+"),
    arg("--iterations N", "iterations completed in the failed launch (default: from the logs)", int),
    flag("--trained-before", "assume that an earlier launch with the same settings completed iterations"),
    JSON,
)
def run_diagnose(arguments: argparse.Namespace) -> None:
    """Applies the launcher's restart rules to logs; for a run folder, also uses the run's events."""
    from moe_exp.runs.records import last_records
    from moe_exp.runs.run_folder import RunFolder
    from moe_exp.watch.blame import log_files
    from moe_exp.watch.diagnosis import diagnose_logs, situation_of_run

    metrics = [path for log in arguments.logs if (path := RunFolder(log).metrics).is_file()]
    known = vars(situation_of_run(last_records(metrics[0]))) if metrics else {}
    given = {"iterations": arguments.iterations, "trained_before": arguments.trained_before or None}
    known |= {name: value for name, value in given.items() if value is not None}
    found = diagnose_logs(log_files(arguments.logs), **known)
    if arguments.json:
        print_json(asdict(found))
        return
    print(found.text, *filter(None, [found.line]), sep="\n    ")


@command("watch run", "monitor runs, from cron or as a daemon, and send alerts")
@takes(
    arg("run_dirs RUN_DIR", "run folders; with --slurm-name, a folder need not exist yet", Path, nargs="+"),
    repeated("--slurm-name NAME", "name of a run's SLURM jobs (one option per RUN_DIR, in the same order)"),
    string("--slurm-user NAME", "owner of the SLURM jobs (default: current user)"),
    one_of(
        flag("--once", "check once, for example from cron (default)"),
        arg("--every SECONDS", "run as a daemon with this interval between checks (seconds)", float),
        flag("--test-alert", "send a test alert to every channel; can be used before the run starts"),
    ),
    flag("--quiet", "print nothing about healthy runs"),
    arg("--again TIME", "time after which an ongoing problem is reported again", default="6h"),
    string("--stuck TIME", "report a run as stuck if it logs no new record for this time (default: derived "
           "from the run's speed)"),
    arg("--ahead TIME", "report a run if its SLURM jobs will end within this time, before the run is done",
        default="24h"),
    arg("--wait TIME", "report a run with queued jobs if no job has run for this time", default="24h"),
    arg("--state FOLDER", "folder for the monitor's state (default: ~/.local/state/moe-exp/watch)", Path),
    group(
        "alert channels; passwords and webhook URLs are read only from files and environment variables",
        arg("--mail-to ADDRESSES", "e-mail recipients"),
        arg("--mail-from ADDRESS", "e-mail sender (default: moe-exp@HOST)"),
        arg("--smtp HOST:PORT", "SMTP server (default: localhost)"),
        arg("--smtp-security", "encryption of the SMTP connection",
            choices=("starttls", "tls", "none"), default="starttls"),
        arg("--smtp-user NAME", "SMTP user name; the password is read from $SMTP_PASSWORD or "
            "--smtp-password-file"),
        arg("--smtp-password-file FILE", "file whose first line is the SMTP password"),
        arg("--webhook-file FILE", "file whose first line is the webhook URL (default: $WATCH_WEBHOOK)"),
        arg("--alert-file FILE", "file to append alerts to"),
    ),
)  # fmt: skip
def run_watchdog(arguments: argparse.Namespace) -> int:
    """Checks whether the jobs of each run are running or queued and whether training makes progress.
    Estimates when the run will end and when the disk will be full. Reports new events. The exit code is 0 if
    all runs are healthy, 1 if there are problems, and 2 if the command is invalid.
    """
    from moe_exp.config import ConfigError
    from moe_exp.host.exit_codes import BAD_INPUT
    from moe_exp.watch.watchdog.watchdog import print_checks, watch_forever, watchdog_of

    try:
        watchdog = watchdog_of(vars(arguments), os.environ)
    except ConfigError as error:
        print(*(f"moe-exp watch: {line}" for line in error.problems), sep="\n", file=sys.stderr)
        return BAD_INPUT
    if arguments.test_alert:
        failed = watchdog.test_channels()
        for channel in watchdog.channels:
            print(f"{channel.name}: {failed.get(channel.name, 'sent')}")
        for line in watchdog.unknown_runs():
            print(f"moe-exp watch: warning: {line}", file=sys.stderr)
        return int(bool(failed))
    checks = watchdog.check()
    print_checks(checks, quiet=arguments.quiet)
    # an unknown run is probably a typo: a daemon would wait for it forever
    if any(check.is_unknown for check in checks):
        return BAD_INPUT
    if arguments.every:
        watch_forever(watchdog, arguments.every, quiet=arguments.quiet)
    return int(not all(look.is_well for look in checks))


@command("watch stacks", "show the stacks of a run's ranks and which ranks differ from the others")
@takes(
    arg(
        "folder RUN|DIR",
        "run folder (requests new stacks) or a folder in RUN/hang (shows its stacks)",
        Path,
    ),
    flag("--full", "also print the full stacks, one per group of ranks with the same stack"),
)
def run_stacks(arguments: argparse.Namespace) -> None:
    """Requests the stacks of all ranks from the launchers of a run; the run continues. Works on any node with
    access to the run folder. If the argument is a folder in RUN/hang, only prints a summary of its stacks.
    """
    from moe_exp.watch.hangs.stacks import stacks_of

    summary, folder = stacks_of(arguments.folder)
    print(summary.whole if arguments.full else summary.short, f"all stacks: {folder}", sep="\n")


@command("watch diff", "compare two checkpoints, or the dumps of two ranks or runs, tensor by tensor")
@takes(
    arg("a", "checkpoint (iter_ folder, checkpoints folder or run folder), or tensor dump (see DUMP_ITERS)",
        Path),
    arg("b", "reference checkpoint or dump; errors are relative to its values", Path),
    flag("--weights-only", "skip the optimizer state of checkpoints"),
    arg("--top N", "number of tensors to show, largest relative error first", default=20),
    arg("--rtol X", "relative error up to which tensors count as equal (default: 0)", default=0.0),
    JSON,
)  # fmt: skip
def run_diff(arguments: argparse.Namespace) -> int:
    from moe_exp.checkpoint.tools.diff import compare
    from moe_exp.checkpoint.tools.info import chosen

    a, b = arguments.a, arguments.b
    check_top(arguments.top)
    for name, path in (("A", a), ("B", b)):
        if not path.exists():
            raise ValueError(f"{name}={path}: not found. Fix: specify a checkpoint or a dump.")
        if dumps := sorted(path.glob("iter_*/rank_*.safetensors")):
            fix = f"specify one iteration, such as {dumps[-1].parent}"
            raise ValueError(f"{name}={path}: contains dumps of several iterations. Fix: {fix}.")
    # the dump of one rank, or of all ranks after one iteration
    if a.suffix == ".safetensors" or any(a.glob("rank_*.safetensors")):
        from moe_exp.training.recordings import compare_dumps

        found = compare_dumps(a, b)
    else:
        found = compare(chosen(a), chosen(b), optimizer=not arguments.weights_only)
    is_within, worst = show_comparison(found, arguments), found.worst(1)
    if arguments.json:
        return int(not is_within)
    if not found.tensors:
        print("NOTHING TO COMPARE: no common tensors")
    elif is_within:
        how = f"up to relative errors of {arguments.rtol:g}" if worst else "in every value of every tensor"
        print(f"THE SAME, {how}")
    else:
        what = f"most in {worst[0].name}, by {worst[0].relative:.3g}" if worst else "in their sets of tensors"
        print(f"DIFFERENT: {what}")
    return int(not is_within or not found.tensors)


@command("watch storage", "recommend a save interval and estimate the disk space that a run requires")
@takes(
    arg("run_folder RUN", "run folder, or a settings file (YAML or NAME=value lines)", Path),
    arg("--mtbf HOURS", "mean time between failures of one node (hours; default: from the run's events)",
        float),
    arg("--nodes N", "number of nodes of the job; --mtbf is divided by it (default: NNODES of the run)", int),
    arg("--save-seconds S", "duration of one save (seconds; default: measured in the run)", float),
    arg("--iteration-seconds S", "duration of one iteration (seconds; default: measured in the run)", float),
    arg("--restart-seconds S",
        "time from a failure to the next iteration (seconds; default: measured in the run)", float),
    JSON,
)  # fmt: skip
def run_storage(arguments: argparse.Namespace) -> int:
    from moe_exp.host.progress import print_summary
    from moe_exp.runs.run_folder import RunFolder, existing_place
    from moe_exp.watch.storage import rows_of, save_advice, storage_of

    positive_options(arguments, "mtbf", "nodes", "restart_seconds")
    given = positive_options(arguments, "save_seconds", "iteration_seconds")
    found = storage_of(arguments.run_folder)
    num_nodes = arguments.nodes or found.config.nnodes
    failures = {"mtbf_hours": arguments.mtbf, "restart_seconds": arguments.restart_seconds}
    measured = replace(found.measured, **given)
    advice = save_advice(found.config.save_interval, measured, num_nodes=num_nodes, **failures)
    place = arguments.run_folder
    # a settings file: measure where the run folder would be
    place = place if place.is_dir() else existing_place(RunFolder.of(found.config).path)
    free_bytes = shutil.disk_usage(place).free
    if arguments.json:
        values = {"free_bytes": free_bytes, "needed_bytes": found.use.needed_bytes, **asdict(found.use)}
        values |= {"measured": asdict(found.measured), "advice": asdict(advice) if advice else None}
        print_json(values)
    else:
        print_summary(str(arguments.run_folder), rows_of(found, advice, free_bytes))
    return int(free_bytes < found.use.needed_bytes)
