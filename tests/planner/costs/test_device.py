from dataclasses import replace

import pytest

from moe_exp.planner.costs.constants import TimeConstants
from moe_exp.planner.costs.device import Device, Group
from moe_exp.planner.hardware import load_hardware

CONSTANTS = TimeConstants()
A100 = load_hardware("A100-80GB")


def device(gpu="A100-80GB", dtype="bf16", **constants) -> Device:
    return Device(load_hardware(gpu), dtype, replace(CONSTANTS, **constants))


def group(size: int, stride: int) -> Group:
    return Group(size, stride, A100, gpus_per_node=8)


def test_waves_by_hand():
    # 2048 x 13824 are 16 x 54 tiles of 128 x 256, 8 waves of 108; 2048 x 14400 are 16 x 57, 9 waves.
    a100 = device()
    full, begun = a100.product(2048, 13824, 1024), a100.product(2048, 14400, 1024)
    assert begun / full == pytest.approx(9 / 8)
    flops = 2 * 2048 * 13824 * (1024 + CONSTANTS.half_depth)
    assert full == pytest.approx(flops / (312e12 * CONSTANTS.matrix_efficiency))
    assert a100.product(128, 256, 512) == a100.product(128, 256 * 108, 512)  # one tile takes a whole wave


def test_short_inner_dimensions_are_slow():
    a100 = device(half_depth=512.0)
    assert a100.product(1024, 1024, 512) / a100.product(1024, 1024, 1536) == pytest.approx(1024 / 2048)


@pytest.mark.parametrize(("m", "n", "k", "ratio"), [(7, 512, 512, 1), (512, 512, 108, 5), (512, 150, 64, 5)])
def test_rows_of_no_multiple_of_16_bytes(m, n, k, ratio):
    slow, fast = (device(unaligned=factor).product(m, n, k) for factor in (5.0, 1.0))
    assert slow / fast == pytest.approx(ratio)


def test_gradients_are_two_products():
    one = device().linear(256, 512, 1024)
    assert one.forward == device().product(256, 512, 1024)
    assert one.backward == device().product(256, 1024, 512) + device().product(512, 1024, 256)


def test_fp32_moves_twice_the_bytes():
    in_fp32, in_bf16 = (device(dtype=dtype).moved(1e6, (2, 4)).forward for dtype in ("fp32", "bf16"))
    assert in_fp32 == pytest.approx(2 * in_bf16)
    assert device(memory_efficiency=1.0).moved(1e6, (2, 4)).backward == pytest.approx(4e6 / 2.039e12)


def test_processors_have_no_waves_and_more_processes_than_cores_take_turns():
    cpu = device("CPU", "fp32")
    assert cpu.product(10, 30, 7) == pytest.approx(2 * 10 * 30 * 7 / cpu.flops)
    cpu = load_hardware("CPU")
    alone, crowded = (Device(cpu, "fp32", CONSTANTS, num_processes=n * cpu.gpus_per_node) for n in (1, 3))
    assert crowded.product(64, 64, 64) == pytest.approx(3 * alone.product(64, 64, 64))
    a100 = load_hardware("A100")
    assert Device(a100, "bf16", CONSTANTS, num_processes=16).flops == Device(a100, "bf16", CONSTANTS).flops


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


def test_one_rank_alone_sends_nothing():
    assert group(1, 1).all_to_all(1e9, 1.0) == group(1, 8).reduce_scatter(1e9, 1.0) == 0
