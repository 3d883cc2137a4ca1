"""Seconds of an iteration: products, collectives, pipeline bubble, optimizer. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from moe_exp.planner.constants import constant
from moe_exp.planner.hardware import Hardware
from moe_exp.planner.job import Job


@dataclass(frozen=True)
class TimeConstants:
    """What no formula gives; fitted to measured runs by `calibration.py`."""

    matrix_efficiency: float = constant(0.6, 0.3, "share of the peak that a large product reaches")


@dataclass(frozen=True)
class IterationTime:
    """Seconds of one iteration on the slowest rank, by where they go; they add up to `total`.

    Attributes:
        compute: products and what is bound by memory, forward, recompute and backward.
        tensor_parallel: collectives of tensor parallel ranks.
        expert_parallel: token dispatch and combine.
        pipeline: messages between stages that nothing hides.
        bubble: waiting for the first and last micro-batches, and for slower stages.
        data_parallel: gradient reduce and parameter gather that nothing hides.
        optimizer: the step itself.
    """

    compute: float
    tensor_parallel: float
    expert_parallel: float
    pipeline: float
    bubble: float
    data_parallel: float
    optimizer: float

    @property
    def total(self) -> float:
        """Seconds per iteration."""
        return (
            self.compute + self.tensor_parallel + self.expert_parallel + self.pipeline + self.bubble + self.data_parallel + self.optimizer
        )


def time_of(job: Job, hardware: Hardware, constants: TimeConstants) -> IterationTime:
    """Time of an iteration at the full global batch."""
    raise NotImplementedError
