import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from helpers.layers.tiny_moe import identity_router, random
from helpers.ranks import run_on_ranks
from moe_exp.layers.router.assignment import best_experts, sinkhorn

# By how much ten tokens prefer expert 0 to expert 1: all do, and symmetrically around 5, which the balance
# therefore takes off.
MARGINS = [9.0, 1.0, 4.5, 5.5, 8.0, 2.0, 7.0, 3.0, 6.0, 4.0]
LOGITS = torch.tensor([[margin, 0.0] for margin in MARGINS])


def test_sinkhorn_by_hand():
    plan_TE = sinkhorn(LOGITS, tolerance=1e-7)
    torch.testing.assert_close(plan_TE.sum(dim=1), torch.full((10,), 0.1), rtol=1e-3, atol=0)
    torch.testing.assert_close(plan_TE.sum(dim=0), torch.full((2,), 0.5), rtol=1e-3, atol=0)
    ratios_T = torch.tensor(MARGINS).sub(5).exp()
    torch.testing.assert_close(plan_TE[:, 0] / plan_TE[:, 1], ratios_T, rtol=2e-2, atol=0)


def test_sinkhorn_router_by_hand():
    router = identity_router(2, 1, assignment="sinkhorn")
    decision = router(LOGITS)
    assert decision.expert_TK.flatten().tolist() == [0, 1, 1, 0, 0, 1, 0, 1, 0, 1]
    chosen = [margin if margin > 5 else 0.0 for margin in MARGINS]
    torch.testing.assert_close(decision.weights_TK.flatten(), torch.tensor(chosen).sigmoid())
    # A token that is evaluated takes the expert that it prefers, whoever its neighbours are.
    assert router.eval()(LOGITS).expert_TK.flatten().tolist() == [0] * 10


def test_sinkhorn_weights_of_two_experts_are_the_softmax():
    logits_TE = random(12, 4, seed=3).float()
    decision = identity_router(4, 2, assignment="sinkhorn")(logits_TE)
    torch.testing.assert_close(decision.weights_TK, logits_TE.softmax(dim=-1).gather(1, decision.expert_TK))


@given(st.integers(0, 12), st.integers(1, 6), st.floats(0.1, 100.0))
def test_sinkhorn_ends_with_finite_rows(num_tokens, num_experts, scale):
    plan_TE = sinkhorn(random(num_tokens, num_experts, seed=2) * scale)
    assert plan_TE.shape == (num_tokens, num_experts)
    assert plan_TE.isfinite().all()


def test_sinkhorn_leaves_padding_out():
    logits_TE = random(10, 3, seed=4)
    valid_T = torch.tensor([True] * 7 + [False] * 3)
    whole = sinkhorn(torch.cat([logits_TE[:7], 100 * logits_TE[7:]]), valid_T, tolerance=1e-12)
    assert not whole[7:].any()
    # Only the common factor depends on the number of tokens.
    alone = sinkhorn(logits_TE[:7], tolerance=1e-12)
    torch.testing.assert_close(whole[:7] / whole[:7].sum(), alone / alone.sum(), rtol=1e-6, atol=0)


def part_of_rank(logits_TE):
    group = dist.group.WORLD
    return sinkhorn(logits_TE.chunk(group.size())[group.rank()], group=group)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_sinkhorn_over_ranks_is_that_of_the_whole_micro_batch(num_ranks):
    logits_TE = 3 * random(16, 4, seed=5)
    parts = run_on_ranks(num_ranks, part_of_rank, logits_TE)
    torch.testing.assert_close(torch.cat(parts), sinkhorn(logits_TE), rtol=1e-12, atol=0)


@given(st.integers(0, 6), st.integers(1, 5))
def test_best_experts_with_ties_and_with_all(num_tokens, num_experts):
    expert_TK = best_experts(torch.zeros(num_tokens, num_experts), topk=num_experts)
    assert [sorted(row) for row in expert_TK.tolist()] == [list(range(num_experts))] * num_tokens


def test_a_group_smaller_than_its_share_of_k():
    # Four experts of two groups of two, all chosen: a group is as good as both of its experts.
    scores_TE = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    assert sorted(best_experts(scores_TE, topk=4, num_groups=2, group_topk=2)[0].tolist()) == [0, 1, 2, 3]
    assert best_experts(-scores_TE, topk=2, num_groups=2, group_topk=1).tolist() == [[0, 1]]
