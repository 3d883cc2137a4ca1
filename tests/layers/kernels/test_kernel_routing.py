"""The layer with the kernels of routing and row order, and without; on a CPU they are interpreted."""

import pytest
import torch
import torch.distributed as dist

from helpers.layers.kernel_device import DEVICE, needs_kernels
from helpers.layers.tiny_moe import EXPERTS, HIDDEN, random, tiny_layer
from helpers.ranks import run_on_ranks
from helpers.relative_error import assert_equal_to
from moe_exp.layers.kernels.launch import INTERPRETED
from moe_exp.layers.losses import AuxLoss
from moe_exp.layers.moe_layer import MoELayer
from moe_exp.layers.router import Router
from moe_exp.layers.router.replay import RoutingReplay

pytestmark = needs_kernels

SUMMED = AuxLoss("aux_loss", 0.5), AuxLoss("global_aux_loss", 0.3)  # which need the sums of scores alone


def layer(*, losses=SUMMED, settings=None, topk=2, **router) -> MoELayer:
    router = {"dtype": "fp32", "global_fractions": True, **router}
    options = {"losses": losses, "z_loss_coeff": 0.1, **(settings or {})}
    made = tiny_layer(topk=topk, router=router, dtype=torch.float32, **options)
    if made.router.config.expert_bias:
        made.router.expert_bias.copy_(random(EXPERTS, seed=4))
    made.router.global_tokens_per_expert.copy_(torch.arange(EXPERTS))
    return made


def run(made: MoELayer, x: torch.Tensor, mask: torch.Tensor | None) -> dict[str, torch.Tensor]:
    x = x.clone().requires_grad_()
    output, loss = made(x, mask)
    grads = torch.autograd.grad((output * x.detach().cos()).sum() + loss, [x, *made.parameters()])
    results = {"output": output, "loss": loss, "sums": made.statistics.sums[1:]}
    results |= {"counts": made.statistics.tokens_per_expert_E}
    return results | {str(i): grad for i, grad in enumerate(grads)}


CASES = {
    "softmax": {},
    "Mixtral": {"pre_softmax": False},
    "one expert": {"topk": 1},
    "expert bias": {"score": "sigmoid", "expert_bias": True, "scaling_factor": 2.5},
    "sqrtsoftplus": {"score": "sqrtsoftplus"},
    "capacity": {"settings": {"capacity_factor": 0.7}},
    "capacity by position, padded": {
        "settings": {"capacity_factor": 0.7, "drop_policy": "position", "pad_to_capacity": True}
    },
    "rounded": {"settings": {"token_rounding": 4}},
    # computed by one kernel
    "one loss": {"losses": SUMMED[:1], "topk": 3},
    "one loss, sigmoid": {"losses": SUMMED[:1], "score": "sigmoid", "expert_bias": True},
    "only the z-loss": {"losses": ()},
}


@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_kernels_change_nothing_that_the_layer_computes(case, padding):
    plain = layer(**CASES[case])
    ours = layer(**CASES[case], use_kernels=True).to(DEVICE)
    x, mask = torch.randn(3, 9, HIDDEN), torch.rand(3, 9) > 0.7 if padding else None
    expected = run(plain, x, mask)
    assert ours.route(x.flatten(0, 1).to(DEVICE)).sums is not None
    ours.load_state_dict(plain.state_dict())
    actual = run(ours, x.to(DEVICE), None if mask is None else mask.to(DEVICE))
    assert_equal_to(1e-5, actual, expected)
    assert ours.statistics.sums[0] == plain.statistics.sums[0]
    assert plain.statistics.sums[0] > 0 or "settings" not in CASES[case]


def decision_of(made: MoELayer):
    return made.to(DEVICE).route(torch.randn(8, HIDDEN, device=DEVICE))


@pytest.mark.parametrize(
    "options", [{"num_groups": 4, "group_topk": 3}, {"losses": (AuxLoss("seq_aux_loss", 1.0),)}]
)
def test_what_the_kernel_does_not_know_goes_step_by_step(options):
    decision = decision_of(layer(**options, use_kernels=True))
    assert decision.sums is None and decision.scores_TE is not None and decision.logits_TE is not None


def test_a_replay_and_a_router_of_its_own_go_step_by_step():
    replayed = layer(use_kernels=True)
    replayed.router.replay = RoutingReplay()
    assert decision_of(replayed).scores_TE is not None
    router = Router(replayed.router.config).to(DEVICE)
    assert router(torch.randn(4, HIDDEN, device=DEVICE)).scores_TE is not None


def test_a_cpu_goes_step_by_step_unless_asked():
    assert layer().route(torch.randn(8, HIDDEN)).sums is None
    assert decision_of(layer(use_kernels=True)).scores_TE is None


def test_jitter_is_in_the_logits_before_the_kernel():
    made = layer(jitter=0.5, use_kernels=True).to(DEVICE)
    x_TD = torch.randn(8, HIDDEN, device=DEVICE)
    first, second = (made.route(x_TD).weights_TK for _ in range(2))
    assert not torch.equal(first, second)


# Rows that travel between ranks

EXCHANGED = ({}, {"capacity_factor": 1.5, "pad_to_capacity": True}, {"token_rounding": 4})


def outputs_of_rank() -> list[torch.Tensor]:
    group = dist.group.WORLD
    x_TD = random(24, HIDDEN, seed=4).chunk(group.size())[group.rank()]
    options = {"ep_group": group, "microbatch_group": group, "router": {"use_kernels": True}}
    layers = [tiny_layer(**options, **settings) for settings in EXCHANGED]
    return [layer(x_TD)[0].detach() for layer in layers]


@pytest.mark.skipif(not INTERPRETED, reason="Triton does not interpret here")
def test_rows_of_the_all_to_all_path_are_moved_by_kernels():
    by_rank = run_on_ranks(2, outputs_of_rank)
    for settings, parts in zip(EXCHANGED, zip(*by_rank, strict=True), strict=True):
        whole = tiny_layer(**settings)(random(24, HIDDEN, seed=4))[0]
        torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-12, atol=0)
