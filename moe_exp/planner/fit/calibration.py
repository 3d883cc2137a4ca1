"""Fits the free constants to measured runs: robust loss, priors, leave-one-out errors. No torch; scipy only
inside functions.

The constants x are logarithms in units of their spread, 0 at their prior. What is minimized is the sum over
runs of soft-L1(ln(predicted / measured) / 2%), which does not let a few odd rows bend the rest, and of x^2
for what was expected before.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Generic, TypeVar

from moe_exp.planner.costs.memory import MemoryConstants, memory_of
from moe_exp.planner.costs.timing import TimeConstants, time_of
from moe_exp.planner.fit.measured import GIBIBYTE, MeasuredRun, data_parallel_size, job_of_row
from moe_exp.planner.hardware import load_hardware
from moe_exp.planner.prediction import Constants, predict

T = TypeVar("T")
LogRatio = Callable[[MeasuredRun, T], float]
_NOISE = 0.02  # relative error of a good row, which priors are weighed against


def log_memory_ratio(run: MeasuredRun, constants: MemoryConstants) -> float:
    """ln(predicted / measured) of the memory of the fullest GPU."""
    assert run.memory_gib
    stages = memory_of(run.job, run.hardware, constants)
    return math.log(max(stage.total for stage in stages) / GIBIBYTE / run.memory_gib)


def log_time_ratio(run: MeasuredRun, constants: TimeConstants) -> float:
    """ln(predicted / measured) of the seconds per iteration."""
    assert run.seconds
    return math.log(time_of(run.job, run.hardware, constants).total / run.seconds)


@dataclass(frozen=True)
class Fit(Generic[T]):
    """Fitted constants of one kind and how near they come.

    Attributes:
        constants: the values.
        errors: row_id to predicted / measured - 1.
        left_out: the same with constants that were fitted without that row.
    """

    constants: T
    errors: dict[str, float]
    left_out: dict[str, float]

    @property
    def bound(self) -> float:
        """The relative error that nine of ten left-out rows stay within; 0 without rows."""
        sizes = sorted(abs(error) for error in self.left_out.values())
        return sizes[math.ceil(0.9 * len(sizes)) - 1] if sizes else 0.0


def fit(kind: type[T], runs: Sequence[MeasuredRun], log_ratio: LogRatio[T], prior: T | None = None) -> Fit[T]:
    """The constants under which predictions are nearest to what was measured.

    Left-out errors take one Gauss-Newton step from the fit to all rows to that without the row: for a fit so
    near to linear that is the fit itself (`tests/planner/fit/test_calibration.py` compares), and costs no
    further evaluation.

    Args:
        kind: dataclass of constants, see `constants.constant`.
        runs: rows that have the measurement.
        log_ratio: ln(predicted / measured) of a row under given constants.
        prior: values to take for the priors, with the spreads of `kind`.
    """
    space = _Space(kind, prior)
    if not runs:
        return Fit(space.constants([0.0] * space.size), {}, {})
    from scipy.optimize import least_squares

    # Robust by hand: least_squares would make the priors robust, too.
    solution = least_squares(
        lambda x: [_robust(log_ratio(run, space.constants(x))) for run in runs] + list(x), [0.0] * space.size
    )
    values = space.constants(solution.x)
    without = _steps_without_each(solution.jac, solution.fun, len(runs))
    return Fit(
        values,
        {run.row_id: math.expm1(log_ratio(run, values)) for run in runs},
        {
            run.row_id: math.expm1(log_ratio(run, space.constants(solution.x + step)))
            for run, step in zip(runs, without, strict=True)
        },
    )


class _Space(Generic[T]):
    """Constants as points: logarithms, in units of their spread from their prior."""

    def __init__(self, kind: type[T], prior: T | None):
        self._kind = kind
        self._scales = {
            field.name: (
                math.log(getattr(prior, field.name) if prior else field.metadata["prior"]),
                field.metadata["spread"],
            )
            for field in fields(kind)  # type: ignore[arg-type]
        }
        self.size = len(self._scales)

    def constants(self, x: Iterable[float]) -> T:
        pairs = zip(self._scales.items(), x, strict=True)
        return self._kind(
            **{name: math.exp(center + spread * value) for (name, (center, spread)), value in pairs}
        )


def _robust(log_ratio: float) -> float:
    """A residual whose square is the soft-L1 loss, 2 * (sqrt(1 + e^2) - 1)."""
    error = log_ratio / _NOISE
    return math.copysign(math.sqrt(2 * (math.sqrt(1 + error * error) - 1)), error)


def _steps_without_each(jacobian: Any, residuals: Any, num_runs: int) -> list[Any]:
    """For each run the Gauss-Newton step from the fit to all runs towards that without it."""
    from numpy import outer
    from numpy.linalg import solve

    normal, gradient = jacobian.T @ jacobian, jacobian.T @ residuals
    rows = zip(jacobian[:num_runs], residuals[:num_runs], strict=True)
    return [solve(normal - outer(row, row), residual * row - gradient) for row, residual in rows]


@dataclass(frozen=True)
class Calibration:
    """Both fits, and the devices that their rows ran on."""

    memory: Fit[MemoryConstants]
    time: Fit[TimeConstants]
    hardware: tuple[str, ...]

    @property
    def constants(self) -> Constants:
        """What predictions are made with."""
        return Constants(
            self.memory.constants, self.time.constants, self.memory.bound, self.time.bound, self.hardware
        )


def calibrate(runs: Sequence[MeasuredRun], prior: Constants | None = None) -> Calibration:
    """Fits all constants to the rows that have measurements which can be trusted.

    Args:
        runs: see `measured.read_runs`.
        prior: constants to start from, for instance those of the package where there are few rows of a new
            device.

    Raises:
        ValueError: there is nothing to fit to.
    """
    with_memory, with_time = [run for run in runs if run.memory_gib], [run for run in runs if run.seconds]
    if not with_memory and not with_time:
        raise ValueError(
            "RUNS: no row has a measured mem_gb or sec_per_it that can be trusted. Fix: fill one of these"
            " columns in."
        )
    return Calibration(
        memory=fit(MemoryConstants, with_memory, log_memory_ratio, prior.memory if prior else None),
        time=fit(TimeConstants, with_time, log_time_ratio, prior.time if prior else None),
        hardware=tuple(sorted({run.hardware.name for run in with_time})),
    )


_FAR, _POOR = 3.0, 0.15


def doubts(calibration: Calibration) -> Iterator[str]:
    """What speaks against a fit: errors that are large, and constants further from what was expected than
    three times their spread.
    """
    for name, part in (("memory", calibration.memory), ("time", calibration.time)):
        errors = [abs(error) for error in part.errors.values()]
        if errors and (mean := sum(errors) / len(errors)) > _POOR:
            yield (
                f"{name}: predictions are {mean:.0%} off on average; look at the columns of the rows that are"
                " furthest off"
            )
        for field in fields(part.constants):
            value, prior = getattr(part.constants, field.name), field.metadata["prior"]
            if abs(math.log(value / prior)) > _FAR * field.metadata["spread"]:
                yield (
                    f"{field.name}={value:.3g} is far from the {prior:.3g} expected:"
                    f" {field.metadata['meaning']}"
                )


def profile_text(calibration: Calibration, source: Path) -> str:
    """What `prediction.load_constants` reads."""
    constants = calibration.constants
    summary = {
        name: _summary(part) for name, part in (("memory", calibration.memory), ("time", calibration.time))
    }
    content = {
        "source": source.name,
        "hardware": list(constants.hardware),
        "constants": {name: _rounded(asdict(getattr(constants, name))) for name in ("memory", "time")},
        "fit": summary,
    }
    return json.dumps(content, indent=2) + "\n"


def _rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: float(f"{value:.5g}") for name, value in values.items()}


def _summary(part: Fit[Any]) -> dict[str, float]:
    def mean(errors: dict[str, float]) -> float:
        return round(sum(map(abs, errors.values())) / max(1, len(errors)), 5)

    return {
        "rows": len(part.errors),
        "mean_error": mean(part.errors),
        "max_error": round(max(map(abs, part.errors.values()), default=0.0), 5),
        "left_out_mean_error": mean(part.left_out),
        "left_out_90_percent_within": round(part.bound, 5),
    }


# Predictions for the rows of a CSV of runs, as a CSV of `row_id,mem_gb,sec_per_it,oom`.


COLUMNS = ("row_id", "mem_gb", "sec_per_it", "oom")


def predicted_csv(rows: Sequence[Mapping[str, str]], constants: Constants) -> str:
    """A line for every row, in their order. Without a batch size there is no time; without a number of GPUs
    they are TP*PP.

    Args:
        rows: of `measured.read_rows`; columns of results may be absent or empty.
        constants: of the predictions.
    """
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(_predicted(row, constants) for row in rows)
    return text.getvalue()


def _predicted(row: Mapping[str, str], constants: Constants) -> dict[str, str]:
    prediction = predict(job_of_row(row), load_hardware(row["gpu"]), constants)
    return {
        "row_id": row["row_id"],
        "mem_gb": f"{prediction.peak_bytes / GIBIBYTE:.6g}",
        "sec_per_it": f"{prediction.time.total:.6g}" if row.get("gbs") and data_parallel_size(row) else "",
        "oom": str(int(prediction.oom)),
    }
