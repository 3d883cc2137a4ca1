"""Builds a watchdog from command line options. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe_exp.config import ConfigError
from moe_exp.host.files import expanded
from moe_exp.watch.watchdog.alerts import channels_of
from moe_exp.watch.watchdog.memory import default_folder
from moe_exp.watch.watchdog.rules import Limits
from moe_exp.watch.watchdog.watchdog import Watchdog, Watched

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def watchdog_of(options: Mapping[str, Any], environ: Mapping[str, str]) -> Watchdog:
    """Makes the watchdog of `moe-exp watch run`; raises ConfigError with all problems.

    Args:
        options: run_dirs, slurm_name, again and so on, as on the command line.
        environ: with SMTP_PASSWORD and WATCH_WEBHOOK.
    """
    problems: list[str] = []
    kinds = ("again", "stuck", "ahead", "wait")
    times = {name: _seconds(options[name], f"--{name}", problems) for name in kinds}
    names, run_dirs = list(options["slurm_name"]), list(options["run_dirs"])
    if names and len(names) != len(run_dirs):
        rule = f"{len(names)} for {len(run_dirs)} runs"
        fix = "give one for each RUN_DIR, in their order"
        problems.append(f"--slurm-name={' '.join(names)}: {rule}. Fix: {fix}.")
        names = []
    for name in names:
        if re.search(r"[,\s]", name):
            problems.append(
                f"--slurm-name={name}: has a comma or a space. Fix: give the --job-name of the jobs."
            )
    if options.get("every") is not None and not options["every"] > 0:
        problems.append(f"--every={options['every']:g}: is no time. Fix: give seconds, as in --every 300.")
    folder = expanded(options.get("state") or default_folder())
    try:
        channels = channels_of(options, environ)
    except ConfigError as error:
        problems += error.problems
    if options.get("test_alert") and not problems and not channels:
        fix = "give --mail-to, --webhook-file or --alert-file"
        problems.append(f"--test-alert: there is no channel. Fix: {fix}.")
    if problems:
        raise ConfigError(problems)
    limits = Limits(times["stuck"] or None, times["ahead"], times["wait"])
    named = zip(run_dirs, names or [""] * len(run_dirs), strict=True)
    runs = [Watched(Path(path).absolute(), name) for path, name in named]
    return Watchdog(runs, channels, limits, times["again"], options.get("slurm_user") or "", folder)


def _seconds(text: str, name: str, problems: list[str]) -> float:
    """Parses 90s, 10m, 6h or 2d; 0 for an empty text."""
    if not text:
        return 0.0
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    if not found:
        problems.append(f"{name}={text}: is no time. Fix: write a number and a unit, as 90s, 10m, 6h or 2d.")
        return 0.0
    return float(found[1]) * _UNITS[found[2]]
