"""Samples without some that are left out: what a run continues with after it has gone back to before a spike.

Training counts the samples that it consumes; schedule, batch ramp-up and checkpoints know that number alone.
The stream counts its own. Without skips the two are the same. With them, consumed sample n is the n-th of the
stream that is not skipped: the order of all others stays, and none of them is lost or repeated. Ranges are
[first, end) in numbers of the stream.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from moe_exp.data.samples.dataset import Origin, Samples, Stage

Range = tuple[int, int]


def merged(ranges: Iterable[Sequence[int]]) -> tuple[Range, ...]:
    """The same numbers as ranges that neither overlap nor touch, in order; empty ones are left out."""
    found: list[Range] = []
    for first, end in sorted((int(first), int(end)) for first, end in ranges):
        if found and first <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        elif first < end:
            found.append((first, end))
    return tuple(found)


def stream_number(consumed: int, skipped: Sequence[Range]) -> int:
    """Number in the stream of consumed sample `consumed`. `skipped`: as `merged` returns them."""
    for first, end in skipped:
        if consumed < first:
            break
        consumed += end - first
    return consumed


def stream_ranges(first: int, end: int, skipped: Sequence[Range]) -> tuple[Range, ...]:
    """Numbers in the stream of the consumed samples [first, end). `skipped`: as `merged` returns them."""
    found = []
    begin = stream_number(first, skipped)
    while first < end:
        # As far as the next skip, or to the end.
        limit = next((start for start, _ in skipped if start > begin), begin + end - first)
        count = min(end - first, limit - begin)
        found.append((begin, begin + count))
        first += count
        begin = stream_number(first, skipped)
    return tuple(found)


def skipped_from(
    saved: Sequence[Sequence[int]], wanted: Sequence[Sequence[int]], consumed: int
) -> tuple[Range, ...]:
    """Ranges that are skipped after a checkpoint.

    What lies before the checkpoint's place in the stream is past: it was skipped, or it was trained on, and
    only the checkpoint knows.

    Args:
        saved: skips of the checkpoint.
        wanted: skips of the run, maybe later than the checkpoint.
        consumed: samples that the checkpoint has consumed.

    Returns:
        Ranges by which consumed sample `consumed` is the one that follows those of the checkpoint.
    """
    past = merged(saved)
    # The sample before is the last that was trained; skips that follow it at once are ahead.
    place = stream_number(consumed - 1, past) + 1 if consumed else 0
    return merged([*past, *((max(int(first), place), int(end)) for first, end in wanted if end > place)])


class SkippingSamples:
    """`samples` without `skipped`; the interface is `dataset.Samples`, by numbers of consumed samples.

    Args:
        samples: the stream.
        skipped: ranges that are left out.
        length: of a stream that ends, such as Megatron's order: as many of its first samples as were skipped
            come again at its end; None: it has no end.
    """

    def __init__(self, samples: Samples, skipped: Iterable[Sequence[int]], length: int | None = None):
        self.skipped = merged(skipped)
        # Without skips a stream that has come to its end says so itself.
        self._samples, self._length = samples, length if self.skipped else None

    def stage_at(self, index: int) -> Stage:
        """The stage that sample number `index` is of."""
        return self._samples.stage_at(self._within(stream_number(index, self.skipped)))

    def batch(self, first: int, count: int) -> torch.Tensor:
        """Samples `first` to `first + count - 1`: int64 token ids of shape [count, S1]."""
        ranges = stream_ranges(first, first + count, self.skipped)
        if self._length is None or ranges[-1][1] <= self._length:
            parts = [self._samples.batch(begin, end - begin) for begin, end in ranges]
            return parts[0] if len(parts) == 1 else torch.cat(parts)
        numbers = (number for begin, end in ranges for number in range(begin, end))
        return torch.cat([self._samples.batch(self._within(number), 1) for number in numbers])

    def origin(self, index: int) -> Origin:
        """Origin of sample number `index`."""
        return self._samples.origin(self._within(stream_number(index, self.skipped)))

    def _within(self, number: int) -> int:
        while self._length is not None and number >= self._length:
            number = stream_number(number - self._length, self.skipped)
        return number
