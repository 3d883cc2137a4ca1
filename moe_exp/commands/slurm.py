"""Arguments of `moe-exp slurm`."""

from __future__ import annotations

import argparse
import os
import shlex
import sys

from moe_exp.config import ConfigError, add_arguments
from moe_exp.host.exit_codes import BAD_INPUT
from moe_exp.host.processes import own_command
from moe_exp.launch.slurm.settings import SlurmSettings


def add_commands(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "slurm",
        help="submit a training run as a chain of SLURM jobs",
        description=(
            "Submits a run, NNODES with GPUS_PER_NODE each, as one or more SLURM jobs that continue from each"
            " other's checkpoints. Every flag is also an environment variable: --time-limit is TIME_LIMIT."
        ),
    )
    about = "print the sbatch file, and on stderr the calls of sbatch; write and submit nothing"
    parser.add_argument("--dry-run", action="store_true", help=about)
    add_arguments(parser, SlurmSettings)
    add_arguments(parser)
    parser.set_defaults(run=_submit)


def _submit(arguments: argparse.Namespace) -> int:
    from moe_exp.config.learning_rate import learning_rate_text, schedule_warnings
    from moe_exp.config.loading import main_settings
    from moe_exp.config.settings_file import warn_of_misspelt
    from moe_exp.launch.machine_checks import disk_problems, disk_warnings
    from moe_exp.launch.slurm.submission import plan_job, planned_commands, script_of, submit
    from moe_exp.launch.source_checks import data_warnings, stage_lines, start_of

    warn_of_misspelt(SlurmSettings.model_fields)
    others = ("command", "run", "dry_run")
    flags = {name: value for name, value in vars(arguments).items() if name not in others}
    try:
        job = plan_job(flags, os.environ, with_space=not arguments.dry_run)
    except ConfigError as error:
        print(*(f"moe-exp slurm: {line}" for line in error.problems), sep="\n", file=sys.stderr)
        return BAD_INPUT
    if job.slurm.exclude_file and not job.exclude_file.exists():
        rule = "is not there yet, no node is left out"
        print(f"moe-exp slurm: warning: EXCLUDE_FILE={job.slurm.exclude_file}: {rule}", file=sys.stderr)
    start = start_of(job.config)
    room = disk_problems(job.config) if arguments.dry_run else []
    about_data = data_warnings(job.config)
    for line in [*schedule_warnings(job.config, start), *room, *disk_warnings(job.config), *about_data]:
        print(f"moe-exp slurm: warning: {line}", file=sys.stderr)
    if arguments.dry_run:
        print(script_of(job), end="", flush=True)
        print(f"moe-exp slurm: {main_settings(job.config)}", file=sys.stderr)
        for line in [learning_rate_text(job.config, start), *stage_lines(job.config)]:
            print(f"moe-exp slurm: {line}", file=sys.stderr)
        head = "moe-exp slurm: variables that jobs get from this shell:"
        variables = [f"{name}={value}" for name, value in job.passed.items()] or ["none"]
        print(head, *variables, sep="\n  ", file=sys.stderr)
        head = "moe-exp slurm: the file would be written and submitted by:"
        print(head, *planned_commands(job), sep="\n  ", file=sys.stderr)
        return 0
    ids = submit(job)
    jobs = f"{job.slurm.num_jobs} jobs of {job.config.nnodes} nodes as {', '.join(ids)}"
    print(f"submitted {jobs}; run folder {job.run_folder}, {main_settings(job.config)}")
    name, folder, run_folder = (shlex.quote(str(text)) for text in (job.name, job.folder, job.run_folder))
    print(f"  squeue --name={name}   # the queue")
    print(f"  tail -F {folder}/jobs.log {folder}/*.log   # what they say")
    watch = f"{shlex.join(own_command())} watch run {run_folder} --slurm-name {name}"
    print(f"  {watch}   # whether all is well")
    return 0
