"""The experts one by one: against the general path, which test_experts.py holds against a loop over rows."""

import functools

import pytest
import torch

from helpers.layers.references import formula
from helpers.layers.tiny_moe import random
from moe_exp.layers.activations import ACTIVATIONS, differentiable_weighted_activation
from moe_exp.layers.experts import loop
from moe_exp.layers.experts.loop import expert_loop

SPLITS = [(3, 1, 7, 5), (0, 4, 0, 9), (5, 0, 0, 0), (0, 0, 0, 2), (0, 0, 0, 0), (1, 1, 1, 1)]
HIDDEN, FFN = 6, 4


def leaves(splits, *, gated: bool, bias: bool, dtype=torch.float64, bias2_width=HIDDEN) -> list[torch.Tensor]:
    width, experts, rows = FFN * (1 + gated), len(splits), sum(splits)
    shapes = [(rows, HIDDEN), (rows,), (experts, width, HIDDEN), (experts, HIDDEN, FFN)]
    shapes += [(experts, width), (experts, bias2_width)] if bias else []
    return [random(*shape, seed=seed).to(dtype).requires_grad_() for seed, shape in enumerate(shapes)]


def plain(x, weights_R, weight1, weight2, bias1=None, bias2=None, *, splits, activation, start=0):
    expert_R = torch.arange(len(splits)).repeat_interleave(torch.tensor(splits))
    hidden = torch.einsum("rd,rfd->rf", x, weight1[expert_R])
    if bias1 is not None:
        hidden = hidden + bias1[expert_R]
    y = torch.einsum("rf,rdf->rd", formula(activation, hidden), weight2[expert_R])
    if bias2 is not None:
        y = y + torch.nn.functional.pad(bias2[expert_R], (start, HIDDEN - start - bias2.size(1)))
    return y * weights_R.unsqueeze(1)


def gradients(y, tensors, dy):
    return [y.detach(), *torch.autograd.grad(y, tensors, dy)]


def by_loop(x, weights_R, *parameters, splits, activation="swiglu", order=None, start=0):
    options = {"rows_per_expert_L": torch.tensor(splits), "activation": activation, "order": order}
    return expert_loop(x, weights_R, *parameters, bias2_start=start, **options)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("splits", SPLITS)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 3e-2)]
)
def test_against_plain_torch(activation, bias, splits, dtype, tolerance):
    gated = ACTIVATIONS[activation][1]
    tensors = leaves(splits, gated=gated, bias=bias, dtype=dtype)
    double = [tensor.detach().double().requires_grad_() for tensor in tensors]
    dy = random(sum(splits), HIDDEN, seed=11).to(dtype)
    actual = gradients(by_loop(*tensors, splits=splits, activation=activation), tensors, dy)
    expected = gradients(plain(*double, splits=splits, activation=activation), double, dy.double())
    for one, other in zip(actual, expected, strict=True):
        assert one.dtype == dtype
        assert (one.double() - other).norm() <= tolerance * other.norm()
    empty = torch.tensor([rows == 0 for rows in splits])
    assert not any(gradient[empty].any() for gradient in actual[3:])


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradcheck(activation):
    splits = (2, 0, 1)
    tensors = leaves(splits, gated=ACTIVATIONS[activation][1], bias=True, bias2_width=2)

    run = functools.partial(by_loop, splits=splits, activation=activation, start=3)
    assert torch.autograd.gradcheck(run, tensors)
    expected = plain(*tensors, splits=splits, activation=activation, start=3)
    assert (run(*tensors) - expected).norm() <= 1e-13 * expected.norm()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_weighted_activation_gradcheck(activation):
    hidden_RF, weights_R = random(3, 4, seed=1).requires_grad_(), random(3, seed=2).requires_grad_()
    run = functools.partial(differentiable_weighted_activation, name=activation)
    assert torch.autograd.gradcheck(run, (hidden_RF, weights_R))


@pytest.mark.parametrize("frozen", range(6))
def test_a_frozen_input_gets_no_gradient_and_the_others_are_the_same(frozen):
    splits = (2, 0, 3)
    tensors = leaves(splits, gated=True, bias=True)
    by_loop(*tensors, splits=splits).sum().backward()
    expected = [tensor.grad for tensor in tensors]
    again = [tensor.detach().requires_grad_(index != frozen) for index, tensor in enumerate(tensors)]
    by_loop(*again, splits=splits).sum().backward()
    for index, tensor in enumerate(again):
        assert tensor.grad is None if index == frozen else torch.equal(tensor.grad, expected[index])


@pytest.mark.parametrize("splits", SPLITS)
def test_groups_of_experts_compute_what_single_experts_compute(monkeypatch, splits):
    results, sizes = [], []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    for group_bytes in (0, 8 * 2 * FFN * 8, 2**30):
        monkeypatch.setattr(loop, "_GROUP_BYTES", group_bytes)
        tensors = leaves(splits, gated=True, bias=True)
        hidden = torch.empty(sum(splits), 2 * FFN, dtype=torch.float64)
        groups, rows = loop._groups(splits, hidden)
        assert [expert for group in groups for expert in group] == list(range(len(splits)))
        assert rows == [sum(splits[expert] for expert in group) for group in groups]
        sizes.append(len(groups))
        y = by_loop(*tensors, splits=splits)
        results.append(gradients(y, tensors, random(sum(splits), HIDDEN, seed=11)))
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == 1
    for result in results[1:]:
        for one, other in zip(result, results[0], strict=True):
            assert (one - other).norm() <= 1e-14 * other.norm()


@pytest.mark.parametrize(("num_threads", "size"), [(1, 32), (2, 4), (4, 2)])
def test_every_thread_gets_several_groups(monkeypatch, num_threads, size):
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    groups, rows = loop._groups([1] * 32, torch.empty(32, FFN))
    assert [len(group) for group in groups] == rows == [size] * (32 // size)


@pytest.mark.parametrize("splits", [(40, 41, 39, 40), (150, 3, 4, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_bits_every_time_on_two_threads(splits, dtype):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        tensors = leaves(splits, gated=True, bias=True, dtype=dtype)
        outputs = [by_loop(*tensors, splits=splits) for _ in range(5)]
        runs = [gradients(y, tensors, torch.ones_like(y)) for y in outputs]
        for run in runs[1:]:
            assert all(torch.equal(one, other) for one, other in zip(run, runs[0], strict=True))
    finally:
        torch.set_num_threads(before)
