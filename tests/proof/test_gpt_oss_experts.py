"""Our experts against those of gpt-oss, with biases and the clamped SwiGLU: outputs and every gradient."""

import pytest
import torch
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from helpers.layers.tiny_moe import random
from helpers.relative_error import assert_equal_to
from moe_exp.layers.experts import Experts, RoutedTokens
from moe_exp.layers.router import RoutingDecision

TOKENS, HIDDEN, FFN, EXPERTS = 17, 12, 10, 5
SHAPES = {
    "weight1": (EXPERTS, 2 * FFN, HIDDEN), "weight2": (EXPERTS, HIDDEN, FFN), "bias1": (EXPERTS, 2 * FFN),
    "bias2": (EXPERTS, HIDDEN),
}  # fmt: skip


@pytest.mark.parametrize(("backend", "dtype"), [("loop", torch.float64), ("triton", torch.float32)])
def test_experts(backend, dtype):
    parameters = {name: 2 * random(*shape, seed=seed) for seed, (name, shape) in enumerate(SHAPES.items())}
    inputs = {"x": random(TOKENS, HIDDEN, seed=4), "weights": random(TOKENS, 2, seed=5).abs()}
    expert_TK = random(TOKENS, EXPERTS, seed=6).argsort(dim=1)[:, :2]
    dy_TD = random(TOKENS, HIDDEN, seed=7)

    config = GptOssConfig(hidden_size=HIDDEN, intermediate_size=FFN, num_local_experts=EXPERTS)
    config._experts_implementation = "eager"
    theirs = GptOssExperts(config).double()
    # Theirs are in (in, out) order, and gates and ups alternate.
    leaves = {name: value.clone().requires_grad_() for name, value in (parameters | inputs).items()}
    halves = (leaves[name].chunk(2, dim=1) for name in ("weight1", "bias1"))
    weight, bias = (torch.stack(pair, dim=2).flatten(1, 2) for pair in halves)
    given = {"gate_up_proj": weight.mT, "gate_up_proj_bias": bias}
    given |= {"down_proj": leaves["weight2"].mT, "down_proj_bias": leaves["bias2"]}
    y_TD = torch.func.functional_call(theirs, given, (leaves["x"], expert_TK, leaves["weights"]))
    y_TD.backward(dy_TD)
    expected = {"y": y_TD.detach(), **{name: leaf.grad for name, leaf in leaves.items()}}
    hidden = torch.einsum("td,ewd->tew", inputs["x"], parameters["weight1"])
    assert 0.1 < (hidden.abs() > 7).double().mean() < 0.9

    ours = Experts(
        num_local_experts=EXPERTS, hidden_size=HIDDEN, ffn_size=FFN, activation="clamped_swiglu",
        backend=backend, bias=True, dtype=dtype,
    )  # fmt: skip
    ours.load_state_dict(parameters)
    x_TD, weights_TK = (value.to(dtype).requires_grad_() for value in inputs.values())
    nothing = torch.empty(0)
    counts_E = expert_TK.flatten().bincount(minlength=EXPERTS)
    decision = RoutingDecision(expert_TK, weights_TK, nothing, nothing, counts_E)
    y_TD = ours(RoutedTokens(x_TD, decision))
    y_TD.backward(dy_TD.to(dtype))
    found = {"y": y_TD.detach(), "x": x_TD.grad, "weights": weights_TK.grad}
    found |= {name: parameter.grad for name, parameter in ours.named_parameters()}
    assert_equal_to(1e-13 if dtype == torch.float64 else 1e-5, found, expected)
