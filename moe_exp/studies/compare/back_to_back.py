"""Runs a comparison: checks, one run after another, and the report, rewritten after each. No torch."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from moe_exp.config import Config, ConfigError, problem
from moe_exp.config.checks.checks import check_config
from moe_exp.host.exit_codes import FINISHED, TO_BE_CONTINUED
from moe_exp.host.files import write_atomically, write_json
from moe_exp.host.processes import free_port, signals_handled
from moe_exp.host.progress import progress_of
from moe_exp.launch.machine_checks import check_environment, check_files
from moe_exp.report.page import write_report
from moe_exp.studies.child_runs import held, run_environment, run_to_end, wait_until_free
from moe_exp.studies.compare.comparison import Comparison, Run, compare_with_before, keep, known_pace
from moe_exp.studies.compare.pace import measured_pace, predicted_seconds
from moe_exp.studies.compare.results import Ended, as_json, is_finished, read_ended
from moe_exp.studies.compare.table import plan_text, result_text
from moe_exp.studies.failures import why_it_failed

# Longer than a record of up to a few thousand experts.
_TAIL_BYTES = 1 << 17
PAGE = "report.html"
_ITERATION = re.compile(rb'"kind": "train", "iteration": (\d+)')


def dry_run(comparison: Comparison) -> str:
    """Describes what a comparison would do; touches no file. ConfigError for settings that cannot run."""
    check_runs(comparison.runs(), check_config)
    compare_with_before(comparison)
    known = known_pace(comparison)
    pace = {one.name: known.get(one.name) or predicted_seconds(one) for one in comparison.variants}
    if comparison.options.match == "time":
        seconds = {name: value for name, value in pace.items() if value}
        if len(seconds) < len(pace):
            return (
                plan_text(comparison, pace, measured=False)
                + "\niterations are chosen when the pace of each is measured"
            )
        comparison = comparison.paced(seconds)
    return plan_text(comparison, pace, measured=len(known) == len(pace))


def check_planned_files(comparison: Comparison) -> None:
    """Checks files and folders of what is left of a comparison, except for space, for its dry run.

    Raises:
        ConfigError: data, a tokenizer or a checkpoint is missing, or a folder cannot be used.
    """
    left = [run for run in comparison.runs() if not is_finished(run)]
    check_runs(left, lambda config: check_files(config, with_space=False))


def run_comparison(comparison: Comparison) -> int:
    """Runs what is left of a comparison.

    Returns:
        Exit code: 1 if a run failed or timed out.

    Raises:
        ConfigError: settings that cannot run, here or in this folder.
        ValueError: the folder is in use, or with `time` a variant does not run.
        KeyboardInterrupt: Ctrl-C, SIGTERM or SIGHUP; the current run has saved a checkpoint.
    """
    if comparison.options.repeats > 1:
        need_packages("repeats", "scipy")
    check_runs(comparison.runs(), check_config)
    compare_with_before(comparison)
    _check_place(comparison)
    with held(comparison.folder, f"RUN_NAME={comparison.folder.name}", "comparison"), stopped_by_signals():
        try:
            return _run_held(comparison)
        except KeyboardInterrupt:
            print("stopped: the same command continues with what is left", flush=True)
            raise


def _run_held(comparison: Comparison) -> int:
    by_time = comparison.options.match == "time"
    pace = known_pace(comparison)
    if by_time:
        pace = measured_pace(comparison, pace)
    keep(comparison, pace)
    if by_time:
        comparison = comparison.paced(pace)
    seconds = {one.name: pace.get(one.name) or predicted_seconds(one) for one in comparison.variants}
    print(plan_text(comparison, seconds, measured=by_time), end="\n\n", flush=True)
    runs = comparison.runs()
    for run in runs:
        wait_until_free(run.folder)
    check_runs([run for run in runs if not is_finished(run)])
    ended: dict[str, Ended] = {}
    text, warnings = "", list[str]()
    for number, run in enumerate(runs, start=1):
        ended[run.name] = run_one(comparison, run, f"[{number}/{len(runs)}] {run.name}")
        print(f"[{number}/{len(runs)}] {_line(ended[run.name])}", flush=True)
        text = write_tables(comparison, [ended.get(other.name) or read_ended(other) for other in runs])
        warnings = write_page(comparison, [run.folder.path for run in runs if run.folder.metrics.exists()])
    print("\n".join(["", text, f"{comparison.folder}/report.md", *warnings]), flush=True)
    if (comparison.folder / PAGE).exists():
        print(comparison.folder / PAGE, flush=True)
    return int(any(one.status in ("failed", "oom", "timeout") for one in ended.values()))


def run_one(comparison: Comparison, run: Run, title: str) -> Ended:
    """Trains a run to its end, unless finished."""
    if is_finished(run):
        return read_ended(run)
    before = run.log.stat().st_size if run.log.exists() else 0
    timeout = comparison.options.timeout or None
    with progress_of(lambda: _iteration(run), title, run.config.train_iters, unit="iterations"):
        code = run_to_end(run.variant.flags, run.log, timeout=timeout, environ=run_environment(), saving=True)
    if code is None:
        return read_ended(
            run, status="timeout", reason=f"had not ended after --timeout {comparison.options.timeout:g} s"
        )
    if code not in (FINISHED, TO_BE_CONTINUED):
        status, reason = why_it_failed(run.log.read_bytes()[before:].decode(errors="replace"), code)
        return read_ended(run, status=status, reason=reason)
    return read_ended(run)


def _line(ended: Ended) -> str:
    loss = f", loss {ended.final_loss:.4f}" if ended.final_loss is not None else ""
    return f"{ended.run.name}: {ended.status}{loss}" + (f": {ended.reason}" if ended.reason else "")


def _iteration(run: Run) -> int:
    """Latest logged iteration; reads only the last lines, as it is called every second."""
    with suppress(OSError), run.folder.metrics.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        found = [int(number) for number in _ITERATION.findall(file.read())]
        return found[-1] if found else 0
    return 0


def write_tables(comparison: Comparison, ended: Sequence[Ended]) -> str:
    """Writes report.md and results.json, and returns the former."""
    text = result_text(comparison, ended)
    write_atomically(comparison.folder / "report.md", text)
    write_json(comparison.folder / "results.json", as_json(comparison, ended))
    return text


def write_page(comparison: Comparison, runs: Sequence[Path]) -> list[str]:
    """Writes report.html of these run folders, if any; returns warnings to read first."""
    return write_report(runs, comparison.folder / PAGE, title=comparison.folder.name) if runs else []


def _settings_and_environment(config: Config) -> list[str]:
    return check_config(config) + check_environment(config)


def need_packages(field: str, *packages: str) -> None:
    """Raises ConfigError if one is missing, which the tables would notice only after the first run."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            rule = f"the tables need {package}, which is not installed"
            raise ConfigError([problem(field, package, rule, f"pip install {' '.join(packages)}")])


def check_runs(
    runs: Sequence[Run], problems_of: Callable[[Config], list[str]] = _settings_and_environment
) -> None:
    """Raises ConfigError, a line per problem, if any run cannot start; names the runs unless all fail."""
    found = {}
    in_folders = len({run.folder.path.parent for run in runs}) > 1
    for run in runs:
        # every run gets a free port when it starts
        config = run.config.model_copy(update={"master_port": free_port()})
        found[f"{run.folder.path.parent.name}/{run.name}" if in_folders else run.name] = problems_of(config)
    lines: dict[str, list[str]] = {}
    for name, problems in found.items():
        for line in problems:
            lines.setdefault(line, []).append(name)
    if lines:
        raise ConfigError(
            [
                line if len(names) == len(found) else f"{', '.join(names)}: {line}"
                for line, names in lines.items()
            ]
        )


def _check_place(comparison: Comparison) -> None:
    """Raises ConfigError if the folder cannot be created or the environment does not fit."""
    folder = comparison.folder
    if (folder / "config.yaml").exists() or (folder / "metrics.jsonl").exists():
        raise ConfigError(
            [
                problem(
                    "run_name",
                    folder.name,
                    f"{folder} is the folder of a run, not of a comparison",
                    "give another RUN_NAME",
                )
            ]
        )
    first = comparison.runs()[0]
    config = first.config.model_copy(update={"run_name": ".new", "master_port": free_port()})
    if problems := check_environment(config):
        raise ConfigError(problems)


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Inside the block, SIGTERM and SIGHUP raise KeyboardInterrupt."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    with signals_handled(interrupt, signals=(signal.SIGTERM, signal.SIGHUP)):
        yield
