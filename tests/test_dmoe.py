"""The dropless layer with its experts spread over all ranks, against one rank.

    torchrun --nproc_per_node=2 tests/test_dmoe.py      # or 4, or 8; NCCL with GPUs, else gloo; a few seconds

Compared are outputs and gradients in fp32; the exit code is 1 where one differs. pytest runs it, too.
"""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from helpers.ranks import run_script_on_ranks
from helpers.relative_error import relative_error

# before moe_exp: it may have to put it on the path
from helpers.under_torchrun import leave, on_first_rank, torchrun, torchrun_job
from moe_exp.layers.dispatcher import AllToAllDispatcher, LocalDispatcher
from moe_exp.layers.experts import Experts
from moe_exp.layers.losses import AuxLoss
from moe_exp.layers.microbatch import MoESettings
from moe_exp.layers.moe_layer import MoELayer
from moe_exp.layers.router import Router, RouterConfig

LIMIT = 1e-5
HIDDEN, FFN, EXPERTS = 32, 48, 8
# Tokens per rank, experts per token, and what is added to the logit of expert 0 of every token.
CASES = {
    "balanced": (57, 2, 0.0),
    "skewed": (64, 3, 3.0),
    "all to one expert": (16, 1, 8.0),  # all other ranks get no rows
    "one token per rank": (1, 2, 0.0),
}


def random(*shape: int, seed: int) -> Tensor:
    """The same numbers on every rank and device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def our_layer(topk: int, pull: float, device: torch.device, *, spread: bool) -> MoELayer:
    """Our layer with its experts on this rank, or spread over all ranks, whose tokens then are one batch."""
    group = dist.group.WORLD if spread else None
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if spread else (1, 0)
    router = Router(RouterConfig(hidden_size=HIDDEN, num_experts=EXPERTS, topk=topk), device=device)
    sizes = {"num_local_experts": EXPERTS // ranks, "hidden_size": HIDDEN, "ffn_size": FFN}
    experts = Experts(**sizes, activation="swiglu", backend="loop", device=device)
    with torch.no_grad():
        router.weight.copy_(random(EXPERTS, HIDDEN, seed=1) * HIDDEN**-0.5)
        router.weight[0, 0] += pull  # the first input of every token is 1
        for seed, weight in enumerate(experts.parameters(), start=2):
            whole = random(EXPERTS, *weight.shape[1:], seed=seed) * weight.size(2) ** -0.5
            weight.copy_(whole.chunk(ranks)[rank])
    dispatcher = LocalDispatcher(EXPERTS)
    if spread:
        dispatcher = AllToAllDispatcher(EXPERTS, ep_group=group, etp_group=None)
    settings = MoESettings(losses=(AuxLoss("aux_loss", 0.1),), z_loss_coeff=0.01)
    parts = {"router": router, "dispatcher": dispatcher, "experts": experts}
    return MoELayer(**parts, settings=settings, microbatch_group=group)


def results(layer: MoELayer, x_TD: Tensor, dy_TD: Tensor) -> dict[str, Tensor]:
    x_TD = x_TD.clone().requires_grad_()
    y_TD, loss = layer(x_TD)
    ((y_TD * dy_TD).sum() / HIDDEN + loss).backward()
    router = layer.router.weight.grad
    if layer.microbatch_group is not None:  # an expert's rank has seen all of its tokens, the router its own
        dist.all_reduce(router)
    experts = {f"gradient of {name}": weight.grad for name, weight in layer.experts.named_parameters()}
    return {"output": y_TD, "gradient of x": x_TD.grad, "gradient of router": router, **experts}


def compare(num_tokens: int, topk: int, pull: float, device: torch.device) -> dict[str, float]:
    """Largest relative error over the ranks of every tensor."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x_TD, dy_TD = (random(ranks * num_tokens, HIDDEN, seed=seed).to(device) for seed in (4, 5))
    x_TD[:, 0] = 1
    layer, alone = (our_layer(topk, pull, device, spread=spread) for spread in (True, False))
    found = results(layer, *(whole.chunk(ranks)[rank] for whole in (x_TD, dy_TD)))
    whole = results(alone, x_TD, dy_TD)
    counts_E = alone.statistics.tokens_per_expert_E
    if num_tokens > 1:  # routed as the case says
        assert (counts_E.count_nonzero() == 1) == (topk == 1)
        assert (counts_E[0] > 0.9 * len(x_TD)) == (pull > 0)
    expected = {name: x if "router" in name else x.chunk(ranks)[rank] for name, x in whole.items()}
    errors = torch.tensor([relative_error(found[name], x) for name, x in expected.items()], device=device)
    dist.all_reduce(errors, op=dist.ReduceOp.MAX)
    return dict(zip(expected, errors.tolist(), strict=True))


def main() -> int:
    with torchrun_job() as device:
        ranks = dist.get_world_size()
        on_first_rank(f"dropless, EP={ranks}, {dist.get_backend()}, fp32, torch {torch.__version__}")
        on_first_rank(f"relative errors against one rank, limit {LIMIT:g}")
        worst = 0.0
        for title, case in CASES.items():
            for name, error in compare(*case, device).items():
                worst = max(worst, error)
                on_first_rank(f"{title:20} {name:20} {error:.1e}{'' if error < LIMIT else '   DIFFERS'}")
        on_first_rank(f"{'equal' if worst < LIMIT else 'DIFFERENT'}: the largest error is {worst:.1e}")
        return 0 if worst < LIMIT else 1


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_under_torchrun(ranks):
    result = torchrun(ranks, __file__)
    assert result.returncode == 0, result.stdout + result.stderr
    _is_whole(result.stdout, ranks)


def test_on_forked_ranks():
    codes, printed = run_script_on_ranks(2, main)
    assert codes == [0, 0], printed
    _is_whole(printed, 2)


def _is_whole(printed, ranks):
    assert f"EP={ranks}" in printed
    assert printed.count("gradient of weight2") == len(CASES)


if __name__ == "__main__":
    leave(main())
