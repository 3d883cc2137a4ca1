"""Bytes of a job on every rank: weights, gradients, optimizer state, activations, buffers, overhead. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from moe_exp.planner.constants import constant
from moe_exp.planner.hardware import Hardware
from moe_exp.planner.job import Job


@dataclass(frozen=True)
class MemoryConstants:
    """What no formula gives; fitted to measured runs by `calibration.py`."""

    context_bytes: float = constant(3e9, 0.5, "CUDA context, libraries and NCCL buffers, where nvidia-smi measures")


@dataclass(frozen=True)
class StageMemory:
    """Bytes of a rank of one pipeline stage at the peak of an iteration."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float
    overhead: float

    @property
    def static(self) -> float:
        """What is there between iterations, as torch's allocator counts it."""
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> float:
        """All of it."""
        return self.static + self.activations + self.buffers + self.overhead


def memory_of(job: Job, hardware: Hardware, constants: MemoryConstants) -> list[StageMemory]:
    """Memory of a rank of every pipeline stage, from the first to the last."""
    raise NotImplementedError
