from __future__ import annotations

import math

import pytest
import torch
from tiny_moe import random

from moe_exp.layers.dispatcher import Dispatched, DispatchRecord
from moe_exp.layers.experts import ACTIVATIONS, Experts, squared_relu
from moe_exp.layers.row_order import RowOrder


def formula(name: str, x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    if name == "swiglu":
        return gate / (1 + torch.exp(-gate)) * up
    if name == "geglu":
        return 0.5 * gate * (1 + torch.erf(gate / math.sqrt(2))) * up
    if name == "gelu":
        return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))
    assert name == "squared_relu"
    return x.clamp(min=0) ** 2


def test_every_activation_is_tested():
    assert {name: gated for name, (_, gated) in ACTIVATIONS.items()} == {
        "swiglu": True,
        "geglu": True,
        "gelu": False,
        "squared_relu": False,
    }


def test_unknown_activation():
    with pytest.raises(ValueError, match=r"activation=relu: is not an activation\. Fix: use one of swiglu, geglu, gelu, squared_relu\."):
        Experts(num_local_experts=1, hidden_size=4, ffn_size=4, activation="relu", backend="loop")


def test_squared_relu_by_hand():
    assert squared_relu(torch.tensor([-2.0, 0.0, 3.0])).tolist() == [0, 0, 9]


def make(activation: str, *, splits, hidden: int, ffn: int, dtype=torch.float64, backend="loop", known_splits=True):
    experts = Experts(num_local_experts=len(splits), hidden_size=hidden, ffn_size=ffn, activation=activation, backend=backend, dtype=dtype)
    with torch.no_grad():
        for seed, weight in enumerate(experts.parameters()):
            weight.copy_(random(*weight.shape, seed=seed))
    rows_RD = random(sum(splits), hidden, seed=7).to(dtype).requires_grad_()
    weights_R = random(sum(splits), seed=8).abs().float().requires_grad_()
    nothing = torch.empty(0)
    dispatched = Dispatched(
        rows_RD, weights_R, torch.tensor(splits), DispatchRecord(RowOrder(nothing, nothing, 1)), splits if known_splits else None
    )
    return experts, dispatched


def reference(activation: str, experts: Experts, dispatched: Dispatched, splits):
    """Row by row, w * expert(x) with the weight at the end."""
    rows = [
        leaf.detach().double().requires_grad_() for leaf in (dispatched.rows_RD, dispatched.weights_R, experts.weight1, experts.weight2)
    ]
    x_RD, weights_R, weight1, weight2 = rows
    outs, row = [], 0
    for expert, count in enumerate(splits):
        for _ in range(count):
            outs.append(weights_R[row] * (weight2[expert] @ formula(activation, weight1[expert] @ x_RD[row])))
            row += 1
    return torch.stack(outs), rows


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("splits", [(3, 0, 4), (0, 0, 1), (2, 5, 1)])
@pytest.mark.parametrize(
    ("backend", "dtype", "tolerance", "hidden", "ffn"),
    [("loop", torch.float64, 1e-13, 5, 3), ("loop", torch.float32, 1e-5, 5, 3), ("torch", torch.float32, 1e-5, 8, 4)],
)
def test_experts_against_a_loop_over_rows(activation, splits, backend, dtype, tolerance, hidden, ffn):
    experts, dispatched = make(
        activation, splits=splits, hidden=hidden, ffn=ffn, dtype=dtype, backend=backend, known_splits=splits == (2, 5, 1)
    )
    gated = activation in ("swiglu", "geglu")
    assert experts.weight1.shape == (3, 2 * ffn if gated else ffn, hidden)
    assert experts.weight2.shape == (3, hidden, ffn)
    expected, leaves = reference(activation, experts, dispatched, splits)
    grad_RD = random(*expected.shape, seed=9)
    expected.backward(grad_RD)
    actual = experts(dispatched)
    assert actual.dtype == dtype
    actual.backward(grad_RD.to(dtype))

    tensors = (dispatched.rows_RD, dispatched.weights_R, experts.weight1, experts.weight2)
    pairs = [(actual.detach(), expected.detach())] + [(tensor.grad, leaf.grad) for tensor, leaf in zip(tensors, leaves, strict=True)]
    for one, other in pairs:
        # The router weights are fp32, and so is their gradient.
        limit = 1e-6 if (one.dtype, dtype) == (torch.float32, torch.float64) else tolerance
        assert (one.double() - other).norm() <= limit * other.norm()


def test_gradcheck():
    experts, like = make("swiglu", splits=(2, 0, 1), hidden=3, ffn=2)

    def run(rows_RD, weights_R, weight1, weight2):
        dispatched = Dispatched(rows_RD, weights_R, like.tokens_per_expert_L, like.record, like.splits)
        return torch.func.functional_call(experts, {"weight1": weight1, "weight2": weight2}, (dispatched,))

    weights_R = like.weights_R.detach().double().requires_grad_()
    assert torch.autograd.gradcheck(run, (like.rows_RD, weights_R, experts.weight1, experts.weight2))


def test_bf16_experts_return_bf16():
    experts, dispatched = make("swiglu", splits=(2, 3), hidden=8, ffn=8, dtype=torch.bfloat16)
    expected, _ = reference("swiglu", experts, dispatched, (2, 3))
    actual = experts(dispatched)
    assert actual.dtype == torch.bfloat16
    assert (actual.double() - expected).norm() < 0.02 * expected.norm()
