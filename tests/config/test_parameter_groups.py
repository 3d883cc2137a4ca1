"""Lines of LR_GROUPS: which parameters they are for, what the first of them decides, and what is printed."""

import pytest

from moe_exp.config import load_config
from moe_exp.config.parameter_groups import group_lines, multiples_of
from moe_exp.config.parameter_names import parameter_sizes
from moe_exp.config.presets import PRESETS
from moe_exp.planner.costs.params import count_parameters

ROUTER = "decoder.layers.3.mlp.router.weight"
EXPERT = "decoder.layers.12.mlp.experts.experts.linear_fc1.weight"
NORM = "decoder.layers.3.pre_mlp_layernorm.weight"
EMBEDDING = "embedding.word_embeddings.weight"


def config(**settings):
    return load_config({"preset": "cpu", "gpus_per_node": 1, **settings}, {})


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {ROUTER: (1, 1), EXPERT: (1, 1), NORM: (1, 0)}),
        ({"router_lr_mult": 0.5}, {ROUTER: (0.5, 1), EXPERT: (1, 1), NORM: (1, 0), EMBEDDING: (1, 1)}),
        ({"expert_lr_mult": 3.0}, {ROUTER: (1, 1), EXPERT: (3, 1), NORM: (1, 0)}),
        # The first line that has it, for lr and wd each.
        (
            {"lr_groups": "*.router.*:wd=0;decoder.layers.3.*:lr=0.5,wd=2;*:lr=4", "router_lr_mult": 9.0},
            {ROUTER: (0.5, 0), EXPERT: (4, 1), NORM: (0.5, 0), EMBEDDING: (4, 1)},
        ),
        # With or without the layer; the whole name; upper case is another name.
        ({"lr_groups": "decoder.layers.mlp.*:lr=2"}, {ROUTER: (2, 1), EXPERT: (2, 1), NORM: (1, 0)}),
        ({"lr_groups": "decoder.layers.?.*:lr=2"}, {ROUTER: (2, 1), EXPERT: (1, 1), NORM: (2, 0)}),
        ({"lr_groups": "router:lr=2;*.Router.*:lr=3"}, {ROUTER: (1, 1)}),
    ],
)
def test_the_first_line_counts(settings, expected):
    assert {name: multiples_of(config(**settings), name) for name in expected} == expected


def test_one_line_per_group_with_numbers():
    """Width 32, 4 layers, 64 experts: 4 * 64 * 32 values of routers, 2048 * 32 of the embedding."""
    assert group_lines(config()) == []
    c = config(
        lr_groups="*.router.*:lr=0.5 wd=0; *word_embeddings*:lr=2; *layer*norm*:lr=3", lr=0.02, min_lr=0.002
    )
    assert group_lines(c) == [
        "parameter group *word_embeddings*: 65,536 parameters, LR 0.04, MIN_LR 0.004, weight decay 0.1",
        "parameter group *layer*norm*: 288 parameters, LR 0.06, MIN_LR 0.006, weight decay 0",
        "parameter group *.router.*: 8,192 parameters, LR 0.01, MIN_LR 0.001, weight decay 0",
        "parameter group all others: 868,352 parameters, LR 0.02, MIN_LR 0.002, weight decay 0.1",
    ]
    (both, rest) = group_lines(config(lr_groups="*.layers.0.*:lr=0", router_lr_mult=1.0))
    assert both.endswith("LR 0, MIN_LR 0, weight decay 0.1 (norms and biases 0)")
    assert rest.startswith("parameter group all others: ")


@pytest.mark.parametrize("preset", PRESETS)
def test_sizes_add_up_to_the_count_of_the_planner(preset):
    c = config(preset=preset)
    assert sum(parameter_sizes(c).values()) == count_parameters(c).total
