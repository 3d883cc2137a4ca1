"""A range of values in memory order is the boxes that it is said to be."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_exp.checkpoint.format.torch_dist import (
    Box,
    boxes_of_range,
    intersection,
    slices,
)

SHAPES = st.lists(st.integers(1, 5), min_size=0, max_size=4).map(tuple)


@st.composite
def shape_and_range(draw):
    shape = draw(SHAPES)
    stop = draw(st.integers(0, math.prod(shape)))
    return shape, draw(st.integers(0, stop)), stop


@st.composite
def box_in(draw, shape):
    ends = [sorted((draw(st.integers(0, size - 1)), draw(st.integers(0, size - 1)))) for size in shape]
    return Box(tuple(low for low, _ in ends), tuple(high - low + 1 for low, high in ends))


def test_by_hand():
    assert boxes_of_range((4, 3), 2, 10) == [Box((0, 2), (1, 1)), Box((1, 0), (2, 3)), Box((3, 0), (1, 1))]
    assert boxes_of_range((4, 3), 3, 9) == [Box((1, 0), (2, 3))]
    assert boxes_of_range((4, 3), 4, 5) == [Box((1, 1), (1, 1))]
    assert boxes_of_range((4, 3), 5, 5) == boxes_of_range((0, 3), 0, 0) == []
    assert boxes_of_range((), 0, 1) == [Box((), ())]
    # 2n - 1 with three axes: the end of a row and of a slab, whole slabs, the start of a slab and of a row
    offsets = [box.offsets for box in boxes_of_range((4, 3, 2), 1, 23)]
    assert offsets == [(0, 0, 1), (0, 1, 0), (1, 0, 0), (3, 0, 0), (3, 2, 0)]


@settings(max_examples=300)
@given(shape_and_range())
def test_boxes_are_the_range_in_memory_order(case):
    shape, start, stop = case
    values = torch.arange(math.prod(shape)).view(shape)
    boxes = boxes_of_range(shape, start, stop)
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    found = [values[slices(box, (0,) * len(shape))] for box in boxes]
    assert [tuple(part.shape) for part in found] == [box.sizes for box in boxes]
    assert [value for part in found for value in part.flatten().tolist()] == list(range(start, stop))


@settings(max_examples=300)
@given(st.data())
def test_intersection(data):
    shape = data.draw(SHAPES)
    one, other = data.draw(box_in(shape)), data.draw(box_in(shape))
    marks = torch.zeros(shape, dtype=torch.int)
    for box in (one, other):
        marks[slices(box, (0,) * len(shape))] += 1
    common = intersection(one, other)
    assert common == intersection(other, one)
    assert (common.num_values if common else 0) == int((marks == 2).sum())
    if common:
        assert bool((marks[slices(common, (0,) * len(shape))] == 2).all())
