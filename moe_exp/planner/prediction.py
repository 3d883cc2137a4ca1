"""Predicts the memory and time of a job on a device, and whether the job fits. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from moe_exp.config import Config
from moe_exp.host.files import read_json
from moe_exp.planner.costs.constants import TimeConstants
from moe_exp.planner.costs.job import PlannedJob
from moe_exp.planner.costs.memory import MemoryConstants, StageMemory, memory_of
from moe_exp.planner.costs.timing import IterationTime, time_of
from moe_exp.planner.hardware import PROFILES, Hardware

CONSTANTS = PROFILES / "constants.json"


@dataclass(frozen=True)
class Constants:
    """All fitted constants, and the expected errors of predictions made with them."""

    memory: MemoryConstants  # of the memory formulas
    time: TimeConstants  # of the time formulas
    memory_error: float  # 90th percentile of the relative errors of runs left out of the fit
    time_error: float  # the same for the time
    hardware: tuple[str, ...]  # devices of the fitted runs
    # errors of published runs by kind (`kind_of`), predicted with constants from other clusters
    published: Mapping[str, PublishedError] = field(default_factory=dict)


@dataclass(frozen=True)
class PublishedError:
    """Mean error of time predictions for published runs of one kind."""

    kind: str  # see `kind_of`
    rows: int  # number of runs
    mean_error: float  # relative


@dataclass(frozen=True)
class Prediction:
    """Memory and time of a job."""

    stages: list[StageMemory]  # memory of a rank in each pipeline stage
    time: IterationTime
    memory_bytes: float  # of the device
    memory_error: float  # expected relative error, see `Constants`
    time_error: float  # the same for the time
    is_calibrated: bool  # whether the fit includes runs on this device; if not, the errors do not apply
    published: PublishedError | None = None  # of runs of this kind on similar devices

    @property
    def peak_stage(self) -> int:
        """Pipeline stage whose ranks need the most memory."""
        return max(range(len(self.stages)), key=lambda stage: self.stages[stage].total)

    @property
    def peak_bytes(self) -> float:
        return self.stages[self.peak_stage].total

    @property
    def needed_bytes(self) -> float:
        """Bytes that the fullest rank needs, excluding its allocator's cache."""
        return max(stage.needed for stage in self.stages)

    @property
    def margin_bytes(self) -> float:
        """Bytes left on the device; negative if the job needs more than the device has."""
        return self.memory_bytes - self.needed_bytes

    @property
    def oom(self) -> bool:
        return self.margin_bytes < 0

    @property
    def is_close(self) -> bool:
        """Whether `margin_bytes`, regardless of its sign, is smaller than the expected error."""
        return abs(self.margin_bytes) < self.memory_error * self.peak_bytes


@cache
def load_constants(path: Path = CONSTANTS) -> Constants:
    """Loads the package's constants, or a profile from `moe-exp plan calibrate`; ValueError if invalid."""
    try:
        content = read_json(path)
        return Constants(
            memory=_filled(MemoryConstants, content["constants"]["memory"]),
            time=_filled(TimeConstants, content["constants"]["time"]),
            # 0 for a fit without rows
            memory_error=float(content["fit"]["memory"]["left_out_90_percent_within"]),
            time_error=float(content["fit"]["time"]["left_out_90_percent_within"]),
            hardware=tuple(content["hardware"]),
            published={
                kind: PublishedError(kind, int(of["rows"]), float(of["mean_error"]))
                for kind, of in content["fit"].get("published", {}).items()
            },
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        rule = "must be a profile written by `moe-exp plan calibrate`"
        raise ValueError(f"PROFILE={path}: {rule}. Fix: run that command again.") from None


def _filled(kind: type[Any], values: dict[str, float]) -> Any:
    # Profiles of older versions lack newer constants.
    numbers = {of.name: float(values.get(of.name, of.metadata["prior"])) for of in fields(kind)}
    if not values.keys() & numbers.keys():
        raise ValueError("constants are missing")
    if not all(0 < number < float("inf") for number in numbers.values()):
        raise ValueError("constants must be finite and above 0")
    return kind(**numbers)


def kind_of(job: PlannedJob, hardware: Hardware) -> str:
    """Returns a job's kind, such as `MoE within NVLink, FP8`. `Constants.published` has kinds as its keys."""
    config = job.config
    in_domain = config.ep * config.etp <= hardware.link_domain(config.gpus_per_node)
    model = ("MoE within NVLink" if in_domain else "MoE across nodes") if config.use_moe else "dense"
    narrow = "NVFP4" if job.engine.is_nvfp4 else "FP8"
    return f"{model}, {narrow if config.fp8 != 'none' else 'bf16'}"


def at_stage(config: Config, seq_len: int) -> Config:
    """Returns the settings for a data stage with longer samples; a batch keeps its number of tokens."""
    factor = seq_len // config.seq_len
    if factor <= 1:
        return config
    mbsz = config.microbatch_samples(seq_len) // factor
    return config.model_copy(update={"seq_len": seq_len, "mbsz": mbsz, "gbsz": config.gbsz // factor})


def predict(job: PlannedJob, hardware: Hardware, constants: Constants | None = None) -> Prediction:
    """Predicts memory and time of a job, by default with the package's constants. Memory is the maximum over
    DATA_STAGES; the time is for samples of length SEQ_LEN.
    """
    constants = constants or load_constants()
    # Longer samples may need more memory, as a micro-batch has at least one of them.
    longer = {stage.seq_len for stage in job.config.stages} - {job.config.seq_len}
    jobs = [job, *(replace(job, config=at_stage(job.config, seq_len)) for seq_len in longer)]
    memory = [memory_of(one, hardware, constants.memory) for one in jobs]
    return Prediction(
        stages=max(memory, key=lambda stages: max(stage.total for stage in stages)),
        time=time_of(job, hardware, constants.time),
        memory_bytes=hardware.memory_bytes,
        memory_error=constants.memory_error,
        time_error=constants.time_error,
        is_calibrated=hardware.name in constants.hardware,
        published=constants.published.get(kind_of(job, hardware)) if hardware.has_published_runs else None,
    )
