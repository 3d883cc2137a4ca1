"""Runs a job on this node: checks, embedded corpus, torchrun (launch/torchrun_job.py), summary, exit code."""

from __future__ import annotations

import os
import shlex
import signal
import time
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from datetime import datetime
from pathlib import Path
from typing import Any

from moe_exp.config import Config, ConfigError, load_config, module_arguments
from moe_exp.config.checks.checks import check_config
from moe_exp.config.misspelt import warn_of_misspelt
from moe_exp.config.presets import preset_values
from moe_exp.data.embedded import ensure_embedded_corpus
from moe_exp.host.exit_codes import (
    BAD_INPUT,
    FAILED,
    FINISHED,
    LAUNCH_TIME,
    METRICS_FILE,
    RENDEZVOUS_KEY,
    complain,
)
from moe_exp.host.processes import signals_handled
from moe_exp.launch.machine_checks import check_environment, check_files, check_machine, space_warnings
from moe_exp.launch.torchrun_job import (
    STOPPING,
    TRAIN_MODULE,
    child_environment,
    run_job,
    shared_key,
    torchrun_command,
)
from moe_exp.planner.costs.params import startup_report
from moe_exp.runs.finish import finish_run
from moe_exp.runs.run_folder import RunFolder
from moe_exp.watch.hangs.monitor import HangWatch


def train(flags: Mapping[str, Any], *, dry_run: bool = False, raises: bool = False) -> int:
    """Checks the settings and runs this node's job, or with `dry_run` prints what would run.

    Args:
        flags: settings from the command line by field name; None counts as not given.
        dry_run: starts and creates nothing; devices and packages missing on this machine are only warnings.
        raises: for settings that cannot run, ConfigError instead of printed lines.

    Returns:
        Exit code: 0 finished, 75 stopped (the same command resumes), 2 settings cannot run, others failed.
    """
    warn_of_misspelt()
    try:
        config = load_config(flags)
        if problems := check_config(config) + ([] if dry_run else check_environment(config)):
            raise ConfigError(problems)
        if not dry_run:
            _warn(space_warnings(config))
        return _dry_run(config, flags) if dry_run else launch(config, flags)
    except ConfigError as error:
        if raises:
            raise
        for line in error.problems:
            complain(line)
        return BAD_INPUT


def launch(config: Config, flags: Mapping[str, Any], module: str = TRAIN_MODULE) -> int:
    """Runs this node's ranks until they end, with up to MAX_RESTARTS restarts after failures.

    Args:
        flags: command line settings, which the ranks resolve again together with the environment.
        module: what each rank runs.

    Raises:
        ConfigError: the embedded corpus, or the key that several nodes share, cannot be made.
    """
    if not config.train_data:
        try:
            ensure_embedded_corpus(Path(config.data_dir))
        except ValueError as error:
            raise ConfigError(str(error).splitlines()) from None
    if config.preflight and module == TRAIN_MODULE:
        # imported here, as it uses functions of this module
        from moe_exp.launch.preflight.report import passes

        if not passes(config, flags):
            return FAILED
    started, start, folder = datetime.now().astimezone(), time.monotonic(), RunFolder.of(config)
    environ = child_environment(config)
    environ |= {METRICS_FILE: str(folder.metrics.absolute()), LAUNCH_TIME: str(start)}
    if config.nnodes > 1:
        try:
            environ[RENDEZVOUS_KEY] = shared_key(folder.rendezvous_key)
        except (OSError, ValueError) as error:
            raise ConfigError([str(error)]) from None
    stopping = STOPPING if config.save_at_end else _STOPPING_UNSAVED
    arguments = rank_arguments(config, flags) if module == TRAIN_MODULE else module_arguments(flags)
    command = torchrun_command(config, arguments, module)
    with HangWatch(config, folder) if module == TRAIN_MODULE else nullcontext() as watch:
        environ |= watch.environment if watch else {}
        code = run_job(command, environ, stopping=stopping, poll=watch.poll if watch else None)
    if config.node_rank:
        return code
    with signals_handled(signal.SIG_IGN):  # schedulers send several
        ended = finish_run(config, folder, since=started, wall_seconds=time.monotonic() - start, code=code)
    if ended is None:
        return code
    status, text = ended
    print(f"\n{text}", flush=True)
    # Teardown of finished ranks may fail, for instance if a peer left earlier.
    return FINISHED if status == "finished" else code or FAILED


def rank_arguments(config: Config, flags: Mapping[str, Any]) -> list[str]:
    """`module_arguments` plus the rendezvous, which the ranks' environment replaces by their own store's."""
    return module_arguments({**flags, "master_addr": config.master_addr, "master_port": config.master_port})


_STOPPING_UNSAVED = (
    "stopping: the run ends, and saves nothing with SAVE_AT_END=false; a second Ctrl-C kills it"
)


def _dry_run(config: Config, flags: Mapping[str, Any]) -> int:
    """Plans also without files, and only warns of a full disk, as the run may be for another machine."""
    print(dry_run_text(config, flags), flush=True)
    problems = check_files(config, with_space=False)
    new = (line for line in check_files(config) if line not in problems)
    _warn([*check_machine(config), *new, *space_warnings(config)])
    if problems:
        raise ConfigError(problems)
    return 0


def _warn(lines: Iterable[str]) -> None:
    for line in lines:
        complain(f"warning: {line}")


def dry_run_text(
    config: Config, flags: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None
) -> str:
    """Merged settings with their sources (none: default), the torchrun command and the start-up report."""
    flags = {name: value for name, value in (flags or {}).items() if value is not None}
    lines = []
    for name, value in config.model_dump().items():
        source = _source(name, config.preset, flags, os.environ if environ is None else environ)
        setting = f"{name.upper()}={_shown(value)}"
        lines.append(f"{setting:<32}  # {source}" if source else setting)
    command = shlex.join(torchrun_command(config, rank_arguments(config, flags)))
    folder = f"run folder: {RunFolder.of(config).path}"
    return "\n".join([*lines, "", folder, command, "", startup_report(config)])


def _shown(value: object) -> str:
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _source(name: str, preset: str, flags: Mapping[str, Any], environ: Mapping[str, str]) -> str:
    if name in flags:
        return "command line"
    if environ.get(name.upper()):
        return "environment"
    return f"preset {preset}" if name in preset_values(preset) else ""
