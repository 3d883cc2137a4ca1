"""Fits the free constants to measured runs: robust loss, priors, leave-one-out errors. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, TypeVar

from moe_exp.planner.measured import MeasuredRun

T = TypeVar("T")
_NOISE = 0.02  # relative error that a good row has: what a prior is weighed against


def fit(kind: type[T], runs: Sequence[MeasuredRun], log_ratio: Callable[[MeasuredRun, T], float]) -> T:
    """The constants under which predictions are nearest to what was measured.

    Minimizes the sum of soft-L1 of ln(predicted / measured) / 2%, so that a few odd rows do not bend the rest, and of the squared
    distances of the constants from their priors, in logarithms and units of their spread.

    Args:
        kind: dataclass of constants, see `constants.constant`.
        runs: rows that have the measurement.
        log_ratio: ln(predicted / measured) of a row under given constants.
    """
    from scipy.optimize import least_squares

    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    priors = [(math.log(field.metadata["prior"]), field.metadata["spread"]) for field in fields(kind)]  # type: ignore[arg-type]

    def constants(x: Any) -> T:
        return kind(**{name: math.exp(value * spread + prior) for name, value, (prior, spread) in zip(names, x, priors, strict=True)})

    def residuals(x: Any) -> list[float]:
        values = constants(x)
        # Robust by hand: least_squares would make the priors robust, too.
        errors = [log_ratio(run, values) / _NOISE for run in runs]
        return [math.copysign(math.sqrt(2 * (math.sqrt(1 + e * e) - 1)), e) for e in errors] + list(x)

    return constants(least_squares(residuals, [0.0] * len(names)).x)
