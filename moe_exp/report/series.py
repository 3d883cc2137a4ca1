"""Functions of curves as arrays: smoothing, when a loss is reached, spikes, and downsampling."""

from typing import NamedTuple

import numpy as np

from moe_exp.report.run_data import Floats

SPIKE_FACTOR = 3.0
SPIKE_WINDOW = 50
_SPIKE_FEWEST = 10


def trailing_mean(x: Floats, values: Floats, window: float) -> Floats:
    """Mean of the finite `values` at (x - window, x], in whole records: at least the record itself. Each
    counts by its length in x: one of a few iterations, before a stop, for no more than these.

    NaN while the records cover less than `window`, in units of the increasing `x`, and if no value is finite.
    """
    finite = np.isfinite(values)
    lengths = np.where(finite, np.diff(x, prepend=begin_of(x)), 0.0)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0) * lengths)])
    counts = np.concatenate([[0.0], np.cumsum(lengths)])
    ends = np.arange(1, len(x) + 1)
    starts = np.minimum(np.searchsorted(x, x - window, side="right"), ends - 1)
    covered = counts[ends] - counts[starts]
    means = np.where(covered > 0, (sums[ends] - sums[starts]) / np.where(covered > 0, covered, 1), np.nan)
    return np.where(x - begin_of(x) >= window * (1 - 1e-9), means, np.nan)


def begin_of(x: Floats) -> float:
    """Start of the first record, extrapolated from the second; 0 with one record, NaN without any.

    Not always 0: a run from LOAD_DIR continues the counts of its checkpoint.
    """
    known = x[np.isfinite(x)]
    if len(known) < 2:
        return 0.0 if len(known) else float("nan")
    return max(0.0, float(2 * known[0] - known[1]))


def first_at_or_below(values: Floats, target: float) -> tuple[int, float] | None:
    """Index of the first value at or below `target`, and the share in (0, 1] of the straight line from the
    value before (1 without one). None if a curve never reaches it.
    """
    reached = np.flatnonzero(values <= target)  # NaN compares false
    if not len(reached):
        return None
    index = int(reached[0])
    before, value = float(values[index - 1]) if index else float("nan"), float(values[index])
    return index, (before - target) / (before - value) if before > target else 1.0


def on_the_way(x: Floats, index: int, share: float) -> float:
    """`x` interpolated at a result of `first_at_or_below`."""
    before = x[index - 1] if index and share < 1.0 and np.isfinite(x[index - 1]) else x[index]
    return float(before + share * (x[index] - before))


def new_minima(values: Floats, most: int = 400) -> list[int]:
    """Indices of new minima, where each loss was first reached; at most `most`, evenly spread."""
    lowest = np.fmin.accumulate(np.where(np.isfinite(values), values, np.inf)) if len(values) else values
    before = np.concatenate([[np.inf], lowest[:-1]])
    indices = np.flatnonzero(lowest < before)
    if len(indices) > most:
        indices = indices[np.linspace(0, len(indices) - 1, most).round().astype(int)]
    return [int(index) for index in indices]


def spikes(values: Floats) -> list[int]:
    """Indices of values above SPIKE_FACTOR times the median of the last SPIKE_WINDOW (ten or more finite)."""
    found: list[int] = []
    if len(values) <= _SPIKE_FEWEST:
        return found
    padded = np.concatenate([np.full(SPIKE_WINDOW, np.nan), values[:-1]])
    windows = np.lib.stride_tricks.sliding_window_view(padded, SPIKE_WINDOW)
    for start in range(0, len(values), 8192):  # the median copies its input
        part = windows[start : start + 8192]
        enough = np.isfinite(part).sum(axis=1) >= _SPIKE_FEWEST
        limits = np.full(len(part), np.nan)
        limits[enough] = SPIKE_FACTOR * np.nanmedian(part[enough], axis=1)
        found += (start + np.flatnonzero(values[start : start + 8192] > limits)).tolist()
    return found


class Buckets(NamedTuple):
    """A downsampled curve [B], of the finite values of each bucket; NaN without any."""

    mean: Floats
    low: Floats
    high: Floats
    num_missing: Floats  # values of each bucket that are not finite


def bucket_starts(num_records: int, most: int) -> Floats:
    """First index of each of at most `most` buckets of nearly equal size."""
    num = min(num_records, most)
    return np.floor(np.arange(num) * num_records / max(num, 1))


def bucketed(values: Floats, starts: Floats) -> Buckets:
    """Buckets with minimum and maximum, so that a spike of one record stays visible."""
    index = starts.astype(int)
    if not len(index):
        return Buckets(values, values, values, values)
    finite = np.isfinite(values)
    num = np.add.reduceat(finite.astype(float), index)
    sizes = np.diff(np.append(index, len(values)))
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.where(num > 0, np.add.reduceat(np.where(finite, values, 0.0), index) / num, np.nan)
    return Buckets(mean, np.fmin.reduceat(values, index), np.fmax.reduceat(values, index), sizes - num)
