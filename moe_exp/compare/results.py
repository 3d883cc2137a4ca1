"""What the runs of a comparison have come to, read from their folders: loss by tokens, FLOPs and time, and who is ahead. No torch."""

from __future__ import annotations

import json
import math
import statistics
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal

from moe_exp.compare.comparison import Run
from moe_exp.compare.matching import flops_per_token
from moe_exp.config import Config
from moe_exp.records import read_metrics

Axis = Literal["tokens", "flops", "seconds"]
AXES: tuple[Axis, ...] = ("tokens", "flops", "seconds")
# The loss of one batch says little: curves are means over so many of the latest of all records.
_WINDOW = 20  # a twentieth of them


@dataclass(frozen=True)
class Curve:
    """Training loss of a run, smoothed, [N] each.

    Attributes:
        loss: nats per token, mean over the latest twentieth of the run's records.
        tokens, flops, seconds: since the start of training, without evaluation and saves.
    """

    loss: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    flops: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def total(self, axis: Axis) -> float:
        """At the end of the run."""
        return float(getattr(self, axis)[-1])

    def loss_at(self, axis: Axis, x: float) -> float:
        """The loss at `x` of an axis, linear between records; the last one beyond the end."""
        xs: list[float] = getattr(self, axis)
        index = bisect_left(xs, x)
        if index == 0 or index == len(xs):
            return self.loss[min(index, len(xs) - 1)]
        share = (x - xs[index - 1]) / (xs[index] - xs[index - 1])
        return self.loss[index - 1] + share * (self.loss[index] - self.loss[index - 1])

    def when(self, axis: Axis, loss: float) -> float | None:
        """Where on an axis the curve first is as low as `loss`, linear between records; None: nowhere."""
        index = next((index for index, value in enumerate(self.loss) if value <= loss), None)
        if index is None:
            return None
        xs: list[float] = getattr(self, axis)
        if index == 0 or not math.isfinite(self.loss[index - 1]):
            return xs[index]
        share = (self.loss[index - 1] - loss) / (self.loss[index - 1] - self.loss[index])
        return xs[index - 1] + share * (xs[index] - xs[index - 1])


@dataclass(frozen=True)
class Ended:
    """A run of the comparison as it stands.

    Attributes:
        run: which.
        status: finished, stopped, failed, oom (out of memory), timeout, or left where it has not started.
        reason: why it failed.
        curve: None before the first record.
        valid_loss: the last one, nats per token; None: not measured.
        tokens_per_second: median over the records.
        memory_bytes: of the rank that needed most.
    """

    run: Run
    status: str
    reason: str = ""
    curve: Curve | None = None
    valid_loss: float | None = None
    tokens_per_second: float | None = None
    memory_bytes: float | None = None

    @property
    def final_loss(self) -> float | None:
        """Of the curve; None where it has none, or is not a number any more."""
        return self.curve.loss[-1] if self.curve and math.isfinite(self.curve.loss[-1]) else None


def is_finished(run: Run) -> bool:
    """Whether a run's summary says that it has been trained to its end."""
    summary = _summary(run)
    return summary.get("status") == "finished" and summary.get("iteration", 0) >= run.config.train_iters


def read_ended(run: Run, *, status: str = "", reason: str = "") -> Ended:
    """A run as its folder has it.

    Args:
        run: which.
        status: why the run did not come to its end; empty: as the summary says.
        reason: why it failed.
    """
    records = read_metrics(run.folder.metrics) if run.folder.metrics.exists() else []
    train = [record for record in records if record.get("kind") == "train"]
    valid = [record["lm_loss"] for record in records if record.get("kind") == "valid" and record.get("lm_loss") is not None]
    memory = [record["peak_memory_bytes"] for record in train if record.get("peak_memory_bytes")]
    rates = [record["tokens_per_second"] for record in train if record.get("tokens_per_second")]
    return Ended(
        run,
        status or str(_summary(run).get("status") or "left"),
        reason,
        curve_of(train, run.config) if train else None,
        valid[-1] if valid else None,
        statistics.median(rates) if rates else None,
        max(memory, default=None),
    )


def _summary(run: Run) -> dict[str, Any]:
    try:
        return dict(json.loads(run.folder.summary.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}


def curve_of(train: Sequence[Mapping[str, Any]], config: Config) -> Curve:
    """The curve of train records; FLOPs and time that they do not have follow from tokens and times per iteration.

    Args:
        train: records of kind train, in order.
        config: settings of the run.
    """
    tokens = [float(record["consumed_tokens"]) for record in train]
    counted, per_token = [record.get("consumed_flops") for record in train], flops_per_token(config)
    flops = [per_token * number if count is None else float(count) for count, number in zip(counted, tokens, strict=True)]
    losses = [math.nan if record.get("lm_loss") is None else float(record["lm_loss"]) for record in train]
    return Curve(_trailing_means(losses), tokens, flops, _seconds(train))


def _seconds(train: Sequence[Mapping[str, Any]]) -> list[float]:
    known = [record.get("training_seconds") for record in train]
    if all(value is not None for value in known):
        return [float(value) for value in known if value is not None]
    iterations = [record["iteration"] for record in train]
    steps = [after - before for before, after in zip([0, *iterations], iterations, strict=False)]
    milliseconds = [record["elapsed_time_per_iteration_ms"] for record in train]
    return list(accumulate(step * each / 1e3 for step, each in zip(steps, milliseconds, strict=True)))


def _trailing_means(losses: Sequence[float]) -> list[float]:
    """NaN stays NaN, and is left out of the means after it."""
    size = max(1, len(losses) // _WINDOW)
    means = []
    for end, loss in enumerate(losses, start=1):
        window = [value for value in losses[max(0, end - size) : end] if math.isfinite(value)]
        means.append(statistics.fmean(window) if math.isfinite(loss) else math.nan)
    return means


def shared_end(ended: Sequence[Ended], axis: Axis) -> float | None:
    """The largest x of an axis that all runs with a curve have got to; None where less than two have one."""
    totals = [one.curve.total(axis) for one in ended if one.curve]
    return min(totals) if len(totals) > 1 else None


@dataclass(frozen=True)
class Reached:
    """How soon a run reached the final loss of another: shares of the other's totals, None where it did not."""

    tokens: float | None
    flops: float | None
    seconds: float | None


def reached(ended: Ended, other: Ended) -> Reached | None:
    """When a run was as good as another at its end; None where one of them has no final loss."""
    if ended.curve is None or other.curve is None or other.final_loss is None:
        return None
    shares = []
    for axis in AXES:
        at, total = ended.curve.when(axis, other.final_loss), other.curve.total(axis)
        shares.append(None if at is None else at / total)
    return Reached(*shares)
