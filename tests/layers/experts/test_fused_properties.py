"""Properties of the `triton` backend as a whole, for drawn sizes: what the kernels must not depend on, and
what must not spread. Without a GPU they run under Triton's interpreter.
"""

import random as draws
from functools import partial

import numpy as np
import pytest
import torch
from test_fused_experts import doubles, leaves_of, loop_over_tokens, tokens_function, with_gradients
from torch import Tensor

from helpers.layers.tiny_moe import random
from helpers.relative_error import assert_equal_to
from moe_exp.layers.kernels.launch import INTERPRETED

NUMBERS = (0, 1, 2, 3, 7, 13, 31, 61)  # the smallest, and primes
NAMES = ("y", "x", "weights", "weight1", "weight2", "bias1", "bias2")


def drawn(seed: int, *, most_experts: int) -> dict[str, int]:
    pick = draws.Random(seed)
    experts = pick.choice([number for number in (1, 2, 3, 7, 31, 128, 512) if number <= most_experts])
    topk, num_tokens = pick.randint(1, min(16, experts)), pick.choice(NUMBERS)
    widths = {"hidden": pick.choice(NUMBERS[1:]), "ffn": pick.choice(NUMBERS[1:])}
    return {"num_tokens": num_tokens, "topk": topk, "num_experts": experts, **widths}


def tensors(seed: int, **sizes: int) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    """x, router weights, weights and biases; experts of the slots; which slots are kept; gradient of y."""
    num_tokens, topk = sizes["num_tokens"], sizes["topk"]
    expert_TK = random(num_tokens, sizes["num_experts"], seed=seed + 6).argsort(dim=1)[:, :topk]
    kept_TK = random(num_tokens, topk, seed=seed + 7) > -1
    dy_TD = random(num_tokens, sizes["hidden"], seed=seed + 8).float()
    return [leaf.detach() for leaf in leaves_of(bias=True, **sizes)], expert_TK, kept_TK, dy_TD


SIZES = {"num_tokens": 31, "topk": 3, "num_experts": 5, "hidden": 13, "ffn": 7}


def by_kernels(leaves: list[Tensor], expert_TK: Tensor, kept_TK: Tensor, dy: Tensor) -> dict[str, Tensor]:
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    return dict(zip(NAMES, with_gradients(tokens_function(expert_TK, kept_TK), leaves, dy), strict=True))


@pytest.mark.parametrize(
    ("seed", "most_experts"),
    [
        *((seed, 7) for seed in range(6)),
        *(pytest.param(seed, 512, marks=pytest.mark.slow) for seed in range(10, 40)),
    ],
)
def test_drawn_sizes(seed, most_experts):
    sizes = drawn(seed, most_experts=most_experts)
    print(sizes)
    leaves, expert_TK, kept_TK, dy_TD = made = tensors(seed, **sizes)
    found = by_kernels(*made)
    if not (leaves[1] * kept_TK).any():  # no token, or no slot that is kept
        assert not any(found[name].any() for name in NAMES)
        return
    reference = loop_over_tokens(expert_TK, kept_TK, "swiglu")
    expected = dict(zip(NAMES, with_gradients(reference, doubles(leaves), dy_TD), strict=True))
    assert_equal_to(1e-5, {name: found[name].double() for name in NAMES}, expected)


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_permuted_tokens_have_permuted_outputs_to_the_bit(seed, monkeypatch):
    """And gradients of tokens; those of the experts are sums in another order."""
    if INTERPRETED:
        # Some CPUs' BLAS, which numpy.matmul calls, sums a row by its place in the tile; a GPU does not.
        monkeypatch.setattr(np, "matmul", partial(np.einsum, "mk,kn->mn"))
    (x, weights, *matrices), expert_TK, kept_TK, dy = tensors(seed, **SIZES)
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
    (x, weights, *matrices), expert_TK, kept_TK, dy = tensors(5, **SIZES)
    found = by_kernels([x, weights, *matrices], expert_TK, kept_TK, dy)
    leaves = [surrounded(leaf) for leaf in (x, weights, *matrices)]
    other = by_kernels(leaves, expert_TK, kept_TK, surrounded(dy))
    for name in NAMES:
        assert torch.equal(other[name], found[name]), name


def test_nan_stays_in_its_token():
    """A token that is NaN and has no kept slot changes nothing; one that has, itself and its experts."""
    (x, weights, *matrices), expert_TK, kept_TK, dy = tensors(6, **SIZES)
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
