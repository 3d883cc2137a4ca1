"""Predicts memory and time of a job on a device, and whether it fits. Entry point for commands. No torch."""

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
    """All fitted constants, and how far they are to be trusted."""

    memory: MemoryConstants  # of the memory formulas
    time: TimeConstants  # of the time formulas
    memory_error: float  # relative error that nine of ten runs stay within which were left out of the fit
    time_error: float  # the same of the time
    hardware: tuple[str, ...]  # devices that the fit had runs of
    # errors of published runs by kind (`kind_of`), each with constants of other clusters; empty: unknown
    published: Mapping[str, PublishedError] = field(default_factory=dict)


@dataclass(frozen=True)
class PublishedError:
    """Errors of the time of published runs of one kind."""

    kind: str  # see `kind_of`
    rows: int  # number of runs
    mean_error: float  # relative


@dataclass(frozen=True)
class Prediction:
    """Memory and time of a job."""

    stages: list[StageMemory]  # memory of a rank of every pipeline stage
    time: IterationTime  # seconds of an iteration
    memory_bytes: float  # of the device
    memory_error: float  # relative error to expect of the memory, see `Constants`
    time_error: float  # the same of the time
    # whether the constants were fitted to runs on this device: the errors say nothing about another one
    is_calibrated: bool
    published: PublishedError | None = None  # of runs of this kind, where the device is like those of theirs

    @property
    def peak_stage(self) -> int:
        """The pipeline stage whose ranks need most."""
        return max(range(len(self.stages)), key=lambda stage: self.stages[stage].total)

    @property
    def peak_bytes(self) -> float:
        return self.stages[self.peak_stage].total

    @property
    def needed_bytes(self) -> float:
        """Bytes that the fullest rank needs without what its allocator only caches."""
        return max(stage.needed for stage in self.stages)

    @property
    def margin_bytes(self) -> float:
        """Rest of the device's memory; below 0: out of memory."""
        return self.memory_bytes - self.needed_bytes

    @property
    def oom(self) -> bool:
        return self.margin_bytes < 0

    @property
    def is_close(self) -> bool:
        """Whether the margin, or what is lacking, is smaller than the error to expect."""
        return abs(self.margin_bytes) < self.memory_error * self.peak_bytes


@cache
def load_constants(path: Path = CONSTANTS) -> Constants:
    """The package's constants, or those of `moe-exp plan calibrate`; a ValueError if it is neither."""
    try:
        content = read_json(path)
        return Constants(
            memory=_filled(MemoryConstants, content["constants"]["memory"]),
            time=_filled(TimeConstants, content["constants"]["time"]),
            # not a number where it had no rows
            memory_error=float(content["fit"]["memory"]["left_out_90_percent_within"]),
            time_error=float(content["fit"]["time"]["left_out_90_percent_within"]),
            hardware=tuple(content["hardware"]),
            published={
                kind: PublishedError(kind, int(of["rows"]), float(of["mean_error"]))
                for kind, of in content["fit"].get("published", {}).items()
            },
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        rule = "is no profile that `moe-exp plan calibrate` wrote"
        raise ValueError(f"PROFILE={path}: {rule}. Fix: write it anew.") from None


def _filled(kind: type[Any], values: dict[str, float]) -> Any:
    # a profile of an older version lacks constants that came later
    numbers = {of.name: float(values.get(of.name, of.metadata["prior"])) for of in fields(kind)}
    if not values.keys() & numbers.keys():
        raise ValueError("no constant has a value")
    if not all(0 < number < float("inf") for number in numbers.values()):
        raise ValueError("a constant is not more than 0")
    return kind(**numbers)


def kind_of(job: PlannedJob, hardware: Hardware) -> str:
    """Kind of a run, by which published errors are given: `MoE within NVLink, FP8`."""
    config = job.config
    in_domain = config.ep * config.etp <= hardware.link_domain(config.gpus_per_node)
    model = ("MoE within NVLink" if in_domain else "MoE across nodes") if config.use_moe else "dense"
    narrow = "NVFP4" if job.engine.is_nvfp4 else "FP8"
    return f"{model}, {narrow if config.fp8 != 'none' else 'bf16'}"


def at_stage(config: Config, seq_len: int) -> Config:
    """The settings in a stage of DATA_STAGES with longer samples, whose batches have as many tokens."""
    factor = seq_len // config.seq_len
    if factor <= 1:
        return config
    mbsz = config.microbatch_samples(seq_len) // factor
    return config.model_copy(update={"seq_len": seq_len, "mbsz": mbsz, "gbsz": config.gbsz // factor})


def predict(job: PlannedJob, hardware: Hardware, constants: Constants | None = None) -> Prediction:
    """Memory and time of a job; with the constants that came with the package if none are given. The memory
    is that of the stage of DATA_STAGES that needs most, the time that of SEQ_LEN.
    """
    constants = constants or load_constants()
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
