"""What a common shift or a factor of a token's logits changes, for every score function and loss: the table
of docs/moe_layer.md.
"""

import math

import pytest
import torch
from torch.nn.functional import softplus

from helpers.layers.tiny_moe import identity_router, random
from moe_exp.config.choices import LOSSES, SCORES
from moe_exp.layers.losses import (
    entropy_loss_share,
    global_balancing_loss_share,
    load_balancing_loss_share,
    sequence_balancing_loss_share,
    z_loss_share,
)

TOKENS, EXPERTS, TOPK = 24, 6, 2
LOGITS = random(TOKENS, EXPERTS, seed=1).double()
BIAS = torch.tensor([0.0, 0.4, 0.0, -0.3, 0.2, 0.0])
GLOBAL_COUNTS = torch.tensor([9.0, 4, 6, 3, 1, 1])
QUANTITIES = ("experts", "experts with bias", "weights", "normalized weights", "z_loss", *LOSSES)
RAW = {"sigmoid": torch.sigmoid, "sqrtsoftplus": lambda z: softplus(z).sqrt(), "relu": torch.relu}


def is_defined(quantity: str, score: str) -> bool:
    if score == "relu":
        return quantity not in ("experts with bias", "normalized weights")
    return quantity != "l1"


DEFINED = [(quantity, score) for quantity in QUANTITIES for score in SCORES if is_defined(quantity, score)]


def found(quantity: str, score: str, logits_TE: torch.Tensor) -> torch.Tensor:
    options = {"score": score, "normalize": quantity == "normalized weights"}
    options["dtype"] = "fp64" if logits_TE.dtype == torch.float64 else "fp32"
    router = identity_router(EXPERTS, TOPK, **options, expert_bias=quantity == "experts with bias")
    if quantity == "experts with bias":
        router.expert_bias.copy_(BIAS)
    decision = router(logits_TE.detach())
    scores_TE, counts_E = decision.scores_TE, decision.tokens_per_expert_E
    by_sequence = [x.unflatten(0, (4, TOKENS // 4)) for x in (scores_TE, decision.expert_TK)]
    experts = decision.expert_TK.sort(dim=1).values if decision.kept_TK is None else decision.kept_TK
    return {
        "experts": lambda: experts,
        "experts with bias": lambda: experts,
        "weights": lambda: decision.weights_TK,
        "normalized weights": lambda: decision.weights_TK,
        "z_loss": lambda: z_loss_share(decision.logits_TE),
        "aux_loss": lambda: load_balancing_loss_share(scores_TE, counts_E, topk=TOPK),
        "seq_aux_loss": lambda: sequence_balancing_loss_share(*by_sequence, None),
        "global_aux_loss": lambda: global_balancing_loss_share(scores_TE, GLOBAL_COUNTS, counts_E),
        "l1": lambda: load_balancing_loss_share(decision.weights_for_l1(), counts_E, topk=TOPK),
        "entropy": lambda: entropy_loss_share(scores_TE),
    }[quantity]().detach()


def is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one.double(), other.double(), rtol=1e-11, atol=1e-11)


def same_under_shift(quantity: str, score: str) -> bool:
    """The rule of the table."""
    if score == "relu":
        return False
    return quantity == "experts" or (score == "softmax" and quantity != "z_loss")


@pytest.mark.parametrize(("quantity", "score"), DEFINED)
def test_a_common_shift(quantity, score):
    before = found(quantity, score, LOGITS)
    same = [is_same(found(quantity, score, LOGITS + shift), before) for shift in (-3.0, 2.5)]
    assert all(same) == same_under_shift(quantity, score)


@pytest.mark.parametrize(("quantity", "score"), DEFINED)
def test_a_factor(quantity, score):
    """Changes all but the order of the logits, and the part of each in the sum of ReLU scores."""
    before = found(quantity, score, LOGITS)
    of_parts = score == "relu" and quantity not in ("weights", "z_loss", "l1")
    for factor in (0.3, 3.0):
        same = is_same(found(quantity, score, factor * LOGITS), before)
        assert same == (quantity == "experts" or of_parts)


@pytest.mark.parametrize("quantity", [name for name in QUANTITIES if name not in ("z_loss", "l1")])
def test_softmax_has_the_same_bits_after_a_shift_that_is_exact(quantity):
    """Of logits that fp32 holds shifted, too: the largest is subtracted first."""
    logits_TE = (LOGITS * 256).round().float() / 256
    assert torch.equal(found(quantity, "softmax", logits_TE + 64), found(quantity, "softmax", logits_TE))


@pytest.mark.parametrize("score", RAW)
def test_weights_by_formula(score):
    """Without normalization they are the score of the shifted logit, with it its part of the sum."""
    chosen_TK = LOGITS + 2.5 if score == "relu" else (LOGITS + 2.5).topk(TOPK, dim=1).values
    raw_TK = RAW[score](chosen_TK)
    assert is_same(found("weights", score, LOGITS + 2.5), raw_TK)
    if score == "relu":
        raw_TE = torch.relu(LOGITS + 2.5)
        expected = (raw_TE * (raw_TE > 0).sum(dim=0)).sum() * EXPERTS / (TOPK * TOKENS**2)
        assert is_same(found("l1", score, LOGITS + 2.5), expected)
        return
    normalized_TK = raw_TK / raw_TK.sum(dim=1, keepdim=True)
    assert is_same(found("normalized weights", score, LOGITS + 2.5), normalized_TK)


@pytest.mark.parametrize(("score", "shift"), [("sigmoid", 40.0), ("sqrtsoftplus", 1e9)])
def test_far_above_zero_all_experts_are_alike(score, shift):
    """Weights 1/K; losses as of a score of 1/E: 1 for those of balance; the choice is still by logit."""
    logits_TE = LOGITS + shift
    assert torch.equal(found("experts", score, logits_TE), found("experts", score, LOGITS))
    weights_TK = found("normalized weights", score, logits_TE)
    assert torch.allclose(weights_TK, torch.tensor(1 / TOPK).double(), atol=1e-8)
    for loss in LOSSES.keys() - {"l1"}:
        expected = math.log(EXPERTS) if loss == "entropy" else 1.0
        assert float(found(loss, score, logits_TE)) == pytest.approx(expected, abs=1e-7)
