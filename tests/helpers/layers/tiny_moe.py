"""A small MoELayer whose weights are drawn for all experts and cut for this rank. Shape suffixes in
`moe_exp.layers`.
"""

import torch
from torch import Tensor, nn

from moe_exp.layers.dispatcher import AllToAllDispatcher, LocalDispatcher
from moe_exp.layers.experts import Experts
from moe_exp.layers.groups import group_size
from moe_exp.layers.losses import AuxLoss
from moe_exp.layers.microbatch import MoESettings
from moe_exp.layers.moe_layer import MoELayer
from moe_exp.layers.router import Router, RouterConfig, RoutingDecision
from moe_exp.layers.router.decision import count_per_expert

HIDDEN, FFN, EXPERTS = 6, 4, 4
MODES = {
    "dropless": {},
    "capacity": {"capacity_factor": 0.7},
    "padded": {"capacity_factor": 0.7, "pad_to_capacity": True},
}
# Experts of tokens for `pushed_tokens`, of which experts 0 and 1 get more than their share.
TOKENS = [[t % 4, (t + 1) % 4] for t in range(9)] + [[0, 1]] * 4 + [[2, 0]] * 4


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def identity_router(num_experts: int, topk: int, **settings) -> Router:
    """fp32 router with D = E whose logits are its input."""
    router = Router(RouterConfig(hidden_size=num_experts, num_experts=num_experts, topk=topk, **settings))
    with torch.no_grad():
        router.weight.copy_(torch.eye(num_experts))
    return router


def decide(expert_TK: Tensor, weights_TK: Tensor, kept_TK=None, *, num_experts=EXPERTS) -> RoutingDecision:
    """A decision without scores and logits."""
    counts_E, nothing = count_per_expert(expert_TK.flatten(), num_experts), torch.empty(0)
    return RoutingDecision(expert_TK, weights_TK, nothing, nothing, counts_E, kept_TK)


def tiny_layer(
    *,
    topk=2,
    ep_group=None,
    etp_group=None,
    alltoall=False,
    activation="swiglu",
    microbatch_group=None,
    context_parallel_size=1,
    aux_loss_coeff=0.0,
    losses=(),
    router=None,
    shared=None,
    latent=0,
    backend="loop",
    dtype=torch.float64,
    **settings,
) -> MoELayer:
    """The first E inputs of a token push it to the expert of the same number. `latent`: the experts' width,
    between projections down and up.
    """
    width, gated = latent or HIDDEN, activation == "swiglu"
    options = {"topk": topk, "dtype": "fp64"} | (router or {})
    config = RouterConfig(hidden_size=HIDDEN, num_experts=EXPERTS, **options)
    router = Router(config, microbatch_group=microbatch_group, dtype=dtype)
    ep, etp = group_size(ep_group), group_size(etp_group)
    sizes = {"num_local_experts": EXPERTS // ep, "hidden_size": width, "ffn_size": FFN // etp}
    experts = Experts(**sizes, activation=activation, backend=backend, dtype=dtype)
    weight1_EFD = random(EXPERTS, FFN * (1 + gated), width, seed=1)
    weight2_EDF = random(EXPERTS, width, FFN, seed=2)
    shape = config.num_outputs, HIDDEN
    with torch.no_grad():
        router.weight.copy_(torch.eye(*shape) + 0.1 * random(*shape, seed=3))
        experts.weight1.copy_(cut(weight1_EFD, 1, ep_group, etp_group, halves=1 + gated))
        experts.weight2.copy_(cut(weight2_EDF, 2, ep_group, etp_group))
    dispatcher = AllToAllDispatcher(EXPERTS, ep_group=ep_group, etp_group=etp_group)
    if ep == etp == 1 and not alltoall:
        dispatcher = LocalDispatcher(EXPERTS)
    if aux_loss_coeff:
        losses = (AuxLoss("aux_loss", aux_loss_coeff),)
    return MoELayer(
        router=router,
        dispatcher=dispatcher,
        experts=experts,
        settings=MoESettings(losses=losses, **settings),
        shared=shared,
        down=projection(latent, HIDDEN, seed=6, dtype=dtype) if latent else None,
        up=projection(HIDDEN, latent, seed=7, dtype=dtype) if latent else None,
        microbatch_group=microbatch_group,
        context_parallel_size=context_parallel_size,
    )


def plain_layer(
    config: RouterConfig, ffn_size: int, *, router_class=Router, bias=False, shared=None, **settings
) -> MoELayer:
    """All experts on this rank, in fp32, with weights as they are drawn."""
    sizes = {"num_local_experts": config.num_experts, "hidden_size": config.hidden_size, "ffn_size": ffn_size}
    return MoELayer(
        router=router_class(config),
        dispatcher=LocalDispatcher(config.num_experts),
        experts=Experts(**sizes, activation="swiglu", backend="loop", bias=bias),
        settings=MoESettings(**settings),
        shared=shared,
    )


def projection(outputs: int, inputs: int, *, seed: int, dtype: torch.dtype = torch.float64) -> nn.Linear:
    """A linear layer without bias."""
    linear = nn.Linear(inputs, outputs, bias=False, dtype=dtype)
    with torch.no_grad():
        linear.weight.copy_(random(outputs, inputs, seed=seed) * inputs**-0.5)
    return linear


def cut(weight: Tensor, axis: int, ep_group, etp_group, *, halves: int = 1) -> Tensor:
    """This rank's experts, and its part of the width F at `axis`, of each half of it."""
    if ep_group is not None:
        weight = weight.chunk(ep_group.size())[ep_group.rank()]
    if etp_group is None:
        return weight
    parts = [half.chunk(etp_group.size(), dim=axis) for half in weight.chunk(halves, dim=axis)]
    return torch.cat([part[etp_group.rank()] for part in parts], dim=axis)


def pushed_tokens(expert_TK: list[list[int]], *, seed: int = 5, strength: float = 4.0) -> Tensor:
    """Tokens [T, D] that the router of `tiny_layer` sends to these experts, the first with the larger
    weight.
    """
    x_TD = 0.2 * random(len(expert_TK), HIDDEN, seed=seed)
    for x_D, experts in zip(x_TD, expert_TK, strict=True):
        for k, expert in enumerate(experts):
            x_D[expert] += strength / (k + 1)
    return x_TD
