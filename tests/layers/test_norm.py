from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from tiny_moe import random

from moe_exp.layers.norm import Norm, choose_norm


def make(normalization: str, *, dtype=torch.float64, sequence_parallel=False, **kwargs) -> torch.nn.Module:
    config = SimpleNamespace(normalization=normalization, sequence_parallel=sequence_parallel, params_dtype=dtype)
    return Norm(config, 5, **kwargs)


def rms_norm(x, weight, eps):
    return x / torch.sqrt((x * x).sum(dim=-1, keepdim=True) / 5 + eps) * weight


def layer_norm(x, weight, bias, eps):
    centred = x - x.sum(dim=-1, keepdim=True) / 5
    return rms_norm(centred, weight, eps) + bias


@pytest.mark.parametrize(("normalization", "formula"), [("RMSNorm", rms_norm), ("LayerNorm", layer_norm)])
@pytest.mark.parametrize("eps", [1e-5, 0.1])
def test_norm_against_its_formula(normalization, formula, eps):
    norm = make(normalization, eps=eps)
    with torch.no_grad():
        for seed, parameter in enumerate(norm.parameters()):
            parameter.copy_(random(5, seed=seed))
    x, grad = random(3, 2, 5, seed=7).requires_grad_(), random(3, 2, 5, seed=8)
    expected = formula(x, *norm.parameters(), eps)
    leaves = (x, *norm.parameters())
    expected_grads = torch.autograd.grad(expected, leaves, grad)
    actual = norm(x)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    for one, other in zip(torch.autograd.grad(actual, leaves, grad), expected_grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_rms_norm_by_hand():
    norm = make("RMSNorm", eps=0.0)
    x_D = torch.tensor([2.0, 4.0, 0.0, 2.0, 1.0], dtype=torch.float64)
    assert norm(x_D).tolist() == pytest.approx([x / math.sqrt(5) for x in (2, 4, 0, 2, 1)])


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize(("normalization", "names"), [("RMSNorm", {"weight"}), ("LayerNorm", {"weight", "bias"})])
def test_every_parameter_is_marked_for_sequence_parallelism(normalization, names, sequence_parallel):
    norm = make(normalization, sequence_parallel=sequence_parallel, dtype=torch.bfloat16)
    parameters = dict(norm.named_parameters())
    assert set(parameters) == names
    assert all(parameter.sequence_parallel is sequence_parallel for parameter in parameters.values())
    assert all(parameter.dtype == torch.bfloat16 for parameter in parameters.values())


def test_choose_norm():
    assert choose_norm("cpu") == ("torch", "torch.nn.RMSNorm and LayerNorm, with sequence parallelism, on cpu")
