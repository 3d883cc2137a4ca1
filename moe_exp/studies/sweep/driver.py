"""A whole sweep: its plan, its cases one by one or as SLURM jobs, and the tables, updated by each. No torch.

$SWEEP_DIR/$SWEEP_NAME/
  sweep.csv sweep.md sweep.png   rewritten after every case
  sweep.json                     the settings that all cases share
  results/CASE.json              written when a case ends; a restarted sweep skips these cases
  logs/CASE.log                  output of a case
  runs/CASE/                     its run folder
  jobs/CASE.sh .id .code         with SLURM: script, job id, exit code
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from moe_exp.config import ConfigError, load_config, problem
from moe_exp.config.loading import main_settings, with_file
from moe_exp.data.embedded import ensure_embedded_corpus
from moe_exp.host.devices import Nodes, device_name
from moe_exp.host.files import read_json, write_atomically, write_json
from moe_exp.host.progress import progress
from moe_exp.launch.machine_checks import check_files
from moe_exp.planner.hardware import load_hardware, profile_of
from moe_exp.runs.run_folder import RunFolder
from moe_exp.studies.child_runs import given_settings, held
from moe_exp.studies.sweep import slurm_cases
from moe_exp.studies.sweep.cases import Case, clear, default_lists, make_cases, run_case
from moe_exp.studies.sweep.outcome import Result, result_of
from moe_exp.studies.sweep.picture import draw_sweep
from moe_exp.studies.sweep.settings import AXES, SweepSettings, load_sweep_settings
from moe_exp.studies.sweep.table import CPU, Row, by_rule, is_oom, prediction_of, to_csv, to_markdown

# Settings that may differ between two calls of one sweep: layout, and those that affect no measurement.
_OWN_OF_CASE = {
    *AXES.values(),
    "node_rank",
    "master_addr",
    "master_port",
    "run_dir",
    "run_name",
    "num_workers",
}


@dataclass(frozen=True)
class Sweep:
    """A sweep as requested.

    Attributes:
        given: settings of the runs that are not defaults.
        folder: see the top of this file.
        device: on which cases are expected to run; empty if unknown.
    """

    settings: SweepSettings
    given: dict[str, Any]
    folder: Path
    device: str

    @classmethod
    def of(cls, flags: Mapping[str, Any], environ: Mapping[str, str]) -> Sweep:
        """Reads all settings. Touches no disk.

        Args:
            flags: of the command line, for the sweep and its runs, by field name; None counts as not given.

        Raises:
            ConfigError: lists every value that cannot be read.
        """
        flags = with_file(flags, environ)
        mine = {
            name: value
            for name, value in flags.items()
            if name in SweepSettings.model_fields and value is not None
        }
        others = {name: value for name, value in flags.items() if name not in SweepSettings.model_fields}
        problems: list[str] = []
        settings = nodes = None
        try:
            settings = load_sweep_settings(mine, environ)
            nodes = _nodes(settings)
        except ConfigError as error:
            problems += error.problems
        try:
            given = given_settings(others, environ, nodes)
        except ConfigError as error:
            problems += error.problems
        if settings is None or problems:
            raise ConfigError(problems)
        base = load_config(given, {})
        if not any(getattr(settings, name) for name in AXES):
            lists = {name: text for name, text in default_lists(base).items() if AXES[name] not in given}
            settings = load_sweep_settings(lists | mine, environ)
        on_cpus = bool(settings.gpu) and load_hardware(settings.gpu).is_cpu
        name = (
            settings.sweep_name
            or f"{base.preset}_layers_{base.num_layers}_hidden_{base.hidden_size}"
            f"_{_kind(base)}_GBS_{base.gbsz}"
        )
        # With SLURM this may be a login node.
        device = "" if settings.executor == "slurm" else device_name()
        return cls(
            settings,
            given,
            Path(settings.sweep_dir).expanduser() / name,
            CPU if on_cpus else device,
        )

    @property
    def name(self) -> str:
        return self.folder.name

    def run_folder(self, case: str) -> RunFolder:
        return RunFolder(self.folder / "runs" / case)

    def log(self, case: str) -> Path:
        return self.folder / "logs" / f"{case}.log"

    def result(self, case: str) -> Path:
        return self.folder / "results" / f"{case}.json"

    def cases(self) -> list[Case]:
        return make_cases(self.given, self.settings, self.folder / "runs")

    def rows(self, *, retry_failed: bool = False) -> list[Row]:
        """Rows of the lists' cases, then of other cases that have a result from an earlier call.

        With `retry_failed`, cases of the lists that failed, ran out of memory or timed out count as not run.
        """
        cases = self.cases()
        names = {case.name for case in cases}
        earlier = [
            path for path in sorted((self.folder / "results").glob("*.json")) if path.stem not in names
        ]
        others = [Case.of(Result.read(path).flags, local=False) for path in earlier]
        return [
            *(self.row(case, retry_failed=retry_failed) for case in cases),
            *(self.row(case) for case in others),
        ]

    def row(self, case: Case, *, retry_failed: bool = False) -> Row:
        """Current state of a case."""
        path = self.result(case.name)
        result = Result.read(path) if path.exists() else None
        if result and retry_failed and result.status != "ok":
            result = None
        device = (result.device if result else "") or self.device
        gpu = self.settings.gpu or profile_of(device)
        status, reason, prediction = "left", "", None
        if case.problems:
            status, reason = "rejected", " ".join(case.problems)
        else:
            prediction = prediction_of(case.config, device, gpu)
            if not self.settings.run_oom and (reason := is_oom(case.config, device, gpu)):
                status = "predicted-oom"
        if result:
            status, reason = result.status, result.reason
        return Row(case, status, reason, result, prediction, device, gpu)


def _nodes(settings: SweepSettings) -> Nodes | None:
    """Where the cases run, if not on this machine."""
    if settings.executor == "local":
        return None
    return load_hardware(settings.gpu).nodes if settings.gpu else Nodes(next(iter(settings.gpus), None))


def _kind(base: Any) -> str:
    return f"experts_{base.num_experts}" if base.use_moe else "dense"


def dry_run_text(sweep: Sweep, *, retry_failed: bool = False) -> str:
    """Describes what `run_sweep` would do, a line per case. Touches nothing.

    Raises:
        ConfigError: data or folders with which no case can run.
        ValueError: the folder belongs to a sweep with other settings.
    """
    _compare(sweep)
    rows = sweep.rows(retry_failed=retry_failed)
    _check_files(rows, with_space=False)
    return "\n".join([_head(sweep, rows), *_case_lines(rows)])


def _check_files(rows: Sequence[Row], *, with_space: bool = True) -> list[Case]:
    """The cases that are left; raises ConfigError if what all need of files and folders is wrong."""
    left = [row.case for row in rows if row.status == "left"]
    # With a run folder that does not exist: the case's own may still be held by a killed sweep.
    config = left[0].config.model_copy(update={"run_name": "none"}) if left else None
    if config and (problems := check_files(config, with_space=with_space)):
        raise ConfigError(problems)
    return left


def plan_text(sweep: Sweep, rows: Sequence[Row]) -> str:
    """Plan of a sweep: a line per valid case, and one per rule that the others break."""
    layouts = [row for row in rows if row.status != "rejected"]
    rejected = [
        f"  rejected: {len(broken)} case{'s' if len(broken) > 1 else ''}, {rule}"
        for rule, broken in by_rule(rows).items()
    ]
    return "\n".join([_head(sweep, rows), *_case_lines(layouts), *rejected])


def _head(sweep: Sweep, rows: Sequence[Row]) -> str:
    settings, counts = sweep.settings, Counter(row.status for row in rows)
    said = ", ".join(
        f"{number} {'to run' if status == 'left' else status}" for status, number in counts.items()
    )
    cases = f"{len(rows)} case{'s' if len(rows) > 1 else ''}"
    return (
        f"{sweep.folder}: {cases} of {settings.sweep_iters} iterations, {settings.sweep_warmup} of them"
        f" warm-up: {said}; {main_settings(rows[0].case.config)}"
    )


def _case_lines(rows: Sequence[Row]) -> list[str]:
    width = max((len(row.case.name) for row in rows), default=0)
    return [f"  {row.status:<14} {row.case.name:<{width}}  {_about(row)}".rstrip() for row in rows]


def _about(row: Row) -> str:
    """Measured and predicted values, or the reason."""
    if row.status not in ("ok", "left"):
        return row.short_reason
    parts = []
    for value, predicted, unit in (
        (row.seconds, row.predicted_seconds, "s per iteration"),
        (row.memory_gib, row.predicted_gib, "GiB"),
    ):
        known = [f"{value:.3g} {unit}"] if value is not None else []
        known += [f"predicted {predicted:.3g}{'' if known else ' ' + unit}"] if predicted is not None else []
        parts += [" ".join([known[0], *(f"({one})" for one in known[1:])])] if known else []
    return ", ".join(parts)


def run_sweep(sweep: Sweep, *, retry_failed: bool = False) -> int:
    """Runs the cases that are left, and writes the tables; returns 0 if any case of the table was measured.

    Args:
        retry_failed: also run cases that failed, ran out of memory or timed out before.

    Raises:
        ConfigError: data or folders with which no case can run.
        ValueError: the folder belongs to a sweep with other settings, or one that is still running.
    """
    rows = sweep.rows(retry_failed=retry_failed)
    cases = [row.case for row in rows]
    left = _check_files(rows)
    with held(sweep.folder, f"SWEEP_NAME={sweep.name}", "sweep"):
        _compare(sweep)
        write_json(sweep.folder / "sweep.json", _shared_settings(sweep))
        for case in left:
            sweep.result(case.name).unlink(missing_ok=True)
        print(plan_text(sweep, rows), flush=True)
        write_tables(sweep, cases)
        if left:
            _run(sweep, left, cases)
    rows = [row for row in map(sweep.row, cases) if row.status != "rejected"]
    print(f"\n{to_markdown(rows, _title(sweep))}\n{sweep.folder}/sweep.csv, sweep.md, sweep.png", flush=True)
    return 0 if any(row.status == "ok" for row in rows) else 1


def _run(sweep: Sweep, left: Sequence[Case], cases: Sequence[Case]) -> None:
    try:
        _prepare_data(sweep, left[0])
        with progress("sweep", len(left), unit="cases") as advance:
            for number, (case, result) in enumerate(_results(sweep, left, partial(advance, 0)), start=1):
                result.write(sweep.result(case.name))
                write_tables(sweep, cases)
                print(
                    f"[{number}/{len(left)}] {case.name}: {result.status}, {_about(sweep.row(case))}",
                    flush=True,
                )
                advance(1)
    except KeyboardInterrupt:
        jobs = "; its SLURM jobs continue" if sweep.settings.executor == "slurm" else ""
        print(f"stopped{jobs}: the same command continues with what is left", flush=True)
        raise


def _prepare_data(sweep: Sweep, case: Case) -> None:
    """Creates the embedded corpus if cases here need it, so that the first case is not charged for it."""
    if sweep.settings.executor == "local" and not case.config.train_data:
        ensure_embedded_corpus(Path(case.config.data_dir))


def _results(
    sweep: Sweep, left: Sequence[Case], report: Callable[[str], None]
) -> Iterator[tuple[Case, Result]]:
    """Yields cases as they end; reports progress to `report`."""
    return (
        _slurm_results(sweep, left, report)
        if sweep.settings.executor == "slurm"
        else _local_results(sweep, left, report)
    )


def _local_results(
    sweep: Sweep, left: Sequence[Case], report: Callable[[str], None]
) -> Iterator[tuple[Case, Result]]:
    timeout = sweep.settings.case_timeout
    for case in left:
        report(case.name)
        clear(sweep.run_folder(case.name), sweep.log(case.name))
        code = run_case(case, sweep.log(case.name), timeout)
        yield case, _result(sweep, case, code, timeout if code is None else 0)


def _slurm_results(
    sweep: Sweep, left: Sequence[Case], report: Callable[[str], None]
) -> Iterator[tuple[Case, Result]]:
    """Submits all cases without a job from an earlier call, and yields cases as their jobs end."""
    settings = sweep.settings
    options = slurm_cases.JobOptions(
        shlex.split(settings.sbatch), settings.case_timeout, on_gpus=sweep.device != CPU
    )
    files = {case.name: slurm_cases.JobFiles.of(sweep.folder / "jobs", case.name) for case in left}
    waiting = {}
    for case in left:
        if files[case.name].job_id.exists():
            waiting[case.name] = files[case.name].job_id.read_text()
        else:
            clear(sweep.run_folder(case.name), sweep.log(case.name))
            waiting[case.name] = slurm_cases.submit(case, files[case.name], sweep.log(case.name), options)
    report("SLURM jobs")
    by_name = {case.name: case for case in left}
    for name in slurm_cases.ended_jobs(waiting):
        yield by_name[name], _result(sweep, by_name[name], files[name].exit_code(), 0)
        files[name].forget()


def _result(sweep: Sweep, case: Case, code: int | None, timeout: int) -> Result:
    numbers = {"num_warmup": sweep.settings.sweep_warmup, "num_iterations": sweep.settings.sweep_iters}
    return result_of(
        sweep.run_folder(case.name), sweep.log(case.name), case.flags, code=code, timeout=timeout, **numbers
    )


def write_tables(sweep: Sweep, cases: Sequence[Case]) -> None:
    """Writes sweep.csv, sweep.md and sweep.png atomically."""
    rows = [sweep.row(case) for case in cases]
    write_atomically(sweep.folder / "sweep.csv", to_csv(rows, sweep.name))
    write_atomically(sweep.folder / "sweep.md", to_markdown(rows, _title(sweep)))
    partial_picture = sweep.folder / ".sweep.png.partial"
    if draw_sweep(rows, partial_picture, _title(sweep)):
        partial_picture.replace(sweep.folder / "sweep.png")


def _title(sweep: Sweep) -> str:
    settings = sweep.settings
    return f"{sweep.name}: median of iterations {settings.sweep_warmup + 1} to {settings.sweep_iters}"


def _shared_settings(sweep: Sweep) -> dict[str, Any]:
    """Settings that all results of the folder share."""
    settings = {
        name: value
        for name, value in load_config(sweep.given, {}).model_dump().items()
        if name not in _OWN_OF_CASE
    }
    return settings | {"sweep_iters": sweep.settings.sweep_iters, "sweep_warmup": sweep.settings.sweep_warmup}


def _compare(sweep: Sweep) -> None:
    """Raises ValueError, a line per difference, if the folder's results were measured with other settings."""
    path = sweep.folder / "sweep.json"
    if not path.exists():
        return
    before, now = read_json(path, fix="remove it, or give another SWEEP_NAME"), _shared_settings(sweep)
    changed = [name for name in now if name in before and before[name] != now[name]]
    changed = ["preset"] if "preset" in changed else changed  # the others follow it
    if changed:
        fix = "set {} as it was, or give another SWEEP_NAME"
        lines = [
            problem(name, now[name], f"{sweep.folder} has {before[name]}", fix.format(name.upper()))
            for name in changed
        ]
        raise ConfigError(lines)
