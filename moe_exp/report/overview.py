"""One run in numbers, at its end: a column of the report's table."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moe_exp.planner.costs.params import count_parameters
from moe_exp.report.comparison import NATS, Cost, cost_of, smoothed, window_of
from moe_exp.report.load_history import Floats
from moe_exp.report.run_data import Run


@dataclass(frozen=True)
class Overview:
    """One run in numbers, at its end; NaN for what was not measured."""

    run: Run
    total_parameters: float
    active_parameters: float
    final_loss: float  # mean training loss of the last 5% of its tokens, nats per token
    valid_loss: float  # with the next two, of the latest validation
    valid_ppl: float
    bits_per_byte: float
    peak_memory_bytes: float  # maximum over ranks
    tokens_per_second: float  # with the next one, median over the records
    tflops_per_gpu: float
    iteration: float
    tokens: float
    flops: float
    seconds: float
    cost: Cost | None  # at the loss that is compared; None if it was not reached


def overview(run: Run, loss: float, unit: str | None, window_tokens: float) -> Overview:
    """Numbers of one run; `cost` is at `loss`, in `unit` (None if losses do not compare)."""
    count = count_parameters(run.config) if run.config else None
    train, nan = run.train, float("nan")
    own_end = smoothed(run, NATS, window_of([run]))
    memory = np.fmax(train["peak_memory_bytes"], train["memory_allocated_bytes"])
    return Overview(
        run,
        total_parameters=count.total if count else nan,
        active_parameters=count.active_per_token if count else nan,
        final_loss=float(own_end[-1]) if len(own_end) else nan,
        valid_loss=_latest(run.valid["lm_loss"]),
        valid_ppl=_latest(run.valid["lm_loss_ppl"]),
        bits_per_byte=_latest(run.valid["lm_loss_bits_per_byte"]),
        peak_memory_bytes=float(np.fmax.reduce(memory)) if len(memory) else nan,
        tokens_per_second=_median(train["tokens_per_second"]),
        tflops_per_gpu=_median(train["tflops_per_gpu"]),
        iteration=run.last("iteration"),
        tokens=run.last("consumed_tokens"),
        flops=run.last("consumed_flops"),
        seconds=run.last("training_seconds"),
        cost=cost_of(run.train, smoothed(run, unit, window_tokens), loss) if unit else None,
    )


def _latest(values: Floats) -> float:
    finite = values[np.isfinite(values)]
    return float(finite[-1]) if len(finite) else float("nan")


def _median(values: Floats) -> float:
    return float(np.nanmedian(values)) if np.isfinite(values).any() else float("nan")
