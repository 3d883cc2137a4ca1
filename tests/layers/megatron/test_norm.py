from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from helpers.layers.tiny_moe import random
from helpers.ranks import run_on_ranks
from moe_exp.layers.megatron.attention import Norm, ProjectionNorm


def make(normalization: str, *, dtype=torch.float64, sequence_parallel=False, **kwargs) -> torch.nn.Module:
    options = {"normalization": normalization, "sequence_parallel": sequence_parallel}
    return Norm(SimpleNamespace(**options, params_dtype=dtype), 5, **kwargs)


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


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize(("normalization", "number"), [("RMSNorm", 1), ("LayerNorm", 2)])
def test_every_parameter_is_marked_for_sequence_parallelism(normalization, number, sequence_parallel):
    norm = make(normalization, sequence_parallel=sequence_parallel, dtype=torch.bfloat16)
    facts = [(parameter.sequence_parallel, parameter.dtype) for parameter in norm.parameters()]
    assert facts == [(sequence_parallel, torch.bfloat16)] * number


# Over all heads: x [S, B, H, d] with two heads of three channels on each rank of two.
HEADS, SIZE = 4, 3
ONE_RANK = SimpleNamespace(size=lambda: 1, rank=lambda: 0)


def normalized(group, dtype):
    """y, and the gradients of x and of the weight, of this rank's heads."""
    config = SimpleNamespace(params_dtype=dtype, layernorm_epsilon=0.01)
    norm = ProjectionNorm(config, HEADS * SIZE, group=group)
    with torch.no_grad():
        norm.weight.copy_(random(HEADS * SIZE, seed=1).chunk(group.size())[group.rank()])
    whole = (random(5, 2, HEADS, SIZE, seed=seed).to(dtype) for seed in (2, 3))
    x, grad = (part.chunk(group.size(), dim=2)[group.rank()] for part in whole)
    x = x.clone().requires_grad_()
    y = norm(x)
    y.backward(grad)
    return y.detach(), x.grad, norm.weight.grad


def normalized_on_rank(dtype):
    return normalized(dist.group.WORLD, dtype)


def explicit_projection_norm():
    x, grad = (random(5, 2, HEADS, SIZE, seed=seed) for seed in (2, 3))
    x.requires_grad_()
    weight = random(HEADS * SIZE, seed=1).requires_grad_()
    mean = (x * x).sum(dim=(2, 3), keepdim=True) / (HEADS * SIZE)
    y = x / torch.sqrt(mean + 0.01) * weight.view(HEADS, SIZE)
    y.backward(grad)
    return y.detach(), x.grad, weight.grad


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-12), (torch.bfloat16, 0.02)])
def test_projection_norm_against_its_formula(num_ranks, dtype, limit):
    parts = [normalized(ONE_RANK, dtype)] if num_ranks == 1 else run_on_ranks(2, normalized_on_rank, dtype)
    for part, other, dim in zip(zip(*parts, strict=True), explicit_projection_norm(), (2, 2, 0), strict=True):
        found = torch.cat(part, dim=dim)
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), other, rtol=limit, atol=limit)
