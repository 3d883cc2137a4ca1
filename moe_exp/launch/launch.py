"""Runs a job on this node: checks it, starts torchrun (launch/torchrun_job.py) and prints a summary."""

import os
import shlex
import signal
import time
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from moe_exp.config import Config, ConfigError, load_config, module_arguments, problem, raise_for
from moe_exp.config.learning_rate import Start, learning_rate_text, schedule_warnings
from moe_exp.config.loading import given_values, settings_path, with_file
from moe_exp.config.parameter_groups import group_lines
from moe_exp.config.presets import preset_values
from moe_exp.config.setting_types import as_given
from moe_exp.config.settings_file import read_settings, warn_of_misspelt
from moe_exp.data.embedded import ensure_embedded_corpus
from moe_exp.data.own_text import facts_for_ranks, plan_text, with_prepared_text
from moe_exp.data.tokens.manifests import with_vocab_size
from moe_exp.host import exit_codes
from moe_exp.host.files import expanded, is_url
from moe_exp.host.processes import own_command, signals_handled
from moe_exp.launch import machine_checks
from moe_exp.launch.machine_checks import check_environment
from moe_exp.launch.source_checks import data_warnings, source_problems, stage_lines, start_of
from moe_exp.launch.torchrun_job import child_environment, run_job, shared_key, torchrun_command
from moe_exp.planner.costs.params import startup_report
from moe_exp.runs.run_folder import (
    RunFolder,
    changes_of_resume,
    changes_text,
    iterations,
    run_folder_problems,
)
from moe_exp.runs.summary import Caller, finish_run
from moe_exp.watch.excluded_nodes import exclude_list
from moe_exp.watch.hangs.monitor import HangWatch


def train(
    flags: Mapping[str, Any], *, resume: str = "", dry_run: bool = False, raises: bool = False,
    command: str = "",
) -> int:  # fmt: skip
    """Checks the settings and runs this node's ranks; with `dry_run`, only prints what would run. Exit codes:
    0: finished; 75: stopped, and the same command resumes the run; 2: invalid settings; 3: failed, and a
    restart would fail in the same way; any other code: failed.

    Args:
        flags: settings by field name, and `config`, the path of a settings file; None counts as not set.
        resume: run folder to resume with the settings in its config.yaml.
        raises: raise ConfigError on invalid settings instead of printing the errors.
        command: command line that the user typed; the summary derives its suggested commands from it.
    """
    warn_of_misspelt()
    try:
        flags = with_run_folder(flags, resume) if resume else flags
        given = with_file(flags, os.environ)
        config = load_config(given)
        sources = {name: str(settings_path(flags["config"])) for name in given if flags.get(name) is None}
        # --config with a run's own config.yaml would silently resume that run
        own = RunFolder.of(config)
        is_old = sources and not resume and own.config.exists()
        if is_old and own.config.samefile(settings_path(flags["config"])):
            rule = f"is the settings file of the run {own.path}, which this command would resume"
            fix = f"set another RUN_NAME for a new run, or use --resume {shlex.quote(str(own.path))}"
            raise ConfigError([problem("config", flags["config"], rule, fix)])
        names, given = set(given_values(given, os.environ)), without_usual(config, given, sources)
        # unless it is set, VOCAB_SIZE follows the data's tokenizer
        config, vocabulary = with_vocab_size(config, names, RunFolder.of(config).config)
        if vocabulary:
            given["vocab_size"], sources["vocab_size"] = config.vocab_size, vocabulary
        raise_for([*config.problems(), *(() if dry_run else check_environment(config))])
        start = start_of(config)
        if dry_run:
            return _dry_run(config, given, sources, start)
        _warn(_warnings(config, start))
        _report_changes(config)
        if vocabulary and config.node_rank == 0:
            print(f"VOCAB_SIZE={config.vocab_size}: {vocabulary}", flush=True)
        return launch(config, given, command=command)
    except ConfigError as error:
        if raises:
            raise
        for line in error.problems:
            exit_codes.complain(line)
        return exit_codes.BAD_INPUT


def with_run_folder(flags: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """Returns `flags` plus a run folder's path and config.yaml. Raises ConfigError if `folder` is not a run
    folder, or if `flags` already contain a settings file or a run folder."""
    path = expanded(folder)
    # `.` and `..` have no name: use the real one
    path = path if path.name not in ("", "..") else path.resolve()
    if not RunFolder(path).config.is_file():
        near = next((one for one in path.parents if RunFolder(one).config.is_file()), "runs/NAME")
        fix = f"specify a run folder, as in --resume {shlex.quote(str(near))}"
        raise ConfigError([problem("resume", folder, "is not a run folder (config.yaml not found)", fix)])
    for name in ("config", "run_dir", "run_name"):
        if flags.get(name) is not None:
            rule = f"--resume {folder} already sets the settings and the run folder"
            fix = "omit this setting, or replace --resume by --config and --run-name to start another run"
            raise ConfigError([problem(name, flags[name], rule, fix)])
    # RUN_NAME may have several parts: split the path where the saved name begins
    saved = Path(read_settings(RunFolder(path).config).get("run_name") or path.name).parts
    parts = len(saved) if path.parts[-len(saved) :] == saved else 1
    run_dir, run_name = Path(*path.parts[:-parts]), Path(*path.parts[-parts:])
    places = {"run_dir": str(run_dir), "run_name": str(run_name)}
    return {**flags, **places, "config": str(RunFolder(path).config)}


def without_usual(config: Config, given: Mapping[str, Any], from_file: Iterable[str]) -> dict[str, Any]:
    """Returns the settings for the ranks: `given` without settings from a file that equal the preset's."""
    usual = load_config({"preset": config.preset}, {})
    same = {name for name in from_file if getattr(config, name) == getattr(usual, name)}
    # unless set, these are derived from other settings or the data
    kept = {"preset", "warmup_iters", "decay_iters", "vocab_size"}
    return {name: value for name, value in given.items() if name not in same - kept}


def launch(config: Config, flags: Mapping[str, Any], *, command: str = "") -> int:
    """Runs this node's ranks until they end, with up to MAX_RESTARTS restarts after failures.

    `flags`: settings from the command line. Raises ConfigError if files for the ranks cannot be created.
    """
    if not config.train_data:
        try:
            ensure_embedded_corpus(Path(config.data_dir))
        except ValueError as error:
            raise ConfigError(str(error).splitlines()) from None
    prepared = with_prepared_text(config)  # replaces text by token files and a tokenizer
    if prepared is not config:
        raise_for([*machine_checks.data_problems(prepared), *source_problems(prepared)])
        _warn(data_warnings(prepared))
    if config.remote_dir or is_url(config.load_dir):
        from moe_exp.checkpoint.remote import check_writable, fetch_load_dir, fetch_run

        try:
            if config.remote_dir and config.node_rank == 0:
                check_writable(config)
            fetch_run(config)
            if is_url(config.load_dir) and not iterations(RunFolder.of(config).checkpoints):
                fetch_load_dir(config)
        except (ValueError, OSError) as error:
            raise ConfigError([str(error)]) from None
    # before the ranks, which a broken node would only make hang or fail
    if config.preflight:
        from moe_exp.launch.preflight.node import passes

        if not passes(config):
            return exit_codes.FAILED
    started, start, folder = datetime.now().astimezone(), time.monotonic(), RunFolder.of(config)
    try:
        environ = child_environment(config, shared_key(folder.rendezvous_key) if config.nnodes > 1 else "")
    except (OSError, ValueError) as error:
        raise ConfigError([str(error)]) from None
    environ |= {exit_codes.METRICS_FILE: str(folder.metrics.absolute()), exit_codes.LAUNCH_TIME: str(start)}
    environ[exit_codes.EXCLUDE_FILE] = str(exclude_list(config.run_dir))
    environ |= {exit_codes.PREPARED_TEXT: facts_for_ranks(prepared)} if prepared is not config else {}
    agent = torchrun_command(config, rank_arguments(config, flags))
    # the ranks' port, as in `rank_arguments`
    of_ranks = config.model_copy(update={"master_port": config.rendezvous_port})
    with HangWatch(config, folder) as watch:
        # from here on, this process only monitors the agent and its ranks
        code = run_job(agent, environ | watch.environment, config=of_ranks, poll=watch.poll)
    if config.node_rank:
        return code
    # environment variables that a suggested command needs for the same run, except those that differ per node
    own = ("master_addr", "nnodes", "node_rank")
    settings = (name.upper() for name in Config.model_fields if name not in own)
    given = {name: os.environ[name] for name in settings if os.environ.get(name)}
    program = own_command()
    typed = command or shlex.join([*program, "train", *module_arguments(flags)])
    caller = Caller(shlex.join(program), typed, given, lambda c: [*c.problems(), *check_environment(c)])
    with signals_handled(signal.SIG_IGN):  # schedulers send signals repeatedly
        seconds = time.monotonic() - start
        ended = finish_run(config, folder, since=started, wall_seconds=seconds, code=code, caller=caller)
    if ended is None:
        return code
    status, text = ended
    print(f"\n{text}", flush=True)
    # the teardown of finished ranks may fail, for instance if a peer exited earlier
    return exit_codes.FINISHED if status == "finished" else code or exit_codes.FAILED


def rank_arguments(config: Config, flags: Mapping[str, Any]) -> list[str]:
    """The ranks' arguments. They include MASTER_ADDR and MASTER_PORT, as torchrun changes these variables."""
    rendezvous = {"master_addr": config.master_addr, "master_port": config.rendezvous_port}
    return module_arguments({**flags, **rendezvous})


def _dry_run(config: Config, flags: Mapping[str, Any], sources: Mapping[str, str], start: Start) -> int:
    """Prints `dry_run_text`, also if files are missing. A full disk only causes a warning."""
    print(dry_run_text(config, flags, sources, start), flush=True)
    # the run may be for another machine, so problems of this one come after everything else
    if not (problems := machine_checks.check_files(config, with_space=False)):
        for line in [*plan_text(config), *stage_lines(config)]:
            print(line, flush=True)
    room = () if run_folder_problems(config) else machine_checks.disk_problems(config)
    _warn([*machine_checks.check_machine(config), *room, *_warnings(config, start)])
    _report_changes(config)
    raise_for(problems)
    return 0


def _warnings(config: Config, start: Start) -> Iterator[str]:
    """Warnings about problems that do not prevent a start; reads token files and calls the planner."""
    yield from schedule_warnings(config, start)
    yield from machine_checks.disk_warnings(config)
    yield from machine_checks.memory_warnings(config)
    yield from data_warnings(config)
    if config.grad_dtype == "bf16" and config.num_microbatches >= 8:
        rule = f"sums the gradients of {config.num_microbatches} micro-batches in bf16. With 8 of them, "
        rule += "bf16 changed the validation loss of PRESET=cpu after 1,000 iterations by -0.009 ± 0.021 "
        rule += "(3 seeds, 90% interval)"
        yield config.problem("grad_dtype", rule, "raise MBSZ, or set GRAD_DTYPE=fp32 if memory allows")


def _report_changes(config: Config) -> None:
    """Prints the settings that change on resume; `open_run_folder` records the changes later."""
    if config.node_rank == 0 and (changes := changes_of_resume(config)):
        exit_codes.complain(changes_text(changes))


def _warn(lines: Iterable[str]) -> None:
    for line in lines:
        exit_codes.complain(f"warning: {line}")


def dry_run_text(config: Config, flags: Mapping[str, Any], sources: Mapping[str, str], start: Start) -> str:
    """Lists the settings with their sources, the torchrun command and the report printed at startup."""
    lines, of_preset = [], preset_values(config.preset)
    for name, value in config.model_dump().items():
        default = of_preset.get(name, Config.model_fields[name].default)
        follows = name in ("warmup_iters", "decay_iters") and value != default
        if flags.get(name) is not None:
            source = "command line"
        elif os.environ.get(name.upper()):
            source = "environment"
        else:
            source = "from TRAIN_ITERS" if follows else f"preset {config.preset}" if name in of_preset else ""
        source = sources.get(name) or source
        setting = f"{name.upper()}={as_given(value)}"
        lines.append(f"{setting:<32}  # {source}" if source else setting)
    command = shlex.join(torchrun_command(config, rank_arguments(config, flags)))
    report = [startup_report(config), learning_rate_text(config, start), *group_lines(config)]
    return "\n".join([*lines, "", f"run folder: {RunFolder.of(config).path}", command, "", *report])
