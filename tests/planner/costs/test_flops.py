import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_exp.config import Config, load_config
from moe_exp.planner.costs.flops import flops_per_iteration
from moe_exp.planner.costs.params import count_parameters, parameters_of_stages


def gpt_2020(hidden: int, num_layers: int, vocab: int, **more) -> Config:
    """The models of the formula of 2021 in our settings."""
    return Config(
        hidden_size=hidden, ffn_hidden_size=4 * hidden, num_layers=num_layers, vocab_size=vocab,
        num_heads=hidden // 64, num_query_groups=hidden // 64, activation="gelu", use_moe=False,
        tie_embeddings=True, add_bias_linear=True, normalization="LayerNorm", seq_len=2048, **more,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("hidden_size", "num_layers", "vocab_size", "total"),
    [
        (12288, 112, 150257, 204826644480),
        (12288, 80, 50257, 145610674176),
        (20480, 105, 50257, 529581506560),
        (14336, 70, 250880, 176276602880),
    ],
)
def test_sizes_of_models_of_2020(hidden_size, num_layers, vocab_size, total):
    config = gpt_2020(hidden_size, num_layers, vocab_size)
    [rank] = parameters_of_stages(config, [num_layers], learned_positions=True)
    padding = (config.padded_vocab_size - vocab_size) * hidden_size
    assert rank.total == total + padding
    assert rank.total - count_parameters(config).total == 2048 * hidden_size


@given(
    batch=st.integers(1, 4096),
    layers=st.integers(1, 200),
    hidden=st.integers(1, 320).map(lambda n: 64 * n),
    vocab=st.integers(1, 2000).map(lambda n: 128 * n),
)
def test_flops_of_models_of_2020_by_the_formula_of_2021(batch, layers, hidden, vocab):
    """Narayanan et al. 2021, arXiv:2104.04473, equation 3, without recompute; it counts all scores."""
    share = 1 + 2048 / (6 * hidden) + vocab / (12 * layers * hidden)
    formula = 72 * batch * 2048 * layers * hidden**2 * share
    masked = 3 * 2 * 2048 * hidden * layers * batch * 2048
    flops = flops_per_iteration(gpt_2020(hidden, layers, vocab, gbsz=batch))
    assert flops + masked == pytest.approx(formula, rel=1e-12)


def test_flops_of_a_published_model():
    """Megatron-LM's rule for Qwen3-30B-A3B at 4096 tokens, by its formula: attention sees half of them."""
    config = load_config({"preset": "qwen3-30b-a3b", "gpus_per_node": 8}, {})
    projections, mlp = 2048 * 128 * (32 + 4 + 4 + 32), 3 * 2048 * 768 * 8
    layer = projections + 2 * 32 * 128 * 2048 + mlp
    per_token = flops_per_iteration(config) / config.gbsz / 4096
    assert per_token == 6 * (48 * layer + 2048 * config.padded_vocab_size)
