from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from tiny_moe import EXPERTS, HIDDEN, pushed_tokens, random, tiny_layer

from moe_exp.layers.capacity import count_per_expert
from moe_exp.layers.dispatcher import AllToAllDispatcher, LocalDispatcher, pad_by_expert, sort_by_expert
from moe_exp.layers.router import RoutingDecision
from ranks import run_on_ranks


def decide(expert_TK, *, kept_TK=None, num_experts: int = EXPERTS, weights_TK=None) -> RoutingDecision:
    expert_TK = torch.tensor(expert_TK)
    if weights_TK is None:
        weights_TK = torch.rand(expert_TK.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    kept_TK = None if kept_TK is None else torch.tensor(kept_TK, dtype=torch.bool)
    nothing = torch.empty(0)
    return RoutingDecision(expert_TK, weights_TK, nothing, nothing, count_per_expert(expert_TK.flatten(), num_experts), kept_TK)


# Ten tokens, two slots each: slot 2t and 2t+1 are those of token t. Expert 2 of 4 gets nothing.
HAND = [[3, 0], [0, 1], [1, 3], [0, 3], [3, 1], [1, 0], [3, 0], [0, 1], [0, 3], [1, 0]]
SLOTS = {0: [1, 2, 6, 11, 13, 14, 16, 19], 1: [3, 4, 9, 10, 15, 18], 3: [0, 5, 7, 8, 12, 17]}
DROPPED = [6, 10, 16, 0]


def test_sort_by_expert_by_hand():
    order, counts_E = sort_by_expert(decide(HAND), num_experts=4)
    assert counts_E.tolist() == [8, 6, 0, 6]
    assert order.slot_R.tolist() == SLOTS[0] + SLOTS[1] + SLOTS[3]
    assert [order.slot_R[row] for row in order.row_N] == list(range(20))
    assert (order.topk, order.has_padding, order.has_drops) == (2, False, False)


def kept_but(dropped: list[int]) -> list[list[bool]]:
    return [[2 * t not in dropped, 2 * t + 1 not in dropped] for t in range(10)]


def test_sort_by_expert_leaves_dropped_slots_out():
    order, counts_E = sort_by_expert(decide(HAND, kept_TK=kept_but(DROPPED)), num_experts=4)
    assert counts_E.tolist() == [6, 5, 0, 5]
    assert order.slot_R.tolist() == [1, 2, 11, 13, 14, 19, 3, 4, 9, 15, 18, 5, 7, 8, 12, 17]
    assert [order.row_N[slot] for slot in DROPPED] == [16] * 4
    assert (order.has_padding, order.has_drops) == (False, True)


def test_pad_by_expert_by_hand():
    order, counts_E = pad_by_expert(decide(HAND, kept_TK=kept_but(DROPPED)), num_experts=4, rows_per_expert=7)
    assert counts_E.tolist() == [7, 7, 7, 7]
    padding = [20]
    assert order.slot_R.tolist() == (
        [1, 2, 11, 13, 14, 19] + padding + [3, 4, 9, 15, 18] + 2 * padding + 7 * padding + [5, 7, 8, 12, 17] + 2 * padding
    )
    assert [order.row_N[slot] for slot in DROPPED] == [28] * 4
    assert [order.row_N[slot] for slot in (1, 3, 5)] == [0, 7, 21]


def test_rows_and_tokens_by_hand():
    order, _ = pad_by_expert(decide([[1], [0], [1], [1]], kept_TK=[[1], [1], [0], [1]], num_experts=2), num_experts=2, rows_per_expert=2)
    x_TD = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    assert order.rows(x_TD).flatten().tolist() == [2, 0, 1, 4]
    assert order.weights(x_TD).tolist() == [2, 0, 1, 4]
    assert order.tokens(torch.tensor([[10.0], [20.0], [30.0], [40.0]])).flatten().tolist() == [30, 10, 0, 40]


@pytest.mark.parametrize("rows_per_expert", [None, 8])
@pytest.mark.parametrize("dropped", [None, DROPPED])
@pytest.mark.parametrize("dispatcher", [LocalDispatcher(4), AllToAllDispatcher(4, ep_group=None, etp_group=None)], ids=lambda d: d.name)
def test_identity_experts_return_x_times_the_sum_of_its_weights(dispatcher, rows_per_expert, dropped):
    weights_TK = random(10, 2, seed=1).requires_grad_()
    x_TD, grad_TD = random(10, HIDDEN, seed=2).requires_grad_(), random(10, HIDDEN, seed=3)
    decision = decide(HAND, kept_TK=None if dropped is None else kept_but(dropped), weights_TK=weights_TK)
    dispatched = dispatcher.dispatch(x_TD, decision, rows_per_expert=rows_per_expert)
    y_TD = dispatcher.combine(dispatched.rows_RD * dispatched.weights_R.unsqueeze(1), dispatched.record)
    y_TD.backward(grad_TD)

    kept_TK = torch.tensor(kept_but(dropped or []), dtype=torch.float64)
    factor_T = (weights_TK.detach() * kept_TK).sum(dim=1, keepdim=True)
    torch.testing.assert_close(y_TD, x_TD * factor_T, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(x_TD.grad, grad_TD * factor_T, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(weights_TK.grad, kept_TK * (x_TD.detach() * grad_TD).sum(dim=1, keepdim=True), rtol=1e-12, atol=1e-14)
    assert dispatched.tokens_per_expert_L.sum() == dispatched.rows_RD.size(0)
    assert dispatched.splits is None or list(dispatched.splits) == dispatched.tokens_per_expert_L.tolist()


def test_gradcheck_of_the_row_orders():
    for kept, rows_per_expert in ((None, None), (kept_but(DROPPED), None), (kept_but(DROPPED), 7)):
        decision = decide(HAND, kept_TK=kept)
        if rows_per_expert is None:
            order, _ = sort_by_expert(decision, num_experts=4)
        else:
            order, _ = pad_by_expert(decision, num_experts=4, rows_per_expert=rows_per_expert)
        assert torch.autograd.gradcheck(order.rows, random(10, 2, seed=1).requires_grad_())
        assert torch.autograd.gradcheck(order.tokens, random(order.slot_R.numel(), 2, seed=1).requires_grad_())


def make_dispatcher_with_three_experts():
    AllToAllDispatcher(3, ep_group=dist.group.WORLD, etp_group=None)


def test_experts_that_the_ranks_do_not_divide():
    with pytest.raises(RuntimeError, match=r"num_experts=3: is not divisible by the expert parallel size 2\."):
        run_on_ranks(2, make_dispatcher_with_three_experts)


# Whole layers on ranks against one rank. Every case has four tokens for each of four ranks.

ROUND_ROBIN = [[t % 4, (t + 1) % 4] for t in range(16)]
CASES = {
    "even": (ROUND_ROBIN, 2, {}),
    "uneven": ([[0, 1]] * 3 + [[3, 0]] + [[0, 2]] * 7 + [[2, 1]] + [[0, 3]] * 4, 2, {}),
    "empty experts": ([[1, 2]] * 9 + [[2, 1]] * 7, 2, {}),
    "all tokens to the first expert": ([[0]] * 16, 1, {}),
    "all tokens to the last expert": ([[3]] * 16, 1, {}),
    "one token per rank": ([[2, 1], [3, 0], [2, 0], [2, 3]], 2, {}),
    "every expert": (ROUND_ROBIN, 4, {}),
    "drops": (ROUND_ROBIN[:8] + [[0, 1]] * 8, 2, {"capacity_factor": 0.8}),
    "drops and padding": (ROUND_ROBIN[:8] + [[0, 1]] * 8, 2, {"capacity_factor": 0.8, "pad_to_capacity": True}),
    "padding only": (ROUND_ROBIN, 2, {"capacity_factor": 4.0, "pad_to_capacity": True}),
    "drops of whole experts' worth": ([[3]] * 16, 1, {"capacity_factor": 0.5, "pad_to_capacity": True}),
    "not gated": (ROUND_ROBIN, 2, {"activation": "squared_relu"}),
}
LAYOUTS = {(2, 1): 2, (4, 1): 4, (1, 2): 2, (2, 2): 4}


def run_case(name: str, **groups):
    """Output, gradients of input, router, and expert weights, loss and kept slots, of this rank's tokens."""
    experts, topk, settings = CASES[name]
    x_TD, grad_TD = pushed_tokens(experts), random(len(experts), HIDDEN, seed=9)
    if groups:
        group = groups["microbatch_group"]
        x_TD, grad_TD = (x.chunk(group.size())[group.rank()].clone() for x in (x_TD, grad_TD))
    layer = tiny_layer(topk=topk, aux_loss_coeff=0.3, z_loss_coeff=0.2, **settings, **groups)
    x_TD.requires_grad_()
    y_TD, loss = layer(x_TD)
    ((y_TD * grad_TD).sum() + loss).backward()
    grads = [x_TD.grad, layer.router.weight.grad, layer.experts.weight1.grad, layer.experts.weight2.grad]
    kept_TK = layer.route(x_TD.detach()).kept_TK
    return y_TD.detach(), grads, loss.item(), kept_TK


def run_cases_on_rank(ep: int, etp: int):
    # Megatron's order: neighbours share an expert, every ETP-th rank the expert parallel group.
    ep_groups = [dist.new_group(list(range(i, ep * etp, etp))) for i in range(etp)]
    etp_groups = [dist.new_group(list(range(i * etp, (i + 1) * etp))) for i in range(ep)]
    rank = dist.get_rank()
    groups = {"ep_group": ep_groups[rank % etp], "etp_group": etp_groups[rank // etp], "microbatch_group": dist.group.WORLD}
    return {name: run_case(name, **groups) for name in CASES}


@functools.cache
def on_ranks(ep: int, etp: int):
    return run_on_ranks(ep * etp, run_cases_on_rank, ep, etp)


def join_experts(ranks: list[torch.Tensor], axis: int, halves: int, ep: int, etp: int) -> torch.Tensor:
    """The tensor of all experts from the parts of the ranks: the inverse of `tiny_moe.cut`."""
    whole = []
    for e in range(ep):
        parts = [rank.chunk(halves, dim=axis) for rank in ranks[e * etp : (e + 1) * etp]]
        whole.append(torch.cat([part[half] for half in range(halves) for part in parts], dim=axis))
    return torch.cat(whole)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("ep", "etp"), LAYOUTS)
def test_layer_on_ranks_equals_one_rank(ep, etp, name):
    y_TD, (x_grad, router_grad, grad1, grad2), loss, kept_TK = run_case(name)
    ranks = [rank[name] for rank in on_ranks(ep, etp)]

    def close(actual, expected):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)

    close(torch.cat([rank[0] for rank in ranks]), y_TD)
    close(torch.cat([rank[1][0] for rank in ranks]), x_grad)
    close(sum(rank[1][1] for rank in ranks), router_grad)
    close(join_experts([rank[1][2] for rank in ranks], 1, 1 if name == "not gated" else 2, ep, etp), grad1)
    close(join_experts([rank[1][3] for rank in ranks], 2, 1, ep, etp), grad2)
    assert sum(rank[2] for rank in ranks) == pytest.approx(loss, rel=1e-12)
    if kept_TK is not None:
        assert torch.equal(torch.cat([rank[3] for rank in ranks]), kept_TK)


@pytest.mark.parametrize("name", CASES)
def test_cases_route_as_they_say(name):
    experts, topk, settings = CASES[name]
    decision = tiny_layer(topk=topk, **settings).route(pushed_tokens(experts))
    assert decision.expert_TK[:, : len(experts[0])].sort().values.tolist() == [sorted(row) for row in experts]
    if "drops" in name:
        assert not decision.kept_TK.all()
    # Values at which the experts' contribution is not lost in rounding.
    assert decision.weights_TK.min() > 1e-4


@pytest.mark.parametrize("name", CASES)
def test_all_to_all_without_groups_equals_local(name):
    experts, topk, settings = CASES[name]
    results = []
    for alltoall in (False, True):
        layer = tiny_layer(topk=topk, alltoall=alltoall, **settings)
        x_TD = pushed_tokens(experts).requires_grad_()
        y_TD, _ = layer(x_TD)
        y_TD.square().sum().backward()
        results.append([y_TD, x_TD.grad, layer.experts.weight1.grad, layer.experts.weight2.grad, layer.router.weight.grad])
    for local, through in zip(*results, strict=True):
        assert torch.equal(local, through)
