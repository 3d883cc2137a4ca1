"""Results of the runs of a comparison, read from their folders as `moe-exp report` does. No torch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from moe_exp.host.files import read_json
from moe_exp.report.comparison import NATS, Overview, smoothed, why_not_compared, window_of
from moe_exp.report.run_data import RunRecords as Recorded
from moe_exp.report.run_data import read_run
from moe_exp.runs.records import json_value
from moe_exp.studies.child_runs import Case
from moe_exp.studies.compare.comparison import Comparison
from moe_exp.studies.compare.variants import differences

Axis = Literal["tokens", "flops", "seconds"]
AXES: tuple[Axis, ...] = get_args(Axis)
_KEYS = {"tokens": "consumed_tokens", "flops": "consumed_flops", "seconds": "training_seconds"}


@dataclass(frozen=True)
class Ended:
    """Current state of a run of the comparison."""

    run: Case
    status: str  # finished, stopped, failed, oom (out of memory), timeout, or left (not started)
    recorded: Recorded  # content of its folder
    numbers: Overview  # as on the page; NaN for what was not measured
    reason: str = ""  # why it failed

    @property
    def final_loss(self) -> float | None:
        """Mean training loss of the last 5% of its tokens, nats per token; None if missing or not finite."""
        return self.numbers.final_loss if math.isfinite(self.numbers.final_loss) else None


def is_finished(run: Case) -> bool:
    """Whether the run's summary says that it was trained to its end."""
    summary = _summary(run)
    return summary.get("status") == "finished" and summary.get("iteration", 0) >= run.config.train_iters


def read_ended(run: Case, *, status: str = "", reason: str = "") -> Ended:
    """Reads a run's state from its folder; `status` and `reason` say why it did not finish, if known."""
    recorded = read_run(run.folder.path)
    numbers = Overview(recorded, float("nan"), None, 0.0)
    return Ended(run, status or str(_summary(run).get("status") or "left"), recorded, numbers, reason)


def _summary(run: Case) -> dict[str, Any]:
    try:
        return dict(read_json(run.folder.summary))
    except (OSError, ValueError):
        return {}


def losses_at_shared_end(ended: Sequence[Ended], axis: Axis) -> tuple[float, list[float | None]] | None:
    """x on `axis` at the end of the shortest run, and the loss of each run there, interpolated linearly (None
    without one), smoothed over the same number of tokens; None if less than two runs can be compared.
    """
    window = window_of([one.recorded for one in ended])
    curves = {}
    for index, one in enumerate(ended):
        if not why_not_compared(one.recorded, window):
            x, loss = one.recorded.train[_KEYS[axis]], smoothed(one.recorded, NATS, window)
            known = np.isfinite(x) & np.isfinite(loss)
            curves[index] = x[known], loss[known]
    curves = {index: curve for index, curve in curves.items() if len(curve[0])}
    if len(curves) < 2:
        return None
    end = min(float(x[-1]) for x, _ in curves.values())
    values = {index: float(np.interp(end, x, loss, left=np.nan)) for index, (x, loss) in curves.items()}
    return end, [values.get(index) for index in range(len(ended))]


def as_json(comparison: Comparison, ended: Sequence[Ended]) -> dict[str, Any]:
    """Results of each run by variant, with the settings in which the variants differ."""
    different = differences(comparison.variants)
    reported = ("final_loss", "valid_loss", "tokens", "flops", "seconds", "tokens_per_second")
    return {
        variant.name: {
            "settings": {name: values[index] for name, values in different.items()},
            "runs": [
                {
                    "seed": one.run.config.seed,
                    "status": one.status,
                    **{name: json_value(getattr(one.numbers, name)) for name in reported},
                }
                for one in ended
                if one.run.variant == variant.name
            ],
        }
        for index, variant in enumerate(comparison.variants)
    }
