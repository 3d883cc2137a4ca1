"""The free constants of the planner, each with its expected value before anything was measured. No torch.

Memory and time have a dataclass of them each. `calibration.py` fits them; the fitted values of the package
are in `profiles/constants.json`, from `profiles/measured_runs.csv`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


def constant(prior: float, spread: float, meaning: str) -> Any:
    """A field of a dataclass of constants.

    Args:
        prior: the value expected, more than 0.
        spread: standard deviation of its logarithm: 0.1 for one that is known within about 10%.
        meaning: what it is, with its unit.
    """
    return field(default=prior, metadata={"prior": prior, "spread": spread, "meaning": meaning})


@dataclass(frozen=True)
class TimeConstants:
    """Constants that no formula gives; fitted to measured runs by `calibration.py`."""

    matrix_efficiency: float = constant(
        0.85, 0.2, "share of the peak that a long product with full waves reaches"
    )
    half_depth: float = constant(400.0, 0.7, "inner dimension at which a product reaches half of that")
    memory_efficiency: float = constant(0.8, 0.3, "bandwidth of elementwise operations, by the memory's")
    unaligned: float = constant(6.0, 0.5, "times that a product with rows of no multiple of 16 bytes takes")
    unaligned_v100: float = constant(2.0, 0.4, "the same on V100")
    v100_share: float = constant(0.75, 0.2, "matrix_efficiency of a V100, as a share of that of others")
    layer_seconds: float = constant(
        5e-4, 0.7, "seconds of a layer's pass beside products and traffic: kernel starts"
    )
    iteration_seconds: float = constant(
        5e-3, 1.0, "seconds of an iteration on the host: data, logs, optimizer loop"
    )
    tensor_bandwidth: float = constant(0.4, 0.4, "share of the bandwidth that tensor parallel ranks reach")
    stage_bandwidth: float = constant(
        1.5, 0.7, "the same between pipeline stages, which also overlap in part"
    )
    data_bandwidth: float = constant(0.5, 0.6, "the same between data parallel ranks")
    exchange_seconds_2024: float = constant(
        1e-3, 0.7, "seconds per peer of a token exchange by software of 2024-10"
    )
    software_a: float = constant(
        1.02, 0.05, "time of the software up to 2022-02-24, in that of a few days later"
    )
    software_c: float = constant(1.05, 0.05, "the same of June 2022")
