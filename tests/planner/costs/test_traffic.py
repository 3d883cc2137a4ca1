import pytest

from moe_exp.planner.costs.device import Group
from moe_exp.planner.hardware import load_hardware

A100 = load_hardware("A100-80GB")


def group(size: int, stride: int) -> Group:
    return Group(size, stride, A100, gpus_per_node=8)


def test_a_group_inside_a_node_uses_its_links():
    inside = group(4, 2)
    assert inside.in_node
    assert inside.reduce_scatter(4e9, 0.5) == pytest.approx(3e9 / (300e9 * 0.5) + A100.node_latency_seconds)


@pytest.mark.parametrize(("size", "stride", "in_a_node"), [(4, 8, 1), (8, 4, 2), (16, 2, 4), (16, 1, 8)])
def test_ranks_of_a_ring_in_one_node_share_its_network_with_fewer_rings(size, stride, in_a_node):
    across = group(size, stride)
    assert not across.in_node
    assert across.bytes_per_second == in_a_node * A100.network_bytes_per_second


def test_all_to_all_by_hand():
    # 16 ranks over two nodes: of 16 parts 7 stay in the node, 8 go over the network, which is slower.
    seconds = 8e8 / A100.network_bytes_per_second + A100.network_latency_seconds
    assert group(16, 1).all_to_all(1.6e9, 1.0) == pytest.approx(seconds)
    assert group(4, 1).all_to_all(4e8, 0.5) == pytest.approx(3e8 / (300e9 * 0.5) + A100.node_latency_seconds)


def test_all_reduce():
    assert group(8, 1).all_reduce(1e9, 1.0) == 2 * group(8, 1).reduce_scatter(1e9, 1.0)
    assert group(1, 1).all_to_all(1e9, 1.0) == group(1, 8).all_reduce(1e9, 1.0) == 0  # one rank alone
