"""The factors of muP, by hand: a model four times as wide, twice as many experts per token, half as large."""

import pytest

from moe_exp.config import Config, load_config
from moe_exp.config.choices import MUP_RULES
from moe_exp.config.parameter_groups import KINDS, Factors, factors, kind_of

BASE = {
    "gpus_per_node": 1, "optimizer": "adam", "parametrization": "mup", "mup_base_hidden_size": 64,
    "num_experts": 16, "hidden_size": 64, "moe_ffn_hidden_size": 32, "topk": 2, "num_heads": 4,
    "num_query_groups": 4,
}  # fmt: skip
LARGER = {
    "hidden_size": 256, "moe_ffn_hidden_size": 16, "topk": 4, "mup_base_moe_ffn_hidden_size": 32,
    "mup_base_topk": 2,
}  # fmt: skip


def config(**settings: object) -> Config:
    return load_config(BASE | settings, {})


@pytest.mark.parametrize(
    ("kind", "init", "lr"),
    [("embedding", 1, 1), ("hidden", 1 / 2, 1 / 4), ("router", 1 / 2, 1 / 4), ("output", 1 / 4, 1 / 4)],
)
def test_by_hand(kind: str, init: float, lr: float):
    found = factors(config(**LARGER), kind)
    assert found == Factors(init, lr)


@pytest.mark.parametrize(
    ("rule", "init"),
    [("fan_in", 2**0.5), ("mean_field", 4.0), ("active_width", 2.0)],  # m^(-1/2), n^(1/2) / m, (k / m)^(1/2)
)
def test_second_projection_of_the_experts_by_hand(rule: str, init: float):
    found = factors(config(**LARGER, mup_rule=rule), "expert_down")
    assert (found.init, found.lr) == (pytest.approx(init), 2.0)


@pytest.mark.parametrize("rule", MUP_RULES)
def test_in_proportion_all_rules_are_one(rule: str):
    wider = config(hidden_size=256, moe_ffn_hidden_size=128, mup_rule=rule)
    assert factors(wider, "expert_down") == factors(wider, "hidden") == Factors(1 / 2, 1 / 4)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_changes_for_the_base_or_without(kind: str):
    assert factors(config(), kind) == Factors()
    assert factors(config(**LARGER, parametrization="standard"), kind) == Factors()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("module.embedding.word_embeddings.weight", "embedding"),
        ("output_layer.weight", "output"),
        ("decoder.layers.0.mlp.router.weight", "router"),
        ("decoder.layers.0.mlp.shared_experts.gate_weight", "router"),
        ("decoder.layers.0.mlp.experts.weight1", "hidden"),
        ("decoder.layers.0.mlp.experts.weight2", "expert_down"),
        ("decoder.layers.0.mlp.experts.7.weight2", "expert_down"),
        ("decoder.layers.0.mlp.shared_experts.linear_fc2.weight", "hidden"),
        ("decoder.layers.0.self_attention.linear_qkv.weight", "hidden"),
    ],
)
def test_kinds_by_name(name: str, kind: str):
    assert kind_of(name) == kind
