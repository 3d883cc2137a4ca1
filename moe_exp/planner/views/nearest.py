"""Published runs that are most like a job: measured beside planned. No torch."""

import csv
import math
from collections.abc import Mapping
from dataclasses import dataclass

from moe_exp.config import Config
from moe_exp.planner.costs.job import Job
from moe_exp.planner.costs.timing import time_of
from moe_exp.planner.fit.measured import PUBLIC_RUNS, job_of_row
from moe_exp.planner.hardware import Hardware, load_hardware
from moe_exp.planner.prediction import Constants

# Settings whose ratio counts, by weight: twice as many experts are as far as half as many.
_RATIOS = {
    "hidden_size": 2.0, "num_layers": 1.0, "num_experts": 1.0, "topk": 1.0, "expert_ffn_size": 1.0, "tp": 0.7,
    "pp": 0.5, "ep": 0.7, "cp": 0.7, "mbsz": 0.5, "seq_len": 0.5, "world_size": 0.2,
}  # fmt: skip


@dataclass(frozen=True)
class Neighbor:
    """A published run."""

    row: Mapping[str, str]  # of profiles/public_runs.csv
    job: Job
    hardware: Hardware
    distance: float  # from the job: sum of weighted logarithms of ratios, and of what differs in kind
    seconds: float  # per iteration, measured
    planned_seconds: float

    @property
    def dispatcher(self) -> str:
        """Its token dispatcher; empty: dense."""
        return self.row["dispatcher"] or ("alltoall" if self.job.config.use_moe else "")

    @property
    def source(self) -> str:
        """Repository and path."""
        return f"{self.row['repo']} {self.row['path']}"


def nearest_runs(config: Config, hardware: Hardware, constants: Constants, count: int) -> list[Neighbor]:
    """The `count` published runs nearest to these settings on this device, the nearest first.

    Of a run that was published several times the newest one is taken.
    """
    found: dict[tuple[object, ...], Neighbor] = {}
    rows = csv.DictReader(PUBLIC_RUNS.read_text(encoding="utf-8").splitlines())
    for row in sorted(rows, key=lambda row: row["date"]):
        job, device = job_of_row(row), load_hardware(row["gpu"])
        planned = time_of(job, device, constants.time).total
        distance = _distance(config, hardware, job, device)
        one = Neighbor(row, job, device, distance, float(row["sec_per_it"]), planned)
        others = (job.config.gbsz, job.config.vpp, job.config.etp, job.config.recompute)
        what = (row["model"], device.name, row["precision"], one.dispatcher, job.engine)
        key = (*what, *others, *_sizes(job.config))
        found[key] = one
    return sorted(found.values(), key=lambda one: one.distance)[:count]


def _sizes(config: Config) -> tuple[float, ...]:
    return tuple(getattr(config, name) for name in _RATIOS)


def _distance(config: Config, hardware: Hardware, other: Job, device: Hardware) -> float:
    total = 0.0
    for (name, weight), mine in zip(_RATIOS.items(), _sizes(config), strict=True):
        theirs = getattr(other.config, name)
        if mine and theirs:
            total += weight * abs(math.log2(mine / theirs))
    total += 10.0 * (config.use_moe != other.config.use_moe)
    total += 3.0 * (hardware.architecture != device.architecture)
    return total + (hardware.name != device.name) + (config.fp8 != other.config.fp8)
