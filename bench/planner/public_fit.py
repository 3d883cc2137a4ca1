"""Reads the published runs of `profiles/public_runs.csv` for a fit. No torch.

`bench_planner.py --public` scores the planner on them, and writes the constants of recent devices.
"""

import csv
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, make_dataclass
from pathlib import Path

from moe_exp.planner.calibration import NOISE_OF_RECENT, Fit, fit, log_time_ratio
from moe_exp.planner.costs.constants import TimeConstants, free
from moe_exp.planner.costs.job import PlannedJob
from moe_exp.planner.hardware import load_hardware
from moe_exp.planner.measured import PUBLIC_RUNS, MeasuredRun, job_of_row
from moe_exp.planner.prediction import kind_of, load_constants

_CLUSTER_FACTOR = 0.1  # spread of the time of a cluster, by that of others
# What a row has to state, to be scored with the others.
_NEEDS, _NEEDS_OF_MOE = {"layout", "recompute"}, {"layout", "recompute", "dispatcher"}


# Words of a source, or on it, that make a figure doubtful: documents of unknown lengths, a slow version of
# cuDNN that the release notes name, two pages that give the same figure for different devices.
_DOUBTFUL = ("packed", "cuDNN regression", "GPU kind disputed")
# columns that say where a row is from and what was measured, not what was run
_NO_SETTINGS = {
    "row_id", "repo", "path", "commit", "software", "date", "cluster", "tokens_per_s_per_gpu",
    "tflops_per_gpu",
    "sec_per_it", "mem_gb", "mem_kind", "sim_sec_per_it", "sim_mem_gb", "stated", "assumed", "notes",
}  # fmt: skip


@dataclass(frozen=True)
class PublicRun(MeasuredRun):
    """A published run."""

    cluster: str = ""  # the source and the kind of device
    model: str = ""
    precision: str = ""  # bf16, fp8_cs, fp8_ds, fp8_sub, fp8_mx or nvfp4
    dispatcher: str = ""  # empty: dense
    # whether layout, recompute and dispatcher are stated, and how tokens are spread over experts
    is_stated: bool = True
    source: str = ""  # repository and path
    date: str = ""  # of the publication, year first
    settings: tuple[str, ...] = ()  # all that the row says of what was run

    @property
    def kind(self) -> str:
        """Kind of run, see `prediction.kind_of`."""
        return kind_of(self.job, self.hardware)


def read_public_runs(path: Path = PUBLIC_RUNS) -> list[PublicRun]:
    """All rows of the table."""
    jobs: dict[str, PlannedJob] = {}  # of equal runs one
    rows = csv.DictReader(path.read_text(encoding="utf-8").splitlines())
    return [_run(row, jobs) for row in rows]


def fit_public(runs: Sequence[PublicRun], *, prior: TimeConstants | None = None) -> Fit[TimeConstants]:
    """Fits the constants of recent devices to those of `runs` that state enough; arguments as of `fit`.

    Without a prior each cluster has a factor of its own on all its times, so that a slow one does not shift
    the constants (a random effect).
    """
    stated = [run for run in runs if run.seconds and run.is_stated]
    factors = {run.row_id: re.sub(r"\W", "_", run.cluster) for run in stated if prior is None}
    own = [(name, float, free(1.0, _CLUSTER_FACTOR, "its times")) for name in sorted({*factors.values()})]
    kind = make_dataclass("WithClusters", own, bases=(TimeConstants,), frozen=True)
    ratio = _SharedRatio()

    def log_ratio(run: MeasuredRun, constants: TimeConstants) -> float:
        factor = math.log(getattr(constants, factors[run.row_id])) if factors else 0.0
        return ratio(run, constants) + factor

    hold = {"unaligned": load_constants().time.unaligned}  # the runs of older devices determine it
    return fit(kind, stated, log_ratio, prior, noise=NOISE_OF_RECENT, hold=hold)


class _SharedRatio:
    """`log_time_ratio` that predicts equal runs once."""

    def __init__(self) -> None:
        self._constants: TimeConstants | None = None
        self._predicted: dict[int, float] = {}

    def __call__(self, run: MeasuredRun, constants: TimeConstants) -> float:
        if constants is not self._constants:
            self._constants, self._predicted = constants, {}
        key = id(run.job)
        if key not in self._predicted:
            self._predicted[key] = log_time_ratio(run, constants) + math.log(run.seconds or 1.0)
        return self._predicted[key] - math.log(run.seconds or 1.0)


def _run(row: Mapping[str, str], jobs: dict[str, PlannedJob]) -> PublicRun:
    def number(name: str) -> float | None:
        return float(row[name]) if row[name] else None

    job = job_of_row(row)
    return PublicRun(
        row_id=row["row_id"],
        section=row["cluster"],
        job=jobs.setdefault(f"{row['gpu']} {job}", job),
        hardware=load_hardware(row["gpu"]),
        memory_gib=number("mem_gb"),
        seconds=number("sec_per_it"),
        oom=None,
        cluster=f"{row['repo'].split()[0].split('/')[-1]} {row['gpu']}",
        model=row["model"],
        precision=row["precision"],
        dispatcher=row["dispatcher"] or ("alltoall" if int(row["experts"] or 0) > 1 else ""),
        is_stated=_is_stated(row),
        source=f"{row['repo']} {row['path']}",
        date=row["date"],
        settings=tuple(text for name, text in row.items() if name not in _NO_SETTINGS),
    )


def _is_stated(row: Mapping[str, str]) -> bool:
    stated = set(row["stated"].split(";"))
    if "seq: not stated" in row["assumed"] or any(words in row["notes"] for words in _DOUBTFUL):
        return False
    if int(row["experts"] or 0) < 2:
        return stated >= _NEEDS
    return stated >= _NEEDS_OF_MOE and row["balance"] == "forced"
