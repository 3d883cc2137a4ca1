"""When the disk of a run will be full. No torch."""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moe_exp.watch.watchdog.run import RunView, event_time

# over which the fill rate is measured: checkpoints come in lumps, and other people write, too
_WINDOW_SECONDS = 24 * 3600.0
_SHORTEST_SECONDS = 3600.0
_LARGEST_SAMPLES = 150

Sample = tuple[float, int]  # seconds since 1970, free bytes


@dataclass(frozen=True)
class Disk:
    """What is known about the disk of a run.

    Attributes:
        free_bytes: for a user, which leaves out what the system keeps for itself; quotas are not seen.
        bytes_per_second: by which that shrinks; None where it is not known.
        measured: seen over the last hours; else from the checkpoints that the run is going to write.
    """

    free_bytes: int
    bytes_per_second: float | None
    measured: bool

    @property
    def full_in_seconds(self) -> float | None:
        """Until it is full at this rate; None where it is not filling."""
        return (
            self.free_bytes / self.bytes_per_second
            if self.bytes_per_second and self.bytes_per_second > 0
            else None
        )


def free_bytes(path: Path) -> int:
    """Of the file system of a folder."""
    return shutil.disk_usage(path).free


def with_sample(samples: Sequence[Sample], now: float, free: int) -> list[Sample]:
    """`samples` of the last day with one more; of looks in quick succession one is kept, so that the list
    stays short.
    """
    kept = [(at, amount) for at, amount in samples if now - _WINDOW_SECONDS <= at < now]
    closest = _WINDOW_SECONDS / _LARGEST_SAMPLES
    if len(kept) > 1 and kept[-1][0] - kept[-2][0] < closest:
        kept.pop()
    return [*kept, (now, free)]


def disk_of(view: RunView, samples: Sequence[Sample]) -> Disk:
    """Measured from the samples where they reach an hour back and see what a few saves have changed, else
    planned from the checkpoints.

    Args:
        view: the run.
        samples: free bytes at the looks of the last day, the latest one last.
    """
    free = samples[-1][1]
    begin = _all_kept_since(view)
    samples = [sample for sample in samples if sample[0] >= begin] or samples[-1:]
    seconds = samples[-1][0] - samples[0][0]
    planned = _planned(view)
    save_seconds = int(view.settings["save_interval"]) * (view.seconds_per_iteration or 0.0)
    if seconds >= max(_SHORTEST_SECONDS, min(2 * save_seconds, _WINDOW_SECONDS / 2)):
        return Disk(free, (samples[0][1] - free) / seconds, True)
    return Disk(free, planned, False)


def _all_kept_since(view: RunView) -> float:
    """When the run had as many checkpoints as it keeps. What the first ones take is no rate at which the disk
    will go on filling.
    """
    settings = view.settings
    if not settings["keep_last"]:
        return 0.0
    number = int(settings["keep_last"]) + int(settings["keep_best"]) + 1
    saves = [event_time(event) for event in view.events if event["event"] == "checkpoint"]
    return saves[number - 1] if len(saves) >= number else math.inf


def _planned(view: RunView) -> float | None:
    """Bytes a second of checkpoints that are all kept; 0 where old ones are removed."""
    pace, size, interval = (
        view.real_seconds_per_iteration,
        view.checkpoint_bytes,
        int(view.settings["save_interval"]),
    )
    if view.settings["keep_last"]:
        return 0.0
    return size / (interval * pace) if pace and size and interval else None
