import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_exp.config import Config
from moe_exp.planner.costs.params import split_layers, stages_text

ENDS_COUNTED = [
    [8, *[9] * 10, 8], [16, *[17] * 4, 16], [6, *[7] * 10, 6], [5, *[6] * 10, 5], [24], [1, 1], [1, 0],
    [0, 1, 1, 0], [0, 1, 0, 0],
]  # fmt: skip


@pytest.mark.parametrize(
    ("stages", "ends"),
    [(stages, True) for stages in ENDS_COUNTED]
    + [(stages, False) for stages in ([6, 6, 6, 6], [3, 4, 4, 3], [2, 3, 2], [2, 1])],
)
def test_layers_with_and_without_the_ends(stages, ends):
    assert split_layers(sum(stages), len(stages), count_ends=ends) == stages


@given(num_layers=st.integers(1, 300), num_stages=st.integers(1, 100), count_ends=st.booleans())
def test_every_layer_is_dealt_out_once_and_evenly(num_layers, num_stages, count_ends):
    stages = split_layers(num_layers, num_stages, count_ends=count_ends)
    assert len(stages) == num_stages
    assert sum(stages) == num_layers
    items = list(stages)
    if count_ends and num_stages > 1:
        items[0] += 1
        items[-1] += 1
    assert max(items) - min(items) <= 1
    assert min(stages) >= 0
    # The longer ones are in the middle.
    if num_stages <= sum(items):
        assert min(items) == min(items[0], items[-1])


@given(st.lists(st.integers(0, 30), min_size=1, max_size=40))
def test_text_of_stages_is_that_of_the_setting(stages):
    assert Config(pipeline_layers=stages_text(stages)).stage_layers == stages


def test_text_of_stages():
    assert stages_text([8, *[9] * 10, 8]) == "8,9*10,8"
    assert stages_text([0, 3, 3, 2]) == "0,3*2,2"
