"""Reads the published runs of `profiles/public_runs.csv`. No torch.

Their columns are those of `measured.py` and some that say what the program of a run did (`Engine`).
`bench/planner/bench_planner.py --public` scores the planner on them.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from moe_exp.planner.costs.job import Engine, Job
from moe_exp.planner.costs.timing import TimeConstants
from moe_exp.planner.fit.calibration import Fit, fit, log_time_ratio
from moe_exp.planner.fit.measured import MeasuredRun, job_of_row
from moe_exp.planner.hardware import PROFILES, load_hardware
from moe_exp.planner.prediction import kind_of

PUBLIC_RUNS = PROFILES / "public_runs.csv"
# FP8 and FP8_RECIPE that cost what a precision of the table does.
_FP8 = {
    "fp8_cs": ("hybrid", "tensorwise"), "fp8_ds": ("hybrid", "tensorwise"), "fp8_sub": ("e4m3", "blockwise"),
    "fp8_mx": ("e4m3", "mxfp8"), "nvfp4": ("e4m3", "mxfp8"),
}  # fmt: skip
# What a row has to state, to be scored with the others.
_NEEDS, _NEEDS_OF_MOE = {"layout", "recompute"}, {"layout", "recompute", "dispatcher"}
_RECOMPUTE = {
    "full": "full",
    "moe": "selective",
    "moe_act": "moe_act",
}  # modules to RECOMPUTE, the most first
# Relative error of a good row: runs that were published several times with the same settings differ by 7.5%.
_NOISE = 0.08
_OF_ENGINE = {"dispatcher", "recompute", "precision", "sharding", "cuda_graph", "offload", "notes"}


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
    simulated_seconds: float | None = None  # that another simulator gives
    simulated_memory_gib: float | None = None

    @property
    def kind(self) -> str:
        """Kind of run, see `prediction.kind_of`."""
        return kind_of(self.job, self.hardware)


def read_public_runs(path: Path = PUBLIC_RUNS) -> list[PublicRun]:
    """All rows of the table."""
    jobs: dict[str, Job] = {}  # of equal runs one
    rows = csv.DictReader(path.read_text(encoding="utf-8").splitlines())
    return [_run(row, jobs) for row in rows]


def fit_public(
    runs: Sequence[PublicRun], *, prior: TimeConstants | None = None, start: TimeConstants | None = None
) -> Fit[TimeConstants]:
    """Fits the constants of recent devices to those of `runs` that state enough; arguments as of `fit`."""
    stated = [run for run in runs if run.seconds and run.is_stated]

    def cluster_of(run: MeasuredRun) -> str:
        assert isinstance(run, PublicRun)
        return run.cluster

    ratio = _SharedRatio()
    return fit(TimeConstants, stated, ratio, prior, start, machine_of=cluster_of, noise=_NOISE)


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


def _run(row: Mapping[str, str], jobs: dict[str, Job]) -> PublicRun:
    def number(name: str) -> float | None:
        return float(row[name]) if row[name] else None

    job = _job(row)
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
        simulated_seconds=number("sim_sec_per_it"),
        simulated_memory_gib=number("sim_mem_gb"),
    )


def _is_stated(row: Mapping[str, str]) -> bool:
    stated = set(row["stated"].split(";"))
    if "packed" in row["notes"]:  # documents of unknown lengths
        return False
    if int(row["experts"] or 0) < 2:
        return stated >= _NEEDS
    return stated >= _NEEDS_OF_MOE and row["balance"] == "forced"


def _job(row: Mapping[str, str]) -> Job:
    fp8, recipe = _FP8.get(row["precision"], ("none", "tensorwise"))
    modules = row["recompute"].split(";")
    recompute = next((_RECOMPUTE[name] for name in _RECOMPUTE if name in modules), "none")
    dispatcher = row["dispatcher"] if row["dispatcher"] != "hybridep" else "deepep"
    mtp, layers = int(row["num_mtp_layers"] or 0), int(row["layers"])
    plain = {name: text for name, text in row.items() if name not in _OF_ENGINE} | {
        "precision": "", "recompute": recompute, "fp8": fp8, "fp8_recipe": recipe, "dispatcher": dispatcher,
        "layers": str(layers + mtp), "impl": "te",
    }  # fmt: skip
    job = job_of_row(plain)
    stages = _stage_layers(row, job, mtp)
    return replace(
        job, stage_layers=stages, engine=_engine(row, frozenset(modules) - {"", "none", *_RECOMPUTE}, mtp)
    )


def _engine(row: Mapping[str, str], recompute: frozenset[str], mtp: int) -> Engine:
    types = dict(part.split("=") for part in row["optimizer_dtypes"].split(";") if part)
    num_bytes = {"fp32": 4.0, "bf16": 2.0}
    gradient = num_bytes[types.get("main_grads", "fp32")]
    moments = num_bytes[types.get("exp_avg", "fp32")] + num_bytes[types.get("exp_avg_sq", "fp32")]
    kind, _, scopes = row["cuda_graph"].partition(":")
    return Engine(
        dispatcher="hybridep" if row["dispatcher"] == "hybridep" else "",
        overlaps_exchange=row["ep_overlap"].startswith("1"),
        overlaps_tensor_parallel=row["tp_overlap"] == "1",
        graphs=frozenset({"all"} if kind in ("full_iteration", "local") else filter(None, scopes.split(";"))),
        recompute=recompute,
        static_rows=row["static_rows"] == "1",
        is_nvfp4=row["precision"] == "nvfp4",
        fp8_attention=row["fp8_attention"] == "1",
        shards_parameters=row["sharding"] == "fsdp",
        gradient_bytes=gradient,
        reduced_bytes=num_bytes[types["grad_reduce"]] if "grad_reduce" in types else gradient,
        gathered_bytes=1.0 if row["fp8_param_gather"] == "1" else 2.0,
        state_bytes=4.0 + moments,
        num_mtp_layers=mtp,
        window=int(row["sliding_window"] or 0),
        balanced=row["balance"] in ("", "forced"),
    )


def _stage_layers(row: Mapping[str, str], job: Job, mtp: int) -> tuple[int, ...]:
    """Layers of every stage by a layout like `Et*3|(tt|)*29m|L`: chunk i is of stage i modulo PP."""
    layout, pp = row["pipeline_layout"], job.config.pp
    if not layout.startswith("E") or " " in layout:
        return tuple(job.stage_layers)
    text = re.sub(r"\(([^)]*)\)\*(\d+)", lambda match: match[1] * int(match[2]), layout)
    text = re.sub(r"(\w)\*(\d+)", lambda match: match[1] * int(match[2]), text)
    stages = [0] * pp
    for chunk, part in enumerate(text.split("|")):
        stages[chunk % pp] += part.count("t") + part.count("m")
    assert sum(stages) == job.config.num_layers, row["row_id"]
    return tuple(stages)
