"""JSON for the page's script: curves in a bounded number of points, and the expert load as bytes."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from moe_exp.report.comparison import BITS, NATS, bits_per_nat, common_loss, loss_unit, smoothed, window_of
from moe_exp.report.headline import baseline_of
from moe_exp.report.load_history import NUM_COLUMNS, Floats
from moe_exp.report.run_data import AXES, VALID_CURVES, Run
from moe_exp.report.series import bucket_starts, bucketed, new_minima, spikes
from moe_exp.runs.curves import marks_of
from moe_exp.runs.seeds import grouped_by_seed

# Limits of one page, far under 5 MB for any runs.
_POINTS, _LOAD_VALUES = 8_000, 600_000
_FEWEST_POINTS, _MOST_POINTS = 40, 1_000
_DRAWN = (
    "lm_loss", "load_balancing_loss", "z_loss", "learning_rate", "grad_norm", "tokens_per_second",
    "tflops_per_gpu", "experts/max_over_mean", "experts/dead_fraction", "experts/dropped_fraction",
    "experts/router_entropy",
)  # fmt: skip
_WITH_RANGE = ("lm_loss", "grad_norm")
LOAD_SCALE = 256  # steps per fair share: uint16 reaches 255 fair shares
_MOST_SPIKES, _MOST_CHANGES = 200, 20


def page_data(runs: Sequence[Run], loss: float | None, detail: float = 1.0) -> dict[str, Any]:
    """The JSON value that the script reads.

    Args:
        runs: from `read_runs`.
        loss: at which costs are given; None for the lowest that all runs reach.
        detail: factor on the number of points.
    """
    points = round(detail * min(_MOST_POINTS, max(_FEWEST_POINTS, _POINTS // max(len(runs), 1))))
    window, unit = window_of(runs), loss_unit(runs)
    budget = detail * _LOAD_VALUES / max(sum(bool(run.load) for run in runs), 1)
    found = common_loss(runs)[0] if loss is None else loss
    return {
        "unit": unit or NATS,
        "groups": grouped_by_seed([run.settings for run in runs]),
        "baseline": baseline_of(runs),
        "window_tokens": _rounded(window),
        "loss": _rounded(found),
        "runs": [
            _run(run, points, unit or NATS, window) | {"experts": _experts(run, budget)} for run in runs
        ],
    }


def embedded(value: Any) -> str:
    """`value` as JSON that is safe inside a script element."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _run(run: Run, points: int, unit: str, window: float) -> dict[str, Any]:
    starts = bucket_starts(run.num_records, points)
    ends = np.append(starts, run.num_records)[1:].astype(int) - 1
    train = run.train
    curves = {key: _curve(train[key], starts, with_range=key in _WITH_RANGE) for key in _DRAWN}
    memory = np.fmax(train["peak_memory_bytes"], train["memory_allocated_bytes"])
    curves["memory_bytes"] = _curve(memory, starts)
    best = smoothed(run, unit, window)
    spiked = spikes(train["grad_norm"])[:_MOST_SPIKES]
    step = max(1, (num_valid := len(run.valid["iteration"])) // points)
    every = slice((num_valid - 1) % step, None, step)  # with the last, which is the latest
    axes = {key: train[key] for key in AXES}
    return {
        "name": run.name,
        "kind": run.kind,
        "seed": run.settings.get("seed"),
        "bits_per_nat": _rounded(bits_per_nat(run)) if unit == BITS else None,
        "x": {key: _list(values[ends]) for key, values in axes.items()},
        "curves": {key: curve for key, curve in curves.items() if curve},
        "valid": {
            **{key: _list(run.valid[key][every]) for key in AXES},
            **{key: [_rounded(value, 9) for value in run.valid[key][every]] for key in VALID_CURVES},
        },
        "reach": _reach(best, axes, new_minima(best, max(20, points // 3))),
        "changes": _changes(run),
        "spikes": {
            "value": _list(train["grad_norm"][spiked]),
            **{key: _list(values[spiked]) for key, values in axes.items()},
        },
    }


def _changes(run: Run) -> dict[str, Any]:
    """The newest stages of data and resumes, each at the record before it, or at the first record."""
    marks = marks_of(run.events)[-_MOST_CHANGES:] if run.num_records else []
    before = np.searchsorted(run.train["iteration"], [mark.after for mark in marks], side="right") - 1
    at = np.maximum(before, 0).astype(int)
    return {
        "text": [mark.text for mark in marks],
        "kind": [mark.kind for mark in marks],
        **{key: _list(run.train[key][at]) for key in AXES},
    }


def _reach(loss: Floats, axes: Mapping[str, Floats], minima: Sequence[int]) -> dict[str, Any]:
    """Record of each new minimum of the loss, and the one before it: the page interpolates between them."""
    pairs = [(max(0, index - 1), index) for index in minima]
    return {
        "loss": [[_rounded(loss[place], digits=9) for place in pair] for pair in pairs],
        **{key: [_list(values[place] for place in pair) for pair in pairs] for key, values in axes.items()},
    }


def _curve(values: Floats, starts: Floats, *, with_range: bool = False) -> dict[str, Any] | None:
    """Mean of each bucket, buckets with gaps, and optionally the range if buckets hold several records."""
    if not np.isfinite(values).any():
        return None
    found = bucketed(values, starts)
    curve: dict[str, Any] = {"mean": _list(found.mean), "gaps": np.flatnonzero(found.num_missing).tolist()}
    if len(starts) < len(values):  # else the page has every record
        curve["last"] = _rounded(values[np.isfinite(values)][-1])
    if with_range and len(starts) < len(values):
        curve |= {"low": _list(found.low), "high": _list(found.high)}
    return curve


def _experts(run: Run, budget: float) -> dict[str, Any] | None:
    """Load [C, L, E] in 1/LOAD_SCALE of the fair share as little-endian uint16, and curves per layer."""
    if not run.load:
        return None
    num_columns = int(min(NUM_COLUMNS, budget // (len(run.load.layers) * run.load.num_experts)))
    if not num_columns:
        return None  # the tables show the latest state
    bounds, shares_CLE, means = run.load.columns(num_columns)
    steps = np.clip(np.round(shares_CLE * LOAD_SCALE), 0, 65535).astype("<u2")
    at = np.clip(np.searchsorted(run.train["iteration"], bounds[:, 1]), 0, run.num_records - 1)
    return {
        "layers": run.load.layers,
        "num_experts": run.load.num_experts,
        "scale": LOAD_SCALE,
        "bounds": bounds.astype(int).tolist(),
        "x": {key: _list(run.train[key][at]) for key in AXES},
        "load": base64.b64encode(steps.tobytes()).decode(),
        **{key: [_list(layer) for layer in values.T] for key, values in means.items()},
    }


def _list(values: Iterable[float]) -> list[float | int | None]:
    return [_rounded(value) for value in values]


def _rounded(value: float, digits: int = 6) -> float | int | None:
    """Rounds to `digits` digits; whole numbers as int, None if not finite."""
    if not math.isfinite(value):
        return None
    short = float(f"{value:.{digits}g}") if abs(value) < 1e6 or value != int(value) else float(f"{value:.9g}")
    return int(short) if short == int(short) and abs(short) < 1e15 else short
