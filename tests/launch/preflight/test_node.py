"""Who is blamed for not coming."""

from __future__ import annotations

import pytest

from moe_exp.config import load_config
from moe_exp.launch.preflight.node import _not_there


@pytest.mark.parametrize(
    ("num_nodes", "num_missing", "num_excluded"), [(2, 1, 1), (16, 2, 2), (16, 3, 0), (64, 30, 0)]
)
def test_one_node_may_be_dead_and_where_many_do_not_come_it_is_something_else(
    num_nodes, num_missing, num_excluded
):
    config = load_config({"preset": "cpu", "nnodes": str(num_nodes)}, {})
    names = [f"n{number}" for number in range(num_nodes)]
    came = {number: {"host": names[number]} for number in range(num_nodes - num_missing)}
    verdict = _not_there(config, came, names)
    assert verdict.grade == "failed"
    assert [node.host for node in verdict.to_exclude()] == names[num_nodes - num_excluded :]
