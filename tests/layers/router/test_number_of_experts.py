"""Routers that give tokens different numbers of experts: top-p, null experts, ReLU with L1 control."""

import pytest
import torch

from helpers.layers.tiny_moe import EXPERTS, HIDDEN, identity_router, random, tiny_layer
from helpers.relative_error import assert_equal_to
from moe_exp.layers.losses import AuxLoss
from moe_exp.layers.router import Router, RouterConfig
from moe_exp.layers.router.replay import record_routing

# Scores of experts 0 to 3: 0.5, 0.3, 0.15, 0.05; then 0.25 each but for rounding; then 0.9, 0.05, 0.03, 0.02.
SCORES = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.27, 0.26, 0.24, 0.23], [0.9, 0.05, 0.03, 0.02]])


def test_top_p_of_one_token_in_numbers():
    """The first two have 0.8 of the scores, over 0.7; their weights are the scores, or their parts of 0.8."""
    plain = identity_router(4, 3, top_p=0.7)(SCORES.log())
    assert plain.kept_TK.tolist() == [[True, True, False], [True, True, True], [True, False, False]]
    assert plain.expert_TK[0].tolist() == [0, 1, 2]
    assert plain.tokens_per_expert_E.tolist() == [3, 2, 1, 0]
    torch.testing.assert_close(plain.weights_TK[0], torch.tensor([0.5, 0.3, 0.0]))
    for settings in ({"pre_softmax": False}, {"normalize": True}):
        normalized = identity_router(4, 3, top_p=0.7, **settings)(SCORES.log())
        torch.testing.assert_close(normalized.weights_TK[0], torch.tensor([0.625, 0.375, 0.0]))
        torch.testing.assert_close(normalized.weights_TK[2], torch.tensor([1.0, 0.0, 0.0]))


def test_null_experts_in_numbers():
    """Six outputs, of which 4 and 5 are null experts: the first token chooses 4 and 0, the second 4 and 5."""
    config = RouterConfig(hidden_size=2, num_experts=4, topk=2, num_null_experts=2, normalize=True)
    router = Router(config)
    with torch.no_grad():
        router.weight.copy_(torch.tensor([[1.0, 0], [0, 0], [0, 0], [0, 0], [2, 1], [0, 2]]))
    found = router(torch.tensor([[1.0, 0], [0, 1.0], [2, -1.0]]))
    assert found.expert_TK.tolist()[:2] == [[4, 0], [5, 4]]
    assert found.kept_TK.tolist() == [[False, True], [False, False], [False, True]]
    assert found.weights_TK[0].tolist() == [0.0, 1.0]
    assert found.weights_TK[1].tolist() == [0.0, 0.0]
    assert found.tokens_per_expert_E.tolist() == [2, 0, 0, 0, 3, 1]


def test_relu_keeps_rows_of_kept_slots_alone():
    """With the kernels, too, which otherwise have a row for each slot: here for all experts of each token."""
    layer = tiny_layer(router={"score": "relu", "dtype": "fp32"}, backend="triton", dtype=torch.float32)
    kept: list[tuple[int, ...]] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(tuple(x.shape)) or x, lambda x: x):
        layer(random(40, HIDDEN, seed=1).float().requires_grad_())
    num_kept = int(layer.statistics.tokens_per_expert_E.sum())
    assert num_kept < 40 * EXPERTS and (num_kept, 8) in kept and (40 * EXPERTS, 8) not in kept


def test_relu_in_numbers():
    found = identity_router(4, 2, score="relu", scaling_factor=2.0)(
        torch.tensor([[1.0, -2.0, 0.5, 0.0], [-1.0, -1.0, -1.0, -1.0]])
    )
    assert found.expert_TK.tolist() == [[0, 1, 2, 3]] * 2
    assert found.kept_TK.tolist() == [[True, False, True, False], [False] * 4]
    assert found.weights_TK.tolist() == [[2.0, 0, 1.0, 0], [0] * 4]
    assert found.tokens_per_expert_E.tolist() == [1, 0, 1, 0]
    torch.testing.assert_close(found.scores_TE[0], torch.tensor([2 / 3, 0, 1 / 3, 0]))


def test_the_weight_of_l1_follows_the_number_of_experts():
    router = identity_router(4, 2, score="relu")
    many, few = torch.tensor([[1.0, 1, 1, -1]]), torch.tensor([[1.0, -1, -1, -1]])
    for x, factor in ((many, 1.2), (many, 1.44), (few, 1.2), (torch.tensor([[1.0, 1, -1, -1]]), 1.2)):
        router(x)
        router.end_of_batch()
        assert float(router.l1_factor) == pytest.approx(factor)
    router(many.repeat(2, 1), torch.tensor([True, False]))  # padding does not count
    router(few)
    router.end_of_batch()
    assert float(router.l1_factor) == pytest.approx(1.2)
    assert set(router.state_dict()) == {"weight", "l1_factor"}
    router.reset_parameters()
    assert float(router.l1_factor) == 1.0


NUMBERS = {
    "top-p": {"topk": 3, "top_p": 0.6},
    "top-p, normalized": {"topk": 4, "top_p": 0.7, "score": "sigmoid"},
    "null experts": {"topk": 3, "num_null_experts": 3, "pre_softmax": False},
    "null experts and top-p": {"topk": 3, "num_null_experts": 3, "top_p": 0.7},
    "relu": {"score": "relu"},
}


def expert_output(x_TD: torch.Tensor, weight1: torch.Tensor, weight2: torch.Tensor) -> torch.Tensor:
    gate_TF, up_TF = (x_TD @ weight1.T).chunk(2, dim=1)
    return (gate_TF.sigmoid() * gate_TF * up_TF) @ weight2.T


def expected_weights(x_TD: torch.Tensor, weight_ED: torch.Tensor, rule: dict) -> torch.Tensor:
    """Weights of all experts [T, E], token by token, without a gather or a mask."""
    logits_TE = x_TD @ weight_ED.T
    if rule.get("score") == "relu":
        return logits_TE.clamp(min=0)
    rows = []
    for logits_E in logits_TE:
        raw_E = logits_E.sigmoid() if rule.get("score") == "sigmoid" else logits_E.softmax(0)
        parts_E, taken, chosen = raw_E / raw_E.sum(), 0.0, []
        for expert in logits_E.argsort(descending=True)[: rule["topk"]].tolist():
            if taken < rule.get("top_p", 1.0):
                chosen.append(expert)
            taken += float(parts_E[expert].detach())
        chosen = [expert for expert in chosen if expert < EXPERTS]
        row_E = raw_E[:EXPERTS] * torch.tensor([expert in chosen for expert in range(EXPERTS)])
        is_normalized = rule.get("score") == "sigmoid" or not rule.get("pre_softmax", True)
        rows.append(row_E / row_E.sum() if is_normalized and chosen else row_E)
    return torch.stack(rows)


@pytest.mark.parametrize("backend", ["loop", "triton"])
@pytest.mark.parametrize("name", NUMBERS)
def test_the_layer_is_a_sum_over_all_experts_by_weight(name, backend):
    """Output and gradients against experts that see every token, in plain torch."""
    dtype = torch.float64 if backend == "loop" else torch.float32
    rule = {"topk": 2, **NUMBERS[name]}
    router = {key: value for key, value in rule.items() if key != "topk"}
    layer = tiny_layer(topk=rule["topk"], router=router, backend=backend, dtype=dtype, aux_loss_coeff=0.0)
    x_TD = random(12, HIDDEN, seed=8).to(dtype)
    x_TD[4] = -2 * x_TD[4].abs()  # with ReLU a token without experts
    grad_TD = random(*x_TD.shape, seed=9).to(dtype)
    parameters = [layer.router.weight, layer.experts.weight1, layer.experts.weight2]

    results = []
    for is_plain in (False, True):
        x = x_TD.clone().requires_grad_()
        for parameter in parameters:
            parameter.grad = None
        if is_plain:
            weights_TE = expected_weights(x.double(), layer.router.weight.double(), rule).to(dtype)
            assert len({int(number) for number in (weights_TE > 0).sum(dim=1)}) > 1
            y = sum(
                weights_TE[:, expert : expert + 1]
                * expert_output(x, layer.experts.weight1[expert], layer.experts.weight2[expert])
                for expert in range(EXPERTS)
            )
        else:
            y, _ = layer(x)
        (y * grad_TD).sum().backward()
        results.append({"y": y.detach(), "x": x.grad} | {str(n): p.grad for n, p in enumerate(parameters)})
    assert_equal_to(1e-12 if dtype == torch.float64 else 1e-5, *results)


@pytest.mark.parametrize("settings", [{"score": "relu"}, {"top_p": 0.5}])
def test_a_replay_is_refused_where_the_number_would_not_be_repeated(settings):
    router = identity_router(4, 2, **settings)
    with (
        record_routing(router),
        pytest.raises(ValueError, match=r"routing replay: .* number of experts .* Fix: set"),
    ):
        router(SCORES)


def test_l1_needs_relu():
    with pytest.raises(ValueError, match=r"aux_loss_type=l1: .* l1_factor\. Fix: set score=relu"):
        tiny_layer(losses=(AuxLoss("l1", 1.0),))
