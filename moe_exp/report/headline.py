"""The first sentence of a report: which run is better, and by how much, at equal tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from moe_exp.config import TRAITS
from moe_exp.host.quantities import count_text, duration, flops_text, loss_text
from moe_exp.report.comparison import (
    BITS,
    NATS,
    Parity,
    in_words,
    is_validated_alike,
    loss_unit,
    parities,
    parity,
    smoothed,
    why_not_compared,
    window_of,
)
from moe_exp.report.load_history import Floats
from moe_exp.report.run_data import Run

Axis = Literal["consumed_tokens", "consumed_flops", "training_seconds"]
AXES: dict[Axis, str] = {
    "consumed_tokens": "tokens",
    "consumed_flops": "FLOPs",
    "training_seconds": "training time",
}


@dataclass(frozen=True)
class Group:
    """Runs that differ only in SEED, in the order of the report."""

    runs: tuple[Run, ...]

    @property
    def name(self) -> str:
        first = self.runs[0].name
        return first if len(self.runs) == 1 else f"{first} ({len(self.runs)} seeds)"


@dataclass(frozen=True)
class Standing:
    """Loss of a group: mean, lowest and highest of its runs."""

    group: Group
    loss: float
    low: float
    high: float


@dataclass(frozen=True)
class Ranking:
    """Losses of groups where all have used the same amount of something.

    Attributes:
        axis: of what.
        at: the amount.
        what: `validation loss` or `training loss`.
        unit: NATS or BITS.
        standings: the lowest loss first.
    """

    axis: Axis
    at: float
    what: str
    unit: str
    standings: tuple[Standing, ...]

    @property
    def lead(self) -> float:
        """Difference between the two lowest losses, at the four places that are printed."""
        best, second = self.standings[:2]
        return round(second.loss, 4) - round(best.loss, 4)


def seed_groups(runs: Sequence[Run]) -> list[Group]:
    """Groups runs whose settings differ only in SEED, in their place or in how they are monitored."""
    return [Group(tuple(runs[index] for index in group)) for group in grouped_by_seed(runs)]


def grouped_by_seed(runs: Sequence[Run]) -> list[list[int]]:
    """The same as indices of `runs`."""
    found: dict[object, list[int]] = {}
    for index, run in enumerate(runs):
        values = {
            name: str(value)
            for name, value in run.settings.items()
            if name != "seed" and (name not in TRAITS or TRAITS[name].compared)
        }
        found.setdefault(tuple(sorted(values.items())) or index, []).append(index)
    return list(found.values())


def baseline_of(runs: Sequence[Run]) -> int:
    """Index of the run that others are compared with: the first dense one, else the first."""
    return next((index for index, run in enumerate(runs) if run.kind == "dense"), 0)


def ranking(runs: Sequence[Run], axis: Axis = "consumed_tokens") -> Ranking | None:
    """Ranks the groups by their loss where all their runs have used the same amount of `axis`.

    The losses are those of validation at the last point that all runs have reached, each on the straight line
    between two of its validations. Without validations that all can be compared by, they are smoothed
    training losses at the end of the shortest run. Runs that cannot be compared are left out; None if less
    than two groups remain.
    """
    window = window_of(runs)
    runs = [run for run in runs if not why_not_compared(run, window)]
    groups, unit = seed_groups(runs), loss_unit(runs)
    if len(groups) < 2 or unit is None:
        return None
    key = "lm_loss_bits_per_byte" if unit == BITS else "lm_loss"
    curves = [_known(run.valid[axis], run.valid[key]) for run in runs]
    what, at = "validation loss", _shared_end(curves)
    if at is None or not is_validated_alike(runs):
        curves = [_known(run.train[axis], smoothed(run, unit, window)) for run in runs]
        what, at = "training loss", _shared_end(curves)
    if at is None:
        return None
    losses = {id(run): float(np.interp(at, *curve)) for run, curve in zip(runs, curves, strict=True)}
    standings = []
    for group in groups:
        values = [losses[id(run)] for run in group.runs]
        standings.append(Standing(group, float(np.mean(values)), min(values), max(values)))
    return Ranking(axis, at, what, unit, tuple(sorted(standings, key=lambda one: one.loss)))


def _known(x: Floats, values: Floats) -> tuple[Floats, Floats]:
    known = np.isfinite(x) & np.isfinite(values)
    return x[known], values[known]


def _shared_end(curves: Sequence[tuple[Floats, Floats]]) -> float | None:
    """The largest x that all curves have reached; None if one has no point up to there."""
    if not all(len(x) for x, _ in curves):
        return None
    end = min(float(x[-1]) for x, _ in curves)
    return end if all(x[0] <= end for x, _ in curves) else None


def amount_text(axis: Axis, amount: float) -> str:
    """An amount with its unit, such as `2.1M tokens`."""
    if axis == "training_seconds":
        return f"{duration(amount)} of training"
    return f"{count_text(amount)} tokens" if axis == "consumed_tokens" else f"{flops_text(amount)} FLOPs"


def headline(runs: Sequence[Run]) -> tuple[str, str]:
    """Which run is better and by how much at equal tokens, or the loss of a single run.

    Returns:
        One sentence, and what the seeds say about it; the second is empty with one seed of each.
    """
    if len(runs) == 1:
        return _single(runs[0]), ""
    found = ranking(runs)
    if found is None:
        return f"No two of the runs can be compared at equal tokens{_reasons(runs)}.", ""
    best, second = found.standings[:2]
    number, after = len(found.standings), f"after {amount_text(found.axis, found.at)} each"
    losses = f"{found.what} {loss_text(best.loss)} against {loss_text(second.loss)} {found.unit}, {after}"
    if not found.lead:
        others = in_words(
            [one.group.name for one in found.standings if f"{one.loss:.4f}" == f"{best.loss:.4f}"]
        )
        text = f"{others} have the same {found.what}, {loss_text(best.loss)} {found.unit}, {after}"
    elif number == 2:
        text = (
            f"{best.group.name} is better than {second.group.name} by {found.lead:.4f} at equal tokens:"
            f" {losses}"
        )
    else:
        text = (
            f"{best.group.name} is the best of {number} by {found.lead:.4f} at equal tokens, before"
            f" {second.group.name}: {losses}"
        )
    return f"{text}.", _seeds(best, second)


def _single(run: Run) -> str:
    known = np.flatnonzero(np.isfinite(run.valid["lm_loss"]))
    if len(known):
        loss, tokens = run.valid["lm_loss"][known[-1]], run.valid["consumed_tokens"][known[-1]]
        what = "a validation loss"
    else:
        loss, tokens, what = run.last("lm_loss"), run.last("consumed_tokens"), "a training loss"
    if not np.isfinite(loss):
        return f"{run.name} has no loss yet."
    after = f" after {count_text(tokens)} tokens" if np.isfinite(tokens) else ""
    return f"{run.name} has {what} of {loss:.4f} {NATS}{after}."


def _reasons(runs: Sequence[Run]) -> str:
    window = window_of(runs)
    reasons = [f"{run.name} {reason}" for run in runs if (reason := why_not_compared(run, window))]
    if reasons:
        return f": {'; '.join(reasons)}"
    if loss_unit(runs) is None:
        return ": their tokenizers differ, and bits per byte are not known for all"
    return ": they differ only in SEED" if len(seed_groups(runs)) == 1 else ""


def _seeds(best: Standing, second: Standing) -> str:
    """What the seeds of the two say about the difference; empty with one seed each."""
    if len(best.group.runs) == len(second.group.runs) == 1:
        return ""
    ranges = [
        f"{one.group.name} from {loss_text(one.low)} to {loss_text(one.high)}"
        for one in (best, second)
        if len(one.group.runs) > 1
    ]
    verdict = "overlap, so the difference may be chance" if second.low <= best.high else "do not overlap"
    return f"The losses are means over seeds: {in_words(ranges)}. These ranges {verdict}."


RANKING_RULE = (
    "The losses are those of the last validation that all runs have reached, each on the straight line"
    " between two validations of its run. If a run has no validations, or the runs were validated on"
    " different data, the training losses are compared instead: the smoothed loss at the end of the shortest"
    " run. Runs whose settings differ only in SEED count as one, with the mean of their losses."
)


def pairs(runs: Sequence[Run]) -> list[Parity]:
    """Compares every MoE run with every dense one; without both kinds, every run with the baseline.

    Where several dense runs differ only in SEED, an MoE run is compared with that of its own seed, if it is
    there.
    """
    if found := parities(runs):
        seeds = {
            id(run): [one.settings.get("seed") for one in group.runs]
            for group in seed_groups(runs)
            for run in group.runs
        }
        return [
            one
            for one in found
            if one.run.settings.get("seed") == one.other.settings.get("seed")
            or one.run.settings.get("seed") not in seeds[id(one.other)]
        ]
    baseline = runs[baseline_of(runs)]
    return [parity(run, baseline) for run in runs if run is not baseline]
