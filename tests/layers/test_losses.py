import math

import pytest
import torch
import torch.distributed as dist

from helpers.layers.tiny_moe import random
from helpers.ranks import run_on_ranks
from moe_exp.layers.groups import sum_over
from moe_exp.layers.losses import (
    global_balancing_loss_share,
    load_balancing_loss_share,
    sequence_balancing_loss_share,
    z_loss_share,
)
from moe_exp.layers.router.decision import count_per_expert


def double(rows) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def close(actual, expected) -> None:
    torch.testing.assert_close(
        torch.as_tensor(actual), torch.as_tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-14
    )


@pytest.mark.parametrize(
    ("scores", "counts", "topk", "expected"),
    [
        ([[0.25] * 4] * 8, [2, 2, 2, 2], 1, 1.0),  # balanced
        ([[0.25] * 4] * 8, [8, 8, 8, 8], 4, 1.0),
        ([[1.0, 0.0, 0.0, 0.0]] * 8, [8, 0, 0, 0], 1, 4.0),  # collapsed: the number of experts
        # Mean scores .4 .3 .2 .1, fractions .1 .2 .3 .4: 4 * (.04 + .06 + .06 + .04)
        ([[0.5, 0.3, 0.2, 0.0]] * 5 + [[0.3, 0.3, 0.2, 0.2]] * 5, [1, 2, 3, 4], 1, 0.8),
        ([[0.5, 0.3, 0.2, 0.0]] * 5 + [[0.3, 0.3, 0.2, 0.2]] * 5, [2, 4, 6, 8], 2, 0.8),
    ],
)
def test_load_balancing_loss_by_hand(scores, counts, topk, expected):
    close(load_balancing_loss_share(double(scores), torch.tensor(counts), topk=topk), expected)


def test_z_loss_of_ten_tokens_by_hand():
    # Two equal logits of c - ln 2 have logsumexp c: the mean of 0, 1, 4, ..., 81.
    logits_TE = double([[c - math.log(2)] * 2 for c in range(10)])
    close(z_loss_share(logits_TE), 28.5)


def test_no_tokens_cost_nothing():
    empty_TE = torch.zeros(0, 4, requires_grad=True)
    assert load_balancing_loss_share(empty_TE, torch.zeros(4, dtype=torch.int64), topk=1).item() == 0.0
    assert z_loss_share(empty_TE).item() == 0.0


@pytest.mark.parametrize("kind", ["balance", "z", "sequence", "global"])
def test_gradcheck(kind):
    logits_TE = random(6, 4, seed=2).requires_grad_()
    expert_TK, counts_E = logits_TE.topk(2).indices, torch.tensor([5.0, 1, 3, 3])

    def loss(logits_TE):
        scores_TE = logits_TE.softmax(dim=-1)
        if kind == "balance":
            return load_balancing_loss_share(scores_TE, counts_E, topk=2)
        if kind == "z":
            return z_loss_share(logits_TE)
        if kind == "sequence":
            return sequence_balancing_loss_share(scores_TE.view(2, 3, 4), expert_TK.view(2, 3, 2), None)
        return global_balancing_loss_share(scores_TE, counts_E, torch.zeros(4))

    assert torch.autograd.gradcheck(loss, logits_TE)
    assert counts_E.tolist() == [5, 1, 3, 3]  # left as they are


def shares(logits_TE: torch.Tensor, topk: int, group) -> tuple[torch.Tensor, ...]:
    """Both shares of these tokens, and the gradients of each with respect to the scores or logits."""
    logits_TE = logits_TE.clone().requires_grad_()
    scores_TE = logits_TE.detach().softmax(dim=-1).requires_grad_()
    counts_E = count_per_expert(scores_TE.topk(topk).indices.flatten(), scores_TE.size(1))
    all_E = sum_over(counts_E, group)
    balance = load_balancing_loss_share(scores_TE, all_E, topk=topk, group=group)
    z = z_loss_share(logits_TE, group=group)
    (balance + z).backward()
    return balance.detach(), z.detach(), scores_TE.grad, logits_TE.grad, counts_E


def shares_of_rank(logits_TE: torch.Tensor, topk: int):
    group = dist.group.WORLD
    return shares(logits_TE.chunk(group.size())[group.rank()], topk, group)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("topk", [1, 3])
def test_shares_of_ranks_add_up_to_the_loss(num_ranks, topk):
    logits_TE = random(24, 5, seed=7)
    balance, z, scores_grad, logits_grad, _ = shares(logits_TE, topk, None)
    ranks = run_on_ranks(num_ranks, shares_of_rank, logits_TE, topk)
    close(sum(rank[0] for rank in ranks), balance)
    close(sum(rank[1] for rank in ranks), z)
    close(torch.cat([rank[2] for rank in ranks]), scores_grad)
    close(torch.cat([rank[3] for rank in ranks]), logits_grad)
    # The test is worth something: the counts differ by rank.
    assert not torch.equal(ranks[0][4], ranks[1][4])
