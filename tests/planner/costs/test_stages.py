import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_exp.config import Config
from moe_exp.planner.costs.params import split_layers, stages_text


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "expected"),
    [
        (106, 12, [8, *[9] * 10, 8]),
        (100, 6, [16, 17, 17, 17, 17, 16]),
        (82, 12, [6, *[7] * 10, 6]),
        (70, 12, [5, *[6] * 10, 5]),
        (24, 1, [24]),
        (2, 2, [1, 1]),
        (1, 2, [1, 0]),
        (2, 4, [0, 1, 1, 0]),
        (1, 4, [0, 1, 0, 0]),
    ],
)
def test_layers_with_both_ends_counted(num_layers, num_stages, expected):
    assert split_layers(num_layers, num_stages, count_ends=True) == expected


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "expected"),
    [(24, 4, [6, 6, 6, 6]), (14, 4, [3, 4, 4, 3]), (7, 3, [2, 3, 2]), (3, 2, [2, 1])],
)
def test_layers_alone(num_layers, num_stages, expected):
    assert split_layers(num_layers, num_stages) == expected


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
