import math

import pytest
import torch

from helpers.layers.tiny_moe import identity_router
from helpers.relative_error import relative_error
from moe_exp.layers.router import Router, RouterConfig
from moe_exp.layers.router.router import bf16_grads


def logits_of_shares(shares_TE: list[list[float]]) -> torch.Tensor:
    """Logits whose softmax is each row over its sum."""
    return torch.tensor([[math.log(share) for share in row] for row in shares_TE])


def logits_of_sigmoid(probabilities_TE: list[list[float]]) -> torch.Tensor:
    return torch.tensor([[math.log(p / (1 - p)) for p in row] for row in probabilities_TE])


def check(decision, expert_TK, weights_TK) -> None:
    assert decision.expert_TK.tolist() == expert_TK
    torch.testing.assert_close(decision.weights_TK, torch.tensor(weights_TK), rtol=1e-5, atol=0)


# Ten tokens, scores in tenths.
SHARES = [
    [1, 2, 3, 4], [4, 3, 2, 1], [1, 6, 1, 2], [5, 0.5, 0.5, 4], [2, 1, 6, 1],
    [0.5, 4.5, 1, 4], [7, 1, 1.5, 0.5], [1, 1.5, 0.5, 7], [2.2, 2.6, 2.4, 2.8], [3, 0.5, 4, 2.5],
]  # fmt: skip
CHOSEN = [[3, 2], [0, 1], [1, 3], [0, 3], [2, 0], [1, 3], [0, 2], [3, 1], [3, 1], [2, 0]]


def test_softmax_before_topk_by_hand():
    decision = identity_router(4, 2)(logits_of_shares(SHARES))
    weights = [
        [0.4, 0.3], [0.4, 0.3], [0.6, 0.2], [0.5, 0.4], [0.6, 0.2], [0.45, 0.4], [0.7, 0.15], [0.7, 0.15],
        [0.28, 0.26], [0.4, 0.3],
    ]  # fmt: skip
    check(decision, CHOSEN, weights)
    assert decision.tokens_per_expert_E.tolist() == [5, 5, 4, 6]
    assert decision.tokens_per_expert_E.dtype == torch.int64
    assert decision.kept_TK is None
    torch.testing.assert_close(decision.scores_TE, torch.tensor(SHARES) / 10)
    torch.testing.assert_close(decision.logits_TE, logits_of_shares(SHARES))


# Mixtral: softmax over the chosen. Qwen3: softmax over all, divided by the sum of the chosen: the same.
@pytest.mark.parametrize("settings", [{"pre_softmax": False}, {"normalize": True}])
def test_softmax_after_topk_by_hand(settings):
    decision = identity_router(4, 2, **settings)(logits_of_shares(SHARES))
    weights = [
        [4 / 7, 3 / 7], [4 / 7, 3 / 7], [3 / 4, 1 / 4], [5 / 9, 4 / 9], [3 / 4, 1 / 4],
        [9 / 17, 8 / 17], [14 / 17, 3 / 17], [14 / 17, 3 / 17], [14 / 27, 13 / 27], [4 / 7, 3 / 7],
    ]  # fmt: skip
    check(decision, CHOSEN, weights)
    # The load-balancing loss looks at the scores of all experts in both orders.
    torch.testing.assert_close(decision.scores_TE, torch.tensor(SHARES) / 10)


# Ten tokens, sigmoid scores that do not sum to one.
PROBABILITIES = [
    [0.6, 0.4, 0.2, 0.8], [0.6, 0.5, 0.4, 0.8], [0.2, 0.3, 0.1, 0.9], [0.5, 0.8, 0.3, 0.6],
    [0.9, 0.6, 0.2, 0.7], [0.1, 0.2, 0.3, 0.4], [0.5, 0.3, 0.6, 0.9], [0.7, 0.8, 0.4, 0.2],
    [0.3, 0.1, 0.9, 0.2], [0.4, 0.6, 0.2, 0.9],
]  # fmt: skip


def test_sigmoid_with_expert_bias_by_hand():
    router = identity_router(4, 2, score="sigmoid", expert_bias=True)
    router.expert_bias.copy_(torch.tensor([0.0, 0.0, 0.25, -0.25]))
    decision = router(logits_of_sigmoid(PROBABILITIES))
    chosen = [[0, 3], [2, 0], [3, 2], [1, 2], [0, 1], [2, 1], [2, 3], [1, 0], [2, 0], [3, 1]]
    weights = [
        [3 / 7, 4 / 7], [0.4, 0.6], [0.9, 0.1], [8 / 11, 3 / 11], [0.6, 0.4],
        [0.6, 0.4], [0.4, 0.6], [8 / 15, 7 / 15], [0.75, 0.25], [0.6, 0.4],
    ]  # fmt: skip
    check(decision, chosen, weights)
    torch.testing.assert_close(decision.scores_TE[0], torch.tensor([0.3, 0.2, 0.1, 0.4]))
    torch.testing.assert_close(decision.scores_TE.sum(dim=1), torch.ones(10))


@pytest.mark.parametrize(
    ("settings", "weights"),
    [
        ({}, [1.0, 0.75]),
        ({"pre_softmax": False}, [10 / 7, 7.5 / 7]),
        ({"score": "sigmoid"}, [2.5 * 9 / 17, 2.5 * 8 / 17]),
    ],
)
def test_scaling_factor_multiplies_the_weights_and_not_the_scores(settings, weights):
    shares = [[0.1, 0.2, 0.3, 0.4]]
    logits = logits_of_sigmoid([[0.1, 0.2, 0.8, 0.9]]) if "score" in settings else logits_of_shares(shares)
    decision = identity_router(4, 2, scaling_factor=2.5, **settings)(logits)
    check(decision, [[3, 2]], [weights])
    torch.testing.assert_close(decision.scores_TE.sum(), torch.tensor(1.0))


# Scores in hundredths; two groups of three experts, of which a token may use one. Marked: best two of each
# group.
GROUPED = [
    [40, 4, 3, 30, 15, 8],    # 44 against 45: the group without the best expert
    [30, 20, 10, 35, 3, 2],   # 50 against 38
    [12, 11, 10, 50, 9, 8],   # 23 against 59
    [5, 25, 20, 44, 1, 5],    # 45 against 49
    [25, 5, 26, 4, 39, 1],    # 51 against 43
    [20, 19, 18, 30, 7, 6],   # 39 against 37
    [14, 13, 12, 1, 27, 33],  # 27 against 60
    [22, 2, 21, 24, 17, 14],  # 43 against 41, though all three of the second sum to more
    [3, 48, 4, 28, 16, 1],    # 52 against 44
    [17, 16, 15, 19, 18, 15], # 33 against 37
]  # fmt: skip


def test_group_limited_topk_by_hand():
    decision = identity_router(6, 2, num_groups=2, group_topk=1)(logits_of_shares(GROUPED))
    chosen = [[3, 4], [0, 1], [3, 4], [3, 5], [2, 0], [0, 1], [5, 4], [0, 2], [1, 2], [3, 4]]
    weights = [
        [0.30, 0.15], [0.30, 0.20], [0.50, 0.09], [0.44, 0.05], [0.26, 0.25],
        [0.20, 0.19], [0.33, 0.27], [0.22, 0.21], [0.48, 0.04], [0.19, 0.18],
    ]  # fmt: skip
    check(decision, chosen, weights)
    assert decision.tokens_per_expert_E.tolist() == [4, 3, 3, 4, 4, 2]


def test_group_counts_by_its_best_k_over_groups_experts():
    # K=2 from two groups: a group counts by its one best expert (40, 20 and 25), not by both (41, 33, 26).
    decision = identity_router(6, 2, num_groups=3, group_topk=2)(logits_of_shares([[40, 1, 20, 13, 25, 1]]))
    check(decision, [[0, 4]], [[0.40, 0.25]])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_input_is_routed_in_fp32(dtype):
    router = Router(RouterConfig(hidden_size=2, num_experts=2, topk=1), dtype=dtype)
    with torch.no_grad():
        router.weight.copy_(torch.tensor([[1.0, 0.5], [1.0, 0.25]]))
    decision = router(torch.tensor([[2048.0, 1.0]], dtype=dtype))
    # Neither bf16 nor fp16 has a number between 2048 and 2050.
    assert decision.logits_TE.tolist() == [[2048.5, 2048.25]]
    assert decision.logits_TE.dtype == decision.weights_TK.dtype == decision.scores_TE.dtype == torch.float32
    decision.weights_TK.sum().backward()
    assert router.weight.grad.dtype == dtype


@pytest.mark.parametrize(("num_tokens", "num_experts", "width"), [(300, 64, 2048), (1, 7, 33)])
def test_bf16_grads_are_those_of_fp32_copies(num_tokens, num_experts, width):
    x_TD, weight_ED = torch.randn(num_tokens, width).bfloat16(), torch.randn(num_experts, width).bfloat16()
    dlogits_TE = torch.randn(num_tokens, num_experts) * torch.logspace(-6, 2, num_experts)

    def mm(a, b, out_dtype=torch.float64):  # sums without rounding, on any device
        assert a.dtype == b.dtype == torch.bfloat16
        return (a.double() @ b.double()).to(out_dtype)

    dx_TD, dweight_ED = bf16_grads(dlogits_TE, x_TD, weight_ED, mm=mm)
    expected = dlogits_TE.double() @ weight_ED.double(), dlogits_TE.double().t() @ x_TD.double()
    assert relative_error(dx_TD, expected[0]) < 2**-16
    assert dweight_ED.dtype == torch.bfloat16
    for one, other in zip(dweight_ED, expected[1], strict=True):  # also where gradients are small
        assert relative_error(one, other) < 2**-8


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_low_precision_on_a_gpu_are_in_fp32(dtype):
    router = Router(RouterConfig(hidden_size=2048, num_experts=64, topk=8), dtype=dtype).cuda()
    x_TD = torch.randn(300, 2048, dtype=dtype, device="cuda", requires_grad=True)
    logits_TE = router.logits(x_TD)
    expected_TE = x_TD.double() @ router.weight.double().t()
    assert torch.equal(logits_TE, torch.mm(x_TD, router.weight.t(), out_dtype=torch.float32))
    assert (logits_TE - expected_TE).norm() < 1e-5 * expected_TE.norm()
    dlogits_TE = torch.randn_like(logits_TE)
    for actual, expected in zip(
        torch.autograd.grad(logits_TE, (x_TD, router.weight), dlogits_TE),
        torch.autograd.grad(expected_TE, (x_TD, router.weight), dlogits_TE.double()),
        strict=True,
    ):
        assert (actual.double() - expected).norm() < 4e-3 * expected.norm()


def test_expert_bias_counts_tokens_in_training_only():
    router = identity_router(4, 2, score="sigmoid", expert_bias=True)
    logits = logits_of_sigmoid(PROBABILITIES)
    router(logits)
    router(logits)
    # Twice the ten tokens, by their two largest probabilities.
    assert router.local_tokens_per_expert.tolist() == [10, 8, 6, 16]
    with torch.no_grad():
        router(logits)
    router.eval()(logits)
    assert router.local_tokens_per_expert.tolist() == [10, 8, 6, 16]
    # Both names are Megatron's; only the bias is in a checkpoint.
    assert set(router.state_dict()) == {"weight", "expert_bias"}


@pytest.mark.parametrize("use_kernels", [False, True])
@pytest.mark.parametrize("rule", [
    {"pre_softmax": True}, {"pre_softmax": False}, {"normalize": True}, {"score": "sigmoid"},
    {"score": "sigmoid", "expert_bias": True}, {"score": "sqrtsoftplus", "dtype": "fp64"}, {"score": "relu"},
    {"top_p": 0.5}, {"num_null_experts": 2}, {"num_groups": 3, "group_topk": 2},
    {"assignment": "sinkhorn", "topk": 1},
], ids=str)  # fmt: skip
def test_a_bias_is_the_weight_of_an_input_of_one(rule, use_kernels):
    """In every score, with the decisions, weights, sums and gradients of the router without a bias."""
    rule = {"num_experts": 6, "topk": 2, "use_kernels": use_kernels} | rule
    biased = Router(RouterConfig(hidden_size=8, bias=True, **rule))
    wider = Router(RouterConfig(hidden_size=9, **rule))
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(40, 8, generator=generator)
    with torch.no_grad():
        biased.bias.normal_(generator=generator)
        wider.weight.copy_(torch.cat([biased.weight, biased.bias[:, None]], dim=1))
    biased.needs_scores = wider.needs_scores = False
    found, expected = biased(x), wider(torch.cat([x, torch.ones(40, 1)], dim=1))
    assert torch.equal(found.expert_TK, expected.expert_TK)
    torch.testing.assert_close(found.weights_TK, expected.weights_TK, rtol=1e-5, atol=1e-7)
    factor = torch.randn(found.weights_TK.shape, generator=generator)
    for decision in (found, expected):
        (decision.weights_TK * factor).sum().backward()
    gradient = torch.cat([biased.weight.grad, biased.bias.grad[:, None]], dim=1)
    torch.testing.assert_close(gradient, wider.weight.grad, rtol=1e-4, atol=1e-6)
