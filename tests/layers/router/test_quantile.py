"""Quantile balancing: the bias against the quantile itself, exact sums in any order, and balance."""

import pytest
import torch

from helpers.layers.tiny_moe import random
from moe_exp.layers.router import Router, RouterConfig
from moe_exp.layers.router.balance import NUM_BINS, balanced_bias, count_gaps

TOKENS, EXPERTS, TOPK = 4000, 12, 3


def counted(choice_TE, valid_T=None):
    return count_gaps(choice_TE, choice_TE.topk(TOPK + 1, dim=1).values[:, -1], valid_T)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
def test_the_bias_is_the_quantile_of_what_each_token_would_have_needed(scale):
    """At any scale of the scores, to 4% of how far it moves."""
    scores_TE = scale * (random(TOKENS, EXPERTS, seed=1) + 0.3 * random(EXPERTS, seed=2))
    bias_E = 0.1 * scale * random(EXPERTS, seed=3)
    choice_TE = scores_TE + bias_E
    needed_TE = choice_TE.topk(TOPK + 1, dim=1).values[:, -1:] - scores_TE
    quantile_E = needed_TE.double().quantile(TOPK / EXPERTS, dim=0)
    counts_EB = counted(choice_TE)
    moved_E = balanced_bias(bias_E, counts_EB, TOPK).double() - bias_E
    expected_E = quantile_E - bias_E
    error_E = (moved_E - moved_E.mean()) - (expected_E - expected_E.mean())
    assert error_E.abs().max() < 0.04 * expected_E.abs().max()
    assert abs(float(balanced_bias(bias_E, counts_EB, TOPK).mean())) < 1e-6 * scale


def test_counts_do_not_depend_on_how_tokens_come():
    choice_TE, valid_T = random(TOKENS, EXPERTS, seed=4), random(TOKENS, seed=5) > -1
    whole_EB = counted(choice_TE, valid_T)
    assert whole_EB.shape == (EXPERTS, NUM_BINS) and whole_EB.dtype == torch.int64
    assert whole_EB.sum(dim=1).tolist() == [int(valid_T.sum())] * EXPERTS
    order = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(6))
    parts = [counted(choice_TE[part], valid_T[part]) for part in order.split([1, 1999, 2000])]
    assert torch.equal(sum(parts), whole_EB)
    assert torch.equal(counted(choice_TE[valid_T]), whole_EB)


def test_nothing_counted_moves_nothing():
    bias_E = random(EXPERTS, seed=7)
    assert torch.equal(balanced_bias(bias_E, torch.zeros(EXPERTS, NUM_BINS, dtype=torch.int64), TOPK), bias_E)


def quantile_router(**options):
    config = RouterConfig(16, options.pop("num_experts", 32), options.pop("topk", 4), **options)
    router = Router(config)
    with torch.no_grad():
        router.weight.copy_(0.5 * random(*router.weight.shape, seed=8))
    return router


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize(("num_experts", "topk"), [(32, 4), (8, 1), (3, 2)])
def test_a_skewed_load_is_balanced_within_a_few_batches(score, num_experts, topk):
    """The load of fresh tokens each time; the busiest expert over the mean, minus 1."""
    options = {"score": score, "num_experts": num_experts, "topk": topk, "expert_bias": True}
    router, mean_D = quantile_router(**options, bias_rule="quantile"), 2 * random(16, seed=9)
    excess = []
    for batch in range(8):
        for microbatch in range(2):
            router(random(2048, 16, seed=100 * batch + microbatch) + mean_D)
        counts_E = router(random(8192, 16, seed=10) + mean_D).tokens_per_expert_E.double()
        excess.append(float(counts_E.max() / counts_E.mean()) - 1)
        router.end_of_batch()
    assert excess[-1] < 0.35 and excess[-1] < 0.4 * excess[0]
    assert not router.gap_counts.any()


def test_only_training_counts():
    router = quantile_router(expert_bias=True, bias_rule="quantile")
    router.eval()
    router(random(64, 16, seed=11))
    assert not router.gap_counts.any()
    router.train().bfloat16()
    router(random(64, 16, seed=11))
    assert router.gap_counts.dtype == torch.int64 and router.gap_counts.sum() == 64 * 32
    assert set(router.state_dict()) == {"weight", "expert_bias"}
