"""Writes the first sentence of a report: which run is better at equal tokens, and by how much."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from moe_exp.host.quantities import count_text, duration, flops_text, loss_text
from moe_exp.report import comparison
from moe_exp.report.comparison import NATS, TRAINING, VALIDATION, Group, Parity, in_words, parity, run_curve
from moe_exp.report.run_data import Floats, RunRecords

Axis = Literal["consumed_tokens", "consumed_flops", "training_seconds"]
AXES: dict[Axis, str] = {
    "consumed_tokens": "tokens", "consumed_flops": "FLOPs", "training_seconds": "training time",
}  # fmt: skip


@dataclass(frozen=True)
class Standing:
    """Mean, lowest and highest loss of a group's runs. `left_out`: runs that have no such loss."""

    group: Group
    loss: float
    low: float
    high: float
    left_out: tuple[RunRecords, ...] = ()


@dataclass(frozen=True)
class Ranking:
    """Losses of groups compared at equal tokens, FLOPs or time."""

    axis: Axis
    at: float  # amount on this axis
    what: str  # VALIDATION or TRAINING loss
    unit: str  # NATS or BITS
    standings: tuple[Standing, ...]  # the lowest loss first

    @property
    def lead(self) -> float:
        """Difference between the two lowest losses, after rounding both to four places as printed."""
        best, second = self.standings[:2]
        return round(second.loss, 4) - round(best.loss, 4)


def baseline_of(runs: Sequence[RunRecords]) -> int:
    """Index of the baseline: the first dense run, or the first run if there is no dense run."""
    return next((index for index, run in enumerate(runs) if run.kind == "dense"), 0)


def ranking(runs: Sequence[RunRecords], axis: Axis = "consumed_tokens") -> Ranking | None:
    """Ranks groups at equal amounts of `axis` (see RANKING_RULE); None if fewer than two groups qualify."""
    window = comparison.window_of(runs)
    runs = [run for run in runs if not comparison.why_not_compared(run, window)]
    groups, unit = comparison.seed_groups(runs), comparison.loss_unit(runs)
    if len(groups) < 2 or unit is None:
        return None
    for what in (VALIDATION, TRAINING) if comparison.is_validated_alike(runs) else (TRAINING,):
        curves: dict[int, tuple[Floats, Floats]] = {}  # x and loss by id of the run
        for run in runs:
            if curve := run_curve(run, what, unit, window):
                known = np.isfinite(curve.at[axis])
                if known.any():
                    curves[id(run)] = curve.at[axis][known], curve.loss[known]
        # seeds without a validation in a group where another seed has one
        left_out = [tuple(run for run in group.runs if id(run) not in curves) for group in groups]
        # the largest x that all curves reach, unless a curve begins after it
        at = min((float(x[-1]) for x, _ in curves.values()), default=-1.0)
        is_common = all(x[0] <= at for x, _ in curves.values())
        is_whole = all(len(group.runs) > len(out) for group, out in zip(groups, left_out, strict=True))
        if is_common and is_whole:
            break
    else:
        return None
    standings = []
    for group, out in zip(groups, left_out, strict=True):
        losses = [float(np.interp(at, *curves[id(run)])) for run in group.runs if id(run) in curves]
        standings.append(Standing(group, float(np.mean(losses)), min(losses), max(losses), out))
    return Ranking(axis, at, what, unit, tuple(sorted(standings, key=lambda one: one.loss)))


def amount_text(axis: Axis, amount: float) -> str:
    """Amount with its unit, such as `2.1M tokens`."""
    if axis == "training_seconds":
        return f"{duration(amount)} of training"
    return f"{count_text(amount)} tokens" if axis == "consumed_tokens" else f"{flops_text(amount)} FLOPs"


def headline(runs: Sequence[RunRecords]) -> tuple[str, str]:
    """Names the better run at equal tokens and its lead; for a single run, states its loss.

    Returns:
        The headline (one sentence), and sentences about seeds and excluded runs (may be empty).
    """
    if len(runs) == 1:
        (run,) = runs
        loss, tokens, what = run.last("lm_loss"), run.last("consumed_tokens"), "a training loss"
        known = np.isfinite(run.valid["lm_loss"])
        if known.any():
            loss, tokens = run.valid["lm_loss"][known][-1], run.valid["consumed_tokens"][known][-1]
            what = "a validation loss"
        if not np.isfinite(loss):
            return f"{run.name} has no loss yet.", ""
        after = f" after {count_text(tokens)} tokens" if np.isfinite(tokens) else ""
        return f"{run.name} has {what} of {loss:.4f} {NATS}{after}.", ""
    found, window = ranking(runs), comparison.window_of(runs)
    refused = [f"{run.name} {reason}" for run in runs if (reason := comparison.why_not_compared(run, window))]
    if found is None:
        why = ""
        if refused:
            why = f": {'; '.join(refused)}"
        elif comparison.loss_unit(runs) is None:
            why = ": their tokenizers differ, and bits per byte are not known for all runs"
        elif len(comparison.seed_groups(runs)) == 1:
            why = ": they differ only in SEED"
        return f"No two of the runs can be compared at equal tokens{why}.", ""
    best, second = found.standings[:2]
    number, after = len(found.standings), f"after {amount_text(found.axis, found.at)} each"
    losses = f"{found.what} {loss_text(best.loss)} against {loss_text(second.loss)} {found.unit}, {after}"
    lead = f"by {found.lead:.4f} at equal tokens"
    if not found.lead:
        level = [one.group.name for one in found.standings if loss_text(one.loss) == loss_text(best.loss)]
        text = f"{in_words(level)} have the same {found.what}, {loss_text(best.loss)} {found.unit}, {after}"
    elif number == 2:
        text = f"{best.group.name} is better than {second.group.name} {lead}: {losses}"
    else:
        text = f"{best.group.name} is the best of {number} {lead}, ahead of {second.group.name}: {losses}"
    parts = []  # the ranges of both groups over their seeds, and what was left out
    if seeded := [one for one in (best, second) if len(one.group.runs) - len(one.left_out) > 1]:
        ranges = [f"{one.group.name} from {loss_text(one.low)} to {loss_text(one.high)}" for one in seeded]
        verdict = "overlap, so the difference may be chance" if second.low <= best.high else "do not overlap"
        parts.append(f"The losses are means over seeds: {in_words(ranges)}. These ranges {verdict}.")
    if missing := [run.name for one in (best, second) for run in one.left_out]:
        parts.append(f"Left out because they have no validation: {in_words(missing)}.")
    if refused:
        parts.append(f"Left out: {'; '.join(refused)}.")
    return f"{text}.", " ".join(parts)


RANKING_RULE = (
    "Validation losses are compared at the last point that all runs have reached, interpolated linearly"
    " between the validations of each run. Runs whose settings differ only in SEED count as one run with"
    " their mean loss; seeds without a validation are left out. If a model has no validation, or"
    " the runs were validated on different data, smoothed training losses are compared instead, at the end of"
    " the shortest run."
)


def other_winners(runs: Sequence[RunRecords]) -> Iterator[str]:
    """Yields a sentence for each winner at equal FLOPs or time that is not the winner at equal tokens."""
    if not (by_tokens := ranking(runs)):
        return
    # without tokens, which the headline already covers
    for one in filter(None, (ranking(runs, axis) for axis in list(AXES)[1:])):
        best, second = one.standings[:2]
        if one.lead and best.group.name != by_tokens.standings[0].group.name:
            losses = f"{one.what} {loss_text(best.loss)} against {loss_text(second.loss)} {one.unit}"
            after = f"after {amount_text(one.axis, one.at)} each"
            yield f"At equal {AXES[one.axis]}, {best.group.name} is better: {losses}, {after}."


def pairs(runs: Sequence[RunRecords]) -> list[Parity]:
    """Compares each MoE with each dense model; if all are of one kind, compares them with the baseline."""
    groups = comparison.seed_groups(runs)
    dense = [group for group in groups if group.runs[0].kind == "dense"]
    if found := [parity(group, other) for group in groups if group.runs[0].is_moe for other in dense]:
        return found
    other = next(group for group in groups if runs[baseline_of(runs)] in group.runs)
    return [parity(group, other) for group in groups if group is not other]


def difference(pair: Parity, found: Ranking | None) -> float:
    """Loss of `pair.run` minus loss of `pair.other` in ranking `found`, to four places; NaN if unknown."""
    # matched by run, because a group may contain other seeds in the ranking than in the pair
    losses = [
        round(one.loss, 4)
        for group in (pair.run, pair.other)
        for one in (found.standings if found else ())
        if any(run is other for run in one.group.runs for other in group.runs)
    ]
    return losses[0] - losses[1] if len(losses) == 2 else float("nan")


def pair_text(pair: Parity, found: Ranking | None) -> str:
    """Describes the comparison, and adds a sentence if the ranking at equal tokens contradicts it."""
    return comparison.parity_text(pair) + opposite_text(pair, found)


def opposite_text(pair: Parity, found: Ranking | None) -> str:
    """Returns a sentence if a run reaches a loss with fewer tokens but is worse at equal tokens, else ""."""
    lead = difference(pair, found)
    # no contradiction: fewer tokens to the same loss, and a lower loss at equal tokens
    if found is None or not (pair.shares.get("consumed_tokens", float("nan")) - 1) * lead < 0:
        return ""
    better = pair.other if lead > 0 else pair.run
    by = f"by {abs(lead):.4f} after {amount_text(found.axis, found.at)} each"
    return f" At equal tokens, however, {better.name} has the lower {found.what}, {by}."
