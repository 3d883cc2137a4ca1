"""Fits the planner's constants to measured runs. Imports no torch; `fit` imports numpy and scipy.

For each constant, the fit optimizes x = ln(constant / prior) / spread (see `constants.free`). It minimizes
sum(x^2) plus the sum of soft-L1(ln(predicted / measured) / 2%) over all runs. The soft-L1 loss is robust to
outliers.
"""

import csv
import io
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Generic, TypeVar

from moe_exp.planner.costs.constants import OWN, TimeConstants
from moe_exp.planner.costs.memory import MemoryConstants, memory_of
from moe_exp.planner.costs.timing import time_of
from moe_exp.planner.hardware import load_hardware
from moe_exp.planner.measured import GIBIBYTE, MeasuredRun, data_parallel_size, job_of_row
from moe_exp.planner.prediction import Constants, predict

T = TypeVar("T")
LogRatio = Callable[[MeasuredRun, T], float]
_NOISE = 0.02  # relative error of a good row; determines the weight of the priors
# For devices newer than Ampere: runs of clusters left out of the fit are predicted within 7%.
NOISE_OF_RECENT = 0.08


def log_memory_ratio(run: MeasuredRun, constants: MemoryConstants) -> float:
    """Returns ln(predicted / measured) for the memory of the fullest GPU."""
    assert run.memory_gib
    stages = memory_of(run.job, run.hardware, constants)
    return math.log(max(stage.total for stage in stages) / GIBIBYTE / run.memory_gib)


def log_time_ratio(run: MeasuredRun, constants: TimeConstants) -> float:
    """Returns ln(predicted / measured) for the seconds per iteration."""
    assert run.seconds
    return math.log(time_of(run.job, run.hardware, constants).total / run.seconds)


@dataclass(frozen=True)
class Fit(Generic[T]):
    """Fitted memory or time constants and their prediction errors."""

    constants: T
    errors: dict[str, float]  # row_id to predicted / measured - 1
    left_out: dict[str, float]  # the same, with constants fitted without that row

    @property
    def bound(self) -> float:
        """90th percentile of the relative leave-one-out errors; 0 if there are no rows."""
        sizes = sorted(abs(error) for error in self.left_out.values())
        return sizes[math.ceil(0.9 * len(sizes)) - 1] if sizes else 0.0

    @property
    def summary(self) -> dict[str, float]:
        """Number of rows and statistics of their absolute errors; all 0 if there are no rows."""
        errors, left_out = (list(map(abs, of.values())) or [0.0] for of in (self.errors, self.left_out))
        return {
            "rows": len(self.errors),
            "mean_error": fmean(errors),
            "max_error": max(errors),
            "left_out_mean_error": fmean(left_out),
            "left_out_90_percent_within": self.bound,
        }


def fit(
    kind: type[T], runs: Sequence[MeasuredRun], log_ratio: LogRatio[T], prior: T | None = None,
    rest: T | None = None, noise: float = _NOISE, hold: Mapping[str, float] | None = None,
) -> Fit[T]:  # fmt: skip
    """Fits the constants of a dataclass (see `constants.free`) to measured runs.

    The leave-one-out error of a row is estimated by one Gauss-Newton step that starts at the fit to all rows.
    Refitting without the row gives a similar error (see `test_calibration.py`).

    `prior` replaces the default priors of `kind` and narrows their spreads. Constants that affect no run are
    taken from `rest` (default: their prior). `hold` maps the names of constants to fixed values. `noise` is
    the relative error of a row that is not an outlier; a smaller value gives the priors less weight.
    """
    # Factors of a single cluster are only fitted for that cluster, which has a prior.
    if prior is None and issubclass(kind, TimeConstants):
        hold = dict.fromkeys(OWN, 1.0) | dict(hold or {})
    space = _Space(kind, prior, runs, log_ratio, rest, hold or {})
    # No runs, or no run depends on a constant, such as the allocator's cache in measurements of `allocated`.
    if not space.scales:
        fixed = space.constants([])
        errors = {run.row_id: math.expm1(log_ratio(run, fixed)) for run in runs}
        return Fit(fixed, errors, errors)
    from numpy import outer
    from numpy.linalg import solve
    from scipy.optimize import least_squares

    # Not least_squares(loss="soft_l1"), which would apply the robust loss to the priors as well.
    def residuals(x: Any) -> list[float]:
        constants = space.constants(x)
        errors = [log_ratio(run, constants) / noise for run in runs]
        # the square of a residual is the soft-L1 loss, 2 * (sqrt(1 + e^2) - 1)
        return [
            math.copysign(math.sqrt(2 * (math.sqrt(1 + error * error) - 1)), error) for error in errors
        ] + list(x)

    solution = least_squares(residuals, [0.0] * len(space.scales), ftol=1e-6)
    values = space.constants(solution.x)
    errors = {run.row_id: math.expm1(log_ratio(run, values)) for run in runs}
    # One Gauss-Newton step per run removes its residual from the normal equations.
    normal, gradient = solution.jac.T @ solution.jac, solution.jac.T @ solution.fun
    left_out = {}
    # not strict: the rows of the priors follow those of the runs
    for run, row, residual in zip(runs, solution.jac, solution.fun, strict=False):
        step = solve(normal - outer(row, row), residual * row - gradient)
        left_out[run.row_id] = math.expm1(log_ratio(run, space.constants(solution.x + step)))
    return Fit(values, errors, left_out)


class _Space(Generic[T]):
    """Maps points x (see the top of this file) to constants."""

    def __init__(
        self, kind: type[T], prior: T | None, runs: Sequence[MeasuredRun], log_ratio: LogRatio[T],
        rest: T | None, hold: Mapping[str, float],
    ):  # fmt: skip
        self._kind, self.scales, self._fixed = kind, dict[str, tuple[float, float]](), dict[str, float]()
        for of in fields(kind):  # type: ignore[arg-type]
            center = getattr(prior, of.name) if prior else of.metadata["prior"]
            # Clusters differ from each other by a fifth of what is unknown before any run.
            spread = of.metadata["spread"] * (0.2 if prior else 1.0)
            self.scales[of.name] = math.log(center), spread
        # Constants that affect no run would make the fit singular; like those in `hold`, they are fixed.
        at_prior = self.constants([0.0] * len(self.scales))
        before = [log_ratio(run, at_prior) for run in runs]
        for name, (center, spread) in list(self.scales.items()):
            moved = replace(at_prior, **{name: math.exp(center + 0.1 * spread)})  # type: ignore[type-var]
            if name in hold or before == [log_ratio(run, moved) for run in runs]:
                self.scales.pop(name)
                self._fixed[name] = hold.get(name, getattr(rest, name) if rest else math.exp(center))

    def constants(self, x: Iterable[float]) -> T:
        pairs = zip(self.scales.items(), x, strict=True)
        values = {name: math.exp(center + spread * value) for (name, (center, spread)), value in pairs}
        return self._kind(**self._fixed, **values)


@dataclass(frozen=True)
class Calibration:
    """Fitted memory and time constants. The time constants were fitted to runs on `hardware`."""

    memory: Fit[MemoryConstants]
    time: Fit[TimeConstants]
    hardware: tuple[str, ...]

    @property
    def parts(self) -> dict[str, Fit[Any]]:
        return {"memory": self.memory, "time": self.time}

    @property
    def constants(self) -> Constants:
        memory, time = self.memory, self.time
        return Constants(memory.constants, time.constants, memory.bound, time.bound, self.hardware)


def calibrate(
    runs: Sequence[MeasuredRun], prior: Constants | None = None, rest: Constants | None = None
) -> Calibration:
    """Fits all constants to trusted measurements; ValueError if there are none. If there are few
    runs, the fit needs a `prior`. A constant that affects no run comes from `rest` (default: its prior).
    """
    with_memory, with_time = [run for run in runs if run.memory_gib], [run for run in runs if run.seconds]
    if not with_memory and not with_time:
        rule = "no row has a measured mem_gb or sec_per_it that can be trusted"
        raise ValueError(f"RUNS: {rule}. Fix: fill in one of these columns.")
    memory, memory_rest = (of.memory if of else None for of in (prior, rest))
    time, time_rest = (of.time if of else None for of in (prior, rest))
    noise = NOISE_OF_RECENT if all(run.hardware.is_recent for run in with_time) else _NOISE
    return Calibration(
        memory=fit(MemoryConstants, with_memory, log_memory_ratio, memory, rest=memory_rest),
        time=fit(TimeConstants, with_time, log_time_ratio, time, rest=time_rest, noise=noise),
        hardware=tuple(sorted({run.hardware.name for run in with_time})),
    )


def doubts(calibration: Calibration) -> Iterator[str]:
    """Yields warnings about large errors and about constants more than three spreads from their prior."""
    for name, part in calibration.parts.items():
        if (mean := part.summary["mean_error"]) > 0.15:
            fix = "check the rows with the largest errors"
            yield f"{name}: predictions are off by {mean:.0%} on average; {fix}"
        for of in fields(part.constants):
            value, prior = getattr(part.constants, of.name), of.metadata["prior"]
            if abs(math.log(value / prior)) > 3 * of.metadata["spread"]:
                yield f"{of.name}={value:.3g} is far from the expected {prior:.3g} ({of.metadata['meaning']})"


def profile_text(calibration: Calibration, source: Path) -> str:
    """Returns the fitted constants as JSON for `prediction.load_constants`."""
    constants, summary = {}, {}
    for name, part in calibration.parts.items():
        constants[name] = {key: float(f"{value:.5g}") for key, value in asdict(part.constants).items()}
        summary[name] = {key: round(value, 5) for key, value in part.summary.items()}
    head = {"source": source.name, "hardware": list(calibration.hardware)}
    return json.dumps(head | {"constants": constants, "fit": summary}, indent=2) + "\n"


def predicted_csv(rows: Sequence[Mapping[str, str]], constants: Constants) -> str:
    """Returns a CSV with a prediction per row. If the batch size or DP of a row is unknown, its time is
    empty. If DP is unknown, the memory is predicted for DP=1.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("row_id", "mem_gb", "sec_per_it", "oom"))
    for row in rows:
        prediction = predict(job_of_row(row), load_hardware(row["gpu"]), constants)
        seconds = f"{prediction.time.total:.6g}" if row.get("gbs") and data_parallel_size(row) else ""
        memory = f"{prediction.peak_bytes / GIBIBYTE:.6g}"
        writer.writerow((row["row_id"], memory, seconds, int(prediction.oom)))
    return text.getvalue()
