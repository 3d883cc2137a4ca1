"""Scaling laws L(C) = E + A C^-alpha of several variants, and effective speedups, with intervals. No torch.

L is the loss, C the compute and E the irreducible loss. Models that grow with C share E, because they are
trained on the same data; models of constant size have their own, higher E. The form is from Hoffmann et
al. 2022 (arXiv:2203.15556, section 3.3), here in the single variable C. The effective speedup of a variant is
the compute that the baseline needs to reach the variant's loss, divided by the variant's compute. Importing
this file does not import scipy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

COVERED, COVERED_BY_PARAMETERS = 0.90, 0.95  # confidence levels of losses and speedups, and of parameters
_LARGEST_LOG = 50.0  # of E and A; prevents overflow during the fit
_LOG_EXPONENTS = (math.log(1e-3), math.log(5.0))  # of alpha, which would grow without bound on a plateau
_LARGEST_RATIO = 1e6  # of a speedup in the trend


@dataclass(frozen=True)
class Points:
    """Losses of one variant."""

    compute: Floats  # model FLOPs of each rung, ascending, shape (rungs,)
    losses: Floats  # nats per token, shape (rungs, seeds); NaN for missing runs

    @property
    def means(self) -> Floats:
        """Mean loss of each rung, shape (rungs,); NaN for a rung without runs."""
        known = np.isfinite(self.losses)
        with np.errstate(invalid="ignore"):
            return np.asarray(np.where(known, self.losses, 0.0).sum(axis=1) / known.sum(axis=1))


@dataclass(frozen=True)
class Law:
    """L(C) = asymptote + coefficient * C^-exponent; L in nats per token, C in FLOPs."""

    asymptote: float
    coefficient: float
    exponent: float

    def loss(self, compute: float) -> float:
        return self.asymptote + self.coefficient * compute**-self.exponent

    def compute(self, loss: float) -> float:
        """Returns the compute at which the law reaches `loss`, or inf if the law stays above `loss`."""
        if loss <= self.asymptote:
            return math.inf
        log = math.log(self.coefficient / (loss - self.asymptote)) / self.exponent
        return math.exp(log) if log < 700 else math.inf


@dataclass(frozen=True)
class Estimate:
    """A value and its confidence interval; the bounds are NaN if there are too few runs."""

    value: float
    low: float = math.nan
    high: float = math.nan

    @property
    def has_interval(self) -> bool:
        return math.isfinite(self.low) and math.isfinite(self.high)


@dataclass(frozen=True)
class Fit:
    """Scaling laws of all variants."""

    laws: dict[str, Law]  # fitted to the means over seeds
    draws: list[dict[str, Law]]  # fitted to each bootstrap draw

    def parameters(self, name: str) -> dict[str, Estimate]:
        """Returns asymptote, coefficient and exponent of a variant's law with 95% intervals."""
        found = {}
        for field in ("asymptote", "coefficient", "exponent"):
            drawn = [getattr(one[name], field) for one in self.draws]
            found[field] = estimate(getattr(self.laws[name], field), drawn, COVERED_BY_PARAMETERS)
        return found

    def loss(self, name: str, compute: float) -> Estimate:
        """Returns the loss that a variant's law gives at `compute`, with the law's confidence interval."""
        return estimate(self.laws[name].loss(compute), [one[name].loss(compute) for one in self.draws])

    def prediction(self, name: str, compute: float, noise: Noise, num_seeds: int) -> Estimate:
        """Like `loss`, but with a prediction interval for a mean over `num_seeds` future runs."""
        error = noise.of_mean(num_seeds, np.random.default_rng(2), len(self.draws))
        draws = [one[name].loss(compute) + own for one, own in zip(self.draws, error, strict=True)]
        return estimate(self.laws[name].loss(compute), draws)


def fit_problem(variants: Mapping[str, Points], asymptote: float | None) -> str:
    """Returns why the points cannot be fitted and which data to add, or "" if a fit is possible."""
    fewest = 2 if asymptote is not None else 3
    for name, points in variants.items():
        rungs = int(np.isfinite(points.means).sum())
        if rungs < fewest:
            more = f"{fewest - rungs} more rung{'s' if fewest - rungs > 1 else ''}"
            pin = "" if asymptote is not None else ", or set --asymptote"
            return f"{name} has {rungs} finished rungs but a law requires {fewest}: add {more}{pin}"
    lowest = min(float(np.nanmin(points.losses)) for points in variants.values())
    if asymptote is not None and asymptote >= lowest:
        return f"--asymptote {asymptote:g} must be below the lowest loss, {lowest:.4f}"
    return ""


def fit_laws(
    variants: Mapping[str, Points], *, asymptote: float | None = None, is_shared: bool = True,
    num_draws: int = 400, seed: int = 0,
) -> Fit:  # fmt: skip
    """Fits the laws by least squares, jointly if they share E; raises ValueError if there is a `fit_problem`.

    Each bootstrap draw adds noise to the mean of each rung (see `Noise`). Draws require at least one rung
    with several seeds. `asymptote` is a fixed E in nats per token (None: E is fitted).
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
    """Standard deviation of losses between seeds, pooled over all rungs and variants."""

    deviation: float  # standard deviation of a run (nats per token)
    freedom: int  # its degrees of freedom; 0 without repeated seeds

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
        """Returns the mean of each rung with added noise."""
        num_seeds = np.maximum(1, np.isfinite(points.losses).sum(axis=1))
        return np.asarray(points.means + self.of_mean(num_seeds, generator, len(num_seeds)))

    def of_mean(self, num_seeds: Any, generator: np.random.Generator, number: int) -> Floats:
        """Draws `number` noise samples for a mean over `num_seeds` runs (an int, or an int per sample)."""
        # Student's t distribution, as the deviation is estimated
        noise = generator.standard_t(self.freedom, number) if self.freedom else np.zeros(number)
        return np.asarray(noise * self.deviation / np.sqrt(num_seeds))


def _fit_means(
    compute: Mapping[str, Floats], means: Mapping[str, Floats], asymptote: float | None,
    start: Mapping[str, Law] | None,
) -> dict[str, Law]:  # fmt: skip
    """Returns the fit that begins at `start`; without `start`, the best fit from several guesses of E."""
    from scipy.optimize import least_squares

    names = list(means)
    known = {name: np.isfinite(means[name]) for name in names}
    losses = np.concatenate([means[name][known[name]] for name in names])
    logs = np.concatenate([np.log(compute[name][known[name]]) for name in names])
    which = np.repeat(np.arange(len(names)), [known[name].sum() for name in names])
    # Uses powers of C / exp(scale), which makes the fits of A and alpha almost independent.
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
        first = len(values) - 2 * len(names)  # the pairs follow E, if that is fitted
        slopes[:, :first] = floor
        slopes[rows, first + 2 * which] = terms
        slopes[rows, first + 2 * which + 1] = -terms * exponents[which] * logs
        return slopes

    # With E fixed, log(L - E) is linear in log C with slope -alpha.
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

    # The sum of squares has several minima in E. A bootstrap draw starts from the fit to the means.
    floors = losses.min() * np.array([0.2, 0.5, 0.8, 0.95]) if asymptote is None else [asymptote]
    guesses = [guess_of(start)] if start else [guess(float(floor)) for floor in floors]
    fits = [least_squares(residuals, one, jac=jacobian, method="lm") for one in guesses]
    floor, coefficients, exponents = unpacked(min(fits, key=lambda one: one.cost).x)
    return {
        name: Law(floor, float(coefficient) * math.exp(float(exponent) * scale), float(exponent))
        for name, coefficient, exponent in zip(names, coefficients, exponents, strict=True)
    }


def estimate(value: float, draws: Sequence[float], covered: float = COVERED) -> Estimate:
    """Returns `value` with the interval that contains a fraction `covered` of `draws`; a draw may be inf."""
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

    rungs: list[Estimate]  # per rung; NaN without a loss
    # slope of log(speedup) over log(C); positive if the gain grows with scale. Speedups are clipped to a
    # million, since they are infinite if the baseline never reaches the loss.
    trend: Estimate


def speedups(fit: Fit, variants: Mapping[str, Points], name: str, baseline: str) -> Speedup:
    """Returns a variant's speedup at each rung: baseline compute / variant compute, at equal loss."""
    points, means = variants[name], variants[name].means
    noise, generator = Noise.of(variants), np.random.default_rng(1)
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
