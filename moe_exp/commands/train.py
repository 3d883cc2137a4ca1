"""`moe-exp train` and `moe-exp slurm`: start a run on this machine or as a chain of SLURM jobs."""

import argparse
import os
import shlex
import sys

from moe_exp.commands.parsers import command, flag, string, takes
from moe_exp.config import Config, ConfigError, add_arguments
from moe_exp.host.exit_codes import BAD_INPUT
from moe_exp.host.processes import own_command
from moe_exp.launch.slurm.settings import SlurmSettings


@command("train", "train a model, or resume a run")
@takes(
    flag("--dry-run", "print settings, torchrun command and parameter report without starting the run"),
    string("--resume RUN_FOLDER", "run folder to resume; its settings apply unless flags override them"),
    add_arguments,
)
def run_train(arguments: argparse.Namespace) -> int:
    """Trains a model. Repeat the command to resume the run. Every setting is both a flag and an environment
    variable: --num-experts is NUM_EXPERTS.
    """
    from moe_exp.launch.launch import train

    flags = {name: getattr(arguments, name) for name in ("config", *Config.model_fields)}
    # scripts/environment.sh sets this variable to the calling script's command line
    typed = os.environ.get("MOE_EXP_COMMAND") or shlex.join([*own_command(), *sys.argv[1:]])
    return train(flags, resume=arguments.resume, dry_run=arguments.dry_run, command=typed)


@command("slurm", "submit a training run as a chain of SLURM jobs")
@takes(
    flag("--dry-run", "submit no job; print the sbatch file to stdout and the sbatch commands to stderr"),
    lambda parser: add_arguments(parser, SlurmSettings),
    add_arguments,
)
def run_slurm(arguments: argparse.Namespace) -> int:
    """Submits a run on NNODES nodes with GPUS_PER_NODE ranks each, as one or more SLURM jobs; each job
    resumes from the checkpoint of the previous job. Each flag also has an environment variable: TIME_LIMIT
    for --time-limit.
    """
    from moe_exp.config.learning_rate import learning_rate_text, schedule_warnings
    from moe_exp.config.loading import main_settings
    from moe_exp.config.settings_file import warn_of_misspelt
    from moe_exp.launch.machine_checks import disk_problems, disk_warnings
    from moe_exp.launch.slurm.submission import plan_job, planned_commands, script_of, submit
    from moe_exp.launch.source_checks import data_warnings, stage_lines, start_of

    def say(*lines: str) -> None:
        for line in lines:
            print(f"moe-exp slurm: {line}", file=sys.stderr)

    warn_of_misspelt(SlurmSettings.model_fields)
    others = ("command", "run", "dry_run")
    flags = {name: value for name, value in vars(arguments).items() if name not in others}
    try:
        job = plan_job(flags, os.environ, with_space=not arguments.dry_run)
    except ConfigError as error:
        say(*error.problems)
        return BAD_INPUT
    config, start = job.config, start_of(job.config)
    warnings = [*schedule_warnings(config, start), *(disk_problems(config) if arguments.dry_run else [])]
    warnings += [*disk_warnings(config), *data_warnings(config)]
    if job.slurm.exclude_file and not job.exclude_file.exists():
        warnings.insert(0, f"EXCLUDE_FILE={job.slurm.exclude_file}: not found, no node is excluded")
    say(*(f"warning: {line}" for line in warnings))
    if arguments.dry_run:
        # standard output has only the file, so that it can be redirected
        print(script_of(job), end="", flush=True)
        say(main_settings(config), learning_rate_text(config, start), *stage_lines(config))
        variables = [f"{name}={value}" for name, value in job.passed.items()] or ["none"]
        for head, lines in (
            ("variables passed from this shell to the jobs:", variables),
            ("commands that would write and submit the file:", planned_commands(job)),
        ):
            say("\n  ".join([head, *lines]))
        return 0
    # from here on, the queue changes
    ids = submit(job)
    jobs = f"{job.slurm.num_jobs} jobs of {config.nnodes} nodes as {', '.join(ids)}"
    print(f"submitted {jobs}; run folder {job.run_folder}, {main_settings(config)}")
    name, folder, run_folder = (shlex.quote(str(text)) for text in (job.name, job.folder, job.run_folder))
    print(f"  squeue --name={name}   # state of the jobs")
    print(f"  tail -F {folder}/jobs.log {folder}/*.log   # logs of the jobs")
    watch = f"{shlex.join(own_command())} watch run {run_folder} --slurm-name {name}"
    print(f"  {watch}   # health of the run")
    return 0
