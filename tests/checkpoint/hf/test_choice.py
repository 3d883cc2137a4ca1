"""Which architecture a model of ours becomes, and what is in the way where there is none."""

from typing import Any

import pytest

from helpers.whole_runs import SMALL
from moe_exp.checkpoint.hf.exporting import choose_architecture, exports_as, fields_of
from moe_exp.checkpoint.hf.fields import UnsupportedModel
from moe_exp.config import load_config
from moe_exp.config.presets import PRESETS

LATENT = {"multi_latent_attention": True, "qk_norm": True, "norm_epsilon": 1e-6}
DEEPSEEK = LATENT | {
    "router_score": "sigmoid", "router_bias_update_rate": 1e-3, "shared_expert_size": 512,
    "moe_ffn_hidden_size": 256, "topk": 4,
}  # fmt: skip
AXK1 = DEEPSEEK | {"norm_placement": "around_moe", "q_lora_rank": 128}
HUNYUAN = {
    "topk": 2, "router_pre_softmax": False, "qk_norm": True, "qk_norm_scope": "rotated",
    "shared_expert_size": 256, "moe_ffn_hidden_size": 256,
}  # fmt: skip
GLM = {name: value for name, value in DEEPSEEK.items() if name not in LATENT}
DENSE = {"use_moe": False}
PARALLEL = {
    "norm_placement": "parallel", "normalization": "LayerNorm", "norm_bias": False, "sliding_window": 8,
    "window_pattern": "2", "rotary_layers": "windowed",
}  # fmt: skip
AVERAGE = {
    "topk": 2, "router_pre_softmax": False, "shared_expert_size": 256, "moe_ffn_hidden_size": 256,
    "router_scaling_factor": 0.5,
}  # fmt: skip
SIGMOID = {"topk": 2, "router_score": "sigmoid", "router_normalize": "true", "sliding_window": 8}
AFMOE = SIGMOID | {
    "norm_placement": "around", "qk_norm": True, "attention_gate": True, "shared_expert_size": 512,
    "moe_ffn_hidden_size": 256, "rotary_layers": "windowed",
}  # fmt: skip
MIMO = SIGMOID | {
    "attention_sinks": "windowed", "window_pattern": "2", "num_query_groups": 1, "window_query_groups": 2,
}  # fmt: skip
OLMO2 = {"qk_norm": True, "qk_norm_scope": "all", "norm_placement": "post"}

WINDOWS = {"sliding_window": 8, "window_pattern": "2"}
SWA = WINDOWS | {"topk": 2, "router_pre_softmax": False, "attention_sinks": "all"}
GPT_OSS = SWA | {"add_bias_linear": True, "activation": "clamped_swiglu"}


@pytest.mark.parametrize(
    ("pre_softmax", "normalize", "expected"),
    [(False, "auto", True), (True, "true", True), (True, "false", False)],
)
def test_weights_that_are_normalized_are_exported_so(pre_softmax, normalize, expected):
    """By a softmax over the top-k, or over all and then divided by their sum."""
    of_router = {"router_pre_softmax": pre_softmax, "router_normalize": normalize}
    config = config_of({"topk": 2, "first_k_dense": 1} | of_router)
    assert fields_of(config, choose_architecture(config))["norm_topk_prob"] is expected


OF_TRAINING = {"router_jitter": 0.1, "z_loss_coeff": 0.1, "aux_loss_type": "seq_aux_loss", "dropout": 0.1}
GROUPS = {"num_router_groups": 4, "router_group_topk": 2}
CHOSEN: list[tuple[dict[str, Any], str]] = [
    ({}, "Qwen2Moe"),
    ({"preset": "reference"}, "Qwen2Moe"),
    ({"preset": "cpu"}, "Mixtral"),
    ({"preset": "gpu"}, "Mixtral"),
    ({"preset": "mixtral-8x7b"}, "Mixtral"),
    ({"preset": "qwen3-30b-a3b"}, "Qwen3Moe"),
    ({"preset": "olmoe-1b-7b"}, "Olmoe"),
    ({"preset": "deepseek-v3-like"}, "DeepseekV3"),
    ({"preset": "gpt-oss-20b"}, "GptOss"),
    ({"topk": 2, "router_pre_softmax": False}, "Mixtral"),
    ({"topk": 2, "router_pre_softmax": False, "router_scaling_factor": 2.5}, "Mixtral"),
    ({"topk": 2, "router_normalize": "true"}, "Mixtral"),
    ({"topk": 2, "router_normalize": "true", "first_k_dense": 1}, "Qwen2Moe"),
    ({"topk": 2, "router_pre_softmax": False, "head_dim": 64, "hidden_size": 512, "num_heads": 4}, "Mixtral"),
    ({"moe_layer_freq": "2"}, "Qwen2Moe"),
    ({"moe_layer_freq": "2", "qk_norm": True}, "Qwen3Moe"),
    ({"qk_norm": True, "qk_norm_scope": "all"}, "Olmoe"),
    ({"qkv_bias": True}, "Qwen2Moe"),
    ({"shared_expert_size": 300, "shared_expert_gate": True}, "Qwen2Moe"),
    ({"tie_embeddings": True}, "Qwen2Moe"),
    ({"rope_scaling": "llama3", "rope_scaling_factor": 8}, "Qwen2Moe"),
    # A capacity that no expert can exceed drops nothing.
    ({"moe_type": "moe", "capacity_factor": 4, "num_experts": 8, "topk": 2}, "Qwen2Moe"),
    (OF_TRAINING, "Qwen2Moe"),
    (DEEPSEEK, "DeepseekV3"),
    (DEEPSEEK | GROUPS | {"first_k_dense": 3, "router_scaling_factor": 2.5}, "DeepseekV3"),
    (DEEPSEEK | {"router_bias_update_rate": 0.0, "q_lora_rank": 128}, "DeepseekV3"),
    (GLM, "Glm4Moe"),
    (GLM | {"qk_norm": True, "qkv_bias": True, "rotary_fraction": 0.5, "first_k_dense": 1}, "Glm4Moe"),
    (GLM | {"norm_epsilon": 1e-5}, "Glm4Moe"),
    ({"router_score": "sigmoid", "topk": 2, "qk_norm": True, "qk_norm_scope": "all"}, "MiniMaxM2"),
    ({"topk": 2, "router_bias_update_rate": 1e-3, "router_normalize": "true"}, "Ernie4_5_Moe"),
    (LATENT | {"shared_expert_size": 512, "moe_ffn_hidden_size": 256, "topk": 2} | GROUPS, "DeepseekV2"),
    (DENSE | {"qkv_bias": True}, "Qwen2"),
    (DENSE, "Llama"),
    (AXK1, "AXK1"),
    (DEEPSEEK | GROUPS | {"topk": 6, "router_group_best": 2}, "DeepseekV3"),
    (HUNYUAN, "HunYuanMoEV1"),
    (DEEPSEEK | {"norm_epsilon": 1e-5, "qk_norm_epsilon": 1e-6}, "DeepseekV3"),
    (OLMO2, "FlexOlmo"),
    (DENSE | OLMO2, "Olmo2"),
    (DENSE | {"attention_multiplier": 0.01}, "Granite"),
    (DENSE | {"norm_placement": "around_moe"}, "Llama"),
    ({"topk": 2, "router_pre_softmax": False, "logits_scaling": 6.0}, "GraniteMoe"),
    ({"topk": 2, "router_pre_softmax": False, "shared_expert_size": 300}, "GraniteMoeShared"),
    (DENSE | {"qk_norm": True, "tie_embeddings": True}, "Qwen3"),
    (DENSE | PARALLEL | {"logits_scaling": 16.0}, "Cohere2"),
    (PARALLEL | AVERAGE | {"logits_scaling": 16.0}, "Cohere2Moe"),
    (PARALLEL | AVERAGE | {"router_scaling_factor": 2.0}, "Cohere2Moe"),
    (AFMOE | {"embedding_multiplier": SMALL["hidden_size"] ** 0.5}, "Afmoe"),
    (MIMO | {"value_head_dim": 8, "value_scale": 0.5, "qkv_bias": True}, "MiMoV2Flash"),
    ({"sliding_window": 8} | DENSE, "Mistral"),
    (WINDOWS | DENSE | {"qk_norm": True}, "Qwen3"),
    (WINDOWS, "Qwen2Moe"),
    (WINDOWS | {"qk_norm": True}, "Mellum"),
    (WINDOWS | DENSE | OLMO2, "Olmo3"),
    (WINDOWS | DENSE | {"qk_norm": True, "norm_placement": "post", "rotary_layers": "windowed"}, "Exaone4"),
    (WINDOWS | DENSE | {"rotary_layers": "3:1"}, "SmolLM3"),
    (DENSE | {"rotary_layers": "3:1"}, "SmolLM3"),
    (WINDOWS | GLM | {"qk_norm": True, "rotary_layers": "windowed"}, "ExaoneMoe"),
    (GPT_OSS, "GptOss"),
    (SWA, "GraniteMoeSWA"),
    (SWA | {"rotary_layers": "2", "window_rotary_base": 1e4}, "GraniteMoeSWA"),
    (
        WINDOWS
        | {
            "router_score": "sigmoid",
            "qk_norm": True,
            "shared_expert_size": 300,
            "attention_sinks": "all",
            "rotary_layers": "windowed",
        },
        "Flint",
    ),
    # Settings of the MoE do not concern a dense model.
    (DENSE | {"router_score": "sigmoid", "moe_type": "moe"}, "Llama"),
]

REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"normalization": "LayerNorm"},
        "NORMALIZATION=LayerNorm NORM_BIAS=True: no supported transformers",
    ),
    (PARALLEL | {"norm_bias": True}, "NORMALIZATION=LayerNorm NORM_BIAS=True"),
    (DENSE | PARALLEL | {"embedding_multiplier": 3.0}, "Cohere2.* not support EMBEDDING_MULTIPLIER=3.0"),
    (AFMOE | {"embedding_multiplier": 3.0}, "Afmoe.* not support EMBEDDING_MULTIPLIER=3.0"),
    (MIMO | {"window_query_groups": 4}, "NUM_QUERY_GROUPS=1 WINDOW_QUERY_GROUPS=4: no supported"),
    ({"activation": "geglu"}, "ACTIVATION=geglu: no supported transformers architecture"),
    ({"activation": "squared_relu"}, "ACTIVATION=squared_relu: no supported transformers architecture"),
    ({"add_bias_linear": True}, "Qwen2MoeForCausalLM does not support ADD_BIAS_LINEAR=True"),
    (
        {"moe_type": "moe"},
        "MOE_TYPE=moe CAPACITY_FACTOR=0.0, which may drop tokens,: no supported transformers architecture",
    ),
    ({"moe_type": "moe", "capacity_factor": 3.9, "num_experts": 8, "topk": 2}, "CAPACITY_FACTOR=3.9"),
    ({"moe_latent_size": 32}, "MOE_LATENT_SIZE=32: no supported transformers architecture"),
    ({"router_score": "sqrtsoftplus"}, "ROUTER_SCORE=sqrtsoftplus"),
    ({"aux_loss_type": "sinkhorn"}, "AUX_LOSS_TYPE=sinkhorn"),
    ({"force_routing": "balanced"}, "FORCE_ROUTING=balanced"),
    ({"attention_softcap": 30.0}, r"ATTENTION_SOFTCAP=30\.0: no supported"),
    ({"value_scale": 0.7}, "Qwen2Moe.* not support VALUE_SCALE=0.7"),
    ({"attention_gate": True}, "Qwen2Moe.* not support ATTENTION_GATE"),
    (WINDOWS | {"qk_norm": True, "qk_norm_scope": "all"}, "Olmoe.* not support SLIDING_WINDOW=8 WINDOW_PAT"),
    (GPT_OSS | {"attention_sinks": "windowed"}, "ATTENTION_SINKS=windowed"),
    (GPT_OSS | {"add_bias_linear": False}, "GptOssForCausalLM does not support ADD_BIAS_LINEAR=False"),
    (
        GPT_OSS | {"rotary_layers": "windowed"},
        "GptOss.* not support SLIDING_WINDOW=8 WINDOW_PATTERN=2 ROTARY",
    ),
    (
        SWA | {"window_rotary_base": 1e4, "rope_scaling": "yarn", "rope_scaling_factor": 4},
        "ROPE_SCALING=yarn",
    ),
    ({"rotary_fraction": 0.5}, r"Qwen2MoeForCausalLM does not support ROTARY_FRACTION=0\.5"),
    (
        {"shared_expert_size": 300},
        "GraniteMoeSharedForCausalLM does not support ROUTER_SCORE=softmax ROUTER_PRE_SOFTMAX=True",
    ),
    (HUNYUAN | {"shared_expert_size": 512}, "HunYuan.*SHARED_EXPERT_SIZE=512"),
    (AXK1 | {"q_lora_rank": 0}, "MULTI_LATENT_ATTENTION=True QK_NORM=True Q_LORA_RANK=0"),
    ({"residual_multiplier": 2.0, "qkv_bias": True}, "EMBEDDING_MULTIPLIER=1.0 RESIDUAL_MULTIPLIER=2.0"),
    (DENSE | {"qk_norm": True, "qk_norm_epsilon": 1e-6, "norm_epsilon": 1e-5}, "QK_NORM_EPSILON=1e-06"),
    (DENSE | {"norm_placement": "post"}, "Olmo2ForCausalLM does not support QK_NORM=False"),
    # vLLM's Qwen2Moe divides, whatever config.json says.
    (
        {"head_dim": 96, "first_k_dense": 1},
        "QK_NORM=False .*; Qwen2MoeForCausalLM does not support HEAD_DIM=96",
    ),
    ({"router_score": "sigmoid"}, "ROUTER_SCORE=sigmoid"),
    (
        {"qk_norm": True, "qk_norm_scope": "all", "first_k_dense": 1},
        "Olmoe.* not support USE_MOE=True .*FIRST_K",
    ),
    (DEEPSEEK | GROUPS | {"topk": 6}, "TOPK=6 NUM_ROUTER_GROUPS=4 ROUTER_GROUP_TOPK=2"),
    (DEEPSEEK | {"shared_expert_size": 300}, "SHARED_EXPERT_SIZE=300"),
    (DEEPSEEK | {"norm_epsilon": 1e-5}, "NORM_EPSILON=1e-05 QK_NORM_EPSILON=0.0"),
    (DEEPSEEK | {"qk_norm": False}, "MULTI_LATENT_ATTENTION=True QK_NORM=False"),
    ({"rope_scaling": "yarn", "rope_scaling_factor": 4, "yarn_mscale": 0.7}, "YARN_MSCALE=0.7"),
    (DENSE | {"qkv_bias": True, "qk_norm": True}, "Qwen2ForCausalLM does not support QK_NORM=True"),
    ({"preset": "olmoe-1b-7b", "rotary_fraction": 0.5}, "ROTARY_FRACTION=0.5"),
]


def config_of(settings: dict[str, Any]):
    base = {} if "preset" in settings else SMALL | {"num_experts": 64}
    return load_config(base | settings, {})


@pytest.mark.parametrize(("settings", "name"), CHOSEN, ids=lambda value: str(value)[:60])
def test_chosen(settings, name):
    config = config_of(settings)
    assert choose_architecture(config).name == exports_as(config) == f"{name}ForCausalLM"


@pytest.mark.parametrize(("settings", "text"), REFUSED, ids=lambda value: str(value)[:60])
def test_refused_by_name(settings, text):
    with pytest.raises(UnsupportedModel, match=text) as caught:
        choose_architecture(config_of(settings))
    assert exports_as(config_of(settings)) is None
    assert str(caught.value).count("Fix: ") == 1 and "\n" not in str(caught.value)


def test_the_class_of_the_source_is_preferred_if_it_is_equivalent():
    dense = config_of(DENSE)
    assert choose_architecture(dense, ["MistralForCausalLM"]).name == "MistralForCausalLM"
    assert choose_architecture(dense, ["Qwen2ForCausalLM", "Unknown"]).name == "LlamaForCausalLM"


def test_every_preset_is_among_the_cases():
    assert {settings.get("preset") for settings, _ in CHOSEN} >= PRESETS.keys()
