"""One global batch through our layer on a layout of ranks, with gradients summed as Megatron does; for
test_layouts.py.

Ranks are numbered as Megatron numbers them. For attention a rank is dp * TP + tp: the tokens of a micro-batch
are split over TP ranks along the sequence. For experts the same rank is edp * (EP * ETP) + ep * ETP + etp.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moe_exp.layers.dispatcher import AllToAllDispatcher, LocalDispatcher
from moe_exp.layers.dispatcher.allgather import AllGatherDispatcher
from moe_exp.layers.experts import Experts, SharedExpert
from moe_exp.layers.losses import AuxLoss
from moe_exp.layers.microbatch import MoESettings
from moe_exp.layers.moe_layer import MoELayer
from moe_exp.layers.router import Router, RouterConfig, RoutingDecision, tokens_in_group

HIDDEN, FFN, EXPERTS, SHARED_FFN = 10, 8, 8, 6
LENGTH, SEQUENCES, MICROBATCHES, BATCHES = 12, 2, 4, 2
DISPATCHERS = {"alltoall": AllToAllDispatcher, "allgather": AllGatherDispatcher}
Tensors = dict[str, Tensor]


class CosineRouter(Router):
    """Cosines times a learned scale; all experts of a token have the same weight, their mean score."""

    def __init__(self, config: RouterConfig, **kwargs: Any):
        super().__init__(config, **kwargs)
        self.scale = nn.Parameter(torch.full_like(self.weight[0, 0], 4.0))

    def logits(self, x_TD: Tensor) -> Tensor:
        return self.scale * nn.functional.normalize(x_TD) @ nn.functional.normalize(self.weight).t()

    def route(self, logits_TE: Tensor, valid_T: Tensor | None) -> RoutingDecision:
        scores_TE = logits_TE.softmax(dim=-1)
        scores_TK, expert_TK = scores_TE.topk(self.config.topk)
        weights_TK = scores_TK.mean(dim=1, keepdim=True).expand_as(scores_TK)
        return RoutingDecision.of(
            expert_TK, weights_TK, scores_TE=scores_TE, logits_TE=logits_TE, valid_T=valid_T
        )


def confidence(decision: RoutingDecision, group: ProcessGroup | None) -> Tensor:
    """The largest score, a mean over the tokens of the micro-batch."""
    scores_TE, _ = decision.for_losses()
    return scores_TE.amax(dim=1).sum() / tokens_in_group(decision, group)


@dataclass(frozen=True)
class Layout:
    """Sizes of the parallel groups, and the dispatcher; where experts are whole, it is local."""

    ep: int
    tp: int
    etp: int
    ranks: int
    dispatcher: str = "alltoall"

    @property
    def dp(self) -> int:
        return self.ranks // self.tp


@dataclass(frozen=True)
class Case:
    """What the layer does."""

    router: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    padded: int = 0  # most tokens of padding at the end of a sequence
    latent: int = 0  # width of the experts, between projections down and up
    cosine: bool = False  # routes by CosineRouter


@dataclass(frozen=True)
class Groups:
    """Process groups of this rank; None for one rank alone."""

    tp: ProcessGroup | None = None
    ep: ProcessGroup | None = None
    etp: ProcessGroup | None = None
    edp: ProcessGroup | None = None


def _group_of(rank: int, key: Callable[[int], tuple[int, ...]], ranks: int) -> ProcessGroup:
    """The group of all ranks with the same key; every rank has to create every group."""
    mine = None
    for value in sorted({key(other) for other in range(ranks)}):
        group = dist.new_group([other for other in range(ranks) if key(other) == value])
        if key(rank) == value:
            mine = group
    assert mine is not None
    return mine


def make_groups(layout: Layout) -> Groups:
    rank, experts = dist.get_rank(), layout.ep * layout.etp
    return Groups(
        tp=_group_of(rank, lambda r: (r // layout.tp,), layout.ranks),
        ep=_group_of(rank, lambda r: (r // experts, r % layout.etp), layout.ranks),
        etp=_group_of(rank, lambda r: (r // layout.etp,), layout.ranks),
        edp=_group_of(rank, lambda r: (r % experts,), layout.ranks),
    )


def random(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def initial_weights(dtype: torch.dtype, *, num_null_experts: int = 0, latent: int = 0) -> Tensors:
    """Of the whole layer; the router's so that experts get different numbers of tokens, and some get few."""
    router = 0.5 * random(EXPERTS, HIDDEN, seed=1, dtype=dtype)
    router[:, 0] += torch.linspace(1, -1, EXPERTS, dtype=dtype)  # the first input of a token is positive
    width = latent or HIDDEN
    shapes = {
        "weight1": (EXPERTS, 2 * FFN, width), "weight2": (EXPERTS, width, FFN), "shared gate": (1, HIDDEN),
        "shared weight1": (2 * SHARED_FFN, HIDDEN), "shared weight2": (HIDDEN, SHARED_FFN),
    }  # fmt: skip
    shapes |= {"down": (latent, HIDDEN), "up": (HIDDEN, latent)} if latent else {}
    drawn = {
        name: random(*shape, seed=seed, dtype=dtype) * shape[-1] ** -0.5
        for seed, (name, shape) in enumerate(shapes.items(), 2)
    }
    null = 0.5 * random(num_null_experts, HIDDEN, seed=30, dtype=dtype)
    return {"router": torch.cat([router, null])} | drawn


def part_of_rank(name: str, whole: Tensor, ep: int, etp: int, layout: Layout) -> Tensor:
    """This rank's experts, and of each its part of the width; all of any tensor that is not of experts."""
    if name not in ("weight1", "weight2"):
        return whole
    whole = whole.chunk(layout.ep)[ep]
    halves, axis = (whole.chunk(2, dim=1), 1) if name == "weight1" else ((whole,), 2)
    return torch.cat([half.chunk(layout.etp, dim=axis)[etp] for half in halves], dim=axis)


def build(case: Case, groups: Groups, layout: Layout, dtype: torch.dtype) -> tuple[MoELayer, Tensors]:
    """The layer of this rank and its parameters by name."""
    ep, etp = (0 if group is None else group.rank() for group in (groups.ep, groups.etp))
    options = {"topk": 2, "dtype": "fp64" if dtype == torch.float64 else "fp32"} | case.router
    config = RouterConfig(hidden_size=HIDDEN, num_experts=EXPERTS, **options)
    router_class = CosineRouter if case.cosine else Router
    router = router_class(config, microbatch_group=groups.tp, dtype=dtype)
    width = case.latent or HIDDEN
    sizes = {"num_local_experts": EXPERTS // layout.ep, "hidden_size": width, "ffn_size": FFN // layout.etp}
    experts = Experts(**sizes, activation="swiglu", backend="loop", dtype=dtype)
    shared = SharedExpert(hidden_size=HIDDEN, ffn_size=SHARED_FFN, gate=True, dtype=dtype)
    parameters = {"router": router.weight, "weight1": experts.weight1, "weight2": experts.weight2}
    parameters |= {"shared weight1": shared.weight1, "shared weight2": shared.weight2}
    parameters["shared gate"] = shared.gate_weight
    if isinstance(router, CosineRouter):
        parameters["scale"] = router.scale
    down = up = None
    if case.latent:
        down = nn.Linear(HIDDEN, case.latent, bias=False, dtype=dtype)
        up = nn.Linear(case.latent, HIDDEN, bias=False, dtype=dtype)
        parameters |= {"down": down.weight, "up": up.weight}
    with torch.no_grad():
        drawn = initial_weights(dtype, num_null_experts=config.num_null_experts, latent=case.latent)
        for name, whole in drawn.items():
            parameters[name].copy_(part_of_rank(name, whole, ep, etp, layout))
        if config.expert_bias:
            router.expert_bias.copy_(random(EXPERTS, seed=20, dtype=torch.float32) * 0.1)
    dispatcher = LocalDispatcher(EXPERTS)
    if layout.ep * layout.etp > 1:
        dispatcher = DISPATCHERS[layout.dispatcher](EXPERTS, ep_group=groups.ep, etp_group=groups.etp)
    parts = {"router": router, "dispatcher": dispatcher, "experts": experts, "shared": shared}
    settings = MoESettings(**case.settings, batch_dim=1)
    return MoELayer(**parts, settings=settings, down=down, up=up, microbatch_group=groups.tp), parameters


def microbatch(
    batch: int, index: int, case: Case, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Input [S, B, D], gradient of the output, and padding mask [S, B], with different numbers of tokens."""
    seed = 1000 * batch + 10 * index
    x = random(LENGTH, SEQUENCES, HIDDEN, seed=seed, dtype=dtype)
    x[..., 0] = x[..., 0].abs() + 0.5
    grad = random(LENGTH, SEQUENCES, HIDDEN, seed=seed + 1, dtype=dtype)
    if not case.padded:
        return x, grad, None
    mask = torch.zeros(LENGTH, SEQUENCES, dtype=torch.bool)
    for sequence in range(SEQUENCES):
        mask[LENGTH - (index + 2 * sequence) % (case.padded + 1) :, sequence] = True
    mask[:, 0] &= index > 0
    return x, grad, mask


def run_batch(
    layer: MoELayer, batch: int, case: Case, groups: Groups, layout: Layout, dtype: torch.dtype
) -> tuple[Tensor, Tensors]:
    """This rank's share of the loss of a global batch; outputs and input gradients of its tokens by
    micro-batch, unsummed gradients.
    """
    rank, tp = (0, 0) if groups.tp is None else (dist.get_rank(), groups.tp.rank())
    total, of_tokens = torch.zeros((), dtype=dtype), {}
    for index in range(MICROBATCHES):
        if index * layout.dp // MICROBATCHES != rank // layout.tp:
            continue
        part = slice(tp * LENGTH // layout.tp, (tp + 1) * LENGTH // layout.tp)
        x, grad, mask = (
            None if whole is None else whole[part] for whole in microbatch(batch, index, case, dtype)
        )
        x = x.clone().requires_grad_()
        y, auxiliary = layer(x, mask)
        loss = ((y * grad).sum() / (LENGTH * SEQUENCES) + auxiliary) / MICROBATCHES
        loss.backward()
        total += loss.detach()
        of_tokens[f"y {index}"], of_tokens[f"x {index}"] = y.detach(), x.grad
    return total, of_tokens


def run_case(case: Case, groups: Groups, layout: Layout, dtype: torch.dtype) -> dict[str, Any]:
    """Several global batches on this rank: losses, gradients summed over ranks, token tensors, expert bias,
    dropped slots.
    """
    layer, parameters = build(case, groups, layout, dtype)
    everyone = None if groups.tp is None else dist.group.WORLD
    found: dict[str, Any] = {}
    for batch in range(BATCHES):
        layer.zero_grad()
        loss, of_tokens = run_batch(layer, batch, case, groups, layout, dtype)
        sums = {"loss": loss} | {name: parameter.grad for name, parameter in parameters.items()}
        for name, value in sums.items():
            if everyone is not None:
                dist.all_reduce(value, group=groups.edp if name in ("weight1", "weight2") else everyone)
            found[f"{name}, batch {batch}"] = value.clone()
        found |= {f"{name}, batch {batch}": value for name, value in of_tokens.items()}
        layer.router.end_of_batch(everyone)
        for name in ("expert_bias", "l1_factor"):
            if hasattr(layer.router, name):
                found[f"{name}, batch {batch}"] = getattr(layer.router, name).clone()
    found["dropped"] = layer.statistics.sums[0].clone()
    return found


def run_on_rank(
    layout: Layout, cases: dict[str, Case], dtypes: list[torch.dtype]
) -> dict[tuple[str, torch.dtype], dict[str, Any]]:
    """Every case in every dtype on this rank of a job."""
    groups = make_groups(layout)
    return {
        (name, dtype): run_case(case, groups, layout, dtype)
        for name, case in cases.items()
        for dtype in dtypes
    }


def balancing(**coeffs: float) -> tuple[AuxLoss, ...]:
    return tuple(AuxLoss(kind, coeff) for kind, coeff in coeffs.items())
