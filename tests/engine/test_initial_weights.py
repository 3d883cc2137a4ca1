"""The initial weights of a config: the same to the bit at every topology, and drawn as the settings say."""

import math
import os
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from helpers.model_on_ranks import assembled, parameter_pieces
from helpers.ranks import run_jobs
from helpers.whole_runs import SMALL
from moe_exp.config import load_config
from moe_exp.engine import initial_weights

MODEL = {
    **SMALL, "num_layers": 4, "hidden_size": 32, "ffn_hidden_size": 48, "num_heads": 4,
    "num_query_groups": 2, "seq_len": 16, "vocab_size": 200, "num_experts": 8, "mbsz": 1, "gbsz": 8,
}  # fmt: skip
LATENT = {
    "multi_latent_attention": True, "kv_lora_rank": 18, "qk_head_dim": 10, "qk_pos_emb_head_dim": 6,
    "v_head_dim": 14, "qk_norm": True,
}  # fmt: skip
LAYER_NORM = {"normalization": "LayerNorm"}
YARN = {"rope_scaling": "yarn", "rope_scaling_factor": 4}
VARIANTS: dict[str, dict[str, Any]] = {
    "moe": {"moe_ffn_hidden_size": 40},
    "moe_gelu_tied": {"activation": "gelu", "tie_embeddings": True, "head_dim": 12}
    | {"init_distribution": "truncated_normal"},
    "moe_shared": {"shared_expert_size": 24, "shared_expert_gate": True, "moe_layer_freq": "0,1,0,1"}
    | {"qk_norm": True, **LAYER_NORM},
    "moe_biased": {"add_bias_linear": True, "activation": "squared_relu", "moe_latent_size": 20},
    "moe_norm_over_heads": {"qk_norm": True, "qk_norm_scope": "all", "head_dim": 12},
    "dense": {"use_moe": False, "num_query_groups": 4},
    "dense_biased": {"use_moe": False, "add_bias_linear": True, "activation": "gelu", "qk_norm": True}
    | LAYER_NORM,
    "latent": {**LATENT, "q_lora_rank": 12, "num_query_groups": 1, "first_k_dense": 1},
    "latent_queries_whole": {**LATENT, **LAYER_NORM, **YARN, "use_moe": False, "add_bias_linear": True},
    "dense_qkv_biased": {**YARN, "use_moe": False, "qkv_bias": True},
    "dense_tied": {"use_moe": False, "tie_embeddings": True},
}
LAYOUTS: dict[int, dict[str, dict[str, int]]] = {
    1: {"one": {}},
    2: {
        "tp2": {"tp": 2}, "pp2_vpp2": {"pp": 2, "vpp": 2}, "ep2": {"ep": 2},
        "pp2_first1": {"pp": 2, "first_stage_layers": 1},
    },
    3: {"pp3_last2": {"pp": 3, "last_stage_layers": 2}},
    4: {
        "ep4": {"ep": 4}, "tp2_pp2_vpp2_ep2": {"tp": 2, "pp": 2, "vpp": 2, "ep": 2},
        "tp2_ep2_etp2": {"tp": 2, "ep": 2, "etp": 2}, "ep2_etp2": {"ep": 2, "etp": 2},
        "tp2_cp2": {"tp": 2, "cp": 2},
    },
}  # fmt: skip
# Of attention, and biases; every layout is one of the others.
ATTENTION = {"moe_norm_over_heads", "latent", "latent_queries_whole", "dense_qkv_biased"}
ATTENTION |= {"moe_biased", "dense_biased"}
CASES = [
    (variant, ranks, layout)
    for variant in VARIANTS
    for ranks in LAYOUTS
    for layout in LAYOUTS[ranks]
    if (variant not in ATTENTION or layout in ("one", "tp2", "tp2_pp2_vpp2_ep2"))
]


def settings_of(variant: str, num_ranks: int, layout: str) -> dict[str, Any]:
    return MODEL | {"gpus_per_node": num_ranks} | VARIANTS[variant] | LAYOUTS[num_ranks][layout]


def build(models: list[dict[str, Any]], port: int) -> list[dict[str, Any]]:
    """On one rank: builds models, all of one layout."""
    from moe_exp.engine import runtime

    os.environ["MASTER_PORT"] = str(port)
    configs = [load_config(settings, {}) for settings in models]
    rank = runtime.start(configs[0])  # what takes the time is the process groups
    built = [_build_one(config, rank) for config in configs]
    runtime.stop()
    return built


def _build_one(config: Any, rank: Any) -> dict[str, Any]:
    from moe_exp.engine.model import build_chunk, transformer_config

    settings, stages = transformer_config(config), range(config.vpp or 1)
    chunks = [build_chunk(config, settings, rank, stage) for stage in stages]
    pieces = [piece for chunk in chunks for piece in parameter_pieces(chunk, rank.groups, of="data")]
    return {"pieces": pieces}


@pytest.fixture(scope="session")
def built() -> Callable[[str, int, str], list[dict[str, Any]]]:
    """What each rank built for a variant and layout; jobs of as many ranks share their processes."""

    @cache
    def all_of(num_ranks: int) -> dict[tuple[str, str], list[dict[str, Any]]]:
        jobs, places = [], {}
        for job, layout in enumerate(LAYOUTS[num_ranks]):
            names = [variant for variant, ranks, of in CASES if (ranks, of) == (num_ranks, layout)]
            jobs.append(([settings_of(variant, num_ranks, layout) for variant in names],))
            places |= {(variant, layout): (job, place) for place, variant in enumerate(names)}
        found = run_jobs(num_ranks, build, jobs)
        return {key: [rank[place] for rank in found[job]] for key, (job, place) in places.items()}

    return lambda variant, num_ranks, layout: all_of(num_ranks)[variant, layout]


@pytest.mark.parametrize(
    ("variant", "num_ranks", "layout"),
    [pytest.param(*case, marks=[pytest.mark.slow] * (case[1] > 2)) for case in CASES if case[1] > 1],
)
def test_same_initial_weights(variant, num_ranks, layout, built):
    one, whole = assembled(built(variant, 1, "one")), assembled(built(variant, num_ranks, layout))
    if "output_layer.weight" not in one:  # tied: the last stage has a copy
        embedding = "embedding.word_embeddings.weight"
        assert torch.equal(whole.pop("output_layer.weight", whole[embedding]), one[embedding])
    assert set(whole) == set(one)
    assert [name for name in one if not torch.equal(whole[name], one[name])] == []


def test_another_seed_draws_other_weights():
    settings = settings_of("moe_shared", 1, "one")
    both = run_jobs(1, build, [([settings | {"seed": seed}],) for seed in (1, 2)])
    for one, other in zip(*(built["pieces"] for ((built,),) in both), strict=True):
        assert torch.equal(one.value, other.value) == (one.value.dim() == 1), one.name  # norms begin at 1


def test_mup_scales_them():
    """Four times as wide as its base: 1/2 of the standard ones, of the output layer 1/4, embedding 1."""
    settings = settings_of("moe_shared", 1, "one")
    mup = {"parametrization": "mup", "mup_base_hidden_size": 8}
    (((plain, scaled),),) = run_jobs(1, build, [([settings, settings | mup],)])
    for (name, *_, one), (*_, other) in zip(plain["pieces"], scaled["pieces"], strict=True):
        factor = 0.25 if "output_layer" in name else 1.0 if "embedding" in name or one.dim() == 1 else 0.5
        torch.testing.assert_close(other, one * factor, rtol=1e-6, atol=0)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_weight_is_drawn_by_itself_with_its_deviation(variant, built):
    weights = assembled(built(variant, 1, "one"))
    matrices = {name: value for name, value in weights.items() if value.dim() == 2}
    for name, value in matrices.items():
        to_residual = any(key in name for key in ("linear_proj", "linear_fc2", "weight2", "fc2_latent"))
        few = 4 / math.sqrt(value.numel())  # the gate of the shared expert has 32 values
        std = 0.02 / math.sqrt(8) if to_residual else 0.02
        assert value.std().item() == pytest.approx(std, rel=max(0.15, few)), name
        assert abs(value.mean().item()) < max(0.2, few) * value.std().item(), name
    assert len({value.sum().item() for value in matrices.values()}) == len(matrices)
    for name, value in weights.items():
        if value.dim() == 1:
            assert set(value.tolist()) == {0.0 if ".bias" in name else 1.0}, name


def test_what_each_rank_has_as_a_whole_is_no_part():
    """Transformer Engine marks such weights as parts, too."""
    linear = torch.nn.Linear(4, 4)
    for parameter in linear.parameters():
        parameter.tensor_model_parallel, parameter.partition_dim = True, 0
    linear.parallel_mode = None
    chunk: Any = torch.nn.Sequential(linear)
    chunk.pg_collection = SimpleNamespace(tp=None)
    initial_weights.initialize_weights(chunk, load_config(MODEL, {}))
    assert linear.weight.partition_dim == -1 and not linear.bias.tensor_model_parallel
