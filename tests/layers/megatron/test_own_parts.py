"""Routers and losses of a user's own in Megatron's layer: gradients on every layout."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from helpers.layers.layout_job import CosineRouter, confidence
from helpers.layers.megatron_pair import EXPERTS, FFN, HIDDEN, megatron_config, start_parallel
from helpers.layers.tiny_moe import plain_layer, random, tiny_layer
from helpers.ranks import run_on_ranks
from helpers.relative_error import assert_equal_to
from moe_exp.layers.losses import AuxLoss, entropy_sum
from moe_exp.layers.router import Router, RouterConfig, RoutingDecision, tokens_in_group
from moe_exp.layers.spec import MegatronRouter, decoder_spec, moe_submodule_spec

from megatron.core import parallel_state
from megatron.core.transformer.spec_utils import build_module

LENGTH = 8
LOSSES = (AuxLoss(confidence, 0.5),)
BALANCED = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1}


def drawn(name: str, shape: torch.Size) -> Tensor:
    """Weights of the whole layer."""
    if name == "scale":
        return torch.tensor(3.0)
    return random(*shape, seed={"weight1": 1, "weight2": 2, "weight": 3}[name]).float() * 0.3


def tokens(dp_rank: int) -> tuple[Tensor, Tensor]:
    """A micro-batch [S, 1, D], and the gradient of its output."""
    return random(LENGTH, 1, HIDDEN, seed=10 + dp_rank).float(), random(LENGTH, 1, HIDDEN, seed=20).float()


def in_megatron(tp: int, ep: int) -> dict[str, Tensor]:
    """Gradients of the router, summed as Megatron sums them, and names of its tensors in a checkpoint."""
    start_parallel(tp=tp, ep=ep)
    sizes = {"tensor_model_parallel_size": tp, "sequence_parallel": tp > 1}
    config = megatron_config(ep, "alltoall", BALANCED | sizes)
    spec = moe_submodule_spec("loop", router_class=CosineRouter, losses=LOSSES)
    layer = build_module(spec, config=config).train()
    experts, first = EXPERTS // ep, dist.get_rank() % ep * (EXPERTS // ep)
    with torch.no_grad():
        for name, weight in layer.router.named_parameters():
            weight.copy_(drawn(name, weight.shape))
        for name, weight in layer.experts.named_parameters():
            weight.copy_(drawn(name, (EXPERTS, *weight.shape[1:]))[first : first + experts])
    x, grad = (whole.chunk(tp)[dist.get_rank() % tp] for whole in tokens(dist.get_rank() // tp))
    layer(x.contiguous())[0].backward(grad)
    for weight in layer.router.parameters():
        if weight.sequence_parallel:
            dist.all_reduce(weight.grad, group=parallel_state.get_tensor_model_parallel_group())
        dist.all_reduce(weight.grad, group=parallel_state.get_data_parallel_group())
    assert {"router.weight", "router.scale"} <= set(layer.sharded_state_dict())
    assert isinstance(layer.router, MegatronRouter) and isinstance(layer.router, CosineRouter)
    return {name: weight.grad for name, weight in layer.router.named_parameters()}


def alone(dp: int) -> dict[str, Tensor]:
    """The same in plain torch on this process."""
    losses = (AuxLoss("aux_loss", 0.1), *LOSSES)
    config = RouterConfig(HIDDEN, EXPERTS, topk=2)
    layer = plain_layer(config, FFN, router_class=CosineRouter, losses=losses, batch_dim=1)
    with torch.no_grad():
        for module in (layer.experts, layer.router):
            for name, weight in module.named_parameters():
                weight.copy_(drawn(name, weight.shape))
    for rank in range(dp):
        x, grad = tokens(rank)
        output, loss = layer(x)
        ((output * grad).sum() + loss).backward()
    return {name: weight.grad for name, weight in layer.router.named_parameters()}


@pytest.mark.parametrize(
    ("tp", "ep", "ranks"), [(1, 1, 1), (1, 2, 2), (2, 2, 2), pytest.param(2, 2, 4, marks=pytest.mark.slow)]
)
def test_own_router_and_loss_in_megatron(tp, ep, ranks):
    expected = alone(ranks // tp)
    assert all(grad.abs().mean() > 0.01 for grad in expected.values())
    for found in run_on_ranks(ranks, in_megatron, tp, ep):
        assert_equal_to(1e-5, found, expected)


def own_entropy(decision: RoutingDecision, group: dist.ProcessGroup | None) -> Tensor:
    return entropy_sum(decision.for_losses()[0]) / tokens_in_group(decision, group)


def test_own_function_equals_the_built_in_loss():
    """Also where the choice differs from the score, and with padding."""
    router = {"score": "sigmoid", "expert_bias": True}
    x_TD = random(9, 6, seed=1).requires_grad_()
    padding_T = torch.arange(9) > 6
    found = {}
    for kind in ("entropy", own_entropy):
        layer = tiny_layer(losses=(AuxLoss(kind, 0.3),), router=router)
        _, loss = layer(x_TD, padding_T)
        (grad,) = torch.autograd.grad(loss, layer.router.weight)
        found[kind] = loss.detach(), grad, layer.statistics.sums[-1]
    assert layer.statistics.names[-1] == "aux_losses.own_entropy"
    for mine, theirs in zip(found[own_entropy], found["entropy"], strict=True):
        assert mine.abs().max() > 0 and torch.equal(mine, theirs)


def without_mean(decision: RoutingDecision, group: dist.ProcessGroup | None) -> Tensor:
    return decision.for_losses()[0].amax(dim=1)


@pytest.mark.parametrize(
    ("losses", "match"),
    [
        ([without_mean], r"losses=without_mean: .*\[9\]"),
        ([lambda decision, group: 0.0], "losses=<lambda>: returned 0.0"),
        (
            [lambda decision: decision.scores_TE.sum()],
            r"losses=.*: must be a function with the arguments \(decision",
        ),
        (["entropy"], "losses='entropy': must be a function"),
        ([torch.nn.MSELoss], "losses=.*MSELoss.*: must be a function"),
        ([confidence, AuxLoss(confidence, 0.1)], "losses=confidence,confidence: .* unique"),
    ],
)
def test_refused_losses(losses, match):
    with pytest.raises(ValueError, match=match):
        tiny_layer(losses=losses)(random(9, 6, seed=1))


@pytest.mark.parametrize(
    ("own", "match"),
    [
        ({"router_class": torch.nn.Linear}, r"router_class=.*Router"),
        ({"router_class": CosineRouter(RouterConfig(8, 4, topk=2))}, r"router_class=.*Router"),
        ({"router_class": "cosine"}, r"router_class=.*Router"),
        ({"losses": [AuxLoss("global_aux_loss", 0.1)]}, r"losses=global_aux_loss: .*_load_balancing_type"),
    ],
)
def test_refused_parts_of_a_spec(own, match):
    with pytest.raises(ValueError, match=match):
        decoder_spec(megatron_config(1, "alltoall", BALANCED), **own)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"weights_TK": torch.ones(5)}, r"weights_TK: .* \[5\].* Fix: return shape \[5, 2\]"),
        ({"expert_TK": torch.zeros(4, 2, dtype=torch.int64)}, r"expert_TK: .* Fix: return shape \[5, 2\]"),
        ({"expert_TK": torch.zeros(5, 2, dtype=torch.int32)}, r"expert_TK: .*int32"),
        ({"used_TK": torch.ones(5, 3, dtype=torch.bool)}, "used_TK: "),
        ({"valid_T": torch.ones(6, dtype=torch.bool)}, "valid_T: "),
    ],
)
def test_a_decision_whose_shapes_do_not_match(change, match):
    given = {"expert_TK": torch.zeros(5, 2, dtype=torch.int64), "weights_TK": torch.ones(5, 2)}
    given |= {"scores_TE": torch.ones(5, 4), "logits_TE": torch.ones(5, 4)}
    assert RoutingDecision.of(**given).tokens_per_expert_E.tolist() == [10, 0, 0, 0]
    with pytest.raises(ValueError, match=match):
        RoutingDecision.of(**given | change)


class HalfRouter(Router):
    """Tokens use the second of their two slots only if they are even."""

    def route(self, logits_TE: Tensor, valid_T: Tensor | None) -> RoutingDecision:
        scores_TE = logits_TE.softmax(dim=-1)
        weights_TK, expert_TK = scores_TE.topk(2)
        used_TK = torch.ones_like(expert_TK, dtype=torch.bool)
        used_TK[1::2, 1] = False
        return RoutingDecision.of(
            expert_TK, weights_TK * used_TK, scores_TE=scores_TE, logits_TE=logits_TE, used_TK=used_TK
        )


@pytest.mark.parametrize("kind", ["aux_loss", "seq_aux_loss"])
def test_balancing_losses_count_the_used_slots(kind):
    """E * sum_e f_e P_e with f of the slots that are used, against the formula."""
    layer = tiny_layer(losses=(AuxLoss(kind, 1.0),))
    layer.router = HalfRouter(layer.router.config, dtype=torch.float64)
    x_TD = random(10, 6, seed=3)
    _, loss = layer(x_TD)
    scores_TE = (x_TD @ layer.router.weight.T).softmax(dim=-1)
    chosen_TK = scores_TE.topk(2).indices
    used = [chosen_TK[t, k].item() for t in range(10) for k in range(2) if k == 0 or t % 2 == 0]
    fractions_E = torch.bincount(torch.tensor(used), minlength=4).double() / len(used)
    expected = 4 * (fractions_E * scores_TE.mean(dim=0)).sum()
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=0)


@pytest.mark.parametrize("losses", [confidence, AuxLoss(confidence, 0.5), [confidence, own_entropy]])
def test_one_loss_or_several(losses):
    names = tiny_layer(losses=losses).statistics.names[7:]
    assert names == ("aux_losses.confidence", "aux_losses.own_entropy")[: len(names)] and names
