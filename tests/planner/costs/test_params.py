import pytest

from moe_exp.config import Config, load_config
from moe_exp.planner.costs.flops import flops_per_iteration
from moe_exp.planner.costs.params import (
    MEBIBYTE,
    count_parameters,
    most_loaded_rank,
    parameters_of_stages,
    rank_parameters,
    startup_report,
    weight_and_optimizer_bytes,
)


def reference(**settings) -> Config:
    return load_config({"preset": "reference", "gpus_per_node": 8} | settings, {})


def tiny(**settings) -> Config:
    """Sizes that are all different, so that no two can be mixed up."""
    sizes = {
        "num_layers": 4, "hidden_size": 16, "ffn_hidden_size": 24, "num_heads": 4, "num_query_groups": 2,
        "head_dim": 6, "vocab_size": 256, "num_experts": 8, "moe_ffn_hidden_size": 12, "gpus_per_node": 1,
    }  # fmt: skip
    return Config(**(sizes | settings))


@pytest.mark.parametrize(
    ("settings", "total", "on_rank", "mb"),
    [
        ({"use_moe": False}, 213_148_160, 213_148_160, 1524.55),
        ({"ep": 4}, 4_375_732_736, 1_204_838_912, 13153.68),
        ({"ep": 8}, 4_375_732_736, 676_356_608, 10129.68),
    ],
)
def test_parameters_of_the_reference_runs(settings, total, on_rank, mb):
    config = reference(**settings)
    count, rank = count_parameters(config), rank_parameters(config)
    assert (count.total, count.embedding, rank.total) == (total, 2 * 128256 * 512, on_rank)
    assert round(weight_and_optimizer_bytes(config, rank) / MEBIBYTE, 2) == mb


@pytest.mark.parametrize("settings", [{"use_moe": False}, {"topk": 1}, {"topk": 1, "ep": 8, "mbsz": 4}])
def test_flops_of_the_reference_runs(settings):
    assert flops_per_iteration(reference(**settings)) == 135_755_326_291_968


def test_startup_report_of_the_reference():
    report = startup_report(reference(ep=4))
    assert "Parameters: 4.38B (4,375,732,736), 214M (213,934,592) active per token\n" in report
    assert "number of parameters on (tensor, pipeline) model parallel rank (0, 0): 1204838912" in report
    assert "weight and optimizer=13153.68 MB" in report
    assert "135755326291968" in report


# From the shapes in their checkpoints.
PUBLISHED = {"olmoe-1b-7b": 6_919_161_856, "mixtral-8x7b": 46_702_792_704, "qwen3-30b-a3b": 30_532_122_624}
# 671.0 billion, and one layer for multi-token prediction, without its copies of embedding and output layer
PUBLISHED |= {"gpt-oss-20b": 20_914_757_184}
PUBLISHED |= {"deepseek-v3-like": 671_026_404_352 + 11_610_067_968}


@pytest.mark.parametrize(("preset", "total"), PUBLISHED.items())
def test_presets_have_the_published_size(preset, total):
    assert count_parameters(load_config({"preset": preset, "gpus_per_node": 8}, {})).total == total


def test_flops_of_latent_experts_by_hand():
    """Two projections of 16 x 10 in each MoE layer, and experts of 3 * 10 * 12 instead of 3 * 16 * 12."""
    sizes = {"num_layers": 2, "first_k_dense": 1, "topk": 2, "shared_expert_size": 20}
    sizes |= {"seq_len": 10, "gbsz": 8}
    more = flops_per_iteration(tiny(**sizes, moe_latent_size=10)) - flops_per_iteration(tiny(**sizes))
    assert more == 6 * 8 * 10 * (2 * 16 * 10 - 2 * 3 * 6 * 12)


LATENT = {
    "multi_latent_attention": True, "qk_norm": True, "q_lora_rank": 10, "kv_lora_rank": 14, "qk_head_dim": 6,
    "qk_pos_emb_head_dim": 4, "v_head_dim": 8, "head_dim": 0,
}  # fmt: skip


def test_flops_of_latent_attention_by_hand():
    config = tiny(num_layers=1, use_moe=False, seq_len=12, gbsz=8, **LATENT)
    projections = 16 * 10 + 10 * 4 * (6 + 4) + 16 * (14 + 4) + 14 * 4 * (6 + 8) + 4 * 8 * 16
    attention = projections + 6 * 4 * (6 + 4) + 6 * 4 * 8  # and scores and values
    assert flops_per_iteration(config) == 6 * 8 * 12 * (attention + 3 * 16 * 24 + 16 * 256)


def test_flops_of_multi_token_prediction_by_hand():
    """Each adds an MoE layer, a projection of 2*16 x 16 and an output layer."""
    sizes = {"num_layers": 2, "first_k_dense": 1, "topk": 2, "seq_len": 10, "gbsz": 8}
    more = flops_per_iteration(tiny(**sizes, mtp_num_layers=2)) - flops_per_iteration(tiny(**sizes))
    layer = 16 * (24 + 12 + 12) + 24 * 16 + 2 * 5 * 24 + 2 * 3 * 16 * 12
    assert more == 2 * 6 * 8 * 10 * (layer + 2 * 16 * 16 + 16 * 256)


def test_flops_by_hand():
    config = tiny(num_layers=3, first_k_dense=1, topk=2, shared_expert_size=20, seq_len=10, gbsz=8)
    attention = 16 * (24 + 12 + 12) + 24 * 16 + 2 * 5 * 24
    multiply_adds = 3 * attention + 3 * 16 * 24 + 2 * 3 * 16 * (2 * 12 + 20) + 16 * 256
    assert flops_per_iteration(config) == 6 * 8 * 10 * multiply_adds
    assert flops_per_iteration(config, batch_size=2) * 4 == flops_per_iteration(config)


def test_interleaved_chunks_go_around_the_stages():
    def experts(num_layers: int, **layout) -> list[int]:
        """MoE layers of every stage, of a model whose first ones are dense."""
        config = tiny(num_layers=num_layers, **layout)
        stages = parameters_of_stages(config, config.stage_layers)
        return [stage.expert // (8 * 3 * 16 * 12) for stage in stages]

    assert experts(8, pp=2, first_k_dense=4) == [0, 4]
    assert experts(8, pp=2, vpp=2, first_k_dense=4) == [2, 2]
    assert experts(8, pp=2, last_stage_layers=2, vpp=2, first_k_dense=4) == [3, 1]
    uneven = tiny(num_layers=8, pp=4, first_stage_layers=1, last_stage_layers=3)
    assert uneven.stage_layers == [1, 2, 2, 3] and tiny(num_layers=8).stage_layers == [8]


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
    layer = attention + norms
    middle = [2 * layer + 3 * 16 * 24 + router, layer + router]
    assert [part.dense for part in parts] == [table, *middle, 16 + table]
    assert [part.expert for part in parts] == [0, expert, expert, 0]
    learned = parameters_of_stages(config, [0, 2, 1, 0], learned_positions=True)
    assert [new.total - old.total for new, old in zip(learned, parts, strict=True)] == [40 * 16, 0, 0, 0]
    # A stage that VPP does not divide has its layers all the same.
    alone, in_chunks = (parameters_of_stages(tiny(num_layers=7, vpp=vpp), [4, 3]) for vpp in (None, 2))
    assert in_chunks == alone
    # Positions are not split with the vocabulary.
    config = tiny(num_layers=3, seq_len=40, tp=2)
    [alone], [learned] = (parameters_of_stages(config, [3], learned_positions=on) for on in (False, True))
    assert learned.dense - alone.dense == 40 * 16


def test_expert_state_is_split_among_fewer_ranks():
    config = tiny(ep=2, cp=2, gpus_per_node=4)
    rank = rank_parameters(config)
    assert weight_and_optimizer_bytes(config, rank) == (6 + 12 / 4) * rank.dense + (6 + 12 / 2) * rank.expert
