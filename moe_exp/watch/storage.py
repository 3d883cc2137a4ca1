"""Save interval and disk space of a run: `moe-exp watch storage`. Does not import torch.

The formulas are in planner/costs/saves.py. With ASYNC_SAVE, training waits for less than the duration d of a
save, and a failure during a save loses that save. For the wait and for the lost save, the formulas use the
upper bound d.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_exp.config import Config, ConfigError, load_config
from moe_exp.config.loading import known_settings, recorded_settings
from moe_exp.config.settings_file import read_settings
from moe_exp.host.files import bytes_text
from moe_exp.planner.costs.saves import DiskUse, daly_interval, disk_use, lost_share, young_interval
from moe_exp.runs.records import Record, iter_metrics, time_of
from moe_exp.runs.run_folder import RunFolder, iterations

# Events that end all ranks. Those within _ONE_FAILURE_SECONDS count as one failure: every rank reports it.
FAILURES = ("rank_failed", "hang", "replicas_differ", "sdc")
_ONE_FAILURE_SECONDS = 120.0
_NUM_RECORDS = 200
_FEW_FAILURES, _FEW_HOURS = 2, 10.0  # minimum for an estimate of the time between failures


@dataclass(frozen=True)
class Measured:
    """Measurements of a run; None: not yet known."""

    iteration_seconds: float | None = None  # median of the latest train records
    save_seconds: float | None = None  # median over the saves
    checkpoint_bytes: int | None = None  # size of the latest
    hours: float = 0.0  # training time
    num_failures: int = 0  # during `hours`
    restart_seconds: float | None = None  # median time from a failure to the next resume
    iteration: int = 0  # last finished iteration


def measured(records: Sequence[Record]) -> Measured:
    """Measurements from the records of a run's metrics.jsonl."""
    train = [record for record in records if record.get("kind") == "train"]
    events = [record for record in records if record.get("kind") == "event"]
    saves = [event for event in events if event.get("event") == "checkpoint"]
    times = _numbers(train[-_NUM_RECORDS:], "elapsed_time_per_iteration_ms")
    seconds = _numbers(saves, "seconds")
    # a restart lasts from the last report of a failure to the next resume
    failures, restarts, last, is_down = 0, list[float](), -math.inf, False
    for event in events:
        if (when := time_of(event)) is None:
            continue
        if event.get("event") in FAILURES:
            failures += when - last > _ONE_FAILURE_SECONDS
            last, is_down = when, True
        elif event.get("event") in ("resume", "start") and is_down:
            restarts.append(when - last)
            is_down = False
    return Measured(
        iteration_seconds=statistics.median(times) / 1e3 if times else None,
        save_seconds=statistics.median(seconds) if seconds else None,
        checkpoint_bytes=int(*_numbers(saves, "bytes")[-1:]) or None,
        hours=sum(_numbers(train[-1:], "training_seconds")) / 3600,
        num_failures=failures,
        restart_seconds=statistics.median(restarts) if restarts else None,
        iteration=int(*_numbers(train, "iteration")[-1:]),
    )


def _numbers(records: Sequence[Record], key: str) -> list[float]:
    """Finite positive values of `key` in the records."""
    values = (record.get(key) for record in records)
    return [value for value in values if isinstance(value, int | float) and 0 < value < math.inf]


@dataclass(frozen=True)
class Advice:
    iteration_seconds: float
    save_seconds: float
    restart_seconds: float
    mtbf_hours: float  # mean time between failures of the whole job
    source: str  # where `mtbf_hours` comes from
    best_iterations: int  # optimal SAVE_INTERVAL (Daly)
    young_iterations: int  # first-order approximation (Young)
    best_share: float  # lost time as a fraction of useful time, at the optimum
    present_share: float | None  # at the current SAVE_INTERVAL; None if SAVE_INTERVAL is 0


def save_advice(
    save_interval: int, found: Measured, *,
    mtbf_hours: float | None = None, num_nodes: int = 1, restart_seconds: float | None = None,
) -> Advice | None:  # fmt: skip
    """Computes the optimal SAVE_INTERVAL. Returns None until the run has measured an iteration and a save.

    Args:
        save_interval: current SAVE_INTERVAL in iterations; 0: save only at the end.
        mtbf_hours: mean time between failures of one of `num_nodes` nodes; None: the job's measured mean.
        restart_seconds: time from a failure to the next resume; None: measured.
    """
    if not found.iteration_seconds or not found.save_seconds:
        return None
    if mtbf_hours is not None:
        # rates of independent failures add up
        hours = mtbf_hours / num_nodes
        source = f"--mtbf {mtbf_hours:g} hours per node, {num_nodes} node{'s' * (num_nodes != 1)}"
    else:
        # without a failure so far, one is assumed, which is pessimistic
        number = found.num_failures
        hours = found.hours / max(1, number)
        what = f"{number} failure{'s' * (number > 1)}" if number else "no failure (counted as one)"
        took = f"{found.hours:.1f} hours" if found.hours >= 1 else f"{found.hours * 60:.1f} minutes"
        source = f"{what} in {took} of this run"
        if number < _FEW_FAILURES or found.hours < _FEW_HOURS:
            source += ", too little data for an estimate: set --mtbf HOURS"
    if hours <= 0:
        return None
    mtbf, save, one = hours * 3600, found.save_seconds, found.iteration_seconds
    restart = found.restart_seconds or 0.0 if restart_seconds is None else restart_seconds
    best, young = (max(1, round(of(save, mtbf) / one)) for of in (daly_interval, young_interval))
    best_share = lost_share(best * one, save, mtbf, restart)
    present_share = lost_share(save_interval * one, save, mtbf, restart) if save_interval else None
    return Advice(one, save, restart, hours, source, best, young, best_share, present_share)


@dataclass(frozen=True)
class Storage:
    """Storage needs of a run or a settings file; `there` lists the iterations of existing checkpoints."""

    config: Config
    measured: Measured
    use: DiskUse
    there: tuple[int, ...]


def storage_of(path: Path) -> Storage:
    """Reads a run folder or settings file (YAML or NAME=value lines); raises ValueError for other paths."""
    folder = RunFolder(path) if path.is_dir() else None
    settings = folder.config if folder else path
    if not settings.is_file():
        fix = "specify a settings file, or a folder that contains config.yaml"
        raise ValueError(f"RUN={path}: is neither a run folder nor a settings file. Fix: {fix}.")
    try:
        given = known_settings(recorded_settings(settings)) if folder else read_settings(settings)
    except ConfigError:
        raise
    except ValueError as error:
        raise ValueError(f"{settings}: cannot be read ({error}). Fix: specify another file.") from None
    config = load_config(given, {})
    lines = iter_metrics(folder.metrics) if folder and folder.metrics.exists() else []
    # `experts` of all records may take gigabytes
    found = measured([record | {"experts": None} for record in lines])
    there = iterations(folder.checkpoints) if folder else ()
    use = disk_use(config, iteration=max(there, default=0), there=there, one_bytes=found.checkpoint_bytes)
    return Storage(config, found, use, tuple(there))


def rows_of(storage: Storage, advice: Advice | None, free_bytes: int) -> dict[str, Any]:
    """The rows to print, in order: a dict from row name to value."""
    config, use, found = storage.config, storage.use, storage.measured
    kept = "KEEP_LAST=0 keeps all"
    if config.keep_last:
        kept = f"KEEP_LAST={config.keep_last}, KEEP_EVERY={config.keep_every}, KEEP_BEST={config.keep_best}"
        kept += ", plus the checkpoint being written"
    size = "measured" if found.checkpoint_bytes else "computed from the settings"
    enough = "enough" if free_bytes >= use.needed_bytes else "NOT ENOUGH"
    rows: dict[str, Any] = {
        "one checkpoint": f"{bytes_text(use.one_bytes)} ({size})",
        "existing checkpoints": len(storage.there),
        "most checkpoints at once": f"{use.num_checkpoints} ({kept})",
        "records until the end": bytes_text(use.records_bytes),
        "space needed until the end": bytes_text(use.needed_bytes),
        "free disk space": f"{bytes_text(free_bytes)}, {enough} (ignores quotas)",
    }
    if advice is None:
        return rows | {"SAVE_INTERVAL": f"{config.save_interval}; no advice before the first save"}

    def loses(share: float) -> str:
        # a share of the useful time: from 1 on, a percentage is harder to read than a factor
        if share < 1:
            return f"loses {share:.2%}"
        return "never finishes" if math.isinf(share) else f"takes {1 + share:.3g} times as long"

    present = "saves only at the end" if advice.present_share is None else loses(advice.present_share)
    times = (advice.iteration_seconds, advice.save_seconds, advice.restart_seconds)
    best = f"{advice.best_iterations} (Daly; {advice.young_iterations} by Young)"
    return rows | {
        "iteration, save, restart": ", ".join(f"{seconds:.3g} s" for seconds in times),
        "time between failures": f"{advice.mtbf_hours:.3g} hours ({advice.source})",
        "best SAVE_INTERVAL": f"{best}, {loses(advice.best_share)}",
        "current SAVE_INTERVAL": f"{config.save_interval}, {present}",
    }
