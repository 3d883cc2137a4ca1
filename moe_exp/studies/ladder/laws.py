"""Scaling laws L(C) = E + A C^-alpha of several variants, and effective speedups, with intervals. No torch.

E is the loss that no amount of compute C removes. Variants that grow with C share it, as they are trained on
the same data; a model whose size stays the same has its own, which is higher. The form is that of Hoffmann
et al. 2022 (arXiv:2203.15556, section 3.3) in the one variable C. The effective speedup of a variant is the
compute that the baseline needs for the variant's loss, over the variant's compute.

scipy is imported inside functions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

COVERED, COVERED_BY_PARAMETERS = 0.90, 0.95  # shares of the intervals
_LARGEST_LOG = 50.0  # of E and A; keeps a step of the fit from overflowing
_LOG_EXPONENTS = (math.log(1e-3), math.log(5.0))  # of alpha; a plateau has no largest
_LARGEST_RATIO = 1e6  # of a speedup, for the trend


@dataclass(frozen=True)
class Points:
    """Losses of one variant."""

    compute: Floats  # model FLOPs of each rung, ascending, shape (rungs,)
    losses: Floats  # nats per token, shape (rungs, seeds); NaN for a run that is missing

    @property
    def means(self) -> Floats:
        """Mean loss of each rung, shape (rungs,); NaN for one without a run."""
        known = np.isfinite(self.losses)
        with np.errstate(invalid="ignore"):
            return np.asarray(np.where(known, self.losses, 0.0).sum(axis=1) / known.sum(axis=1))

    def until(self, num_rungs: int) -> Points:
        return Points(self.compute[:num_rungs], self.losses[:num_rungs])


@dataclass(frozen=True)
class Law:
    """L(C) = asymptote + coefficient * C^-exponent, in nats per token, C in FLOPs."""

    asymptote: float
    coefficient: float
    exponent: float

    def loss(self, compute: float) -> float:
        return self.asymptote + self.coefficient * compute**-self.exponent

    def compute(self, loss: float) -> float:
        """The compute at which the law reaches `loss`; infinite if it never does."""
        if loss <= self.asymptote:
            return math.inf
        log = math.log(self.coefficient / (loss - self.asymptote)) / self.exponent
        return math.exp(log) if log < 700 else math.inf


@dataclass(frozen=True)
class Estimate:
    """A value and its interval, NaN bounds where there are too few runs for one."""

    value: float
    low: float = math.nan
    high: float = math.nan

    @property
    def has_interval(self) -> bool:
        return math.isfinite(self.low) and math.isfinite(self.high)


@dataclass(frozen=True)
class Fit:
    """Laws of all variants, once of the means of their seeds and once per bootstrap draw."""

    laws: dict[str, Law]
    draws: list[dict[str, Law]]

    def parameters(self, name: str) -> dict[str, Estimate]:
        """Asymptote, coefficient and exponent of a variant's law, with 95% intervals."""
        found = {}
        for field in ("asymptote", "coefficient", "exponent"):
            drawn = [getattr(one[name], field) for one in self.draws]
            found[field] = estimate(getattr(self.laws[name], field), drawn, COVERED_BY_PARAMETERS)
        return found

    def loss(self, name: str, compute: float) -> Estimate:
        """The law's loss of a variant at `compute`, with the interval of the law."""
        return estimate(self.laws[name].loss(compute), [one[name].loss(compute) for one in self.draws])

    def prediction(self, name: str, compute: float, noise: Noise, num_seeds: int, seed: int = 2) -> Estimate:
        """The same, with the interval of what a mean over `num_seeds` runs will be."""
        error = noise.of_mean(num_seeds, np.random.default_rng(seed), len(self.draws))
        draws = [one[name].loss(compute) + own for one, own in zip(self.draws, error, strict=True)]
        return estimate(self.laws[name].loss(compute), draws)


def fit_problem(variants: Mapping[str, Points], asymptote: float | None) -> str:
    """Reason why these points cannot be fitted, and what to add; empty if they can."""
    fewest = 2 if asymptote is not None else 3
    for name, points in variants.items():
        rungs = int(np.isfinite(points.means).sum())
        if rungs < fewest:
            more = f"{fewest - rungs} more rung{'s' if fewest - rungs > 1 else ''}"
            pin = "" if asymptote is not None else ", or set --asymptote"
            return f"{name} has {rungs} finished rungs, a law needs {fewest}: add {more}{pin}"
    lowest = min(float(np.nanmin(points.losses)) for points in variants.values())
    if asymptote is not None and asymptote >= lowest:
        return f"--asymptote {asymptote:g} is not below the lowest loss, {lowest:.4f}"
    return ""


def fit_laws(
    variants: Mapping[str, Points], *, asymptote: float | None = None, is_shared: bool = True,
    num_draws: int = 400, seed: int = 0,
) -> Fit:  # fmt: skip
    """Fits the variants by least squares in the losses, jointly if they share the asymptote.

    A draw of the bootstrap adds to the mean of each rung the noise of a mean over its seeds, see `Noise`;
    without two seeds anywhere there are no draws. `asymptote`: E in nats per token; None: fitted. ValueError
    for too few points, see `fit_problem`.
    """
    if problem := fit_problem(variants, asymptote):
        raise ValueError(problem)
    means = {name: points.means for name, points in variants.items()}
    compute = {name: points.compute for name, points in variants.items()}

    def fitted(means: Mapping[str, Floats], start: Mapping[str, Law] | None = None) -> dict[str, Law]:
        laws: dict[str, Law] = {}
        for group in [list(means)] if is_shared else [[name] for name in means]:
            laws |= _fit_means(compute, {name: means[name] for name in group}, asymptote, start)
        return laws

    laws, draws = fitted(means), []
    noise, generator = Noise.of(variants), np.random.default_rng(seed)
    for _ in range(num_draws if noise.freedom else 0):
        drawn = {name: noise.drawn(points, generator) for name, points in variants.items()}
        draws.append(fitted(drawn, start=laws))
    return Fit(laws, draws)


@dataclass(frozen=True)
class Noise:
    """Deviation of losses between seeds, pooled over the rungs of all variants."""

    deviation: float  # standard deviation of one run, nats per token
    freedom: int  # its degrees of freedom; 0 without two seeds anywhere

    @classmethod
    def of(cls, variants: Mapping[str, Points]) -> Noise:
        squares, freedom = 0.0, 0
        for row in (row for points in variants.values() for row in points.losses):
            known = row[np.isfinite(row)]
            if len(known) > 1:
                squares += float(((known - known.mean()) ** 2).sum())
                freedom += len(known) - 1
        return cls(math.sqrt(squares / freedom) if freedom else 0.0, freedom)

    def drawn(self, points: Points, generator: np.random.Generator) -> Floats:
        """The mean of each rung with the noise of a mean, of Student's t as the deviation is estimated."""
        num_seeds = np.maximum(1, np.isfinite(points.losses).sum(axis=1))
        return np.asarray(points.means + self.of_mean(num_seeds, generator, len(num_seeds)))

    def of_mean(self, num_seeds: Any, generator: np.random.Generator, number: int) -> Floats:
        """`number` draws of the noise of a mean over `num_seeds` runs (one for all, or one each)."""
        noise = generator.standard_t(self.freedom, number) if self.freedom else np.zeros(number)
        return np.asarray(noise * self.deviation / np.sqrt(num_seeds))


def _fit_means(
    compute: Mapping[str, Floats], means: Mapping[str, Floats], asymptote: float | None,
    start: Mapping[str, Law] | None,
) -> dict[str, Law]:  # fmt: skip
    """The best of the fits from several first guesses of E, or from `start` alone."""
    from scipy.optimize import least_squares

    names = list(means)
    known = {name: np.isfinite(means[name]) for name in names}
    losses = np.concatenate([means[name][known[name]] for name in names])
    logs = np.concatenate([np.log(compute[name][known[name]]) for name in names])
    which = np.repeat(np.arange(len(names)), [known[name].sum() for name in names])
    # Powers of C / exp(scale), so that A and alpha are fitted almost independently of each other.
    scale = float(logs.mean())
    logs -= scale

    def unpacked(values: Floats) -> tuple[float, Floats, Floats]:
        free = np.exp(np.clip(values, -_LARGEST_LOG, _LARGEST_LOG))
        floor, rest = (asymptote, free) if asymptote is not None else (float(free[0]), free[1:])
        logs = values[len(values) - len(rest) :]
        return floor, rest[::2], np.exp(np.clip(logs[1::2], *_LOG_EXPONENTS))

    def residuals(values: Floats) -> Floats:
        floor, coefficients, exponents = unpacked(values)
        return np.asarray(floor + coefficients[which] * np.exp(-exponents[which] * logs) - losses)

    def jacobian(values: Floats) -> Floats:
        floor, coefficients, exponents = unpacked(values)
        # The parameters are logarithms: dL/dlog E = E, dL/dlog A = A C^-alpha, and so on.
        terms = coefficients[which] * np.exp(-exponents[which] * logs)
        slopes, rows = np.zeros((len(losses), len(values))), np.arange(len(losses))
        first = len(values) - 2 * len(names)  # of the pairs, after E if that is free
        slopes[:, :first] = floor
        slopes[rows, first + 2 * which] = terms
        slopes[rows, first + 2 * which + 1] = -terms * exponents[which] * logs
        return slopes

    # With E fixed, log(L - E) is a line in log C, whose slope is -alpha.
    def guess(floor: float) -> list[float]:
        values = [] if asymptote is not None else [math.log(floor)]
        for index in range(len(names)):
            own = which == index
            slope, intercept = np.polyfit(logs[own], np.log(losses[own] - floor), 1)
            values += [float(intercept), math.log(max(-float(slope), 1e-3))]
        return values

    def guess_of(laws: Mapping[str, Law]) -> list[float]:
        values = [] if asymptote is not None else [math.log(laws[names[0]].asymptote)]
        for law in map(laws.__getitem__, names):
            values += [math.log(law.coefficient) - law.exponent * scale, math.log(law.exponent)]
        return values

    # The sum of squares has several minima in E; a draw of the bootstrap starts near the fit of the means.
    floors = losses.min() * np.array([0.2, 0.5, 0.8, 0.95]) if asymptote is None else [asymptote]
    guesses = [guess_of(start)] if start else [guess(float(floor)) for floor in floors]
    fits = [least_squares(residuals, one, jac=jacobian, method="lm") for one in guesses]
    floor, coefficients, exponents = unpacked(min(fits, key=lambda one: one.cost).x)
    return {
        name: Law(floor, float(coefficient) * math.exp(float(exponent) * scale), float(exponent))
        for name, coefficient, exponent in zip(names, coefficients, exponents, strict=True)
    }


def estimate(value: float, draws: Sequence[float], covered: float = COVERED) -> Estimate:
    """The value with the percentiles of its draws; infinite draws count."""
    if not draws:
        return Estimate(value)
    tail = 100 * (1 - covered) / 2
    # Interpolating between a number and infinity would give NaN.
    method: Any = "linear" if np.isfinite(draws).all() else "nearest"
    low, high = np.percentile(draws, [tail, 100 - tail], method=method)
    return Estimate(value, float(low), float(high))


@dataclass(frozen=True)
class Speedup:
    """Effective speedup of a variant over the baseline."""

    rungs: list[Estimate]  # per rung, NaN for one without a loss
    # slope of log(speedup) over log(C): above 0, the gain grows with scale. A speedup counts there as a
    # million at most, as that of a loss which the baseline never reaches.
    trend: Estimate


def speedups(fit: Fit, variants: Mapping[str, Points], name: str, baseline: str, *, seed: int = 1) -> Speedup:
    """Compute that the baseline's law needs for the variant's loss at each rung, over the variant's compute.

    The variant's losses are the measured means; in a draw, they vary with the seeds, as the laws do.
    """
    points, means = variants[name], variants[name].means
    noise, generator = Noise.of(variants), np.random.default_rng(seed)
    values = _ratios(fit.laws[baseline], points.compute, means)
    drawn = [_ratios(laws[baseline], points.compute, noise.drawn(points, generator)) for laws in fit.draws]
    rungs = []
    for rung, value in enumerate(values):
        rungs.append(estimate(value, [one[rung] for one in drawn] if math.isfinite(value) else []))
    slopes = [_slope(points.compute, one) for one in drawn]
    return Speedup(rungs, estimate(_slope(points.compute, values), slopes))


def _ratios(law: Law, compute: Floats, losses: Floats) -> list[float]:
    return [
        law.compute(float(loss)) / float(flops) if math.isfinite(loss) else math.nan
        for flops, loss in zip(compute, losses, strict=True)
    ]


def _slope(compute: Floats, ratios: Sequence[float]) -> float:
    known = ~np.isnan(ratios)
    if known.sum() < 2:
        return math.nan
    bounded = np.clip(np.asarray(ratios)[known], 1 / _LARGEST_RATIO, _LARGEST_RATIO)
    return float(np.polyfit(np.log(compute[known]), np.log(bounded), 1)[0])
