"""The free constants of the planner: each with what it is expected to be before anything was measured. No torch.

Memory and time each have a dataclass of them beside their formulas. `calibration.py` fits them; the values that come with the package
are in `profiles/constants.json`, fitted to `profiles/measured_runs.csv`.
"""

from __future__ import annotations

from dataclasses import field
from typing import Any


def constant(prior: float, spread: float, meaning: str) -> Any:
    """A field of a dataclass of constants.

    Args:
        prior: the value expected, more than 0.
        spread: standard deviation of its logarithm: 0.1 for one that is known within about 10%.
        meaning: what it is, with its unit.
    """
    return field(default=prior, metadata={"prior": prior, "spread": spread, "meaning": meaning})
