"""Estimates when the disk of a run will be full. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from moe_exp.watch.watchdog.run import RunView, event_time

# window of the fill rate: checkpoints come in bursts, and other users write, too
_WINDOW_SECONDS = 24 * 3600.0
_SHORTEST_SECONDS = 3600.0
_LARGEST_SAMPLES = 150

Sample = tuple[float, int]  # seconds since 1970, free bytes


@dataclass(frozen=True)
class Disk:
    """The state of a run's disk.

    Attributes:
        free_bytes: available to a user; ignores quotas.
        bytes_per_second: fill rate, None if unknown.
        measured: whether the rate was measured over the last hours, or planned from future checkpoints.
    """

    free_bytes: int
    bytes_per_second: float | None
    measured: bool

    @property
    def full_in_seconds(self) -> float | None:
        """Time until it is full at this rate; None if it is not filling."""
        rate = self.bytes_per_second or 0.0
        return self.free_bytes / rate if rate > 0 else None


def with_sample(samples: Sequence[Sample], now: float, free: int) -> list[Sample]:
    """`samples` of the last day plus one; frequent samples replace each other, to keep the list short."""
    kept = [(at, amount) for at, amount in samples if now - _WINDOW_SECONDS <= at < now]
    closest = _WINDOW_SECONDS / _LARGEST_SAMPLES
    if len(kept) > 1 and kept[-1][0] - kept[-2][0] < closest:
        kept.pop()
    return [*kept, (now, free)]


def disk_of(view: RunView, samples: Sequence[Sample]) -> Disk:
    """Measures the fill rate if `samples` span an hour and a few saves, else plans it from checkpoints."""
    free = samples[-1][1]
    begin = _all_kept_since(view)
    samples = [sample for sample in samples if sample[0] >= begin] or samples[-1:]
    seconds = samples[-1][0] - samples[0][0]
    save_seconds = int(view.settings["save_interval"]) * (view.seconds_per_iteration or 0.0)
    if seconds >= max(_SHORTEST_SECONDS, min(2 * save_seconds, _WINDOW_SECONDS / 2)):
        return Disk(free, (samples[0][1] - free) / seconds, True)
    return Disk(free, _planned(view), False)


def _all_kept_since(view: RunView) -> float:
    """When the run first had as many checkpoints as it keeps: until then the disk fills faster than later."""
    settings = view.settings
    if not settings["keep_last"]:
        return 0.0
    number = int(settings["keep_last"]) + int(settings["keep_best"]) + 1
    saves = [event_time(event) for event in view.events if event["event"] == "checkpoint"]
    return saves[number - 1] if len(saves) >= number else math.inf


def _planned(view: RunView) -> float | None:
    """Bytes per second of checkpoints if all are kept; 0 if old ones are removed."""
    pace, size = view.real_seconds_per_iteration, view.checkpoint_bytes
    interval = int(view.settings["save_interval"])
    if view.settings["keep_last"]:
        return 0.0
    return size / (interval * pace) if pace and size and interval else None
