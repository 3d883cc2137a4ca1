from __future__ import annotations

import pytest

from moe_exp.config import Config, load_config
from moe_exp.planner.costs.flops import flops_per_iteration
from moe_exp.planner.costs.params import (
    MEBIBYTE,
    checkpoint_bytes,
    count_parameters,
    most_loaded_rank,
    parameters_of_stages,
    rank_parameters,
    stage_of_layer,
    startup_report,
    weight_and_optimizer_bytes,
)


def reference(**settings) -> Config:
    return load_config({"preset": "reference", "gpus_per_node": 8} | settings, {})


def tiny(**settings) -> Config:
    """Sizes that are all different, so that no two can be mixed up."""
    sizes = {
        "num_layers": 4,
        "hidden_size": 16,
        "ffn_hidden_size": 24,
        "num_heads": 4,
        "num_query_groups": 2,
        "head_dim": 6,
    }
    sizes |= {"vocab_size": 256, "num_experts": 8, "moe_ffn_hidden_size": 12, "gpus_per_node": 1}
    return Config(**(sizes | settings))


# The exact numbers of the reference runs


def test_dense_reference():
    config = reference(use_moe=False)
    count = count_parameters(config)
    assert (count.transformer_layers, count.embedding, count.total) == (
        81_814_016,
        2 * 128256 * 512,
        213_148_160,
    )
    assert count.active_per_token == count.total
    assert round(weight_and_optimizer_bytes(config, rank_parameters(config)) / MEBIBYTE, 2) == 1524.55


@pytest.mark.parametrize(
    ("ep", "on_rank", "megabytes"), [(4, 1_204_838_912, 13153.68), (8, 676_356_608, 10129.68)]
)
def test_moe_reference(ep, on_rank, megabytes):
    config = reference(ep=ep)
    assert count_parameters(config).total == 4_375_732_736
    assert rank_parameters(config).total == on_rank
    assert round(weight_and_optimizer_bytes(config, rank_parameters(config)) / MEBIBYTE, 2) == megabytes


@pytest.mark.parametrize("settings", [{"use_moe": False}, {"topk": 1}, {"topk": 1, "ep": 8, "mbsz": 4}])
def test_flops_of_the_reference_runs(settings):
    assert flops_per_iteration(reference(**settings)) == 135_755_326_291_968


def test_startup_report_of_the_reference():
    report = startup_report(reference(ep=4))
    assert "Parameters: 4.38B (4,375,732,736), 214M (213,934,592) active per token\n" in report
    assert "number of parameters on (tensor, pipeline) model parallel rank (0, 0): 1204838912" in report
    assert "weight and optimizer=13153.68 MB" in report
    assert "135755326291968" in report


# Published models, from the shapes in their checkpoints


PUBLISHED = {"olmoe-1b-7b": 6_919_161_856, "mixtral-8x7b": 46_702_792_704, "qwen3-30b-a3b": 30_532_122_624}
PUBLISHED |= {"deepseek-v3-like": 671_026_404_352}


@pytest.mark.parametrize(("preset", "total"), PUBLISHED.items())
def test_presets_have_the_published_size(preset, total):
    assert count_parameters(load_config({"preset": preset, "gpus_per_node": 8}, {})).total == total


# By hand


def test_one_dense_layer_by_hand():
    config = tiny(
        num_layers=1,
        use_moe=False,
        activation="gelu",
        normalization="LayerNorm",
        qk_norm=True,
        add_bias_linear=True,
    )
    attention = (24 + 12 + 12) * 16 + 48 + 24 * 16 + 16 + 2 * 2 * 6
    mlp = 16 * 24 + 24 + 24 * 16 + 16
    assert count_parameters(config).transformer_layers == attention + mlp + 3 * 2 * 16
    assert count_parameters(config).embedding == 2 * 256 * 16


def test_one_moe_layer_by_hand():
    config = tiny(num_layers=2, first_k_dense=1, topk=2, shared_expert_size=20, tie_embeddings=True)
    attention, norms, expert = (24 + 12 + 12) * 16 + 24 * 16, 2 * 16, 3 * 16 * 12
    dense_layer = attention + norms + 3 * 16 * 24
    moe_layer = attention + norms + 8 * 16 + 8 * expert + 3 * 16 * 20
    count = count_parameters(config)
    assert (count.transformer_layers, count.embedding) == (dense_layer + moe_layer + 16, 256 * 16)
    assert count.active_per_token == count.total - 6 * expert


def test_biases_of_an_moe_layer_by_hand():
    sizes = {"num_layers": 1, "topk": 2, "use_moe": True}
    plain, biased = (count_parameters(tiny(**sizes, add_bias_linear=flag)) for flag in (False, True))
    router, attention, expert = 8, (24 + 12 + 12) + 16, 2 * 12 + 16
    assert biased.total - plain.total == router + attention + 8 * expert


def test_latent_experts_by_hand():
    """Two projections of 16 x 10 in each MoE layer, and experts of 3 * 10 * 12 instead of 3 * 16 * 12."""
    sizes = {
        "num_layers": 2,
        "first_k_dense": 1,
        "topk": 2,
        "shared_expert_size": 20,
        "seq_len": 10,
        "gbsz": 8,
    }
    plain, latent = count_parameters(tiny(**sizes)), count_parameters(tiny(**sizes, moe_latent_size=10))
    assert latent.total - plain.total == 2 * 16 * 10 - 8 * 3 * 6 * 12
    assert latent.active_per_token - plain.active_per_token == 2 * 16 * 10 - 2 * 3 * 6 * 12
    more = flops_per_iteration(tiny(**sizes, moe_latent_size=10)) - flops_per_iteration(tiny(**sizes))
    assert more == 6 * 8 * 10 * (2 * 16 * 10 - 2 * 3 * 6 * 12)
    split = {"tp": 2, "ep": 4, "gpus_per_node": 4}
    part = rank_parameters(tiny(**sizes, moe_latent_size=10, **split))
    assert part.expert == 2 * 3 * 10 * 12
    # Every tensor parallel rank has the projections whole.
    assert part.dense - rank_parameters(tiny(**sizes, **split)).dense == 2 * 16 * 10


LATENT = {
    "multi_latent_attention": True,
    "qk_norm": True,
    "q_lora_rank": 10,
    "kv_lora_rank": 14,
    "qk_head_dim": 6,
}
LATENT |= {"qk_pos_emb_head_dim": 4, "v_head_dim": 8, "head_dim": 0}


def test_latent_attention_by_hand():
    config = tiny(num_layers=1, use_moe=False, **LATENT)
    query, latent = 16 * 10 + 10 + 10 * 4 * (6 + 4), 16 * (14 + 4) + 14 + 14 * 4 * (6 + 8)
    mlp_and_norms = 3 * 16 * 24 + 3 * 16
    assert count_parameters(config).transformer_layers == query + latent + 4 * 8 * 16 + mlp_and_norms
    of_tp2 = 16 * 10 + 10 + 10 * 2 * (6 + 4) + 16 * (14 + 4) + 14 + 14 * 2 * (6 + 8) + 2 * 8 * 16
    assert rank_parameters(tiny(num_layers=1, use_moe=False, tp=2, gpus_per_node=2, **LATENT)).dense == (
        of_tp2 + 3 * 16 * 12 + 3 * 16 + 2 * 128 * 16
    )
    whole = tiny(num_layers=1, use_moe=False, **(LATENT | {"q_lora_rank": 0}))
    assert (
        count_parameters(whole).transformer_layers == 16 * 4 * (6 + 4) + latent + 4 * 8 * 16 + mlp_and_norms
    )


def test_flops_of_latent_attention_by_hand():
    config = tiny(num_layers=1, use_moe=False, seq_len=12, gbsz=8, **LATENT)
    projections = 16 * 10 + 10 * 4 * (6 + 4) + 16 * (14 + 4) + 14 * 4 * (6 + 8) + 4 * 8 * 16
    scores_and_values = 6 * 4 * (6 + 4) + 6 * 4 * 8
    assert flops_per_iteration(config) == 6 * 8 * 12 * (
        projections + scores_and_values + 3 * 16 * 24 + 16 * 256
    )


def test_flops_by_hand():
    config = tiny(num_layers=3, first_k_dense=1, topk=2, shared_expert_size=20, seq_len=10, gbsz=8)
    attention = 16 * (24 + 12 + 12) + 24 * 16 + 2 * 5 * 24
    multiply_adds = 3 * attention + 3 * 16 * 24 + 2 * 3 * 16 * (2 * 12 + 20) + 16 * 256
    assert flops_per_iteration(config) == 6 * 8 * 10 * multiply_adds
    assert flops_per_iteration(config, batch_size=2) * 4 == flops_per_iteration(config)


# Ranks


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"use_moe": False},
        {"tie_embeddings": True},
        {"first_k_dense": 3},
        {"shared_expert_size": 20},
        {"normalization": "LayerNorm"},
    ],
)
@pytest.mark.parametrize(
    "layout", [(1, 1, None), (2, 1, None), (1, 2, None), (1, 2, 2), (2, 2, None), (1, 4, None)]
)
def test_ranks_together_hold_the_model(settings, layout):
    tp, pp, vpp = layout
    config = tiny(tp=tp, pp=pp, vpp=vpp, gpus_per_node=tp * pp, **settings)
    held = [rank_parameters(config, pp_rank) for pp_rank in range(pp)]
    # Norms and router are on every tensor-parallel rank, tied embeddings once more on the last stage.
    norm = 16 if config.normalization == "RMSNorm" else 32
    num_moe = config.num_layers - config.first_k_dense if config.use_moe else 0
    replicated = (2 * config.num_layers + 1) * norm + num_moe * 8 * 16
    copied = 256 * 16 if config.tie_embeddings and pp > 1 else 0
    dense = tp * sum(part.dense for part in held) - (tp - 1) * replicated - copied
    assert dense + sum(part.expert for part in held) == count_parameters(config).total


def test_row_parallel_biases_are_on_every_tensor_rank():
    settings = {"use_moe": False, "add_bias_linear": True, "activation": "gelu", "num_layers": 1}
    alone, split = (rank_parameters(tiny(tp=tp, gpus_per_node=tp, **settings)).dense for tp in (1, 2))
    assert 2 * split - alone == 3 * 16 + 2 * 16


def test_experts_are_split_by_ep_and_etp():
    alone = rank_parameters(tiny()).expert
    assert alone == 4 * 8 * 3 * 16 * 12
    assert rank_parameters(tiny(ep=4, gpus_per_node=4)).expert * 4 == alone
    assert rank_parameters(tiny(ep=2, etp=2, gpus_per_node=4)).expert * 4 == alone


def test_interleaved_chunks_go_around_the_stages():
    assert [stage_of_layer(tiny(num_layers=8, pp=2), i) for i in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [stage_of_layer(tiny(num_layers=8, pp=2, vpp=2), i) for i in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    uneven = tiny(num_layers=8, pp=4, first_stage_layers=1, last_stage_layers=3)
    assert uneven.stage_layers == [1, 2, 2, 3]
    assert [stage_of_layer(uneven, i) for i in range(8)] == [0, 1, 1, 2, 2, 3, 3, 3]
    assert [stage_of_layer(tiny(num_layers=8, pp=2, last_stage_layers=2, vpp=2), i) for i in range(8)] == [
        0,
        0,
        0,
        1,
        0,
        0,
        0,
        1,
    ]
    assert tiny(num_layers=8).stage_layers == [8]


def test_most_loaded_rank():
    assert most_loaded_rank(tiny(pp=2)) == 1  # the final norm
    assert most_loaded_rank(tiny(pp=2, use_moe=False, num_layers=2, normalization="LayerNorm")) == 1
    assert most_loaded_rank(tiny(pp=4, first_k_dense=1, vocab_size=1)) == 3
    assert most_loaded_rank(tiny(pp=1)) == 0


def test_stages_without_layers_and_learned_positions():
    config = tiny(num_layers=3, first_k_dense=1, seq_len=40)
    parts = parameters_of_stages(config, [0, 2, 1, 0])
    table, attention, norms, router = 256 * 16, (24 + 12 + 12) * 16 + 24 * 16, 2 * 16, 8 * 16
    expert = 8 * 3 * 16 * 12
    assert [part.dense for part in parts] == [
        table,
        2 * (attention + norms) + 3 * 16 * 24 + router,
        attention + norms + router,
        16 + table,
    ]
    assert [part.expert for part in parts] == [0, expert, expert, 0]
    learned = parameters_of_stages(config, [0, 2, 1, 0], learned_positions=True)
    assert [new.total - old.total for new, old in zip(learned, parts, strict=True)] == [40 * 16, 0, 0, 0]
    # A stage that VPP does not divide has its layers all the same.
    alone, in_chunks = (parameters_of_stages(tiny(num_layers=7, vpp=vpp), [4, 3]) for vpp in (None, 2))
    assert in_chunks == alone
    # Positions are not split with the vocabulary.
    config = tiny(num_layers=3, seq_len=40, tp=2)
    alone, learned = (
        parameters_of_stages(config, [3], learned_positions=given)[0].dense for given in (False, True)
    )
    assert learned - alone == 40 * 16


# Bytes


@pytest.mark.parametrize(
    ("dtype", "sharded", "per_parameter"),
    [("bf16", False, 18), ("bf16", True, 9), ("fp32", False, 16), ("fp32", True, 10)],
)
def test_bytes_per_parameter(dtype, sharded, per_parameter):
    config = tiny(use_moe=False, gpus_per_node=4, dtype=dtype, distributed_optimizer=sharded)
    rank = rank_parameters(config)
    assert weight_and_optimizer_bytes(config, rank) == per_parameter * rank.dense


def test_expert_state_is_split_among_fewer_ranks():
    config = tiny(ep=2, cp=2, gpus_per_node=4)
    rank = rank_parameters(config)
    assert weight_and_optimizer_bytes(config, rank) == (6 + 12 / 4) * rank.dense + (6 + 12 / 2) * rank.expert


def test_checkpoint_holds_weights_and_adam_state():
    assert checkpoint_bytes(tiny(dtype="bf16")) == 14 * count_parameters(tiny()).total
    assert checkpoint_bytes(tiny(dtype="fp32")) == 16 * count_parameters(tiny()).total
