"""Seconds per iteration: measured in a few iterations of each variant, or predicted. No torch."""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Mapping

from moe_exp.host.devices import device_name
from moe_exp.host.progress import progress
from moe_exp.planner.estimate import cost_of
from moe_exp.planner.hardware import load_hardware, profile_of
from moe_exp.runs.records import read_metrics
from moe_exp.runs.run_folder import RunFolder
from moe_exp.studies.child_runs import MEASURED_ONLY, run_environment, run_to_end, wait_until_free
from moe_exp.studies.compare.comparison import Comparison
from moe_exp.studies.compare.variants import Variant
from moe_exp.studies.failures import why_it_failed

_ITERATIONS, _WARMUP = 12, 4


def predicted_seconds(variant: Variant) -> float | None:
    """The planner's prediction for this host's device; None if it has no profile."""
    profile = profile_of(device_name())
    if not profile:
        return None
    cost = cost_of(variant.config, load_hardware(profile))
    return cost.seconds / cost.num_iterations


def measured_pace(comparison: Comparison, known: Mapping[str, float]) -> dict[str, float]:
    """Median seconds per iteration by variant; those in `known`, from earlier calls, are not measured again.

    Raises:
        ValueError: a variant does not run, with the reason.
    """
    left = [variant for variant in comparison.variants if variant.name not in known]
    pace = dict(known)
    if not left:
        return pace
    with progress("measuring the pace", len(left), unit="variants") as advance:
        for variant in left:
            pace[variant.name] = _measured_seconds(comparison, variant)
            advance(1)
    shutil.rmtree(comparison.folder / "pace", ignore_errors=True)
    return pace


def _measured_seconds(comparison: Comparison, variant: Variant) -> float:
    folder, log = (
        RunFolder(comparison.folder / "pace" / variant.name),
        comparison.folder / "logs" / f"{variant.name}.pace.log",
    )
    wait_until_free(folder)
    shutil.rmtree(folder.path, ignore_errors=True)
    log.unlink(missing_ok=True)
    place = {"run_dir": str(folder.path.parent), "run_name": folder.path.name, "train_iters": _ITERATIONS}
    code = run_to_end(
        {**variant.flags, **MEASURED_ONLY, **place}, log, timeout=None, environ=run_environment()
    )
    if code:
        _, reason = why_it_failed(log.read_text(encoding="utf-8", errors="replace"), code)
        raise ValueError(
            f"variant={variant.name}: does not run: {reason}. Fix: see {log}, and fix or leave out the"
            " variant."
        )
    records = [
        record
        for record in read_metrics(folder.metrics)
        if record["kind"] == "train" and record["iteration"] > _WARMUP
    ]
    return statistics.median(record["elapsed_time_per_iteration_ms"] for record in records) / 1e3
