"""The dropless layer with its experts spread over all ranks, against one rank and against plain torch.

    torchrun --nproc_per_node=2 tests/test_dmoe.py      # or 4, or 8; NCCL with GPUs, else gloo; a few seconds

Compared are outputs, gradients, and the weights after one step of SGD, in fp32; the exit code is 1 where one
differs. pytest runs it, too.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass

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
AUX, Z, LEARNING_RATE = 0.1, 0.01, 0.5


@dataclass(frozen=True)
class Case:
    """Tokens per rank, experts per token, and what is added to the logit of expert 0 of every token."""

    num_tokens: int
    topk: int
    pull: float = 0.0


CASES = {
    "balanced": Case(57, topk=2),
    "skewed": Case(64, topk=3, pull=3.0),
    "all to one expert": Case(16, topk=1, pull=8.0),  # all other ranks get no rows
    "one token per rank": Case(1, topk=2),
}
Tensors = dict[str, Tensor]
Forward = Callable[[Tensor], tuple[Tensor, Tensor]]


def random(*shape: int, seed: int) -> Tensor:
    """The same numbers on every rank and device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def initial_weights(pull: float) -> Tensors:
    """Weights of the router and of all experts, in the layout of our layer."""
    router = random(EXPERTS, HIDDEN, seed=1) * HIDDEN**-0.5
    router[0, 0] += pull  # the first input of every token is 1
    weight1 = random(EXPERTS, 2 * FFN, HIDDEN, seed=2) * HIDDEN**-0.5
    return {"router": router, "weight1": weight1, "weight2": random(EXPERTS, HIDDEN, FFN, seed=3) * FFN**-0.5}


def batch(num_tokens: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of all ranks."""
    x_TD = random(num_tokens, HIDDEN, seed=4)
    x_TD[:, 0] = 1
    return x_TD, random(num_tokens, HIDDEN, seed=5)


def plain_torch(x_TD: Tensor, weights: Tensors, topk: int) -> tuple[Tensor, Tensor]:
    """The layer as its formula: every expert computes every token, those that were not chosen weigh zero."""
    logits_TE = x_TD @ weights["router"].T
    scores_TE = logits_TE.softmax(dim=-1)
    chosen_TE = torch.zeros_like(scores_TE).scatter(1, scores_TE.topk(topk).indices, 1.0)
    hidden_TEF = torch.einsum("td,efd->tef", x_TD, weights["weight1"])
    gate_TEF, up_TEF = hidden_TEF.chunk(2, dim=-1)
    y_TED = torch.einsum("tef,edf->ted", torch.nn.functional.silu(gate_TEF) * up_TEF, weights["weight2"])
    balance = EXPERTS * (chosen_TE.mean(dim=0) / topk * scores_TE.mean(dim=0)).sum()
    z = torch.logsumexp(logits_TE, dim=-1).square().mean()
    return (y_TED * (scores_TE * chosen_TE).unsqueeze(-1)).sum(dim=1), AUX * balance + Z * z


def our_layer(weights: Tensors, *, topk: int, spread: bool, device: torch.device) -> MoELayer:
    """Our layer with its experts on this rank, or spread over all ranks, whose tokens then are one batch."""
    group = dist.group.WORLD if spread else None
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if spread else (1, 0)
    router = Router(RouterConfig(hidden_size=HIDDEN, num_experts=EXPERTS, topk=topk), device=device)
    sizes = {"num_local_experts": EXPERTS // ranks, "hidden_size": HIDDEN, "ffn_size": FFN}
    experts = Experts(**sizes, activation="swiglu", backend="loop", device=device)
    with torch.no_grad():
        router.weight.copy_(weights["router"])
        experts.weight1.copy_(weights["weight1"].chunk(ranks)[rank])
        experts.weight2.copy_(weights["weight2"].chunk(ranks)[rank])
    dispatcher = LocalDispatcher(EXPERTS)
    if spread:
        dispatcher = AllToAllDispatcher(EXPERTS, ep_group=group, etp_group=None)
    settings = MoESettings(losses=(AuxLoss("aux_loss", AUX),), z_loss_coeff=Z)
    parts = {"router": router, "dispatcher": dispatcher, "experts": experts}
    return MoELayer(**parts, settings=settings, microbatch_group=group)


def step(forward: Forward, weights: Tensors, x_TD: Tensor, target_TD: Tensor, *, spread=False) -> Tensors:
    """Output, gradients, and the weights and the output after one step of SGD on a squared error summed over
    the tokens.
    """
    x_TD = x_TD.clone().requires_grad_()
    y_TD, loss = forward(x_TD)
    ((y_TD - target_TD).square().sum() / HIDDEN + loss).backward()
    if spread:  # an expert's rank has seen all of its tokens, the router of each rank its own
        dist.all_reduce(weights["router"].grad)
    found = {"output": y_TD, "gradient of x": x_TD.grad}
    found |= {f"gradient of {name}": weight.grad for name, weight in weights.items()}
    torch.optim.SGD(weights.values(), lr=LEARNING_RATE).step()
    with torch.no_grad():
        found |= {f"{name} after a step": weight.clone() for name, weight in weights.items()}
        found["output after a step"] = forward(x_TD)[0]
    return found


def run_layer(layer: MoELayer, x_TD: Tensor, target_TD: Tensor) -> Tensors:
    weights = {"router": layer.router.weight, **dict(layer.experts.named_parameters())}
    return step(layer, weights, x_TD, target_TD, spread=layer.microbatch_group is not None)


def run_plain_torch(weights: Tensors, topk: int, x_TD: Tensor, target_TD: Tensor) -> Tensors:
    weights = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
    return step(lambda x_TD: plain_torch(x_TD, weights, topk), weights, x_TD, target_TD)


def of_this_rank(name: str, whole: Tensor) -> Tensor:
    """This rank's part of a tensor of all tokens or all experts."""
    if "router" in name:
        return whole
    return whole.chunk(dist.get_world_size())[dist.get_rank()]


def compare(case: Case, device: torch.device) -> dict[str, tuple[float, float]]:
    """Largest relative error over the ranks of every tensor, against one rank and against plain torch."""
    x_TD, target_TD = (tensor.to(device) for tensor in batch(case.num_tokens * dist.get_world_size()))
    weights = {name: weight.to(device) for name, weight in initial_weights(case.pull).items()}
    mine = [of_this_rank("tokens", tensor) for tensor in (x_TD, target_TD)]
    options = {"topk": case.topk, "device": device}
    found = run_layer(our_layer(weights, spread=True, **options), *mine)
    alone = our_layer(weights, spread=False, **options)
    references = run_layer(alone, x_TD, target_TD), run_plain_torch(weights, case.topk, x_TD, target_TD)
    errors = [
        [relative_error(y, of_this_rank(name, whole[name])) for whole in references]
        for name, y in found.items()
    ]
    errors = torch.tensor(errors, device=device)
    dist.all_reduce(errors, op=dist.ReduceOp.MAX)
    return {name: (one_rank, plain) for name, (one_rank, plain) in zip(found, errors.tolist(), strict=True)}


def table(title: str, errors: dict[str, tuple[float, float]]) -> str:
    """Relative errors in words, with a mark at those that are not below the limit."""
    lines = [f"{title:24} {'against one rank':>18} {'against plain torch':>20}"]
    for name, pair in errors.items():
        mark = "" if max(pair) < LIMIT else "   DIFFERS"
        lines.append(f"  {name:22} {pair[0]:18.1e} {pair[1]:20.1e}{mark}")
    return "\n".join(lines)


def main() -> int:
    ranks = int(os.environ["WORLD_SIZE"])
    if EXPERTS % ranks:
        if os.environ["RANK"] == "0":
            print(f"nproc_per_node={ranks}: does not divide the {EXPERTS} experts. Fix: use 1, 2, 4 or 8.")
        return 1
    with torchrun_job() as device:
        on_first_rank(f"dropless, EP={ranks}, {dist.get_backend()}, fp32, torch {torch.__version__}")
        on_first_rank(f"relative errors, limit {LIMIT:g}")
        worst = 0.0
        for name, case in CASES.items():
            errors = compare(case, device)
            worst = max(worst, *(max(pair) for pair in errors.values()))
            on_first_rank(table(name, errors))
        equal = worst < LIMIT
        on_first_rank(f"{'equal' if equal else 'DIFFERENT'}: the largest relative error is {worst:.1e}")
        return 0 if equal else 1


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_under_torchrun(ranks):
    result = torchrun(ranks, __file__)
    print(result.stdout)
    assert result.returncode == 0, result.stdout + result.stderr
    _is_whole(result.stdout, ranks)


def test_on_forked_ranks():
    codes, printed = run_script_on_ranks(2, main)
    assert codes == [0, 0], printed
    _is_whole(printed, 2)


def _is_whole(printed, ranks):
    assert f"EP={ranks}" in printed
    assert printed.count("output after a step") == len(CASES)


def test_number_of_ranks_that_does_not_divide_the_experts(monkeypatch, capsys):
    printed = []
    for rank in range(3):
        monkeypatch.setenv("WORLD_SIZE", "3")
        monkeypatch.setenv("RANK", str(rank))
        assert main() == 1
        printed.append(capsys.readouterr().out)
    assert printed == ["nproc_per_node=3: does not divide the 8 experts. Fix: use 1, 2, 4 or 8.\n", "", ""]


def test_cases_route_as_they_say():
    cpu = torch.device("cpu")
    for title, case in CASES.items():
        layer = our_layer(initial_weights(case.pull), topk=case.topk, spread=False, device=cpu)
        tokens_per_expert = layer.route(batch(4 * case.num_tokens)[0]).tokens_per_expert_E
        assert (tokens_per_expert.count_nonzero() == 1) == (title == "all to one expert")
        assert (tokens_per_expert[0] > 0.9 * 4 * case.num_tokens) == (case.pull > 0)


def test_table_marks_what_differs():
    errors = {"output": (1e-7, 2e-5), "gradient of x": (float("inf"), 0.0), "router": (1e-7, 0.0)}
    lines = table("a case", errors).splitlines()
    assert ["DIFFERS" in line for line in lines] == [False, True, True, False]


if __name__ == "__main__":
    leave(main())
