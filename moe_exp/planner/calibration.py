"""Fits the planner's constants to measured runs. No torch; scipy only inside functions.

The constants x are logarithms in units of their spread, 0 at their prior. Minimizes the sum over runs of
soft-L1(ln(predicted / measured) / 2%), which is robust to outliers, plus sum x^2 for the priors.
"""

import csv
import io
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from moe_exp.planner.costs.constants import OWN, TimeConstants
from moe_exp.planner.costs.memory import MemoryConstants, memory_of
from moe_exp.planner.costs.timing import time_of
from moe_exp.planner.hardware import load_hardware
from moe_exp.planner.measured import GIBIBYTE, MeasuredRun, data_parallel_size, job_of_row
from moe_exp.planner.prediction import Constants, predict

T = TypeVar("T")
LogRatio = Callable[[MeasuredRun, T], float]
_NOISE = 0.02  # relative error of a good row; sets the weight of priors
# The same on devices newer than Ampere: runs of clusters that were left out of a fit are predicted within 7%.
NOISE_OF_RECENT = 0.08


def log_memory_ratio(run: MeasuredRun, constants: MemoryConstants) -> float:
    """ln(predicted / measured) memory of the fullest GPU."""
    assert run.memory_gib
    stages = memory_of(run.job, run.hardware, constants)
    return math.log(max(stage.total for stage in stages) / GIBIBYTE / run.memory_gib)


def log_time_ratio(run: MeasuredRun, constants: TimeConstants) -> float:
    """ln(predicted / measured) seconds per iteration."""
    assert run.seconds
    return math.log(time_of(run.job, run.hardware, constants).total / run.seconds)


@dataclass(frozen=True)
class Fit(Generic[T]):
    """Fitted constants of one kind and their errors."""

    constants: T
    errors: dict[str, float]  # row_id to predicted / measured - 1
    left_out: dict[str, float]  # the same with constants fitted without that row

    @property
    def bound(self) -> float:
        """90th percentile of the relative errors of left-out rows; 0 without rows."""
        sizes = sorted(abs(error) for error in self.left_out.values())
        return sizes[math.ceil(0.9 * len(sizes)) - 1] if sizes else 0.0


def fit(
    kind: type[T],
    runs: Sequence[MeasuredRun],
    log_ratio: LogRatio[T],
    prior: T | None = None,
    start: T | None = None,
    rest: T | None = None,
    noise: float = _NOISE,
    hold: Mapping[str, float] | None = None,
) -> Fit[T]:
    """Fits the constants of a dataclass (see `constants.free`) to measured runs.

    Left-out errors take one Gauss-Newton step from the fit to all rows to the one without that row, without
    further evaluations; for a fit this close to linear that is the refit (`test_calibration.py` compares).
    `prior` replaces the priors of `kind`, with narrower spreads; `start` is where the search begins, the
    prior by default. Constants that no run depends on are those of `rest`, or stay at their prior; those in
    `hold` keep these values. `noise` is the relative error of a good row: the smaller, the less do priors
    count.
    """
    if prior is None and issubclass(kind, TimeConstants):
        hold = dict.fromkeys(OWN, 1.0) | dict(hold or {})
    space = _Space(kind, prior, runs, log_ratio, rest, hold or {})
    # without runs, or if none depends on a constant, such as memory of torch's allocator in dense models
    if not space.scales:
        fixed = space.constants([])
        errors = {run.row_id: math.expm1(log_ratio(run, fixed)) for run in runs}
        return Fit(fixed, errors, errors)
    from numpy import outer
    from numpy.linalg import solve
    from scipy.optimize import least_squares

    def residuals(x: Any) -> list[float]:  # its own robust loss would count for the priors, too
        constants = space.constants(x)
        errors = [log_ratio(run, constants) / noise for run in runs]
        # the square of a residual is the soft-L1 loss, 2 * (sqrt(1 + e^2) - 1)
        return [
            math.copysign(math.sqrt(2 * (math.sqrt(1 + error * error) - 1)), error) for error in errors
        ] + list(x)

    at = [0.0] * len(space.scales)
    if start:
        scales = space.scales.items()
        at = [(math.log(getattr(start, name)) - center) / spread for name, (center, spread) in scales]
    solution = least_squares(residuals, at, ftol=1e-6)
    values = space.constants(solution.x)
    errors = {run.row_id: math.expm1(log_ratio(run, values)) for run in runs}
    # per run the Gauss-Newton step from the fit to all runs to the one without it
    normal, gradient = solution.jac.T @ solution.jac, solution.jac.T @ solution.fun
    left_out = {}
    for run, row, residual in zip(runs, solution.jac, solution.fun, strict=False):  # after them the priors
        step = solve(normal - outer(row, row), residual * row - gradient)
        left_out[run.row_id] = math.expm1(log_ratio(run, space.constants(solution.x + step)))
    return Fit(values, errors, left_out)


class _Space(Generic[T]):
    """Constants as points: logarithms relative to the prior, in units of the spread."""

    def __init__(
        self,
        kind: type[T],
        prior: T | None,
        runs: Sequence[MeasuredRun],
        log_ratio: LogRatio[T],
        rest: T | None,
        hold: Mapping[str, float],
    ):
        self._kind, self.scales, self._fixed = kind, dict[str, tuple[float, float]](), dict[str, float]()
        for of in fields(kind):  # type: ignore[arg-type]
            center = getattr(prior, of.name) if prior else of.metadata["prior"]
            # machines differ by a fifth of what is not known before any run
            spread = of.metadata["spread"] * (0.2 if prior else 1.0)
            self.scales[of.name] = math.log(center), spread
        # Constants that no run depends on are no dimension, and neither are those of `hold`.
        at_prior = self.constants([0.0] * len(self.scales))
        before = [log_ratio(run, at_prior) for run in runs]
        for name, (center, spread) in list(self.scales.items()):
            moved = replace(at_prior, **{name: math.exp(center + 0.1 * spread)})  # type: ignore[type-var]
            if name in hold or before == [log_ratio(run, moved) for run in runs]:
                self.scales.pop(name)
                value = getattr(rest, name) if rest else math.exp(center)
                self._fixed[name] = hold.get(name, value)

    def constants(self, x: Iterable[float]) -> T:
        pairs = zip(self.scales.items(), x, strict=True)
        values = {name: math.exp(center + spread * value) for (name, (center, spread)), value in pairs}
        return self._kind(**self._fixed, **values)


@dataclass(frozen=True)
class Calibration:
    """Both fits, and the devices of their rows."""

    memory: Fit[MemoryConstants]
    time: Fit[TimeConstants]
    hardware: tuple[str, ...]

    @property
    def constants(self) -> Constants:
        memory, time = self.memory, self.time
        return Constants(memory.constants, time.constants, memory.bound, time.bound, self.hardware)


def calibrate(
    runs: Sequence[MeasuredRun], prior: Constants | None = None, rest: Constants | None = None
) -> Calibration:
    """Fits all constants to trusted measurements; ValueError without any. Few rows need a `prior`. Constants
    that no row depends on are those of `rest`, or of the prior.
    """
    with_memory, with_time = [run for run in runs if run.memory_gib], [run for run in runs if run.seconds]
    if not with_memory and not with_time:
        rule = "no row has a measured mem_gb or sec_per_it that can be trusted"
        raise ValueError(f"RUNS: {rule}. Fix: fill one of these columns in.")
    memory, memory_rest = (of.memory if of else None for of in (prior, rest))
    time, time_rest = (of.time if of else None for of in (prior, rest))
    noise = NOISE_OF_RECENT if all(run.hardware.is_recent for run in with_time) else _NOISE
    return Calibration(
        memory=fit(MemoryConstants, with_memory, log_memory_ratio, memory, rest=memory_rest),
        time=fit(TimeConstants, with_time, log_time_ratio, time, rest=time_rest, noise=noise),
        hardware=tuple(sorted({run.hardware.name for run in with_time})),
    )


def doubts(calibration: Calibration) -> Iterator[str]:
    """Lines on problems of a fit: large errors, and constants over three spreads from their prior."""
    for name, part in (("memory", calibration.memory), ("time", calibration.time)):
        errors = [abs(error) for error in part.errors.values()]
        if errors and (mean := sum(errors) / len(errors)) > 0.15:
            fix = "check the columns of the rows with the largest error"
            yield f"{name}: predictions are {mean:.0%} off on average; {fix}"
        for of in fields(part.constants):
            value, prior = getattr(part.constants, of.name), of.metadata["prior"]
            if abs(math.log(value / prior)) > 3 * of.metadata["spread"]:
                far = f"{of.name}={value:.3g} is far from the {prior:.3g} expected"
                yield f"{far}: {of.metadata['meaning']}"


def profile_text(calibration: Calibration, source: Path) -> str:
    """JSON for `prediction.load_constants`."""
    parts: dict[str, Fit[Any]] = {"memory": calibration.memory, "time": calibration.time}
    constants, summary = {}, {}

    def mean(errors: Mapping[str, float]) -> float:
        return round(sum(map(abs, errors.values())) / max(1, len(errors)), 5)

    for name, part in parts.items():
        constants[name] = {key: float(f"{value:.5g}") for key, value in asdict(part.constants).items()}
        summary[name] = {
            "rows": len(part.errors),
            "mean_error": mean(part.errors),
            "max_error": round(max(map(abs, part.errors.values()), default=0.0), 5),
            "left_out_mean_error": mean(part.left_out),
            "left_out_90_percent_within": round(part.bound, 5),
        }
    head = {"source": source.name, "hardware": list(calibration.hardware)}
    return json.dumps(head | {"constants": constants, "fit": summary}, indent=2) + "\n"


COLUMNS = ("row_id", "mem_gb", "sec_per_it", "oom")


def predicted_csv(rows: Sequence[Mapping[str, str]], constants: Constants) -> str:
    """CSV with a line per row of `measured.read_rows`; no time without a batch size; default TP*PP GPUs."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in rows:
        prediction = predict(job_of_row(row), load_hardware(row["gpu"]), constants)
        has_batch = row.get("gbs") and data_parallel_size(row)
        seconds = f"{prediction.time.total:.6g}" if has_batch else ""
        memory = f"{prediction.peak_bytes / GIBIBYTE:.6g}"
        writer.writerow((row["row_id"], memory, seconds, int(prediction.oom)))
    return text.getvalue()
