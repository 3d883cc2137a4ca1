"""What the Megatron side of the layer refuses before it builds anything, and how it reads Megatron's
settings.
"""

from __future__ import annotations

from typing import Any

import pytest

from moe_exp.layers.losses import AuxLoss
from moe_exp.layers.megatron.moe_parts import (
    MegatronMoELayer,
    balancing_losses,
    check_parallel_sizes,
    router_config,
)

from megatron.core.transformer.transformer_config import TransformerConfig

SETTINGS = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_moe_experts": 6,
    "moe_ffn_hidden_size": 12,
}


def settings(**changes: Any) -> TransformerConfig:
    config = TransformerConfig(**SETTINGS, moe_router_topk=2)
    for name, value in changes.items():
        setattr(config, name, value)
    return config


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        (
            {"tp": 1, "ep": 4, "etp": 1},
            r"num_moe_experts=6: is not divisible by EP=4\. Fix: use a divisor for EP\.",
        ),
        (
            {"tp": 1, "ep": 2, "etp": 5},
            r"moe_ffn_hidden_size=12: is not divisible by ETP=5\. Fix: use a divisor for ETP\.",
        ),
        (
            {"tp": 2, "ep": 1, "etp": 1},
            r"sequence_parallel=False: with TP=2 every rank would route the same tokens\. Fix: .*",
        ),
    ],
)
def test_sizes_that_cannot_be(sizes, text):
    with pytest.raises(ValueError, match=text):
        check_parallel_sizes(settings(), **sizes)


def test_sizes_that_can_be():
    check_parallel_sizes(settings(sequence_parallel=True), tp=2, ep=3, etp=4)


def test_a_layer_without_a_spec():
    with pytest.raises(
        ValueError,
        match=r"submodules=None: the layer is built from a spec\. Fix: use moe_submodule_spec\(\)\.",
    ):
        MegatronMoELayer(settings())


@pytest.mark.parametrize(
    ("kinds", "coeffs", "expected"),
    [
        ("aux_loss", 0.5, (AuxLoss("aux_loss", 0.5),)),
        ("none", 0.5, ()),
        ("sinkhorn", 0.0, ()),
        (
            ["aux_loss", "seq_aux_loss"],
            [0.5, 0.25],
            (AuxLoss("aux_loss", 0.5), AuxLoss("seq_aux_loss", 0.25)),
        ),
    ],
)
def test_losses_of_a_transformer_config(kinds, coeffs, expected):
    assert (
        balancing_losses(settings(moe_router_load_balancing_type=kinds, moe_aux_loss_coeff=coeffs))
        == expected
    )


def test_an_unknown_loss():
    with pytest.raises(ValueError, match=r"aux_loss_type=aux: is not a loss\. Fix: use aux_loss"):
        balancing_losses(settings(moe_router_load_balancing_type="aux"))


def test_router_of_a_transformer_config():
    config = settings(
        moe_router_load_balancing_type=["global_aux_loss"],
        moe_aux_loss_coeff=[0.1],
        moe_router_dtype="fp64",
        moe_input_jitter_eps=0.1,
    )
    router = router_config(config, {"score": "sqrtsoftplus", "normalize": False})
    assert (router.global_fractions, router.dtype, router.jitter, router.topk) == (True, "fp64", 0.1, 2)
    assert (router.score, router.normalizes, router.assignment, router.pre_softmax) == (
        "sqrtsoftplus",
        False,
        "topk",
        False,
    )
    assert router_config(settings(moe_router_load_balancing_type="sinkhorn"), {}).assignment == "sinkhorn"
    assert router_config(settings(moe_router_force_load_balancing=True), {}).assignment == "balanced"
