"""What every provider of `bench_gpu_layer.py` gets (weights, tokens, routing, output gradient), the right
results, and the comparison.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from gpu_floors import Shape
from torch import Tensor, nn

from moe_exp.layers.router.assignment import zipf_experts

ROUTINGS = ("balanced", "zipf")
# Relative norms. The reference is exact, so what is allowed is the rounding of operands and of results to the
# dtype.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
# Other people's gradient of the router weights may be so many times as far off: liger-kernel 0.8.5 adds it up
# by atomics in the dtype of the tokens, one addition per 128 columns of F. Simulated for F = 14336: 1.3e-2 in
# bf16, 1.6e-3 in fp16.
PEER_ROUTER_FACTOR = 3
RESULTS = ("output", "x", "weight1", "weight2", "router weights")


@dataclass(frozen=True)
class Weights:
    """Of all experts, in torch's order, gate half first; they require gradients.

    Args:
        weight1_LWD: [E, 2F, D].
        weight2_LDF: [E, D, F].
    """

    weight1_LWD: nn.Parameter
    weight2_LDF: nn.Parameter


@dataclass(frozen=True)
class Routing:
    """Where the tokens go.

    Args:
        expert_TK: int64, K different experts of each token.
        weights_TK: fp32 router weights, with gradient.
        counts_E: rows per expert, int64, on the device.
        splits: the same on the host for rows that arrive from other ranks, where the exchange had to know
            them; else None.
    """

    expert_TK: Tensor
    weights_TK: Tensor
    counts_E: Tensor
    splits: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Inputs:
    """One set: tokens with gradient, routing, and the gradient of the output."""

    x_TD: Tensor
    routing: Routing
    dy_TD: Tensor

    @property
    def num_bytes(self) -> int:
        return sum(
            x.numel() * x.itemsize
            for x in (self.x_TD, self.dy_TD, self.routing.expert_TK, self.routing.weights_TK)
        )


@dataclass(frozen=True)
class Leaves:
    """Weights as a provider has them: parameters in the memory of `Weights`, and how their gradients become
    those of the two weights.
    """

    parameters: Sequence[nn.Parameter]
    join: Callable[[Sequence[Tensor]], list[Tensor]] = list


def whole(weights: Weights) -> Leaves:
    """The two weights."""
    return Leaves([weights.weight1_LWD, weights.weight2_LDF])


def gate_and_up(weights: Weights) -> Leaves:
    """Gate [E, F, D], up [E, F, D] and down projection: as parts of one parameter autograd would put two
    gradients together.
    """
    halves = weights.weight1_LWD.detach().chunk(2, dim=1)
    return Leaves(
        [*map(nn.Parameter, halves), weights.weight2_LDF],
        lambda grads: [torch.cat(grads[:2], dim=1), grads[2]],
    )


def one_per_expert(weights: Weights) -> Leaves:
    """[2F, D] of every expert, then [D, F] of every expert: as parts of one parameter autograd would put E
    gradients together.
    """
    parts = [w for weight in (weights.weight1_LWD, weights.weight2_LDF) for w in weight.detach().unbind(0)]
    num_experts = len(parts) // 2
    return Leaves(
        [*map(nn.Parameter, parts)],
        lambda grads: [torch.stack(list(grads[:num_experts])), torch.stack(list(grads[num_experts:]))],
    )


def draw_weights(shape: Shape, *, dtype: torch.dtype, device: torch.device, seed: int = 1) -> Weights:
    """Normal, with standard deviation 1 / sqrt(inputs)."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def draw(*size: int) -> nn.Parameter:
        # Expert by expert: in fp32 all of them would be twice the memory of the weights.
        weights = torch.empty(size, dtype=dtype, device=device)
        for weight in weights:
            weight.copy_(
                torch.empty(size[1:], device=device).normal_(std=size[-1] ** -0.5, generator=generator)
            )
        return nn.Parameter(weights)

    return Weights(
        draw(shape.experts, 2 * shape.ffn, shape.hidden), draw(shape.experts, shape.hidden, shape.ffn)
    )


def draw_inputs(shape: Shape, routing: str, *, dtype: torch.dtype, device: torch.device, seed: int) -> Inputs:
    """Normal tokens and output gradient, and routing of the named kind."""
    generator = torch.Generator(device=device).manual_seed(seed)
    x_TD, dy_TD = (
        torch.randn(shape.tokens, shape.hidden, device=device, generator=generator).to(dtype)
        for _ in range(2)
    )
    expert_TK = draw_experts(shape, routing, device=device, generator=generator)
    if shape.arrives:
        expert_TK = expert_TK.sort(dim=0).values
    weights_TK = torch.rand(shape.tokens, shape.topk, device=device, generator=generator) + 0.1
    weights_TK = weights_TK / weights_TK.sum(dim=1, keepdim=True) if shape.topk > 1 else weights_TK
    counts_E = torch.bincount(expert_TK.flatten(), minlength=shape.experts)
    splits = tuple(counts_E.tolist()) if shape.arrives else None
    return Inputs(
        x_TD.requires_grad_(), Routing(expert_TK, weights_TK.requires_grad_(), counts_E, splits), dy_TD
    )


def draw_experts(shape: Shape, routing: str, *, device: torch.device, generator: torch.Generator) -> Tensor:
    """[T, K]: `balanced`, every expert the same number of rows, dealt out at random; `zipf`, expert e in
    proportion to 1 / (e + 1).
    """
    if routing == "zipf":
        expert_TK = zipf_experts(
            shape.tokens, num_experts=shape.experts, topk=shape.topk, exponent=1.0, device=device
        )
        return expert_TK[torch.randperm(shape.tokens, device=device, generator=generator)]
    if shape.rows % shape.experts or shape.experts % shape.topk:
        raise ValueError(
            f"routing=balanced: {shape.rows} rows cannot be dealt evenly to {shape.experts} experts. Fix: use"
            " zipf."
        )
    deals = torch.rand(shape.rows // shape.experts, shape.experts, device=device, generator=generator)
    return deals.argsort(dim=1).view(shape.tokens, shape.topk)


@torch.no_grad()
def reference(inputs: Inputs, weights: Weights) -> list[Tensor]:
    """RESULTS in float64, expert by expert: y = sum_k w_k (silu(x G^T) * x U^T) V^T and its gradients,
    written out by hand.
    """
    x_TD, dy_TD = inputs.x_TD.double(), inputs.dy_TD.double()
    expert_TK, weights_TK = inputs.routing.expert_TK, inputs.routing.weights_TK.double()
    y_TD, dx_TD, dweights_TK = torch.zeros_like(x_TD), torch.zeros_like(x_TD), torch.zeros_like(weights_TK)
    dweight1_LWD, dweight2_LDF = (
        torch.zeros_like(w, dtype=torch.float32) for w in (weights.weight1_LWD, weights.weight2_LDF)
    )
    for expert in range(weights.weight1_LWD.size(0)):
        token_R, slot_R = (expert_TK == expert).nonzero(as_tuple=True)
        weight1_WD, weight2_DF = weights.weight1_LWD[expert].double(), weights.weight2_LDF[expert].double()
        x_RD, dy_RD, weights_R1 = x_TD[token_R], dy_TD[token_R], weights_TK[token_R, slot_R].unsqueeze(1)
        gate_RF, up_RF = (x_RD @ weight1_WD.t()).chunk(2, dim=1)
        sigmoid_RF = gate_RF.sigmoid()
        silu_RF = gate_RF * sigmoid_RF
        active_RF = silu_RF * up_RF
        y_TD.index_add_(0, token_R, weights_R1 * (active_RF @ weight2_DF.t()))
        dactive_RF = dy_RD @ weight2_DF
        dweights_TK[token_R, slot_R] = (dactive_RF * active_RF).sum(dim=1)
        dweight2_LDF[expert] = dy_RD.t() @ (weights_R1 * active_RF)
        dactive_RF = dactive_RF * weights_R1
        dgate_RF = dactive_RF * up_RF * (sigmoid_RF + silu_RF * (1 - sigmoid_RF))
        dhidden_RW = torch.cat([dgate_RF, dactive_RF * silu_RF], dim=1)
        dweight1_LWD[expert] = dhidden_RW.t() @ x_RD
        dx_TD.index_add_(0, token_R, dhidden_RW @ weight1_WD)
    return [x.float() for x in (y_TD, dx_TD, dweight1_LWD, dweight2_LDF, dweights_TK)]


def bounds(dtype: torch.dtype, *, of_peer: bool) -> dict[str, float]:
    """The largest error of every result."""
    return dict.fromkeys(RESULTS, TOLERANCE[dtype]) | {
        "router weights": TOLERANCE[dtype] * (PEER_ROUTER_FACTOR if of_peer else 1)
    }


def errors(results: list[Tensor], expected: list[Tensor]) -> dict[str, float]:
    """Relative norm of every result; inf where something is not finite, which no comparison with a bound
    would catch for NaN.
    """
    return {name: _error(one, other) for name, one, other in zip(RESULTS, results, expected, strict=True)}


def _error(one: Tensor, other: Tensor) -> float:
    if one.shape != other.shape:
        return float("inf")
    # In parts: a difference in float64 would be four times the memory of the largest weight.
    parts = list(zip(one.detach().chunk(8), other.chunk(8), strict=True))
    difference = sum(float((a.double() - b.double()).square().sum()) for a, b in parts)
    error = (difference / sum(float(b.double().square().sum()) for _, b in parts)) ** 0.5
    return error if error < float("inf") else float("inf")
