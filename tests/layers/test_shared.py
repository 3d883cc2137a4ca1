import pytest
import torch

from helpers.layers.tiny_moe import HIDDEN, random, tiny_layer
from moe_exp.layers.experts import SharedExpert


def shared(**settings):
    module = SharedExpert(hidden_size=HIDDEN, ffn_size=5, dtype=torch.float64, **settings)
    for seed, parameter in enumerate(module.parameters()):
        parameter.data.copy_(random(*parameter.shape, seed=seed))
    return module


@pytest.mark.parametrize("gate", [False, True])
def test_one_token_by_the_formula(gate):
    module, x_D = shared(gate=gate), random(HIDDEN, seed=9)
    a, b = (module.weight1 @ x_D).chunk(2)
    expected = module.weight2 @ (a * torch.sigmoid(a) * b)
    if gate:
        expected = expected / (1 + torch.exp(-(module.gate_weight @ x_D)))
    torch.testing.assert_close(module(x_D), expected, rtol=1e-12, atol=0)


def test_without_gate_half():
    module, x_D = shared(activation="squared_relu"), random(HIDDEN, seed=9)
    assert module.weight1.shape == (5, HIDDEN)
    torch.testing.assert_close(
        module(x_D), module.weight2 @ torch.relu(module.weight1 @ x_D).square(), rtol=1e-12, atol=0
    )


def test_the_layer_adds_it_for_every_token_dropped_ones_too():
    x_TD = random(12, HIDDEN, seed=1)
    module = shared(gate=True)
    alone, _ = tiny_layer(capacity_factor=0.5)(x_TD)
    both, _ = tiny_layer(capacity_factor=0.5, shared=module)(x_TD)
    torch.testing.assert_close(both, alone + module(x_TD), rtol=1e-12, atol=0)


def test_errors():
    with pytest.raises(ValueError, match=r"activation=tanh: is not an activation\. Fix: use one of swiglu"):
        SharedExpert(hidden_size=4, ffn_size=4, activation="tanh")
