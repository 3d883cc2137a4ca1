"""Boxes of a tensor: what a range of its values in memory order is made of. No torch.

The values of a tensor of shape (4, 3) from the 2nd to the 10th, counted from 0, are three boxes:

    . . 0      (0, 2) of size 1 x 1
    1 1 1      (1, 0) of size 2 x 3
    1 1 1
    2 . .      (3, 0) of size 1 x 1
"""

import math
from collections.abc import Sequence
from typing import NamedTuple


class Box(NamedTuple):
    """A part of a tensor: where it begins and how long it is along every axis."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def num_values(self) -> int:
        return math.prod(self.sizes)


def boxes_of_range(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """The boxes that values `start` to `stop` of a tensor of `shape` fill, in memory order, at most 2n - 1
    with n axes. Each is one piece of memory: value i of a box is value i of the tensor after its first.
    """
    if start >= stop:
        return []
    if len(shape) <= 1:
        return [Box((start,), (stop - start,)) if shape else Box((), ())]
    row, inner = math.prod(shape[1:]), tuple(shape[1:])
    (first, begin), (last, end) = divmod(start, row), divmod(stop, row)
    if first == last:
        return _in_row(first, boxes_of_range(inner, begin, end))
    boxes = _in_row(first, boxes_of_range(inner, begin, row)) if begin else []
    whole = first + (begin > 0)
    if whole < last:
        boxes.append(Box((whole, *(0 for _ in inner)), (last - whole, *inner)))
    return boxes + _in_row(last, boxes_of_range(inner, 0, end))


def _in_row(row: int, boxes: list[Box]) -> list[Box]:
    return [Box((row, *box.offsets), (1, *box.sizes)) for box in boxes]


def first_value(box: Box, shape: Sequence[int]) -> int:
    """Place of a box's first value in the memory order of a tensor of `shape`."""
    place = 0
    for offset, size in zip(box.offsets, shape, strict=True):
        place = place * size + offset
    return place


def box_at(place: int, sizes: Sequence[int], shape: Sequence[int]) -> Box:
    """The box of `sizes` whose first value has this place in memory order; undoes `first_value`."""
    offsets = []
    for size in reversed(shape):
        place, offset = divmod(place, size)
        offsets.append(offset)
    return Box(tuple(reversed(offsets)), tuple(sizes))


def intersection(one: Box, other: Box) -> Box | None:
    """Overlap of two boxes of a tensor."""
    lows = tuple(map(max, one.offsets, other.offsets))
    ends = ([a + n for a, n in zip(box.offsets, box.sizes, strict=True)] for box in (one, other))
    sizes = tuple(high - low for low, high in zip(lows, map(min, *ends), strict=True))
    return None if any(size <= 0 for size in sizes) else Box(lows, sizes)


def slices(box: Box, origin: Sequence[int]) -> tuple[slice, ...]:
    """Index of a box in a tensor that begins at `origin`."""
    return tuple(slice(a - o, a - o + n) for a, n, o in zip(box.offsets, box.sizes, origin, strict=True))
