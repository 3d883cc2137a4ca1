"""Properties of the `triton` backend as a whole, for drawn sizes: what the kernels must not depend on, and
what must not spread. Without a GPU they run under Triton's interpreter.
"""

import random as draws
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from helpers.layers.tiny_moe import random
from helpers.relative_error import assert_equal_to
from moe_exp.layers.experts.fused import experts_of_tokens
from moe_exp.layers.kernels.launch import INTERPRETED

NUMBERS = (0, 1, 2, 3, 7, 13, 31, 61)  # the smallest, and primes
NAMES = ("y", "x", "weights", "weight1", "weight2", "bias1", "bias2")


class Sizes(NamedTuple):
    tokens: int
    topk: int
    experts: int
    hidden: int
    ffn: int


def drawn(seed: int, *, most_experts: int) -> Sizes:
    pick = draws.Random(seed)
    experts = pick.choice([number for number in (1, 2, 3, 7, 31, 128, 512) if number <= most_experts])
    topk = pick.randint(1, min(16, experts))
    return Sizes(pick.choice(NUMBERS), topk, experts, pick.choice(NUMBERS[1:]), pick.choice(NUMBERS[1:]))


def tensors(sizes: Sizes, seed: int) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    """x, router weights, weights and biases; experts of the slots; which slots are kept; gradient of y."""
    tokens, topk, experts, hidden, ffn = sizes
    shapes = [(tokens, hidden), (tokens, topk), (experts, 2 * ffn, hidden), (experts, hidden, ffn)]
    shapes += [(experts, 2 * ffn), (experts, hidden)]
    leaves = [random(*shape, seed=seed + place).float() for place, shape in enumerate(shapes)]
    expert_TK = random(tokens, experts, seed=seed + 6).argsort(dim=1)[:, :topk]
    kept_TK = random(tokens, topk, seed=seed + 7) > -1
    return leaves, expert_TK, kept_TK, random(tokens, hidden, seed=seed + 8).float()


def by_kernels(leaves: list[Tensor], expert_TK: Tensor, kept_TK: Tensor, dy: Tensor) -> dict[str, Tensor]:
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    x, weights, *matrices = leaves
    y = experts_of_tokens(x, weights, expert_TK, kept_TK, *matrices, activation="swiglu")
    return dict(zip(NAMES, (y.detach(), *torch.autograd.grad(y, leaves, dy)), strict=True))


def in_float64(leaves: list[Tensor], expert_TK: Tensor, kept_TK: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """All experts for all tokens, in plain torch."""
    leaves = [leaf.double().requires_grad_() for leaf in leaves]
    x, weights, weight1, weight2, bias1, bias2 = leaves
    gate, up = (torch.einsum("td,ewd->tew", x, weight1) + bias1).chunk(2, dim=2)
    out_TED = torch.einsum("tef,edf->ted", torch.nn.functional.silu(gate) * up, weight2) + bias2
    share_TE = torch.zeros(out_TED.shape[:2], dtype=x.dtype).scatter_add(1, expert_TK, weights * kept_TK)
    y = torch.einsum("te,ted->td", share_TE, out_TED)
    return dict(zip(NAMES, (y.detach(), *torch.autograd.grad(y, leaves, dy.double())), strict=True))


@pytest.mark.parametrize(
    ("seed", "most_experts"),
    [
        *((seed, 7) for seed in range(6)),
        *(pytest.param(seed, 512, marks=pytest.mark.slow) for seed in range(10, 40)),
    ],
)
def test_drawn_sizes(seed, most_experts):
    sizes = drawn(seed, most_experts=most_experts)
    made = tensors(sizes, seed)
    print(sizes)
    found, expected = by_kernels(*made), in_float64(*made)
    if not (made[0][1] * made[2]).any():  # no token, or no slot that is kept
        assert not any(found[name].any() for name in NAMES)
        return
    assert_equal_to(1e-5, {name: found[name].double() for name in NAMES}, expected)


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_permuted_tokens_have_permuted_outputs_to_the_bit(seed, monkeypatch):
    """And gradients of tokens; those of the experts are sums in another order."""
    if INTERPRETED:
        # Some CPUs' BLAS, which numpy.matmul calls, sums a row by its place in the tile; a GPU does not.
        monkeypatch.setattr(np, "matmul", partial(np.einsum, "mk,kn->mn"))
    (x, weights, *matrices), expert_TK, kept_TK, dy = tensors(Sizes(31, 3, 5, 13, 7), seed)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    found = by_kernels([x, weights, *matrices], expert_TK, kept_TK, dy)
    other = by_kernels([x[order], weights[order], *matrices], expert_TK[order], kept_TK[order], dy[order])
    for name in ("y", "x"):
        assert torch.equal(other[name], found[name][order]), name
    found["weights"] = found["weights"][order]  # torch multiplies the gradient by the second bias
    assert_equal_to(1e-6, {n: other[n] for n in NAMES[2:]}, {n: found[n] for n in NAMES[2:]})


def surrounded(x: Tensor) -> Tensor:
    """The same values in the middle of a buffer of NaN, in every dimension."""
    buffer = torch.full([size + 6 for size in x.shape], float("nan"))
    inside = buffer[tuple(slice(3, 3 + size) for size in x.shape)]
    return inside.copy_(x)


def test_what_is_around_the_tensors_is_not_read():
    (x, weights, *matrices), expert_TK, kept_TK, dy = tensors(Sizes(31, 2, 3, 13, 7), seed=5)
    found = by_kernels([x, weights, *matrices], expert_TK, kept_TK, dy)
    leaves = [surrounded(leaf) for leaf in (x, weights, *matrices)]
    other = by_kernels(leaves, expert_TK, kept_TK, surrounded(dy))
    for name in NAMES:
        assert torch.equal(other[name], found[name]), name


def test_nan_stays_in_its_token():
    """A token that is NaN and has no kept slot changes nothing; one that has, itself and its experts."""
    (x, weights, *matrices), expert_TK, kept_TK, dy = tensors(Sizes(13, 2, 5, 13, 7), seed=6)
    kept_TK[4], kept_TK[9] = False, True
    clean = by_kernels([x, weights, *matrices], expert_TK, kept_TK, dy)
    x, dy = x.clone(), dy.clone()
    x[4] = dy[4] = float("nan")
    found = by_kernels([x, weights, *matrices], expert_TK, kept_TK, dy)
    for name in NAMES:
        assert torch.equal(found[name], clean[name]), name
    x[9] = float("nan")
    found = by_kernels([x, weights, *matrices], expert_TK, kept_TK, dy)
    others = torch.arange(len(x)) != 9
    for name in ("y", "x", "weights"):
        assert torch.equal(found[name][others], clean[name][others]), name
    assert found["y"][9].isnan().all()
    untouched = [expert for expert in range(5) if expert not in expert_TK[9].tolist()]
    for name in NAMES[3:]:
        assert torch.equal(found[name][untouched], clean[name][untouched]), name
