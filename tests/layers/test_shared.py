import pytest
import torch

from helpers.layers.references import formula
from helpers.layers.tiny_moe import HIDDEN, random, tiny_layer
from moe_exp.layers.experts import SharedExpert


def shared(**settings):
    module = SharedExpert(hidden_size=HIDDEN, ffn_size=5, dtype=torch.float64, **settings)
    for seed, parameter in enumerate(module.parameters()):
        parameter.data.copy_(random(*parameter.shape, seed=seed))
    return module


@pytest.mark.parametrize(
    ("activation", "gate"), [("swiglu", False), ("swiglu", True), ("squared_relu", False)]
)
def test_one_token_by_the_formula(activation, gate):
    module, x_D = shared(activation=activation, gate=gate), random(HIDDEN, seed=9)
    assert module.weight1.shape == (10 if activation == "swiglu" else 5, HIDDEN)
    expected = module.weight2 @ formula(activation, module.weight1 @ x_D)
    if gate:
        expected = expected / (1 + torch.exp(-(module.gate_weight @ x_D)))
    torch.testing.assert_close(module(x_D), expected, rtol=1e-12, atol=0)


def test_the_layer_adds_it_for_every_token_dropped_ones_too():
    x_TD = random(12, HIDDEN, seed=1)
    module = shared(gate=True)
    alone, _ = tiny_layer(capacity_factor=0.5)(x_TD)
    both, _ = tiny_layer(capacity_factor=0.5, shared=module)(x_TD)
    torch.testing.assert_close(both, alone + module(x_TD), rtol=1e-12, atol=0)


def test_errors():
    with pytest.raises(ValueError, match=r"activation=tanh: .* Fix: use one of swiglu"):
        SharedExpert(hidden_size=4, ffn_size=4, activation="tanh")
