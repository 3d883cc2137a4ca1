"""Runs a comparison sequentially and rewrites its report after each run. Does not import torch."""

import importlib.util
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress

from moe_exp.config import Config, ConfigError, load_config, problem, raise_for
from moe_exp.host.devices import device_name
from moe_exp.host.exit_codes import FINISHED, TO_BE_CONTINUED
from moe_exp.host.files import write_atomically, write_json
from moe_exp.host.processes import free_port
from moe_exp.host.progress import progress, progress_of
from moe_exp.launch.machine_checks import check_environment, check_files
from moe_exp.planner.estimate import cost_of
from moe_exp.planner.hardware import load_hardware, profile_of
from moe_exp.report.page import write_report
from moe_exp.runs.records import last_records
from moe_exp.studies import child_runs
from moe_exp.studies.child_runs import Case, median_seconds, records_after, run_to_end, why_it_failed
from moe_exp.studies.compare.comparison import Comparison, Ended, is_finished, read_ended
from moe_exp.studies.compare.table import as_json, plan_text, result_text
from moe_exp.studies.compare.variants import Variant

_PACE_ITERATIONS, _PACE_WARMUP = 12, 4


def dry_run(comparison: Comparison) -> str:
    """Describes a comparison without touching files; ConfigError for invalid settings."""
    check_runs(comparison.runs(), Config.problems)
    comparison.compare_with_before()
    known = comparison.known_pace()
    pace = {one.name: known.get(one.name) or predicted_seconds(one) for one in comparison.variants}
    if comparison.options.match == "time":
        seconds = {name: value for name, value in pace.items() if value}
        if len(seconds) < len(pace):
            text = plan_text(comparison, pace, measured=False)
            return f"{text}\nthe numbers of iterations depend on the speeds, which are measured first"
        comparison = comparison.paced(seconds)
    return plan_text(comparison, pace, measured=len(known) == len(pace))


def check_planned_files(comparison: Comparison) -> None:
    """Checks the files and folders of the remaining runs, but not disk space; ConfigError on failure."""
    left = [run for run in comparison.runs() if not is_finished(run)]
    check_runs(left, lambda config: check_files(config, with_space=False))


def run_comparison(comparison: Comparison) -> int:
    """Performs the remaining runs of a comparison; returns the exit code, 1 if a run failed or timed out.

    Raises:
        ConfigError: if the settings cannot run on this machine or in this folder.
        ValueError: if the folder is in use, or if a variant fails while --match time measures its speed.
        KeyboardInterrupt: on Ctrl-C, SIGTERM or SIGHUP, after the current run has saved a checkpoint.
    """
    if comparison.options.repeats > 1:
        need_packages("repeats", "scipy")
    check_runs(comparison.runs(), Config.problems)
    comparison.compare_with_before()
    folder = comparison.folder
    if (folder / "config.yaml").exists() or (folder / "metrics.jsonl").exists():
        rule = f"{folder} belongs to a run, not a comparison"
        raise ConfigError([problem("run_name", folder.name, rule, "use another RUN_NAME")])
    first = comparison.runs()[0].config.model_copy(update={"run_name": ".new", "master_port": free_port()})
    raise_for(check_environment(first))  # includes the folder to create
    with child_runs.at_work(folder, f"RUN_NAME={folder.name}", "comparison"):
        by_time, pace = comparison.options.match == "time", comparison.known_pace()
        if by_time:
            pace = measured_pace(comparison, pace)
        # Saved before `paced` changes TRAIN_ITERS, as a repeated command compares the settings without it.
        comparison.keep(pace)
        if by_time:
            comparison = comparison.paced(pace)
        seconds = {one.name: pace.get(one.name) or predicted_seconds(one) for one in comparison.variants}
        print(plan_text(comparison, seconds, measured=by_time), end="\n\n", flush=True)
        runs = comparison.runs()
        for run in runs:
            child_runs.wait_until_free(run.folder)
        check_runs([run for run in runs if not is_finished(run)])
        ended: dict[str, Ended] = {}
        text, warnings, page = "", list[str](), folder / "report.html"
        for number, run in enumerate(runs, start=1):
            ended[run.name] = run_one(comparison, run, f"[{number}/{len(runs)}] {run.name}")
            print(f"[{number}/{len(runs)}] {ended_line(ended[run.name], run.name)}", flush=True)
            so_far = [ended.get(other.name) or read_ended(other) for other in runs]
            # Rewritten after each run, so that an interrupted comparison has a report.
            text = result_text(comparison, so_far)
            write_atomically(folder / "report.md", text)
            write_json(folder / "results.json", as_json(comparison, so_far))
            if with_records := [other.folder.path for other in runs if other.folder.metrics.exists()]:
                warnings = write_report(with_records, page, title=folder.name)
        pages = [str(page)] if page.exists() else []
        print("", text, f"{folder}/report.md", *warnings, *pages, sep="\n", flush=True)
        return int(any(one.status in ("failed", "oom", "timeout") for one in ended.values()))


def run_one(comparison: Comparison, run: Case, title: str) -> Ended:
    """Trains a run to its end, unless the run is finished."""
    if is_finished(run):
        return read_ended(run)
    # The launcher appends to the log; only the output of this start explains a failure.
    before = run.log.stat().st_size if run.log.exists() else 0
    timeout, environ = comparison.options.timeout or None, child_runs.run_environment()

    def iteration() -> int:
        with suppress(OSError):
            # Called every second, so only reads the end: enough for a record of several thousand experts.
            records = last_records(run.folder.metrics, 1 << 17)
            return max((record["iteration"] for record in records if record["kind"] == "train"), default=0)
        return 0

    with progress_of(iteration, title, run.config.train_iters, unit="iterations"):
        code = run_to_end(run.flags, run.log, timeout=timeout, environ=environ, saving=True)
    if code is None:
        reason = f"exceeded --timeout {comparison.options.timeout:g} s"
        return read_ended(run, status="timeout", reason=reason)
    return ended_with(run, code, run.log.read_bytes()[before:].decode(errors="replace"))


def ended_with(run: Case, code: int | None, printed: str) -> Ended:
    """Determines the state of a run from its launcher's output and exit code (None if unknown)."""
    if code in (FINISHED, TO_BE_CONTINUED):
        return read_ended(run)
    status, reason = why_it_failed(printed, code)
    return read_ended(run, status=status, reason=reason)


def ended_line(ended: Ended, name: str) -> str:
    loss = f", loss {ended.final_loss:.4f}" if ended.final_loss is not None else ""
    return f"{name}: {ended.status}{loss}" + (f": {ended.reason}" if ended.reason else "")


def predicted_seconds(variant: Variant) -> float | None:
    """Returns the predicted seconds per iteration on this host's device; None without a device profile."""
    if not (profile := profile_of(device_name())):
        return None
    cost = cost_of(variant.config, load_hardware(profile))
    return cost.seconds / cost.num_iterations


def measured_pace(comparison: Comparison, known: Mapping[str, float]) -> dict[str, float]:
    """Seconds per iteration of each variant, `known` or measured; ValueError if a measurement fails."""
    left = [variant for variant in comparison.variants if variant.name not in known]
    pace, folder = dict(known), comparison.folder / "pace"
    if not left:
        return pace
    with progress("measuring the speed", len(left), unit="variants") as advance:
        for variant in left:
            place = {"run_dir": str(folder), "run_name": variant.name, "train_iters": _PACE_ITERATIONS}
            flags = {**variant.flags, **child_runs.MEASURED_ONLY, **place}
            log = comparison.folder / "logs" / f"{variant.name}.pace.log"
            case = Case(variant.name, flags, load_config(flags, {}), log)
            child_runs.clear(case)
            if code := run_to_end(flags, log, timeout=None, environ=child_runs.run_environment()):
                _, reason = why_it_failed(log.read_text(encoding="utf-8", errors="replace"), code)
                fix = f"see {log}, and fix or omit the variant"
                raise ValueError(f"variant={variant.name}: failed: {reason}. Fix: {fix}.")
            pace[variant.name] = median_seconds(records_after(case.folder, _PACE_WARMUP))
            advance(1)
    # The logs are kept so that a surprising speed can be investigated.
    shutil.rmtree(folder, ignore_errors=True)
    return pace


def need_packages(field: str, *packages: str) -> None:
    """Checks that packages for the report's tables are installed; ConfigError if one is missing."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            rule = "the tables require this package, which is not installed"
            raise ConfigError([problem(field, package, rule, f"pip install {' '.join(packages)}")])


def check_runs(
    runs: Sequence[Case],
    problems_of: Callable[[Config], Iterable[str]] = lambda one: [*one.problems(), *check_environment(one)],
) -> None:
    """ConfigError if runs cannot start; if a problem affects only some runs, its line names these runs."""
    named: dict[str, list[str]] = {}
    in_folders = len({run.folder.path.parent for run in runs}) > 1
    for run in runs:
        # Runs in different rungs of a ladder have the same names.
        name = f"{run.folder.path.parent.name}/{run.name}" if in_folders else run.name
        # A free port, since each run chooses one when it starts.
        for line in problems_of(run.config.model_copy(update={"master_port": free_port()})):
            named.setdefault(line, []).append(name)
    raise_for(
        line if len(names) == len(runs) else f"{', '.join(names)}: {line}" for line, names in named.items()
    )
