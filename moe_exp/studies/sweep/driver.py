"""Runs a sweep's cases one by one or as SLURM jobs; updates tables after each case. Does not import torch.

$SWEEP_DIR/$SWEEP_NAME/
  sweep.csv sweep.md sweep.png   rewritten after each case
  sweep.json                     settings shared by all cases
  results/CASE.json              written when a case ends; a resumed sweep skips these cases
  logs/CASE.log                  output of a case
  runs/CASE/                     run folder
  jobs/CASE.sh .id .code         SLURM: script, job id, exit code
"""

from __future__ import annotations

import itertools
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_exp.config import Config, ConfigError, load_config, problem, raise_for
from moe_exp.config.loading import main_settings, with_file
from moe_exp.data.embedded import ensure_embedded_corpus
from moe_exp.host.devices import Nodes, device_name
from moe_exp.host.files import read_json, write_atomically, write_json
from moe_exp.host.processes import free_port
from moe_exp.host.progress import Advance, progress
from moe_exp.launch.machine_checks import check_files, check_machine
from moe_exp.planner.hardware import load_hardware, profile_of
from moe_exp.planner.measured import GIBIBYTE
from moe_exp.planner.prediction import predict
from moe_exp.studies import child_runs
from moe_exp.studies.child_runs import MEASURED_ONLY, Case, at_work, given_settings
from moe_exp.studies.sweep import table
from moe_exp.studies.sweep.settings import AXES, SweepSettings, load_sweep_settings
from moe_exp.studies.sweep.table import CPU, Result, Row, by_rule, result_of, to_markdown

# Settings that may differ between calls of a sweep: the layout, and those that don't affect measurements.
_OWN_OF_CASE = {
    *AXES.values(), "node_rank", "master_addr", "master_port", "run_dir", "run_name", "num_workers",
}  # fmt: skip


def case_of(flags: Mapping[str, Any], folder: Path, *, local: bool) -> Case:
    """Creates the case with the settings `flags`. If `local`, checks whether this machine can run it."""
    config = load_config(flags, {})
    name = case_name(config)
    problems = list(config.problems())
    if local:
        # A free port, since each case chooses one when it starts.
        problems += check_machine(config.model_copy(update={"master_port": free_port()}))
        if config.nnodes > 1:
            rule = "EXECUTOR=local supports a single node"
            problems.append(problem("nodes", config.nnodes, rule, "set NODES=1 or EXECUTOR=slurm"))
    texts = {key: str(value) for key, value in flags.items()}
    return Case(name, texts, config, folder / "logs" / f"{name}.log", problems=tuple(problems))


def case_name(config: Config) -> str:
    """Names a layout. VPP is included only if set; ETP, CP and the number of nodes only if above 1."""
    nodes = f"nodes_{config.nnodes}_" if config.nnodes > 1 else ""
    name = f"{nodes}gpus_{config.gpus_per_node}_TP_{config.tp}_PP_{config.pp}"
    name += "" if config.vpp is None else f"_VPP_{config.vpp}"
    name += f"_EP_{config.ep}"
    name += f"_ETP_{config.etp}" if config.etp > 1 else ""
    name += f"_CP_{config.cp}" if config.cp > 1 else ""
    return f"{name}_MBS_{config.mbsz}"


@dataclass(frozen=True)
class Sweep:
    """A requested sweep: its settings and its folder."""

    settings: SweepSettings
    given: dict[str, Any]  # settings of the runs that are not defaults
    folder: Path  # see the top of this file
    device: str  # device that cases are expected to run on; empty if unknown

    @classmethod
    def of(cls, flags: Mapping[str, Any], environ: Mapping[str, str]) -> Sweep:
        """Reads all settings, writing nothing to disk; raises one ConfigError for all invalid values.
        `flags` maps names of settings (of the sweep or its runs) to values; None means not given.
        """
        flags = with_file(flags, environ)
        fields = SweepSettings.model_fields
        mine = {name: value for name, value in flags.items() if name in fields and value is not None}
        others = {name: value for name, value in flags.items() if name not in fields}
        problems: list[str] = []
        settings = nodes = None
        try:
            settings = load_sweep_settings(mine, environ)
            if settings.executor == "slurm":
                nodes = Nodes(next(iter(settings.gpus), None))
                nodes = load_hardware(settings.gpu).nodes if settings.gpu else nodes
        except ConfigError as error:
            problems += error.problems
        # Read both kinds of settings before raising, to report all errors at once.
        try:
            given = given_settings(others, environ, nodes)
        except ConfigError as error:
            problems += error.problems
        if settings is None or problems:
            raise ConfigError(problems)
        base = load_config(given, {})
        if not any(getattr(settings, name) for name in AXES):
            # Default lists: powers of two that divide the ranks of a node, and half the micro-batch size.
            ranks = base.gpus_per_node
            sizes = [str(2**power) for power in range(ranks.bit_length()) if ranks % 2**power == 0]
            few, mbszs = " ".join(sizes[:2]), f"{max(1, base.mbsz // 2)} {base.mbsz}"
            lists = {"tps": few, "pps": few, "eps": " ".join(sizes), "mbszs": mbszs}
            lists = {name: text for name, text in lists.items() if AXES[name] not in given}
            settings = load_sweep_settings(lists | mine, environ)
        kind = f"experts_{base.num_experts}" if base.use_moe else "dense"
        model = f"{base.preset}_layers_{base.num_layers}_hidden_{base.hidden_size}_{kind}_GBS_{base.gbsz}"
        folder = Path(settings.sweep_dir).expanduser() / (settings.sweep_name or model)
        # With SLURM, this may be a login node with other devices.
        device = "" if settings.executor == "slurm" else device_name()
        if settings.gpu and load_hardware(settings.gpu).is_cpu:
            device = CPU
        return cls(settings, given, folder, device)

    @property
    def title(self) -> str:
        first, last = self.settings.sweep_warmup + 1, self.settings.sweep_iters
        return f"{self.folder.name}: median of iterations {first} to {last}"

    def result(self, case: str) -> Path:
        return self.folder / "results" / f"{case}.json"

    def shared_settings(self) -> dict[str, Any]:
        """Returns the settings that all results in the folder share."""
        settings = load_config(self.given, {}).model_dump(exclude=_OWN_OF_CASE)
        return settings | self.settings.model_dump(include={"sweep_iters", "sweep_warmup"})

    def cases(self) -> list[Case]:
        """Returns the cases for all combinations of values; raises ConfigError for problems shared by all."""
        base = load_config(self.given, {})
        lists = [getattr(self.settings, name) or (getattr(base, setting),) for name, setting in AXES.items()]
        shared = {**self.given, **MEASURED_ONLY, "train_iters": self.settings.sweep_iters}
        cases: dict[str, Case] = {}
        for values in itertools.product(*lists):
            layout = dict(zip(AXES.values(), ("none" if one is None else one for one in values), strict=True))
            if not base.use_moe:
                layout |= {"ep": 1, "etp": 1}  # a dense model has one case for all values in EPS and ETPS
            name = case_name(load_config(shared | layout, {}))
            flags = shared | layout | {"run_dir": str(self.folder / "runs"), "run_name": name}
            # setdefault, since several combinations may be the same case
            cases.setdefault(name, case_of(flags, self.folder, local=self.settings.executor == "local"))
        first, *others = cases.values()
        raise_for(line for line in first.problems if all(line in case.problems for case in others))
        return [first, *others]

    def rows(self, *, retry_failed: bool = False) -> list[Row]:
        """Returns the rows of this sweep's `cases`, then the rows of other cases with results in the folder.

        With `retry_failed`, cases of this sweep that failed, ran out of memory or timed out count as not run.
        """
        cases = self.cases()
        names = {case.name for case in cases}
        found = [self.row(case, retry_failed=retry_failed) for case in cases]
        for path in sorted((self.folder / "results").glob("*.json")):
            if path.stem not in names:
                found.append(self.row(case_of(Result.read(path).flags, self.folder, local=False)))
        return found

    def row(self, case: Case, *, retry_failed: bool = False) -> Row:
        path = self.result(case.name)
        result = Result.read(path) if path.exists() else Result("left")
        if retry_failed and result.status != "ok":
            result = Result("left")
        device, memory = result.device or self.device, result.memory_bytes
        gpu, status, reason = self.settings.gpu or profile_of(device), str(result.status), result.reason
        prediction = None
        if gpu and not case.problems:
            prediction = predict(table.job_of(case.config, device), load_hardware(gpu))
        if status == "left" and case.problems:
            status, reason = "rejected", " ".join(case.problems)
        elif status == "left" and not self.settings.run_oom:
            reason = table.is_oom(case.config, device, gpu)
            status = "predicted-oom" if reason else "left"
        return Row(
            case, status, reason, device, gpu, result.seconds,
            memory_gib=memory / GIBIBYTE if memory else None,
            predicted_seconds=prediction.time.total if prediction else None,
            predicted_gib=prediction.peak_bytes / GIBIBYTE if prediction else None,
        )  # fmt: skip


def dry_run_text(sweep: Sweep, *, retry_failed: bool = False) -> str:
    """Describes a sweep, one line per case, without running it; raises ConfigError as `run_sweep` does."""
    _compare(sweep)
    rows = sweep.rows(retry_failed=retry_failed)
    _check_files(rows, with_space=False)
    return "\n".join(_plan_lines(sweep, rows, rows))


def _check_files(rows: Sequence[Row], *, with_space: bool = True) -> list[Case]:
    """Returns the cases left to run; raises ConfigError if their shared data or folders are invalid."""
    left = [row.case for row in rows if row.status == "left"]
    # Uses a run folder that does not exist, since the case's own may still be locked by a killed sweep.
    if left:
        config = left[0].config.model_copy(update={"run_name": "none"})
        raise_for(check_files(config, with_space=with_space))
    return left


def _plan_lines(sweep: Sweep, rows: Sequence[Row], shown: Sequence[Row]) -> list[str]:
    """Returns a line about the whole sweep, and a line for each case in `shown`."""
    settings, num, counts = sweep.settings, len(rows), Counter(row.status for row in rows)
    said = ", ".join(f"{number} {status}" for status, number in counts.items()).replace(" left", " to run")
    head = (
        f"{sweep.folder}: {num} case{'s' if num > 1 else ''} of {settings.sweep_iters} iterations,"
        f" including {settings.sweep_warmup} warm-up: {said}; {main_settings(rows[0].case.config)}"
    )
    width = max((len(row.case.name) for row in shown), default=0)
    cases = [f"  {row.status:<14} {row.case.name:<{width}}  {_about(row)}".rstrip() for row in shown]
    return [head, *cases]


def _about(row: Row) -> str:
    """Returns the measured and predicted values of a row, or the reason why it was not measured."""
    if row.status not in ("ok", "left"):
        return row.short_reason
    parts = []
    for value, predicted, unit in (
        (row.seconds, row.predicted_seconds, "s per iteration"),
        (row.memory_gib, row.predicted_gib, "GiB"),
    ):
        expected = "" if predicted is None else f"predicted {predicted:.3g}"
        if value is not None:
            parts.append(f"{value:.3g} {unit}" + (expected and f" ({expected})"))
        elif expected:
            parts.append(f"{expected} {unit}")
    return ", ".join(parts)


def run_sweep(sweep: Sweep, *, retry_failed: bool = False) -> int:
    """Runs the remaining cases and writes the tables. Returns exit code 0 if any case was measured, else 1.
    `retry_failed`: rerun cases that previously failed, ran out of memory or timed out.

    Raises:
        ConfigError: if no case can run with the given data or folders, or sweep.json has other settings.
        ValueError: if another sweep is using the folder.
    """
    rows = sweep.rows(retry_failed=retry_failed)
    cases = [row.case for row in rows]
    left = _check_files(rows)
    with at_work(sweep.folder, f"SWEEP_NAME={sweep.folder.name}", "sweep", executor=sweep.settings.executor):
        _compare(sweep)
        write_json(sweep.folder / "sweep.json", sweep.shared_settings())
        # With retry_failed, old results would otherwise remain in the tables until the case has run.
        for case in left:
            sweep.result(case.name).unlink(missing_ok=True)
        valid = [row for row in rows if row.status != "rejected"]
        broken = {rule: len(some) for rule, some in by_rule(rows).items()}
        rejected = [f"  rejected: {num} case{'s' if num > 1 else ''}, {rule}" for rule, num in broken.items()]
        print(*_plan_lines(sweep, rows, valid), *rejected, sep="\n", flush=True)
        write_tables(sweep, cases)
        if left:
            _run(sweep, left, cases)
    rows = [row for row in map(sweep.row, cases) if row.status != "rejected"]
    print(f"\n{to_markdown(rows, sweep.title)}\n{sweep.folder}/sweep.csv, sweep.md, sweep.png", flush=True)
    return 0 if any(row.status == "ok" for row in rows) else 1


def _run(sweep: Sweep, left: Sequence[Case], cases: Sequence[Case]) -> None:
    settings, timeout = sweep.settings, sweep.settings.case_timeout
    is_local = settings.executor == "local"
    if is_local and not left[0].config.train_data:  # otherwise the first case would create it
        ensure_embedded_corpus(Path(left[0].config.data_dir))
    with progress("sweep", len(left), unit="cases") as advance:
        if is_local:
            ended = _local_cases(left, timeout, advance)
        else:
            on_gpus, sbatch = sweep.device != CPU, shlex.split(settings.sbatch)
            options = child_runs.JobOptions(sbatch, timeout, on_gpus, is_cleared=True)
            ended = child_runs.run_jobs({case.name: case for case in left}, sweep.folder / "jobs", options)
            advance(0, "SLURM jobs")
        for number, (case, code) in enumerate(ended, start=1):
            counts = {"num_warmup": settings.sweep_warmup, "num_iterations": settings.sweep_iters}
            result = result_of(case, code, timeout=timeout if is_local else 0, **counts)
            result.write(sweep.result(case.name))
            write_tables(sweep, cases)
            about = _about(sweep.row(case))
            print(f"[{number}/{len(left)}] {case.name}: {result.status}, {about}", flush=True)
            advance(1)


def _local_cases(cases: Sequence[Case], timeout: int, advance: Advance) -> Iterator[tuple[Case, int | None]]:
    """Runs the cases; yields each case with its launcher's exit code, or with None after a timeout."""
    # Without the sweep's lists, which would look like misspelled run settings.
    environ = child_runs.run_environment(also_without=SweepSettings.model_fields)
    for case in cases:
        advance(0, case.name)
        child_runs.clear(case)
        yield case, child_runs.run_to_end(case.flags, case.log, timeout=timeout, environ=environ)


def write_tables(sweep: Sweep, cases: Sequence[Case]) -> None:
    rows = [sweep.row(case) for case in cases]
    write_atomically(sweep.folder / "sweep.csv", table.to_csv(rows, sweep.folder.name))
    write_atomically(sweep.folder / "sweep.md", to_markdown(rows, sweep.title))
    partial_picture = sweep.folder / ".sweep.png.partial"
    if table.draw_sweep(rows, partial_picture, sweep.title):
        partial_picture.replace(sweep.folder / "sweep.png")


def _compare(sweep: Sweep) -> None:
    """Raises ConfigError with a line for each setting that differs from the folder's results."""
    path = sweep.folder / "sweep.json"
    if not path.exists():
        return
    before, now = read_json(path, fix="delete it, or use another SWEEP_NAME"), sweep.shared_settings()
    changed = [name for name in now if name in before and before[name] != now[name]]
    changed = ["preset"] if "preset" in changed else changed  # the others follow from it
    fix = "restore {}, or use another SWEEP_NAME"
    raise_for(
        problem(name, now[name], f"{sweep.folder} has {before[name]}", fix.format(name.upper()))
        for name in changed
    )
