"""Which checkpoints are kept: cases by hand, and what holds for every case."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_exp.checkpoint.format.folders import which_to_remove

TEN = list(range(100, 1100, 100))
LOSSES = {200: 3.0, 400: 2.0, 600: 2.5, 800: 2.0, 900: math.nan}


@pytest.mark.parametrize(
    ("last", "every", "best", "kept"),
    [
        (0, 0, 0, TEN),
        (0, 500, 1, TEN),
        (2, 0, 0, [900, 1000]),
        (2, 500, 0, [500, 900, 1000]),
        (1, 0, 1, [800, 1000]),
        (1, 0, 3, [400, 600, 800, 1000]),
        (1, 300, 2, [300, 400, 600, 800, 900, 1000]),
        (1, 0, 99, [200, 400, 600, 800, 1000]),
        (99, 0, 0, TEN),
    ],
)
def test_rules(last, every, best, kept):
    removed = which_to_remove(TEN[::-1], LOSSES, last=last, every=every, best=best)
    assert removed == [iteration for iteration in TEN if iteration not in kept]
    assert which_to_remove([], {}, last=last, every=every, best=best) == []


NUMBERS = st.integers(0, 12)
ITERATIONS = st.integers(1, 40)


@given(st.lists(ITERATIONS, min_size=1), st.dictionaries(ITERATIONS, st.floats()), NUMBERS, NUMBERS, NUMBERS)
def test_the_newest_stays_and_a_second_time_removes_nothing(iterations, losses, last, every, best):
    removed = which_to_remove(iterations, losses, last=last, every=every, best=best)
    left = sorted(set(iterations) - set(removed))
    assert max(iterations) in left
    assert len(left) >= min(last, len(set(iterations)))
    assert which_to_remove(left, losses, last=last, every=every, best=best) == []
