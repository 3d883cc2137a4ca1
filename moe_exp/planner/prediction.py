"""What a job costs on a device: memory with the verdict, and time. The one entry to the planner for commands. No torch."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from moe_exp.planner.hardware import PROFILES, Hardware
from moe_exp.planner.job import Job
from moe_exp.planner.memory import MemoryConstants, StageMemory, memory_of
from moe_exp.planner.timing import IterationTime, TimeConstants, time_of

CONSTANTS = PROFILES / "constants.json"


@dataclass(frozen=True)
class Constants:
    """All fitted constants."""

    memory: MemoryConstants
    time: TimeConstants


@dataclass(frozen=True)
class Prediction:
    """What a job costs.

    Attributes:
        stages: memory of a rank of every pipeline stage.
        time: seconds of an iteration.
        memory_bytes: of the device.
    """

    stages: list[StageMemory]
    time: IterationTime
    memory_bytes: float

    @property
    def peak_stage(self) -> int:
        """The pipeline stage whose ranks need most."""
        return max(range(len(self.stages)), key=lambda stage: self.stages[stage].total)

    @property
    def peak_bytes(self) -> float:
        """What they need."""
        return self.stages[self.peak_stage].total

    @property
    def margin_bytes(self) -> float:
        """What is left of the device's memory; less than 0: out of memory."""
        return self.memory_bytes - self.peak_bytes

    @property
    def oom(self) -> bool:
        """Whether the job runs out of memory."""
        return self.margin_bytes < 0


@cache
def load_constants(path: Path = CONSTANTS) -> Constants:
    """The constants that came with the package, or those that `moe-exp plan calibrate` wrote.

    Raises:
        ValueError: the file has not the form that calibrate writes.
    """
    try:
        content = json.loads(path.read_text())
        parts = {name: content["constants"][name] for name in ("memory", "time")}
    except (json.JSONDecodeError, KeyError, TypeError):
        raise ValueError(f"PROFILE={path}: is no profile that `moe-exp plan calibrate` wrote. Fix: write it anew.") from None
    return Constants(_filled(MemoryConstants, parts["memory"]), _filled(TimeConstants, parts["time"]))


def _filled(kind: type[Any], values: dict[str, float]) -> Any:
    return kind(**{field.name: values[field.name] for field in fields(kind) if field.name in values})


def predict(job: Job, hardware: Hardware, constants: Constants | None = None) -> Prediction:
    """Memory and time of a job; with the constants that came with the package where none are given."""
    constants = constants or load_constants()
    return Prediction(
        stages=memory_of(job, hardware, constants.memory),
        time=time_of(job, hardware, constants.time),
        memory_bytes=hardware.memory_bytes,
    )
