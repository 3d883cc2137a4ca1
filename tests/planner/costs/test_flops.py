from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_exp.config import Config, load_config
from moe_exp.planner.costs.flops import (
    flops_per_iteration,
    hardware_flops_per_iteration,
    narayanan_flops,
)
from moe_exp.planner.costs.params import count_parameters, gpt_parameters, parameters_of_stages

# Sizes that are all different. Multiply-adds per token and layer: 768 for queries, keys and values, 240 for
# scores and weighted values, 384 for the projection after them; 3 * 16 * 24 for a dense MLP, 3 * 16 * (2 *
# 12 + 20) for an MoE.
TINY = {
    "hidden_size": 16,
    "ffn_hidden_size": 24,
    "num_heads": 4,
    "num_query_groups": 2,
    "head_dim": 6,
    "vocab_size": 256,
    "topk": 2,
}
TINY |= {
    "num_experts": 8,
    "moe_ffn_hidden_size": 12,
    "shared_expert_size": 20,
    "num_layers": 3,
    "seq_len": 10,
    "gbsz": 8,
}
LATENT = {
    "multi_latent_attention": True,
    "q_lora_rank": 10,
    "kv_lora_rank": 14,
    "qk_head_dim": 6,
    "qk_pos_emb_head_dim": 4,
}
LATENT |= {"v_head_dim": 8, "head_dim": 0}


def gpt_2020(hidden: int, num_layers: int, vocab: int, **more) -> Config:
    """The models of the formula of 2021 in our settings."""
    shape = {
        "hidden_size": hidden,
        "ffn_hidden_size": 4 * hidden,
        "num_layers": num_layers,
        "vocab_size": vocab,
        "num_heads": hidden // 64,
    }
    kind = {
        "num_query_groups": hidden // 64,
        "activation": "gelu",
        "use_moe": False,
        "tie_embeddings": True,
        "add_bias_linear": True,
    }
    return Config(**(shape | kind | {"normalization": "LayerNorm", "seq_len": 2048} | more))


def masked_half(config: Config, *, passes: int) -> int:
    """Operations on scores that the causal mask drops, which the formulas of 2020 count."""
    per_token = 2 * config.seq_len * config.hidden_size * config.num_layers
    return passes * per_token * config.gbsz * config.seq_len


@pytest.mark.parametrize(
    ("hidden_size", "num_layers", "vocab_size", "total"),
    [
        (12288, 112, 150257, 204826644480),
        (13312, 96, 150257, 206189288448),
        (12288, 80, 50257, 145610674176),
        (16384, 96, 50257, 310115090432),
        (20480, 105, 50257, 529581506560),
        (14336, 70, 250880, 176276602880),
    ],
)
def test_sizes_of_models_of_2020(hidden_size, num_layers, vocab_size, total):
    assert (
        gpt_parameters(num_layers=num_layers, hidden_size=hidden_size, vocab_size=vocab_size, seq_len=2048)
        == total
    )
    config = gpt_2020(hidden_size, num_layers, vocab_size)
    [rank] = parameters_of_stages(config, [num_layers], learned_positions=True)
    padding = (config.padded_vocab_size - vocab_size) * hidden_size
    assert rank.total == total + padding
    assert rank.total - count_parameters(config).total == 2048 * hidden_size


def test_teraflops_of_a_published_run():
    sizes = {
        "batch_size": 2048,
        "seq_len": 2048,
        "num_layers": 70,
        "hidden_size": 14336,
        "vocab_size": 250880,
    }
    assert round(narayanan_flops(**sizes) / 141.94 / 288 / 1e12, 2) == 147.29
    config = gpt_2020(14336, 70, 250880, gbsz=2048, recompute="full")
    assert hardware_flops_per_iteration(config) + masked_half(config, passes=4) == narayanan_flops(**sizes)
    without = narayanan_flops(**sizes, recompute=False)
    assert flops_per_iteration(config) + masked_half(config, passes=3) == without


@given(
    batch=st.integers(1, 4096),
    layers=st.integers(1, 200),
    hidden=st.integers(1, 320).map(lambda n: 64 * n),
    vocab=st.integers(1, 2000).map(lambda n: 128 * n),
)
def test_formula_of_2021_is_ours_for_models_of_2020(batch, layers, hidden, vocab):
    sizes = {
        "batch_size": batch,
        "seq_len": 2048,
        "num_layers": layers,
        "hidden_size": hidden,
        "vocab_size": vocab,
    }
    in_words = (
        96 * batch * 2048 * layers * hidden**2 * (1 + 2048 / (6 * hidden) + vocab / (16 * layers * hidden))
    )
    assert narayanan_flops(**sizes) == pytest.approx(in_words, rel=1e-12)
    config = gpt_2020(hidden, layers, vocab, gbsz=batch)
    without = narayanan_flops(**sizes, recompute=False)
    assert flops_per_iteration(config) + masked_half(config, passes=3) == without
    repeated = hardware_flops_per_iteration(config.model_copy(update={"recompute": "full"}))
    assert repeated + masked_half(config, passes=4) == narayanan_flops(**sizes)


@pytest.mark.parametrize(
    ("recompute", "settings", "repeated"),
    [
        ("none", {}, 0),
        ("moe_act", {}, 0),
        ("full", {}, 3 * (768 + 240 + 384) + 3 * 3 * 16 * 44),
        ("full", {"first_k_dense": 1}, 3 * (768 + 240 + 384) + 3 * 16 * 24 + 2 * 3 * 16 * 44),
        ("selective", {"first_k_dense": 1}, 2 * 3 * 16 * 44),
        ("selective", {"use_moe": False}, 3 * 240),
        ("moe_act", {"use_moe": False}, 3 * 240),
        ("selective", {"use_moe": False, **LATENT}, 3 * 5 * 4 * (10 + 8)),
        ("full", {"use_moe": False, "activation": "gelu"}, 3 * (768 + 240 + 384) + 3 * 2 * 16 * 24),
    ],
)
def test_what_is_computed_twice_by_hand(recompute, settings, repeated):
    config = Config(**(TINY | settings | {"recompute": recompute}))
    assert hardware_flops_per_iteration(config) - flops_per_iteration(config) == 2 * 8 * 10 * repeated
    assert hardware_flops_per_iteration(config, batch_size=2) * 4 == hardware_flops_per_iteration(config)


def test_flops_of_a_published_model():
    """Megatron-LM's rule for Qwen3-30B-A3B at 4096 tokens, by its formula: attention sees half of them."""
    config = load_config({"preset": "qwen3-30b-a3b", "gpus_per_node": 8}, {})
    projections, mlp = 2048 * 128 * (32 + 4 + 4 + 32), 3 * 2048 * 768 * 8
    layer = projections + 2 * 32 * 128 * 2048 + mlp
    per_token = flops_per_iteration(config) / config.gbsz / 4096
    assert per_token == 6 * (48 * layer + 2048 * config.padded_vocab_size)
