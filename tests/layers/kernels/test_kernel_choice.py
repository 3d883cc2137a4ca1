"""ROUTING_KERNELS: which of the layer's parts take a kernel, and what is said of it."""

import pytest
import torch

from helpers.layers.kernel_device import DEVICE, needs_kernels
from moe_exp.layers.dispatcher.row_order import RowOrder, slots_of, sort_by_expert
from moe_exp.layers.kernels import launch as choice
from moe_exp.layers.kernels.launch import KernelFailure, choose_routing, failure_of, takes_kernels
from moe_exp.layers.router import Router, RouterConfig, RoutingDecision, kernel_problem


def test_without_a_choice_the_device_decides():
    x = torch.zeros(1)
    assert not takes_kernels(x, None) and not takes_kernels(x, False)
    assert takes_kernels(x, True)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@needs_kernels
def test_without_a_choice_a_gpu_takes_kernels():
    x = torch.zeros(1, device=DEVICE)
    assert takes_kernels(x, None) and takes_kernels(x, True)
    assert not takes_kernels(x, False)


@needs_kernels
def test_the_same_routing_and_order_on_both_paths():
    """Indices of a kernel are int32, those of plain torch int64, which shows which of the two ran."""
    x_TD = torch.randn(12, 16, device=DEVICE)
    decision, order = routed(x_TD, use_kernels=True)
    decision_off, order_off = routed(x_TD, use_kernels=False)
    assert decision.sums is not None and decision_off.sums is None
    assert (order.slot_R.dtype, order_off.slot_R.dtype) == (torch.int32, torch.int64)
    assert order.slot_R.tolist() == order_off.slot_R.tolist()
    torch.testing.assert_close(decision.weights_TK, decision_off.weights_TK)


def routed(x_TD: torch.Tensor, *, use_kernels: bool) -> tuple[RoutingDecision, RowOrder]:
    torch.manual_seed(5)
    config = RouterConfig(hidden_size=16, num_experts=4, topk=2, use_kernels=use_kernels)
    router = Router(config, device=DEVICE)
    router.needs_scores = False
    decision = router(x_TD)
    order = sort_by_expert(**slots_of(decision, 4)).order()
    assert decision.use_kernels == order.use_kernels == use_kernels
    return decision, order


@pytest.mark.parametrize(
    ("settings", "needs_scores", "rule"),
    [
        ({}, False, ""),
        ({"score": "sigmoid", "expert_bias": True}, False, ""),
        ({}, True, "seq_aux_loss or l1 or entropy needs the scores of all experts"),
        ({"assignment": "sinkhorn"}, False, "the router kernel supports only top-k, not sinkhorn"),
        ({"num_groups": 2, "group_topk": 1}, False, "the router kernel does not support groups of experts"),
        ({"dtype": "fp64"}, False, "the router kernel computes in fp32, not in fp64"),
    ],
)
def test_rules_that_the_kernel_of_the_router_knows(settings, needs_scores, rule):
    config = RouterConfig(hidden_size=16, num_experts=4, topk=2, **settings)
    assert kernel_problem(config, needs_scores=needs_scores) == rule


@pytest.mark.parametrize(
    ("name", "device_type", "missing", "problem", "expected"),
    [
        ("auto", "cpu", "", "", ("torch", "the Triton kernels are for GPUs")),
        ("off", "cuda", "", "", ("torch", "set by ROUTING_KERNELS")),
        ("auto", "cuda", "", "", ("triton", "Triton kernels for the router, row order and drops")),
        ("auto", "cuda", "", "no groups", ("triton", "Triton kernels for row order and drops; ")),
        ("auto", "cuda", "no triton", "", ("torch", "not triton: no triton")),
    ],
)
def test_the_reason_in_words(monkeypatch, name, device_type, missing, problem, expected):
    monkeypatch.setattr(choice, "missing", lambda: missing)
    found, reason = choose_routing(name, device_type=device_type, router_problem=problem)
    assert found == expected[0] and reason.startswith(expected[1]) and reason.endswith(problem)


def test_a_failed_self_test_is_the_reason_of_its_part_alone(monkeypatch):
    monkeypatch.setattr(choice, "missing", lambda: "")
    failures = [KernelFailure("routing", ["slot_sort is wrong", "combine is wrong"], "torch")]
    assert failure_of("experts", failures) == ""
    rule = failure_of("routing", failures)
    assert rule == "the self-test failed: slot_sort is wrong; and 1 more"
    assert choose_routing("auto", device_type="cuda", failure=rule) == ("torch", f"not triton: {rule}")
