"""ROUTING_KERNELS: which of the layer's parts take a kernel, and what is said of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from helpers.layers.kernel_device import DEVICE, needs_kernels
from moe_exp.layers.dispatcher.row_order import sort_by_expert
from moe_exp.layers.kernels import choice
from moe_exp.layers.kernels.choice import (
    choose_routing,
    interpreted_kernels,
    set_routing_kernels,
    takes_kernels,
)
from moe_exp.layers.router import Router, RouterConfig, kernel_problem


@pytest.fixture
def switch(monkeypatch: pytest.MonkeyPatch) -> Any:
    """set_routing_kernels, undone after the test."""
    monkeypatch.setattr(choice, "_switched_off", False)
    return set_routing_kernels


@needs_kernels
def test_off_takes_no_kernel(switch):
    of_gpu: Any = SimpleNamespace(is_cuda=True)
    assert takes_kernels(of_gpu)
    switch("off")
    assert not takes_kernels(of_gpu)
    with interpreted_kernels():
        assert not takes_kernels(torch.zeros(1))
    switch("auto")
    assert takes_kernels(of_gpu)
    with pytest.raises(ValueError, match=r"routing_kernels=on: is not a choice\. Fix: use auto or off\."):
        switch("on")


@needs_kernels
def test_the_same_routing_and_order_on_both_paths(switch):
    """Indices of a kernel are int32, those of plain torch int64: so it is seen which of the two has run."""
    router = Router(RouterConfig(hidden_size=16, num_experts=4, topk=2), device=DEVICE)
    router.needs_scores = False
    x_TD = torch.randn(12, 16, device=DEVICE)
    with interpreted_kernels():
        decision = router(x_TD)
        order = sort_by_expert(decision.expert_TK, num_experts=4).order()
        switch("off")
        decision_off = router(x_TD)
        order_off = sort_by_expert(decision_off.expert_TK, num_experts=4).order()
    assert decision.sums is not None and decision_off.sums is None
    assert (order.slot_R.dtype, order_off.slot_R.dtype) == (torch.int32, torch.int64)
    assert order.slot_R.tolist() == order_off.slot_R.tolist()
    torch.testing.assert_close(decision.weights_TK, decision_off.weights_TK)


@pytest.mark.parametrize(
    ("settings", "needs_scores", "rule"),
    [
        ({}, False, ""),
        ({"score": "sigmoid", "expert_bias": True}, False, ""),
        ({}, True, "seq_aux_loss needs the scores of all experts"),
        ({"assignment": "sinkhorn"}, False, "it has top-k alone, not sinkhorn"),
        ({"num_groups": 2, "group_topk": 1}, False, "it has no groups of experts"),
        ({"dtype": "fp64"}, False, "it computes in fp32, not in fp64"),
    ],
)
def test_rules_that_the_kernel_of_the_router_knows(settings, needs_scores, rule):
    config = RouterConfig(hidden_size=16, num_experts=4, topk=2, **settings)
    assert kernel_problem(config, needs_scores=needs_scores) == rule


def test_the_reason_in_words(monkeypatch):
    assert choose_routing("auto", device_type="cpu") == ("torch", "the kernels are for GPUs")
    assert choose_routing("off", device_type="cuda") == ("torch", "asked for by ROUTING_KERNELS")
    monkeypatch.setattr(choice, "missing", lambda: "")
    assert choose_routing("auto", device_type="cuda") == (
        "triton",
        "Triton kernels for the router, row order and drops",
    )
    rule = "it has no groups of experts"
    reason = f"Triton kernels for row order and drops; the router itself in torch: {rule}"
    assert choose_routing("auto", device_type="cuda", router_problem=rule) == ("triton", reason)
    monkeypatch.setattr(choice, "missing", lambda: "triton is not installed")
    assert choose_routing("auto", device_type="cuda") == ("torch", "not triton: triton is not installed")
