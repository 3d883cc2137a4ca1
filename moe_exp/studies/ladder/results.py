"""Results of a ladder from its run folders: losses, laws, speedups, prediction. No torch."""

import math
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from moe_exp.host.files import read_json, write_json
from moe_exp.runs.records import json_value
from moe_exp.studies.child_runs import Case
from moe_exp.studies.compare.results import Ended, read_ended
from moe_exp.studies.ladder.ladder import Ladder, compute_of
from moe_exp.studies.ladder.laws import Estimate, Fit, Noise, Points, Speedup, fit_laws, fit_problem, speedups


@dataclass(frozen=True)
class Predicted:
    """The prediction of the last rung, by variant, and how far off it was (None before it has run)."""

    when: str
    losses: dict[str, Estimate]
    is_validated: bool

    def errors(self, points: dict[str, Points]) -> dict[str, float]:
        """Relative error of the mean loss, by variant that has one."""
        measured = {name: float(points[name].means[-1]) for name in self.losses if name in points}
        return {
            name: self.losses[name].value / loss - 1 for name, loss in measured.items() if math.isfinite(loss)
        }


@dataclass(frozen=True)
class Results:
    """Results of a ladder so far."""

    points: dict[str, Points]  # losses by variant
    left_out: list[str]  # runs that failed or diverged, with the reason
    training_seconds: float  # of all runs together
    num_left: int  # runs that have not finished yet
    is_validated: bool  # whether losses are of validation at the end; else means over the last 5% of training
    fit: Fit | None  # None if there are too few rungs, see `missing`
    missing: list[str]  # what to add for a fit or for intervals
    speedups: dict[str, Speedup]
    predicted: Predicted | None


def results_of(ladder: Ladder, reasons: dict[str, str] | None = None) -> Results:
    """Reads all runs. `reasons`: why runs failed, by `RUNG/RUN`; without it their status says it."""
    ended = [[read_ended(run) for run in comparison.runs()] for comparison in ladder.rungs]
    everything = [one for rung in ended for one in rung]
    is_validated = all(_validated(one) is not None for one in everything if one.status == "finished")
    left_out = [text for one in everything if (text := _why_left_out(one, reasons or {}, is_validated))]

    def counted(one: Ended) -> float:
        """NaN for a run that is not finished, or has diverged."""
        is_left_out = one.status != "finished" or _has_diverged(one, is_validated)
        return math.nan if is_left_out else _loss(one, is_validated)

    points = {
        name: Points(
            np.array([_compute(ladder, rung, name) for rung in range(len(ladder.rungs))]),
            np.array([[counted(one) for one in rung if one.run.variant == name] for rung in ended]),
        )
        for name in ladder.names
    }
    problem = fit_problem(points, ladder.definition.asymptote)
    fit = None if problem else _fit(ladder, points)
    missing = [problem] if problem else []
    if fit and not fit.draws:
        missing.append("there are no intervals: one seed says nothing about noise; add --repeats 3")
    others = [name for name in ladder.names if name != ladder.baseline]
    found = {name: speedups(fit, points, name, ladder.baseline) for name in others} if fit else {}
    num_left = sum(one.status not in ("finished", "failed", "oom", "timeout") for one in everything)
    predicted = read_prediction(ladder)
    if predicted and predicted.is_validated != is_validated:
        missing.append("the prediction was of another kind of loss than those of the runs, and is left out")
        predicted = None
    seconds = float(np.nansum([one.numbers.seconds for one in everything]))
    return Results(points, left_out, seconds, num_left, is_validated, fit, missing, found, predicted)


def _fit(ladder: Ladder, points: dict[str, Points]) -> Fit:
    return fit_laws(points, asymptote=ladder.definition.asymptote, is_shared=ladder.grows)


def _compute(ladder: Ladder, rung: int, name: str) -> float:
    return compute_of(next(one.config for one in ladder.rungs[rung].variants if one.name == name))


def _loss(ended: Ended, validated: bool) -> float:
    """NaN if there is none."""
    loss = _validated(ended) if validated else ended.final_loss
    return math.nan if loss is None else loss


def _validated(ended: Ended) -> float | None:
    """Validation loss at the last iteration."""
    table = ended.recorded.valid
    if not len(table["iteration"]) or table["iteration"][-1] < ended.run.config.train_iters:
        return None
    return float(table["lm_loss"][-1])


def _has_diverged(ended: Ended, validated: bool) -> bool:
    """Whether the loss is no number, or well above that of guessing; one that has hardly begun is close."""
    limit = 1.1 * math.log(ended.run.config.vocab_size)
    return ended.status == "finished" and not _loss(ended, validated) <= limit


def _why_left_out(ended: Ended, reasons: dict[str, str], validated: bool) -> str:
    name = run_name(ended.run)
    if _has_diverged(ended, validated):
        return f"{name} diverged: its loss is {_loss(ended, validated):.4g}"
    if name in reasons:
        return f"{name}: {reasons[name]}"
    return f"{name} {ended.status}" if ended.status in ("failed", "oom", "timeout") else ""


def run_name(run: Case) -> str:
    """RUNG/RUN."""
    return f"{run.folder.path.parent.name}/{run.name}"


# The prediction.


def prediction_file(ladder: Ladder) -> Path:
    return ladder.folder / f"prediction_{len(ladder.rungs)}.json"


def predict(ladder: Ladder) -> str:
    """Predicts the losses of the last rung from those below it; keeps a prediction once that has begun.
    Returns why there is none, as a sentence; empty if there is one.
    """
    if any(run.folder.metrics.exists() for run in ladder.rungs[-1].runs()):
        if read_prediction(ladder):
            return ""
        return "The last rung was not predicted: it has run, or begun to, before the others had ended."
    results = results_of(ladder)
    below = {name: points.until(len(ladder.rungs) - 1) for name, points in results.points.items()}
    if problem := fit_problem(below, ladder.definition.asymptote):
        return f"The last rung is not predicted: {problem}."
    fit = _fit(ladder, below)
    noise, flops = Noise.of(below), _last_flops(ladder)
    repeats = ladder.definition.repeats
    losses = {name: fit.prediction(name, flops[name], noise, repeats) for name in ladder.names}
    kept = {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "flops": flops,
        "is_validated": results.is_validated,
        "losses": {name: asdict(one) for name, one in losses.items()},
        "laws": {name: asdict(law) for name, law in fit.laws.items()},
    }
    write_json(prediction_file(ladder), json_value(kept))
    return ""


def _last_flops(ladder: Ladder) -> dict[str, float]:
    return {name: _compute(ladder, -1, name) for name in ladder.names}


def read_prediction(ladder: Ladder) -> Predicted | None:
    """The prediction of the last rung; None if there is none, or it was of other models."""
    path = prediction_file(ladder)
    if not path.exists():
        return None
    kept = read_json(path, fix="remove it, and the last rung counts as not predicted")
    if kept.get("flops") != _last_flops(ladder):
        return None
    losses = {
        name: Estimate(**{key: math.nan if value is None else value for key, value in one.items()})
        for name, one in kept["losses"].items()
    }
    return Predicted(kept["time"], losses, kept["is_validated"])


def as_json(ladder: Ladder, results: Results) -> dict[str, Any]:
    """Definition and results, in plain types, NaN as None."""
    fit, predicted, laws = results.fit, results.predicted, None
    if fit:
        laws = {name: {k: asdict(v) for k, v in fit.parameters(name).items()} for name in ladder.names}
    rungs = {name: {"flops": of.compute, "losses": of.losses} for name, of in results.points.items()}
    content = {
        "definition": asdict(ladder.definition),
        "baseline": ladder.baseline,
        "losses_are": "validation" if results.is_validated else "training",
        "rungs": rungs,
        "laws": laws,
        "speedups": {name: asdict(one) for name, one in results.speedups.items()},
        "prediction": predicted and asdict(predicted) | {"errors": predicted.errors(results.points)},
        "left_out": results.left_out,
        "training_seconds": results.training_seconds,
        "missing": results.missing,
    }
    return json_value(content)
