import pytest
import torch

from helpers.layers.kernel_device import DEVICE, at_real_size, needs_kernels
from helpers.relative_error import assert_equal_to
from moe_exp.layers.kernels.scores import RouterLosses
from moe_exp.layers.kernels.topk import TopK, router_topk, router_topk_torch
from moe_exp.layers.losses import load_balancing_loss_share, z_loss_share

pytestmark = [needs_kernels, pytest.mark.usefixtures("poisoned")]

SCORES = [("softmax", True), ("softmax", False), ("sigmoid", True), ("sqrtsoftplus", True)]
WITH_GRADIENT = ("weights_TK", "lse_squares", "score_sums_E")
INTEGERS = ("expert_TK", "tokens_per_expert_E", "by_score_E")


def tied_logits(num_tokens: int, num_experts: int) -> torch.Tensor:
    """With many ties, and what is no tie far enough apart that fp32 and fp64 agree which is larger."""
    return ((torch.randn(num_tokens, num_experts, device=DEVICE) * 16).round() / 16).requires_grad_()


def gradient(out: TopK, logits_TE: torch.Tensor, seeds: dict[str, torch.Tensor]) -> torch.Tensor:
    total = sum((getattr(out, name) * seed).sum() for name, seed in seeds.items())
    return torch.autograd.grad(total, logits_TE, retain_graph=True)[0]


def compare(logits_TE, topk, options, bias_E=None, valid_T=None, *, each_gradient=False):
    """Asserts that the kernel in fp32 equals its twin in float64."""
    exact_TE = logits_TE.detach().double().requires_grad_()
    double_E = None if bias_E is None else bias_E.double()
    exact = router_topk_torch(exact_TE, topk, **options, bias_E=double_E, valid_T=valid_T)
    ours = router_topk(logits_TE, topk, **options, bias_E=bias_E, valid_T=valid_T)
    for name in INTEGERS:
        assert torch.equal(getattr(ours, name), getattr(exact, name)), name
    seeds = {name: torch.randn(getattr(ours, name).shape, device=DEVICE) for name in WITH_GRADIENT}
    alone = {name: {name: seeds[name]} for name in seeds} if each_gradient else {}

    def floats(out, logits_TE):
        values = {name: getattr(out, name) for name in (*WITH_GRADIENT, "entropy", "largest")}
        wanted = {"gradient of all": seeds, **alone}
        return values | {f"d {name}": gradient(out, logits_TE, of) for name, of in wanted.items()}

    assert_equal_to(1e-5, floats(ours, logits_TE), floats(exact, exact_TE))
    return ours


@pytest.mark.parametrize("extras", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("score", "pre_softmax"), SCORES)
def test_kernel_computes_as_its_twin_in_float64(score, pre_softmax, normalize, extras):
    options = {"score": score, "pre_softmax": pre_softmax, "normalize": normalize, "scaling_factor": 2.5}
    for num_tokens, num_experts, topk, each_gradient in [(35, 60, 4, False), (67, 5, 3, True)]:
        bias_E = 0.3 * torch.randn(num_experts, device=DEVICE) if extras else None
        valid_T = torch.rand(num_tokens, device=DEVICE) > 0.2 if extras else None
        logits_TE = tied_logits(num_tokens, num_experts)
        compare(logits_TE, topk, options, bias_E, valid_T, each_gradient=each_gradient)


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "topk"),
    [(9, 130, 2), at_real_size(32768, 128, 8), at_real_size(16384, 64, 1)],
)
def test_the_same_bits_twice(num_tokens, num_experts, topk):
    logits_TE = tied_logits(num_tokens, num_experts)
    first, second = (compare(logits_TE, topk, {}) for _ in range(2))
    seeds = {name: torch.randn(getattr(first, name).shape, device=DEVICE) for name in WITH_GRADIENT}
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    assert torch.equal(gradient(first, logits_TE, seeds), gradient(second, logits_TE, seeds))


def test_ties_go_to_the_lowest_expert_by_hand():
    logits_TE = torch.tensor([[0.0, 1, 1, 0, 1], [2, 2, 2, 2, 2], [0, 0, 0, 0, 3]], device=DEVICE)
    bias_E = torch.tensor([0.0, 0, 0, 5, 0], device=DEVICE)
    for function in (router_topk, router_topk_torch):
        assert function(logits_TE, 2).expert_TK.tolist() == [[1, 2], [0, 1], [4, 0]]
        out = function(logits_TE, 2, score="sigmoid", bias_E=bias_E)
        assert out.expert_TK.tolist() == [[3, 1], [3, 0], [3, 4]]
        assert out.tokens_per_expert_E.tolist() == [1, 1, 0, 3, 1]
        assert out.by_score_E.tolist() == [2, 2, 1, 0, 1]


def test_extreme_logits_give_finite_weights_and_gradients():
    logits_TE = torch.tensor(
        [[100.0, -100, 0, 50], [-100, -100, -100, -100], [-60, 80, -200, 0]], device=DEVICE
    ).requires_grad_()
    for score, pre_softmax in SCORES:
        options = {"score": score, "pre_softmax": pre_softmax, "normalize": True}
        out, twin = (function(logits_TE, 2, **options) for function in (router_topk, router_topk_torch))
        total = out.weights_TK[:, 0].sum() + out.lse_squares + out.score_sums_E[0]
        assert torch.autograd.grad(total, logits_TE)[0].isfinite().all()
        for name in ("weights_TK", "lse_squares", "score_sums_E"):
            torch.testing.assert_close(getattr(out, name), getattr(twin, name), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("score", ["sigmoid", "sqrtsoftplus"])
def test_shifted_logits(score, normalize):
    # without normalization weights vanish with the shift, which a relative error cannot compare
    for shift in (-100, -60, -18, 40, 100) if normalize else (-18, 40):
        logits_TE = (tied_logits(35, 12).detach() + shift).requires_grad_()
        out = compare(logits_TE, 3, {"score": score, "normalize": normalize})
        assert out.score_sums_E.sum().item() == pytest.approx(35, rel=1e-6)
        if normalize:
            ones_T = torch.ones(35, device=DEVICE)
            torch.testing.assert_close(out.weights_TK.sum(dim=1), ones_T, rtol=1e-6, atol=0)


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
def test_broken_logits_still_choose_experts_that_exist(broken):
    logits_TE = torch.full((3, 5), broken, device=DEVICE)
    logits_TE[1, :3] = 0
    with pytest.warns(RuntimeWarning) if DEVICE == "cpu" else torch.no_grad():  # numpy's, of the interpreter
        expert_TK = router_topk(logits_TE, 3).expert_TK
    assert all(len(set(row)) == 3 and set(row) <= set(range(5)) for row in expert_TK.tolist())


@pytest.mark.parametrize(("total", "num_tokens"), [(None, 70), (53, 0), (0, 0)])
def test_losses_of_the_sums_are_the_pure_functions(total, num_tokens):
    """Values, and the gradient of the weighted sum; without any token it is finite."""
    sums_E, counts_E = torch.rand(60, device=DEVICE), torch.randint(0, 20, (60,), device=DEVICE)
    total = None if total is None else torch.tensor(total, device=DEVICE)
    leaves = [x.requires_grad_() for x in (sums_E, sums_E.sum())]
    losses = RouterLosses.apply(*leaves, counts_E, total, num_tokens, 4, 0.3, 0.2)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    number = {"num_tokens": num_tokens if total is None else total}
    balance = load_balancing_loss_share(exact[0], counts_E, topk=4, **number)
    z = z_loss_share(exact[1], **number)
    values, gradients = (0.3 * balance + 0.2 * z, balance, z), torch.autograd.grad(losses[0] * 1.7, leaves)
    assert_equal_to(
        1e-6,
        dict(enumerate((*losses, *gradients))),
        dict(enumerate((*values, *torch.autograd.grad(values[0] * 1.7, exact)))),
    )
    assert [x.requires_grad for x in losses] == [True, False, False]


def test_no_tokens():
    out = router_topk(torch.zeros(0, 6, device=DEVICE, requires_grad=True), 2)
    assert out.expert_TK.shape == (0, 2)
    assert out.score_sums_E.tolist() == out.tokens_per_expert_E.tolist() == [0] * 6
