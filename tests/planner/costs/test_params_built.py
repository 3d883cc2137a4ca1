"""The counts of the planner against the package's own modules: models and ranks of worlds of any size."""

from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from helpers.planner.built_ranks import BuiltRank, build_rank, built_ranks
from helpers.ranks import run_on_ranks
from moe_exp.config import load_config
from moe_exp.config.presets import PRESETS
from moe_exp.planner.costs import params
from moe_exp.planner.costs.params import RankParameters, count_parameters, rank_parameters

DENSE_GPT = {
    "preset": "reference", "use_moe": False, "num_layers": 96, "hidden_size": 12288, "ffn_hidden_size": 49152,
    "num_heads": 96, "num_query_groups": 96, "vocab_size": 50257, "activation": "gelu",
    "normalization": "LayerNorm", "add_bias_linear": True, "tie_embeddings": True, "mbsz": 1, "gbsz": 1536,
}  # fmt: skip
ENDS, UNEVEN = {"first_stage_layers": 7, "last_stage_layers": 6}, {"pipeline_layers": "2,4*14,3"}
TIED = {"tie_embeddings": True}
# Worlds of 64 and of 1024 ranks.
WORLDS: dict[str, dict[str, Any]] = {
    "olmoe 64": {"preset": "olmoe-1b-7b", "nnodes": 8, "tp": 2, "pp": 2, "ep": 8, "cp": 2},
    "mixtral 64": {"preset": "mixtral-8x7b", "nnodes": 8, "tp": 4, "pp": 4, "vpp": 2, "ep": 2, "etp": 2},
    "qwen3 64": {"preset": "qwen3-30b-a3b", "nnodes": 8, "tp": 4, "pp": 2, "vpp": 3, "ep": 8},
    "deepseek 64": {"preset": "deepseek-v3-like", "nnodes": 8, "pp": 8, "ep": 8, **ENDS},
    "mtp 64": {
        "preset": "mixtral-8x7b",
        "nnodes": 8,
        "tp": 4,
        "pp": 4,
        "ep": 2,
        "etp": 2,
        "mtp_num_layers": 2,
    },
    "dense 64": DENSE_GPT | {"nnodes": 8, "tp": 8, "pp": 8, "pipeline_layers": "0,16*6,0"},
    "mixtral 1024": {"preset": "mixtral-8x7b", "nnodes": 128, "tp": 8, "pp": 8, "vpp": 4, "ep": 8, **TIED},
    "deepseek 1024": {"preset": "deepseek-v3-like", "nnodes": 128, "tp": 2, "pp": 16, "ep": 64, **UNEVEN},
}
WHOLE: dict[str, dict[str, Any]] = {name: {"preset": name, "nnodes": 1} for name in PRESETS}
WHOLE["dense"] = DENSE_GPT


def of(given: dict[str, Any]) -> dict[str, Any]:
    """All settings of a world of whole nodes of 8, of one rank where it has no nodes."""
    ranks = {"gpus_per_node": 8 if given.get("nnodes", 1) > 1 else 1}
    return ranks | given


@pytest.fixture(scope="module")
def built() -> dict[str, list[BuiltRank]]:
    """Ranks by name: the first, a middle and the last; in worlds of 64 then the first of every stage."""
    worlds = {}
    for name, given_here in (WORLDS | WHOLE).items():
        config = load_config(of(given_here), {})
        last = config.world_size - 1
        ranks = [0, (last + 1) // 2, last] if last else [0]
        firsts = [config.world_size // config.pp * stage for stage in range(config.pp)] if last == 63 else []
        worlds[name] = (of(given_here), ranks + firsts)
    return dict(zip(worlds, built_ranks(list(worlds.values())), strict=True))


@pytest.mark.parametrize("name", WHOLE)
def test_whole_model_of_published_size(name, built):
    config, rank = load_config(of(WHOLE[name]), {}), built[name][0]
    count = count_parameters(config)
    in_layers = rank.dense - rank.embedding + rank.expert
    assert (count.embedding, count.transformer_layers) == (rank.embedding, in_layers)
    chosen = rank.expert * config.topk // config.num_experts
    assert count.active_per_token == rank.dense + chosen


@pytest.mark.parametrize("name", WORLDS)
def test_ranks_of_large_worlds(name, built):
    config = load_config(of(WORLDS[name]), {})
    assert list(config.problems()) == []
    assert config.world_size == int(name.split()[-1])
    for rank in built[name]:
        assert rank_parameters(config, rank.pp_rank) == RankParameters(rank.dense, rank.expert)


@pytest.mark.parametrize("name", [name for name in WORLDS if name.endswith(" 64")])
def test_most_loaded_rank_of_the_built_ones(name, built):
    config, stages = load_config(of(WORLDS[name]), {}), built[name][3:]
    assert [rank.pp_rank for rank in stages] == list(range(config.pp))
    loads = [rank.dense + rank.expert for rank in stages]
    assert params.most_loaded_rank(config) == loads.index(max(loads))
    assert [stage.total for stage in params.parameters_of_stages(config, config.stage_layers)] == loads


ON_ONE_RANK = dict.fromkeys(("nnodes", "gpus_per_node", "tp", "pp", "ep", "etp", "cp"), 1)
ON_ONE_RANK |= {"vpp": None, "first_stage_layers": 0, "last_stage_layers": 0, "pipeline_layers": ""}


@st.composite
def drawn(draw: st.DrawFn, *, use_moe: bool) -> dict[str, Any]:
    """Settings of a small model in a world of up to 256 ranks; most of them can run."""
    sizes = st.sampled_from([1, 2, 4])
    tp, pp, cp = draw(sizes), draw(sizes), draw(st.sampled_from([1, 2]))
    vpp = draw(st.sampled_from([None, 2])) if pp > 1 else None
    values = draw(drawn_stages(pp, vpp or 1)) | {
        "preset": "reference", "seq_len": 64, "tp": tp, "pp": pp, "vpp": vpp, "cp": cp, "mbsz": 1,
        "gbsz": 1024, "train_data": "not read", "eval_interval": 0,
    }  # fmt: skip
    activations = ["swiglu", "clamped_swiglu", "geglu", "gelu", "squared_relu"]
    values |= {
        "hidden_size": 8 * draw(st.integers(2, 5)), "ffn_hidden_size": 4 * draw(st.integers(1, 9)),
        "num_heads": 4 * draw(sizes), "tie_embeddings": draw(st.booleans()),
        "add_bias_linear": draw(st.booleans()), "activation": draw(st.sampled_from(activations)),
        "normalization": draw(st.sampled_from(["RMSNorm", "LayerNorm"])),
        "norm_placement": draw(st.sampled_from(["pre", "post", "around", "around_moe", "parallel"])),
        "norm_bias": draw(st.booleans()),
        "vocab_size": draw(st.integers(1, 600)),
    }  # fmt: skip
    values["norm_bias"] |= values["normalization"] == "RMSNorm"
    if draw(st.booleans()):
        values |= {"sliding_window": 8, "window_pattern": draw(st.sampled_from(["2", "1:2"]))}
    values |= draw(draw(st.sampled_from([drawn_heads, drawn_latent]))(values["num_heads"]))
    values |= draw(drawn_experts(values["num_layers"])) if use_moe else {"use_moe": False}
    # Neither shared experts nor split ones have biases.
    values["add_bias_linear"] &= not values.get("shared_expert_size") and values.get("etp", 1) == 1
    replicas = draw(st.sampled_from([1, 2, 4])) * values.get("ep", 1) * values.get("etp", 1)
    return values | {"nnodes": tp * pp * cp, "gpus_per_node": replicas}


@st.composite
def drawn_stages(draw: st.DrawFn, pp: int, vpp: int) -> dict[str, Any]:
    """Even stages, another first or last one, or any; the ends may be without layers."""
    middle = vpp * draw(st.integers(1, 2))
    if pp == 1 or draw(st.booleans()):
        first, last = (vpp * draw(st.integers(0, 2)) if pp > 1 else 0 for _ in range(2))
        ends = (first or middle) + (last or middle)
        num_layers = ends + (pp - 2) * middle if pp > 1 else draw(st.integers(1, 4))
        return {"num_layers": num_layers, "first_stage_layers": first, "last_stage_layers": last}
    least = [0 if vpp == 1 and stage in (0, pp - 1) else 1 for stage in range(pp)]
    stages = [vpp * draw(st.integers(fewest, 3)) for fewest in least]
    assume(any(stages))
    return {"num_layers": sum(stages), "pipeline_layers": params.stages_text(stages)}


@st.composite
def drawn_heads(draw: st.DrawFn, num_heads: int) -> dict[str, Any]:
    groups = draw(st.sampled_from([size for size in (1, 2, 4, 8, 16) if num_heads % size == 0]))
    over_all = {"qk_norm": True, "qk_norm_scope": "all", "normalization": "RMSNorm"}
    rotated = {"qk_norm": True, "qk_norm_scope": "rotated"}
    values = {"head_dim": 2 * draw(st.integers(1, 6)), "qkv_bias": draw(st.booleans())}
    return (
        values
        | draw(st.sampled_from([{}, {"qk_norm": True}, over_all, rotated]))
        | {"num_query_groups": groups, "value_head_dim": draw(st.sampled_from([0, 2]))}
        | {"attention_sinks": draw(st.sampled_from(["none", "all"]))}
    )


@st.composite
def drawn_latent(draw: st.DrawFn, num_heads: int) -> dict[str, Any]:
    names = ("kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
    widths = {name: 2 * draw(st.integers(1, 9)) for name in names}
    widths |= {"q_lora_rank": draw(st.sampled_from([0, 6, 10])), "num_query_groups": num_heads}
    return widths | {"multi_latent_attention": True, "qk_norm": draw(st.booleans())}


@st.composite
def drawn_experts(draw: st.DrawFn, num_layers: int) -> dict[str, Any]:
    sizes = st.sampled_from([1, 2, 4])
    ep, pattern = draw(sizes), f"[{','.join(draw(st.sampled_from('01')) for _ in range(num_layers))}]"
    frequency = draw(st.sampled_from(["1", "2", pattern]))
    shared = 4 * draw(st.integers(0, 5))
    return {
        "ep": ep, "etp": draw(sizes), "num_experts": ep * draw(st.integers(1, 4)),
        "moe_ffn_hidden_size": 4 * draw(st.integers(0, 7)), "moe_layer_freq": frequency,
        "first_k_dense": draw(st.integers(0, num_layers - 1)), "shared_expert_size": shared,
        "shared_expert_gate": shared > 0 and draw(st.booleans()),
        "moe_latent_size": draw(st.sampled_from([0, 8, 12])),
        "router_bias_update_rate": draw(st.sampled_from([0.0, 1e-3])), "router_score": "sigmoid",
    }  # fmt: skip


def compare_drawn(use_moe: bool, max_examples: int) -> list[dict[str, Any]]:
    """Builds and counts; the settings that were compared."""
    compared = []
    kept = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}

    @settings(max_examples=max_examples, derandomize=True, **kept)
    @given(given_here=drawn(use_moe=use_moe), place=st.integers(0, 255))
    def compare(given_here: dict[str, Any], place: int) -> None:
        config = load_config(given_here, {})
        assume(not any(config.problems()))
        rank = build_rank(config, place % config.world_size)
        assert rank_parameters(config, rank.pp_rank) == RankParameters(rank.dense, rank.expert)
        whole = build_rank(config.model_copy(update=ON_ONE_RANK), 0)
        assert count_parameters(config).total == whole.dense + whole.expert
        compared.append(given_here)

    compare()
    return compared


@pytest.mark.parametrize("use_moe", [False, True])
@pytest.mark.parametrize("num", [15, pytest.param(500, marks=pytest.mark.slow)])
def test_drawn_models_and_layouts(use_moe, num):
    [compared] = run_on_ranks(1, compare_drawn, use_moe, num, join=False, timeout=300)
    assert len(compared) >= num
