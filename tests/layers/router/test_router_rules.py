"""The router's other rules, each with ten tokens by hand, and what it refuses."""

import math

import pytest
import torch
from test_router import PROBABILITIES, SHARES, check, logits_of_shares, logits_of_sigmoid

from helpers.layers.tiny_moe import identity_router, random
from helpers.relative_error import assert_equal_to
from moe_exp.layers.kernels.topk import scores_torch
from moe_exp.layers.losses import load_balancing_loss_share
from moe_exp.layers.router import Router, RouterConfig


def logits_of_sqrtsoftplus(scores_TE: list[list[float]]) -> torch.Tensor:
    """sqrt(log(1 + e^z)) = s."""
    return torch.tensor([[math.log(math.exp(s * s) - 1) for s in row] for row in scores_TE])


def test_sqrtsoftplus_by_hand():
    decision = identity_router(4, 2, score="sqrtsoftplus")(logits_of_sqrtsoftplus(PROBABILITIES))
    chosen = [[3, 0], [3, 0], [3, 1], [1, 3], [0, 3], [3, 2], [3, 2], [1, 0], [2, 0], [3, 1]]
    weights = [
        [4 / 7, 3 / 7], [4 / 7, 3 / 7], [0.75, 0.25], [4 / 7, 3 / 7], [9 / 16, 7 / 16],
        [4 / 7, 3 / 7], [0.6, 0.4], [8 / 15, 7 / 15], [0.75, 0.25], [0.6, 0.4],
    ]  # fmt: skip
    check(decision, chosen, weights)
    torch.testing.assert_close(decision.scores_TE[0], torch.tensor([0.3, 0.2, 0.1, 0.4]))


def shifted(score: str, shift: float, *, dtype: str = "fp32", **settings) -> dict[str, torch.Tensor]:
    """Results of 64 tokens whose logits are multiples of 1/64, so that the shift rounds none of them."""
    generator = torch.Generator().manual_seed(3)
    router = identity_router(16, 4, score=score, dtype=dtype, **settings)
    logits_TE = (torch.randn(64, 16, generator=generator) * 96).round() / 64 + shift
    out = router(logits_TE.double().requires_grad_() if dtype == "fp64" else logits_TE.requires_grad_())
    seed_TK = torch.randn(64, 4, generator=generator)
    loss = load_balancing_loss_share(out.scores_TE, out.tokens_per_expert_E, topk=4, num_tokens=64)
    gradients = {
        f"gradient of {name}": torch.autograd.grad(value, out.logits_TE, retain_graph=True)[0]
        for name, value in {"loss": loss, "weights": (out.weights_TK * seed_TK).sum()}.items()
    }
    return {
        "weights": out.weights_TK, "scores": out.scores_TE, "loss": loss, "experts": out.expert_TK,
        "logits": out.logits_TE, **gradients,
    }  # fmt: skip


@pytest.mark.parametrize("groups", [{}, {"num_groups": 4, "group_topk": 2}])
@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
@pytest.mark.parametrize(("score", "power"), [("sigmoid", 1), ("sqrtsoftplus", 0.5)])
def test_a_common_shift_of_far_logits_changes_nothing(score, power, dtype, groups):
    # -29 and less: sigmoid(z) is exp(z), and the root of softplus(z) is exp(z / 2)
    first = shifted(score, -35, dtype=dtype, **groups)
    scores_TE = (first["logits"].detach().double() * power).softmax(dim=1)
    chosen_TK = scores_TE.gather(1, first["experts"])
    limits = {"scores": scores_TE, "weights": chosen_TK / chosen_TK.sum(dim=1, keepdim=True)}
    for name, limit in limits.items():
        assert ((first[name] - limit) / limit).abs().max() < 1e-6, name
    for shift in (-60, -100, -135):
        actual = shifted(score, shift, dtype=dtype, **groups)
        del actual["logits"]
        assert_equal_to(1e-6, actual, {name: first[name] for name in actual})


@pytest.mark.parametrize("score", ["sigmoid", "sqrtsoftplus"])
def test_gradients_of_shifted_scores_are_right(score):
    for shift in (0, -8, -18, -40, -100):
        exact = shifted(score, shift, dtype="fp64")
        actual = shifted(score, shift)
        names = [name for name in exact if name != "logits"]
        assert_equal_to(2e-6, {name: actual[name] for name in names}, {name: exact[name] for name in names})
        logits_TE = exact["logits"].detach()[:2].requires_grad_()
        assert torch.autograd.gradcheck(lambda z: scores_torch(z, score)[1].softmax(dim=1), logits_TE)


@pytest.mark.parametrize(("topk", "weights"), [(1, [0.8]), (2, [0.8, 0.6])])
def test_sigmoid_without_normalization(topk, weights):
    """The default with one expert."""
    settings = {} if topk == 1 else {"normalize": False}
    router = identity_router(4, topk, score="sigmoid", **settings)
    check(router(logits_of_sigmoid([[0.6, 0.5, 0.4, 0.8]])), [[3, 0][:topk]], [weights])


def test_softmax_with_expert_bias_by_hand():
    router = identity_router(4, 2, expert_bias=True)
    router.expert_bias.copy_(torch.tensor([0.0, 0.26, -0.25, 0.0]))
    weights = [[0.2, 0.4], [0.3, 0.4], [0.6, 0.2], [0.5, 0.4], [0.1, 0.6]]
    check(router(logits_of_shares(SHARES[:5])), [[1, 3], [1, 0], [1, 3], [0, 3], [1, 2]], weights)


def test_padding_goes_nowhere_and_counts_nowhere():
    padding_T = torch.tensor([t in (1, 5, 9) for t in range(10)])
    decision = identity_router(4, 2)(logits_of_shares(SHARES), padding_T)
    assert decision.kept_TK.tolist() == [[t not in (1, 5, 9)] * 2 for t in range(10)]
    # Of the ten tokens [5, 5, 4, 6], less the three pairs 0 1, 1 3 and 2 0.
    assert decision.tokens_per_expert_E.tolist() == [3, 3, 3, 5]
    assert decision.valid_T.tolist() == [t not in (1, 5, 9) for t in range(10)]


def test_balanced_routing_deals_in_turn():
    router = identity_router(4, 2, assignment="balanced")
    decision = router(logits_of_shares(SHARES))
    assert decision.expert_TK.tolist() == [[0, 1], [2, 3]] * 5
    torch.testing.assert_close(decision.weights_TK[:2], torch.tensor([[0.1, 0.2], [0.2, 0.1]]))
    decision = identity_router(4, 3, assignment="balanced")(torch.zeros(5, 4))
    assert decision.tokens_per_expert_E.tolist() == [4, 4, 4, 3]


@pytest.mark.parametrize("exponent", [0.0, 1.0])
def test_zipf_routing_is_skewed_as_asked(exponent):
    router = identity_router(8, 1, assignment="zipf", zipf_exponent=exponent)
    decision = router(torch.zeros(20000, 8))
    expected_E = torch.arange(1, 9).double() ** -exponent
    shares_E = decision.tokens_per_expert_E.double() / 20000
    torch.testing.assert_close(shares_E, expected_E / expected_E.sum(), rtol=0.08, atol=0)
    assert torch.equal(router(torch.ones(20000, 8)).expert_TK, decision.expert_TK)


def test_zipf_routing_takes_different_experts():
    expert_TK = identity_router(5, 4, assignment="zipf")(torch.zeros(100, 5)).expert_TK
    assert all(len(set(row)) == 4 for row in expert_TK.tolist())


def test_jitter_is_noise_on_the_input_in_training_only():
    router, x_TD = identity_router(4, 2, jitter=0.1), 1 + random(2000, 4, seed=0).float().abs()
    ratio = router(x_TD).logits_TE / x_TD
    assert 0.9 <= ratio.min() < 0.901 and 1.099 < ratio.max() <= 1.1
    assert torch.equal(router.eval()(x_TD).logits_TE, x_TD)


def test_fp64_router():
    x_TD, router = random(6, 4, seed=1).bfloat16(), Router(RouterConfig(4, 3, topk=2, dtype="fp64"))
    decision = router(x_TD)
    assert decision.logits_TE.dtype == decision.weights_TK.dtype == torch.float64
    expected_TE = x_TD.double() @ router.weight.double().t()
    torch.testing.assert_close(decision.logits_TE, expected_TE, rtol=1e-14, atol=0)
    decision.weights_TK.sum().backward()
    assert router.weight.grad.dtype == torch.float32


# Once per global batch


def test_the_bias_moves_at_the_end_of_the_batch():
    router = identity_router(4, 2, score="sigmoid", expert_bias=True, bias_update_rate=0.1)
    logits = logits_of_sigmoid(PROBABILITIES)
    router(logits[:6])
    router(logits[6:])
    assert router.expert_bias.tolist() == [0, 0, 0, 0]
    router.end_of_batch()
    # By the two largest of each row: 5, 4, 3 and 8 slots of a mean of 5.
    torch.testing.assert_close(router.expert_bias, torch.tensor([0.0, 0.1, 0.1, -0.1]))
    router(logits[:1])
    router.end_of_batch()
    # The first row now: 0.6, 0.5, 0.3 and 0.7.
    torch.testing.assert_close(router.expert_bias, torch.tensor([-0.1, 0.2, 0.2, -0.2]))
    assert set(router.state_dict()) == {"weight", "expert_bias"}


def test_the_weight_of_l1_comes_back_from_its_smallest_value():
    router = identity_router(4, 2, score="relu", normalize=False)
    for _ in range(700):  # no expert at all
        router(torch.full((1, 4), -1.0))
        router.end_of_batch()
    smallest = router.l1_factor.item()
    router(torch.full((1, 4), 1.0))
    router.end_of_batch()
    assert 0 < smallest < 1e-19 and router.l1_factor.item() / smallest == pytest.approx(1.2)


QUANTILE, RELU = {"expert_bias": True, "bias_rule": "quantile"}, {"score": "relu"}


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"topk": 0}, "topk=0: must be at least 1"),
        ({"topk": 5}, "topk=5: must be at most num_experts=4"),
        ({"topk": 1, "normalize": True}, "normalize=True: .*topk=1 .* would not learn"),
        ({"topk": 1, "pre_softmax": False}, "pre_softmax=False: .*topk=1 .* would not learn"),
        ({"score": "tanh"}, "score=tanh: must be one of softmax, sigmoid, sqrtsoftplus, relu"),
        ({"dtype": "bf16"}, "dtype=bf16: must be one of fp32, fp64"),
        ({"assignment": "best"}, "assignment=best: must be one of topk, sinkhorn, balanced, zipf"),
        ({"assignment": "zipf", "zipf_exponent": -1.0}, "zipf_exponent=-1.0: must not be negative"),
        (
            {"assignment": "sinkhorn", "expert_bias": True},
            "assignment=sinkhorn: .* cannot be combined with expert_bias",
        ),
        ({"jitter": 1.0}, r"jitter=1.0: must be in \[0, 1\)"),
        ({"num_groups": 3, "group_topk": 1}, "num_groups=3: must divide num_experts=4"),
        ({"num_groups": 2}, "num_groups=2: has no effect while group_topk=0"),
        ({"num_groups": 2, "group_topk": 3}, "group_topk=3: must be from 1 to num_groups=2"),
        (
            {"topk": 3, "num_groups": 2, "group_topk": 1},
            "topk=3: must be at most 2, the number of experts in group_topk=1",
        ),
        ({"top_p": 0.0}, r"top_p=0.0: must be in \(0, 1\]"),
        ({"top_p": 0.5, "assignment": "sinkhorn"}, "top_p=0.5: cannot be combined with assignment=sinkhorn"),
        ({"num_null_experts": -1}, "num_null_experts=-1: must not be negative"),
        ({"num_null_experts": 2, "num_groups": 2, "group_topk": 1}, "num_null_experts=2: .* with num_groups"),
        (RELU | {"top_p": 0.5}, "score=relu: cannot be combined with top_p"),
        (RELU | {"expert_bias": True}, "score=relu: cannot be combined with expert_bias"),
        (RELU | {"normalize": True}, "score=relu: cannot be combined with normalize"),
        ({"expert_bias": True, "bias_rule": "mean"}, "bias_rule=mean: must be one of sign, quantile"),
        (QUANTILE | {"num_groups": 2, "group_topk": 1}, "bias_rule=quantile: .* group has its own cutoff"),
        (QUANTILE | {"topk": 4}, "bias_rule=quantile: .* every token uses every expert"),
    ],
)
def test_what_cannot_work_is_refused(settings, text):
    with pytest.raises(ValueError, match=text):
        RouterConfig(hidden_size=4, num_experts=4, **{"topk": 2} | settings)
