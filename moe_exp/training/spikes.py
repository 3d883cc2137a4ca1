"""Detects spikes in the loss and gradient norm; uses neither torch nor files.

The measure is a robust z-score of the loss and of the logarithm of the gradient norm:

    level      median of the last LEVEL_WINDOW accepted values
    departure  value of an accepted iteration - level before that iteration
    spread     1.4826 * median |departure - median departure| over the last SPREAD_WINDOW departures (scaled
               MAD, an estimate of the standard deviation, Iglewicz and Hoaglin 1993), but not below a floor
    z          (value - level) / spread

Medians tolerate outliers in up to half of a window. The spread is measured on differences from the level, so
that the early decrease of the loss does not count as noise. The level uses a short window, so that it
follows changes of the batch size and learning rate. Only rises count as spikes. An iteration is accepted if
no spike is going on and its loss has z < LOSS_LASTING.

A spike is detected in
    the loss      if z >= LOSS_ALONE in one iteration, or z >= LOSS_LASTING in LOSS_TIMES consecutive
                  iterations (two hard batches in a row can happen by chance)
    the gradient  if z >= NORM_LASTING and norm >= NORM_FACTOR * level of the norm, in NORM_TIMES consecutive
                  iterations (clipping handles a single large gradient)

A spike starts with the unusual iterations (z >= LOSS_EARLY or NORM_EARLY) directly before its detection,
because the gradient often rises one or two iterations before the loss. It ends after CALM_ITERATIONS
consecutive normal iterations. A spike that lasts LONGEST iterations ends too; later values form a new level.
"""

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

LEVEL_WINDOW = 16
SPREAD_WINDOW = 64
FEWEST = 32  # departures before z-scores are computed
_FEWEST_FOR_LEVEL = 8

LOSS_ALONE = 12.0
LOSS_LASTING = 7.0
LOSS_TIMES = 4
NORM_LASTING = 8.0
NORM_FACTOR = 5.0
NORM_TIMES = 3
LOSS_EARLY = 4.0
NORM_EARLY = 6.0
CALM_ITERATIONS = 5
LONGEST = 500

# Floors of the spread. The first is relative to the loss level, so that LOSS_ALONE is a rise by at least a
# tenth of it; the second is for the logarithm of the norm.
LOSS_FLOOR = 0.1 / LOSS_ALONE
NORM_FLOOR = 0.05
_MAD_TO_SIGMA = 1.4826


@dataclass
class Baseline:
    """Normal range of one quantity: level of its last accepted values, and spread around the level."""

    relative_floor: float = 0.0  # minimum of spread / level
    floor: float = 0.0  # minimum of the spread
    values: deque[float] = field(default_factory=lambda: deque(maxlen=LEVEL_WINDOW))
    departures: deque[float] = field(default_factory=lambda: deque(maxlen=SPREAD_WINDOW))

    @property
    def level(self) -> float | None:
        """Median of the last accepted values; None if there are too few values yet."""
        return median(self.values) if len(self.values) >= _FEWEST_FOR_LEVEL else None

    @property
    def spread(self) -> float:
        """Spread of the departures, defined at the top of this file."""
        middle = median(self.departures) if self.departures else 0.0
        mad = median(abs(value - middle) for value in self.departures) if self.departures else 0.0
        return max(_MAD_TO_SIGMA * mad, self.floor, self.relative_floor * abs(self.level or 0.0))

    def z(self, value: float) -> float:
        """How far `value` is above the level, in units of the spread; 0 until there are FEWEST departures."""
        level = self.level
        return 0.0 if level is None or len(self.departures) < FEWEST else (value - level) / self.spread

    def accept(self, value: float) -> None:
        """Adds `value` to `values`; if there already is a level, also adds the departure to `departures`."""
        if (level := self.level) is not None:
            self.departures.append(value - level)
        self.values.append(value)


@dataclass(frozen=True)
class Spike:
    """A spike detected at `iteration`. Losses are in nats per token; a norm is None if unknown."""

    iteration: int
    first_iteration: int  # first unusual iteration
    loss: float
    grad_norm: float | None
    loss_z: float
    grad_norm_z: float  # of its logarithm
    loss_level: float | None  # levels and spread before the spike
    loss_spread: float
    grad_norm_level: float | None
    recent_losses: tuple[float, ...]  # accepted losses behind the level, oldest first


@dataclass(frozen=True)
class SpikeEnd:
    """The end of a spike, with the highest loss and gradient norm during the spike."""

    iteration: int  # first normal iteration after it
    first_iteration: int  # of the spike
    outcome: Literal["recovered", "new level"]
    highest_loss: float
    highest_grad_norm: float | None


@dataclass(frozen=True)
class _Reading:
    iteration: int
    loss: float
    log_norm: float | None
    loss_z: float
    norm_z: float


class SpikeDetector:
    """Detects where spikes start and end. Can continue from the `state` of an earlier detector."""

    def __init__(self, state: Mapping[str, Any] | None = None):
        self._recent: deque[_Reading] = deque(maxlen=LEVEL_WINDOW)
        self._forget()
        self._since: int | None = None  # first iteration of the current spike
        self._calm: list[_Reading] = []
        self._highest: tuple[float, float | None] = (-math.inf, None)
        if state is not None:
            for name, baseline in self._baselines().items():
                baseline.values.extend(state[name][0])
                baseline.departures.extend(state[name][1])
            self._since = state["spike_since"]

    def _baselines(self) -> dict[str, Baseline]:
        return {"loss": self._loss, "log_grad_norm": self._norm}

    def state(self) -> dict[str, Any]:
        """Windows and current spike as plain values, for a checkpoint."""
        windows = {name: [list(of.values), list(of.departures)] for name, of in self._baselines().items()}
        return {**windows, "spike_since": self._since}

    def add(self, iteration: int, loss: float, grad_norm: float | None) -> Spike | SpikeEnd | None:
        """Checks the next iteration's loss (finite, nats per token) and unclipped gradient norm."""
        log_norm = math.log(grad_norm) if grad_norm else None
        norm_z = 0.0 if log_norm is None else self._norm.z(log_norm)
        reading = _Reading(iteration, loss, log_norm, self._loss.z(loss), norm_z)
        self._recent.append(reading)
        if self._since is not None:
            return self._go_on(reading, grad_norm)
        if not self._alarms():
            # an iteration that may be the start of a spike must not raise the level
            if reading.loss_z < LOSS_LASTING:
                self._accept([reading])
            return None
        return self._begin(reading, grad_norm)

    def _alarms(self) -> bool:
        recent, level = list(self._recent), self._norm.level
        losses, norms = recent[-LOSS_TIMES:], recent[-NORM_TIMES:]
        if recent[-1].loss_z >= LOSS_ALONE:
            return True
        if len(losses) == LOSS_TIMES and all(reading.loss_z >= LOSS_LASTING for reading in losses):
            return True
        return len(norms) == NORM_TIMES and all(
            level is not None
            and reading.log_norm is not None
            and reading.norm_z >= NORM_LASTING
            and reading.log_norm >= level + math.log(NORM_FACTOR)
            for reading in norms
        )

    def _begin(self, reading: _Reading, grad_norm: float | None) -> Spike:
        first = reading.iteration
        for earlier in reversed(list(self._recent)[:-1]):
            if earlier.loss_z < LOSS_EARLY and earlier.norm_z < NORM_EARLY:
                break
            first = earlier.iteration
        self._since, self._calm, self._highest = first, [], (reading.loss, grad_norm)
        norm_level = self._norm.level
        return Spike(
            iteration=reading.iteration, first_iteration=first, loss=reading.loss, grad_norm=grad_norm,
            loss_z=reading.loss_z, grad_norm_z=reading.norm_z, loss_level=self._loss.level,
            loss_spread=self._loss.spread,
            grad_norm_level=None if norm_level is None else math.exp(norm_level),
            recent_losses=tuple(self._loss.values),
        )  # fmt: skip

    def _go_on(self, reading: _Reading, grad_norm: float | None) -> SpikeEnd | None:
        assert self._since is not None
        loss, norm = self._highest
        self._highest = max(loss, reading.loss), max(norm or 0.0, grad_norm or 0.0) or None
        is_calm = reading.loss_z < LOSS_LASTING and reading.norm_z < NORM_LASTING
        self._calm = [*self._calm, reading] if is_calm else []
        lasts = reading.iteration - self._since >= LONGEST
        if len(self._calm) < CALM_ITERATIONS and not lasts:
            return None
        since, self._since = self._since, None
        # LONGEST also ends a spike that is still high. Its values become the new level; with the old windows
        # it would be detected again at once.
        if is_calm:
            self._accept(self._calm)
            return SpikeEnd(self._calm[0].iteration, since, "recovered", *self._highest)
        self._forget()
        return SpikeEnd(reading.iteration, since, "new level", *self._highest)

    def _accept(self, readings: Iterable[_Reading]) -> None:
        for reading in readings:
            self._loss.accept(reading.loss)
            if reading.log_norm is not None:
                self._norm.accept(reading.log_norm)

    def _forget(self) -> None:
        self._loss, self._norm = Baseline(relative_floor=LOSS_FLOOR), Baseline(floor=NORM_FLOOR)
        self._recent.clear()
