"""Tables of the supported architectures, checked against transformers 5.23 (modeling_*.py and
configuration_*.py) and, for serving, against vLLM's vllm/model_executor/models/*.py on GitHub.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from moe_exp.checkpoint.hf import fields as rules
from moe_exp.checkpoint.hf import layer_tensors as t
from moe_exp.checkpoint.hf.fields import FieldRule, must_be, rope, same
from moe_exp.checkpoint.hf.tensor_rules import ZERO_EXPERT_SIZE, TensorRule


@dataclass(frozen=True)
class Architecture:
    """A transformers model class."""

    name: str  # class name, as in `architectures` of config.json
    model_type: str  # as in config.json; `architecture_of` also knows OTHER_TYPES
    fields: tuple[FieldRule, ...]  # rules for config.json
    tensors: tuple[TensorRule, ...]  # rules for the weights
    settings: Mapping[str, Any]  # settings that all models of this class share
    # names of exporting.TRAITS to allowed values; default: the usual one
    traits: Mapping[str, tuple[Any, ...]]
    defaults: Mapping[str, Any]  # field defaults of its configuration class
    null: Mapping[str, Any]  # fields that may be null, to the meaning of null; None: the rules decide
    # patterns of tensors without effect, to the condition under which they have no effect
    without_effect: Mapping[str, str] = field(default_factory=dict)

    @property
    def scales(self) -> bool:
        """Whether config.json has a field for ROUTER_SCALING_FACTOR."""
        names = {name for rule in self.fields for name in rule.names}
        return bool(names & {"routed_scaling_factor", "router_scaling_factor"})


_LENGTH = "max_position_embeddings"
_SIZES = (
    same("num_hidden_layers", "num_layers"), same("hidden_size", "hidden_size"),
    same("num_attention_heads", "num_heads"), same("vocab_size", "vocab_size"),
    FieldRule((_LENGTH,), same(_LENGTH, "seq_len").read, lambda c: {_LENGTH: c.longest_sample}),
    same("initializer_range", "init_std"), same("attention_dropout", "attention_dropout"),
    must_be("hidden_act", "silu", because="activations other than SwiGLU are not supported"),
)  # fmt: skip


def _common(*, theta: float = 10000.0, fraction: float | None = None) -> tuple[FieldRule, ...]:
    epsilon, tied = same("rms_norm_eps", "norm_epsilon"), same("tie_word_embeddings", "tie_embeddings")
    return (*_SIZES, rope(theta, fraction=fraction), epsilon, tied)


_HEADS = (rules.KEY_VALUE_HEADS, rules.HEAD_DIM)
# vLLM always computes the head size as width / heads, regardless of config.json
_HEADS_BY_WIDTH = (rules.KEY_VALUE_HEADS, FieldRule(("head_dim",), rules.HEAD_DIM.read, lambda c: {}))
_NO_BIAS = must_be("attention_bias", False, because="biases in the attention projections are not supported")
_NO_MLP_BIAS = must_be("mlp_bias", False, because="biases in the MLP are not supported")
_TOPK = same("num_experts_per_tok", "topk")
_DENSE_WIDTH = same("intermediate_size", "ffn_hidden_size")
_EXPERT_WIDTH = same("moe_intermediate_size", "moe_ffn_hidden_size.expert_ffn_size")
_ONE_WIDTH = same("intermediate_size", "ffn_hidden_size.expert_ffn_size")

# Defaults and meanings of null in transformers' configuration classes. Sizes have no defaults here: a folder
# that omits one is unlikely to have weights of the default size.
_NO_DROPOUT = {"attention_dropout": 0.0}
_DEFAULTS_OF_ERNIE = {
    "hidden_act": "silu", "initializer_range": 0.02, "rms_norm_eps": 1e-6, "tie_word_embeddings": False
}  # fmt: skip
_DEFAULTS = _DEFAULTS_OF_ERNIE | _NO_DROPOUT
_QWEN_MOE_DEFAULTS = _DEFAULTS | {
    "max_position_embeddings": 32768, "decoder_sparse_step": 1, "mlp_only_layers": None,
    "norm_topk_prob": False, "sliding_window": 4096, "use_sliding_window": False,
    "router_aux_loss_coef": 0.001,
}  # fmt: skip
_QWEN_DEFAULTS = _DEFAULTS | {
    "max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096,
    "use_sliding_window": False, "max_window_layers": 28, "layer_types": None,
}  # fmt: skip
_AS_MANY_AS_HEADS = {"num_key_value_heads": None}
_QWEN_MOE_NULL = {"mlp_only_layers": None, "sliding_window": None}

_SOFTMAX = {"router_score": "softmax"}
_SIGMOID = {"router_score": "sigmoid", "router_normalize": "true", "router_bias_update_rate": 1e-3}
_DENSE_MODEL = {"use_moe": False}
_COMPRESSED = ("latent", "latent, queries whole")
_LATENT = {"multi_latent_attention": True, "qk_norm": True}
_EITHER = (False, True)
_WHOLE = ("as an expert", "of whole experts")  # widths of a shared expert
_NORMALIZED_OR_NOT = ("softmax", "softmax, normalized", "softmax over all")
_DENSE_TRAITS = {"moe_layers": ("none",), "routing": ("none",)}
_QWEN_TRAITS = {
    "moe_layers": ("all", "after the first", "mixed"), "routing": _NORMALIZED_OR_NOT
}  # fmt: skip

MIXTRAL = Architecture(
    "MixtralForCausalLM", "mixtral",
    fields=(
        *_common(theta=1e6), *_HEADS, _ONE_WIDTH, same("num_local_experts|num_experts", "num_experts"), _TOPK,
        rules.no_sliding_window(switched=False), rules.balancing(),
        # in transformers, the noise also reaches the experts
        same("router_jitter_noise", "router_jitter"),
    ),
    tensors=(*t.MODEL, *t.ATTENTION, *t.experts("block_sparse_moe", "w1", "w3", "w2")),
    settings=_SOFTMAX | {"router_pre_softmax": False},
    traits={"routing": ("softmax, normalized", "softmax over all"), "heads_fill_width": _EITHER},
    defaults=_DEFAULTS | {
        "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "num_key_value_heads": 8, "head_dim": None,
        "sliding_window": None, "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0,
    },
    null={"head_dim": None, "sliding_window": None},
)  # fmt: skip
OLMOE = Architecture(
    "OlmoeForCausalLM", "olmoe",
    fields=(
        *_common(), *_HEADS_BY_WIDTH, _NO_BIAS, _ONE_WIDTH,
        same("num_experts|num_local_experts", "num_experts"), _TOPK,
        must_be("clip_qkv", None, because="clipped queries, keys and values are not supported"),
        rules.NORMALIZED_WEIGHTS, rules.balancing(),
    ),
    tensors=(*t.MODEL, *t.ATTENTION, *t.PROJECTION_NORMS, *t.EXPERTS),
    settings=_SOFTMAX | {"qk_norm": True, "qk_norm_scope": "all"},
    traits={"qk_norm": ("all",), "routing": _NORMALIZED_OR_NOT},
    defaults=_DEFAULTS | {
        "rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "num_key_value_heads": None,
        "attention_bias": False, "clip_qkv": None, "norm_topk_prob": False, "router_aux_loss_coef": 0.01,
    },
    null=_AS_MANY_AS_HEADS | {"clip_qkv": None},
)  # fmt: skip
QWEN3_MOE = Architecture(
    "Qwen3MoeForCausalLM", "qwen3_moe",
    fields=(
        *_common(), *_HEADS, _NO_BIAS, _DENSE_WIDTH, _EXPERT_WIDTH,
        same("num_experts|num_local_experts", "num_experts"), _TOPK, rules.NORMALIZED_WEIGHTS,
        rules.DENSE_LAYERS_BY_LIST, rules.no_sliding_window(), rules.balancing(),
    ),
    tensors=(*t.MODEL, *t.ATTENTION, *t.HEAD_NORMS, *t.DENSE, *t.EXPERTS),
    settings=_SOFTMAX | {"qk_norm": True},
    traits=_QWEN_TRAITS | {"qk_norm": ("head",), "heads_fill_width": _EITHER},
    defaults=_QWEN_MOE_DEFAULTS | {"num_key_value_heads": 4, "attention_bias": False},
    null=_QWEN_MOE_NULL,
)  # fmt: skip


# transformers reports the tensors of an expert with size 0 as missing, and vLLM does not support them. A
# model without a shared expert is therefore exported with a small one of zeros, marked by a field of our own.
_WIDTH, _IS_ZERO = "shared_expert_intermediate_size", "shared_expert_is_zero"
_ZEROS = {_WIDTH: ZERO_EXPERT_SIZE, _IS_ZERO: True}


def _read_shared_expert(fields: rules.Fields) -> rules.Settings:
    width = rules.given(fields, _WIDTH)
    if rules.given(fields, _IS_ZERO, False):
        width = 0
    return {"shared_expert_size": width, "shared_expert_gate": width > 0}


_SHARED_EXPERT = FieldRule(
    (_WIDTH, _IS_ZERO),
    _read_shared_expert,
    lambda c: {_WIDTH: c.shared_expert_size} if c.shared_expert_size else _ZEROS,
)
# vLLM's class requires biases regardless of `qkv_bias`; a model without them is exported with zeros.
_WITH_BIAS = FieldRule(
    ("qkv_bias",), lambda f: {"qkv_bias": rules.given(f, "qkv_bias")}, lambda c: {"qkv_bias": True}
)
QWEN2_MOE = Architecture(
    "Qwen2MoeForCausalLM", "qwen2_moe",
    fields=(
        *_common(), *_HEADS_BY_WIDTH, _DENSE_WIDTH, _EXPERT_WIDTH,
        _SHARED_EXPERT, same("num_experts", "num_experts"), _TOPK, _WITH_BIAS, rules.NORMALIZED_WEIGHTS,
        rules.DENSE_LAYERS_BY_LIST, rules.no_sliding_window(), rules.balancing(),
    ),
    tensors=(
        *t.MODEL, *t.ATTENTION, *t.QKV_BIAS, *t.DENSE, *t.EXPERTS, *t.shared("shared_expert"), *t.SHARED_GATE
    ),
    settings=_SOFTMAX,
    traits=_QWEN_TRAITS | {"shared": ("none", "gated"), "qkv_bias": _EITHER},
    without_effect={r"model\.layers\.\d+\.mlp\.shared_expert(_gate)?\..*": "no_shared"},
    defaults=_QWEN_MOE_DEFAULTS | {
        "num_key_value_heads": 16, "qkv_bias": True, "max_window_layers": 28, "layer_types": None
    },
    null=_QWEN_MOE_NULL | {"layer_types": None},
)  # fmt: skip
_FIRST_DENSE = rules.first_dense_layers("first_k_dense_replace")
_LAYERS_OF_VLLM = (
    must_be("moe_layer_freq", 1, because="all layers after the first dense ones must be MoE"),
    must_be("ep_size", 1, because="must be 1 in a config.json"),
)
# Sigmoid scores with a bias for the choice, and fields of the published config.json files that vLLM reads.
_BIASED_ROUTING = (
    same("n_routed_experts|num_local_experts", "num_experts"), _TOPK, rules.shared_experts(),
    rules.SIGMOID_ROUTING, rules.limited_groups(2), rules.balancing("aux_loss_alpha"),
    must_be("scoring_func", "sigmoid", because="DeepSeek-V3's routing uses sigmoid scores"),
    must_be("topk_method", "noaux_tc", because="experts must be chosen by score plus bias"),
    *_LAYERS_OF_VLLM,
)  # fmt: skip
_DEEPSEEK_FIELDS = (_DENSE_WIDTH, _EXPERT_WIDTH, *_BIASED_ROUTING, _FIRST_DENSE)
_INTERLEAVED = must_be(
    "rope_interleave", True, because="Megatron's latent attention rotates adjacent channels"
)
_DEEPSEEK_TRAITS = {
    "moe_layers": ("all", "after the first"), "routing": ("sigmoid", "sigmoid, normalized"),
    "expert_bias": _EITHER, "groups": (0, 2),
    "shared": _WHOLE,
}  # fmt: skip
_PREDICTS = {"mtp": ("none", "MoE")}
DEEPSEEK_V3 = Architecture(
    "DeepseekV3ForCausalLM", "deepseek_v3",
    fields=(
        *_common(), *_DEEPSEEK_FIELDS, _NO_BIAS, rules.LATENT_ATTENTION, _INTERLEAVED, rules.PREDICTION
    ),
    tensors=(*t.MODEL, *t.LATENT_ATTENTION, *t.DENSE, *t.DEEPSEEK_EXPERTS, *t.PREDICTION),
    settings=_LATENT,
    traits=_DEEPSEEK_TRAITS | _PREDICTS | {"attention": _COMPRESSED},
    defaults=_DEFAULTS | {
        "max_position_embeddings": 4096, "num_key_value_heads": 128, "attention_bias": False,
        "q_lora_rank": 1536, "rope_interleave": True, "first_k_dense_replace": 3, "norm_topk_prob": True,
        "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4, "num_mtp_layers": 1,
    },
    null=_AS_MANY_AS_HEADS | _NO_DROPOUT | {
        "q_lora_rank": None, "rope_interleave": False, "norm_topk_prob": False
    },
)  # fmt: skip
# DeepSeek-V3's MoE without latent attention.
GLM4_MOE = Architecture(
    "Glm4MoeForCausalLM", "glm4_moe",
    fields=(
        *_common(fraction=0.5), *_HEADS, *_DEEPSEEK_FIELDS, same("attention_bias", "qkv_bias"),
        same("use_qk_norm", "qk_norm"), rules.PREDICTION,
    ),
    tensors=(
        *t.MODEL, *t.ATTENTION, t.QKV_BIAS[0], *t.HEAD_NORMS, *t.DENSE, *t.DEEPSEEK_EXPERTS, *t.PREDICTION
    ),
    settings={},
    traits=_DEEPSEEK_TRAITS | _PREDICTS | {
        "qk_norm": ("none", "head"), "qkv_bias": _EITHER, "rotates_whole_heads": _EITHER,
        "heads_fill_width": _EITHER,
    },
    defaults=_DEFAULTS | {
        "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "num_key_value_heads": 8,
        "attention_bias": False, "use_qk_norm": False, "first_k_dense_replace": 1, "norm_topk_prob": True,
        "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1, "num_mtp_layers": 1,
    },
    null={},
)  # fmt: skip
DOTS1 = Architecture(
    "Dots1ForCausalLM", "dots1",
    fields=(
        *_common(), *_HEADS, *_DEEPSEEK_FIELDS, _NO_BIAS,
        rules.no_sliding_window(switched=False, by_layer=True),
    ),
    tensors=(*t.MODEL, *t.ATTENTION, *t.HEAD_NORMS, *t.DENSE, *t.DEEPSEEK_EXPERTS),
    settings={"qk_norm": True},
    traits=_DEEPSEEK_TRAITS | {"qk_norm": ("head",), "heads_fill_width": _EITHER},
    defaults=_DEFAULTS | {
        "max_position_embeddings": 2048, "num_key_value_heads": 32, "attention_bias": False,
        "first_k_dense_replace": 0, "norm_topk_prob": False, "routed_scaling_factor": 1.0, "n_group": 1,
        "topk_group": 1, "sliding_window": 4096, "max_window_layers": 62, "layer_types": None,
    },
    null=_AS_MANY_AS_HEADS | _NO_DROPOUT | {
        "norm_topk_prob": False, "sliding_window": None, "max_window_layers": None, "layer_types": None
    },
)  # fmt: skip
SOLAR_OPEN = Architecture(
    "SolarOpenForCausalLM", "solar_open",
    fields=(
        *_common(theta=1e6), *_HEADS, _EXPERT_WIDTH, *_BIASED_ROUTING, same("attention_bias", "qkv_bias"),
        FieldRule(("intermediate_size",), lambda f: {}, lambda c: {}),  # of dense layers, which it lacks
    ),
    tensors=(*t.MODEL, *t.ATTENTION, t.QKV_BIAS[0], *t.DEEPSEEK_EXPERTS),
    settings={},
    traits=_DEEPSEEK_TRAITS | {"moe_layers": ("all",), "qkv_bias": _EITHER, "heads_fill_width": _EITHER},
    defaults=_DEFAULTS | {
        "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "num_key_value_heads": 8, "head_dim": 128,
        "attention_bias": False, "norm_topk_prob": True, "routed_scaling_factor": 1.0, "n_group": 1,
        "topk_group": 1,
    },
    null={},
)  # fmt: skip
# No shared experts; queries and keys normalized over all heads.
MINIMAX_M2 = Architecture(
    "MiniMaxM2ForCausalLM", "minimax_m2",
    fields=(
        *_common(theta=5e6, fraction=1.0), *_HEADS, rules.ROTATED_CHANNELS, _ONE_WIDTH,
        same("num_local_experts|num_experts", "num_experts"), _TOPK, rules.balancing(),
        same("router_jitter_noise", "router_jitter"),
        must_be("scoring_func", "sigmoid", because="MiniMax-M2 uses sigmoid scores"),
        must_be("use_routing_bias", True, because="experts must be chosen by score plus bias"),
        must_be("use_qk_norm", True, because="queries and keys must be normalized"),
        must_be("qk_norm_type", "per_layer", because="queries and keys must be normalized over all heads"),
    ),
    tensors=(
        *t.MODEL, *t.ATTENTION, *t.PROJECTION_NORMS, *t.experts("block_sparse_moe", "w1", "w3", "w2"),
        *t.expert_bias("block_sparse_moe.e_score_correction_bias", alias=t.BIAS_OF_BLOCK),
    ),
    settings=_SIGMOID | {"qk_norm": True, "qk_norm_scope": "all"},
    traits={
        "qk_norm": ("all",), "routing": ("sigmoid, normalized",), "expert_bias": _EITHER,
        "rotates_whole_heads": _EITHER, "heads_fill_width": _EITHER,
    },
    defaults=_DEFAULTS | {
        "max_position_embeddings": 196608, "num_key_value_heads": 8, "head_dim": 128,
        "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0,
    },
    null={},
)  # fmt: skip
# DeepSeek-V3 with another field for the dense layers.
GLM4_MOE_LITE = Architecture(
    "Glm4MoeLiteForCausalLM", "glm4_moe_lite",
    fields=(
        *_common(), _DENSE_WIDTH, _EXPERT_WIDTH, *_BIASED_ROUTING, rules.DENSE_LAYERS_BY_TYPE, _NO_BIAS,
        rules.LATENT_ATTENTION, _INTERLEAVED, rules.PREDICTION,
    ),
    tensors=DEEPSEEK_V3.tensors,
    settings=_LATENT,
    traits=_DEEPSEEK_TRAITS | _PREDICTS | {
        "attention": _COMPRESSED, "moe_layers": ("all", "after the first", "mixed")
    },
    defaults=_DEFAULTS | {
        "rms_norm_eps": 1e-5, "max_position_embeddings": 202752, "num_key_value_heads": 20,
        "attention_bias": False, "q_lora_rank": 768, "rope_interleave": True, "mlp_layer_types": None,
        "norm_topk_prob": True, "routed_scaling_factor": 1.8, "n_group": 1, "topk_group": 1,
    },
    null={"q_lora_rank": None, "mlp_layer_types": None},
)  # fmt: skip
# GLM-4-MoE-Lite with a norm after the MoE layers.
AXK1 = replace(
    GLM4_MOE_LITE, name="AXK1ForCausalLM", model_type="axk1",
    fields=tuple(rule for rule in GLM4_MOE_LITE.fields if rule is not rules.PREDICTION),
    tensors=(*t.MODEL, *t.LATENT_ATTENTION, *t.DENSE, *t.DEEPSEEK_EXPERTS, t.NORM_AFTER_MOE),
    settings=_LATENT | {"norm_placement": "around_moe"},
    traits={
        **GLM4_MOE_LITE.traits, "attention": ("latent",), "norm_placement": ("around_moe",),
        "mtp": ("none",),
    },
    defaults={
        **GLM4_MOE_LITE.defaults, "rms_norm_eps": 1e-6, "max_position_embeddings": 32768,
        "num_key_value_heads": 64, "q_lora_rank": 1536, "routed_scaling_factor": 2.5, "n_group": 8,
        "topk_group": 4,
    },
    null=_NO_DROPOUT | {"mlp_layer_types": None, "rope_interleave": False, "norm_topk_prob": False},
)  # fmt: skip
# Softmax scores without a bias, never normalized. transformers ignores `norm_topk_prob`, vLLM does not.
DEEPSEEK_V2 = Architecture(
    "DeepseekV2ForCausalLM", "deepseek_v2",
    fields=(
        *_common(), _DENSE_WIDTH, _EXPERT_WIDTH, same("n_routed_experts|num_experts", "num_experts"), _TOPK,
        rules.shared_experts(), _FIRST_DENSE, rules.LATENT_ATTENTION, _NO_BIAS, _NO_MLP_BIAS,
        same("routed_scaling_factor", "router_scaling_factor"), rules.balancing("aux_loss_alpha"),
        rules.limited_groups(1, methods=("greedy", "group_limited_greedy")),
        must_be("norm_topk_prob", False, because="transformers' DeepSeek-V2 does not normalize weights"),
        must_be("scoring_func", "softmax", because="DeepSeek-V2 uses softmax scores"), *_LAYERS_OF_VLLM,
    ),
    tensors=(*t.MODEL, *t.LATENT_ATTENTION, *t.DENSE, *t.EXPERTS, *t.shared("shared_experts")),
    settings=_LATENT | _SOFTMAX,
    traits=_DEEPSEEK_TRAITS | {
        "attention": _COMPRESSED, "routing": ("softmax", "softmax over all"), "expert_bias": (False,),
        "groups": (0, 1),
    },
    defaults=_DEFAULTS | {
        "max_position_embeddings": 2048, "num_key_value_heads": None, "attention_bias": False,
        "mlp_bias": False, "head_dim": None, "first_k_dense_replace": 0, "q_lora_rank": 1536,
        "n_group": None, "topk_group": None, "topk_method": "greedy", "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
    },
    null=_AS_MANY_AS_HEADS | _NO_DROPOUT | {
        "q_lora_rank": None, "head_dim": None, "n_group": None, "topk_group": None, "norm_topk_prob": False
    },
)  # fmt: skip
HY_V3 = Architecture(
    "HYV3ForCausalLM", "hy_v3",
    fields=(
        *_common(theta=11158840.0), *_HEADS, _NO_BIAS, _NO_MLP_BIAS, _DENSE_WIDTH, _EXPERT_WIDTH, _TOPK,
        same("num_experts|num_local_experts", "num_experts"), rules.shared_experts("num_shared_experts"),
        same("router_scaling_factor", "router_scaling_factor"), rules.DENSE_LAYERS_BY_TYPE,
        rules.balancing("aux_loss_alpha"),
        must_be("enable_moe_fp32_combine", True, False, because="must be true or false"),
    ),
    tensors=(
        *t.MODEL, *t.ATTENTION, *t.HEAD_NORMS, *t.DENSE,
        *t.experts("mlp", "gate_proj", "up_proj", "down_proj", "router.gate"),
        *t.expert_bias("mlp.expert_bias", alias=t.BIAS_OF_BLOCK), *t.shared("shared_mlp"),
    ),
    settings=_SIGMOID | {"qk_norm": True},
    traits=_DEEPSEEK_TRAITS | {
        "moe_layers": ("all", "after the first", "mixed"), "routing": ("sigmoid, normalized",),
        "groups": (0,), "qk_norm": ("head",), "heads_fill_width": _EITHER,
    },
    defaults=_DEFAULTS | {
        "initializer_range": 0.006, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072,
        "num_key_value_heads": 8, "head_dim": 128, "attention_bias": False, "mlp_bias": False,
        "router_scaling_factor": 2.826, "mlp_layer_types": None, "enable_moe_fp32_combine": True,
    },
    null={"mlp_layer_types": None},
)  # fmt: skip
# Softmax scores with a bias for the choice; rotates adjacent channels.
ERNIE4_5_MOE = Architecture(
    "Ernie4_5_MoeForCausalLM", "ernie4_5_moe",
    fields=(
        *(rule for rule in _common(theta=5e5) if rule.names != ("attention_dropout",)), *_HEADS,
        _DENSE_WIDTH, _EXPERT_WIDTH, same("moe_num_experts|num_experts", "num_experts"),
        same("moe_k|num_experts_per_tok", "topk"), rules.shared_experts("moe_num_shared_experts"),
        rules.first_dense_layers("moe_layer_start_index"), rules.LAST_LAYER_IS_MOE, rules.balancing(),
        must_be("moe_layer_interval", 1, because="all layers after the first dense ones must be MoE"),
        must_be("use_bias", False, because="biases in all projections are not supported"),
        must_be("moe_norm_min", 1e-12, because="the sum of the router weights must not be limited"),
    ),
    tensors=(
        *t.MODEL, t.ATTENTION[0], TensorRule(t.ATTENTION[1].ours, t.QKV, "adjacent heads"), t.ATTENTION[2],
        *t.DENSE, *t.EXPERTS, *t.shared("shared_experts"),
        *t.expert_bias(
            "mlp.moe_statics.e_score_correction_bias", "1 E", "mlp.gate.moe_statics.e_score_correction_bias"
        ),
    ),
    settings=_SOFTMAX | {"router_normalize": "true", "router_bias_update_rate": 1e-3},
    traits={
        "moe_layers": ("all", "after the first"), "heads_fill_width": _EITHER,
        "routing": ("softmax, normalized", "softmax over all"), "expert_bias": _EITHER,
        "shared": ("none", *_WHOLE),
    },
    defaults=_DEFAULTS_OF_ERNIE | {
        "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "num_key_value_heads": 4,
        "tie_word_embeddings": True, "use_bias": False, "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_layer_interval": 1, "moe_norm_min": 1e-12,
        "router_aux_loss_coef": 0.001,
    },
    null={"use_bias": False, "router_aux_loss_coef": None},
)  # fmt: skip
LLAMA = Architecture(
    "LlamaForCausalLM", "llama",
    fields=(
        *_common(), *_HEADS, _NO_BIAS, _NO_MLP_BIAS, _DENSE_WIDTH,
    ),
    tensors=(*t.MODEL, *t.ATTENTION, *t.DENSE),
    settings=_DENSE_MODEL,
    traits=_DENSE_TRAITS | {"heads_fill_width": _EITHER},
    defaults=_DEFAULTS | {
        "max_position_embeddings": 2048, "num_key_value_heads": None, "head_dim": None,
        "attention_bias": False, "mlp_bias": False,
    },
    null=_AS_MANY_AS_HEADS | _NO_DROPOUT | {"head_dim": None},
)  # fmt: skip
QWEN3 = Architecture(
    "Qwen3ForCausalLM", "qwen3",
    fields=(*_common(), *_HEADS, _NO_BIAS, _DENSE_WIDTH, rules.no_sliding_window()),
    tensors=(*t.MODEL, *t.ATTENTION, *t.HEAD_NORMS, *t.DENSE),
    settings=_DENSE_MODEL | {"qk_norm": True},
    traits=_DENSE_TRAITS | {"qk_norm": ("head",), "heads_fill_width": _EITHER},
    defaults=_QWEN_DEFAULTS | {"head_dim": 128, "attention_bias": False},
    null=_AS_MANY_AS_HEADS | {"sliding_window": None, "layer_types": None},
)  # fmt: skip

# Norms after attention and MLP instead of before.
_OLMO_ATTENTION = (*t.MODEL, *t.ATTENTION[1:], *t.PROJECTION_NORMS, *t.OUTPUT_NORMS)
_OLMO_SETTINGS = {"qk_norm": True, "qk_norm_scope": "all", "norm_placement": "post"}
_OLMO_TRAITS = {"qk_norm": ("all",), "norm_placement": ("post",)}
OLMO2 = Architecture(
    "Olmo2ForCausalLM", "olmo2",
    fields=(*_common(), *_HEADS_BY_WIDTH, _NO_BIAS, _DENSE_WIDTH),
    tensors=(*_OLMO_ATTENTION, *t.DENSE[1:]),
    settings=_DENSE_MODEL | _OLMO_SETTINGS,
    traits=_DENSE_TRAITS | _OLMO_TRAITS,
    defaults=_DEFAULTS | {
        "rms_norm_eps": 1e-5, "max_position_embeddings": 2048, "num_key_value_heads": None,
        "attention_bias": False,
    },
    null=_AS_MANY_AS_HEADS,
)  # fmt: skip
FLEX_OLMO = Architecture(
    "FlexOlmoForCausalLM", "flex_olmo",
    fields=(
        *_common(theta=5e5), *_HEADS_BY_WIDTH, _NO_BIAS, _ONE_WIDTH, _TOPK,
        same("num_experts|num_local_experts", "num_experts"), rules.NORMALIZED_WEIGHTS, rules.balancing(),
    ),
    tensors=(*_OLMO_ATTENTION, *t.EXPERTS[1:]),
    settings=_SOFTMAX | _OLMO_SETTINGS,
    traits=_OLMO_TRAITS | {"routing": _NORMALIZED_OR_NOT},
    defaults=_DEFAULTS | {
        "max_position_embeddings": 4096, "num_key_value_heads": None, "attention_bias": False,
        "norm_topk_prob": False, "router_aux_loss_coef": 0.01,
    },
    null=_AS_MANY_AS_HEADS | _NO_DROPOUT,
)  # fmt: skip
# Norms of queries and keys after the rotary embedding; one shared expert.
HUNYUAN_MOE = Architecture(
    "HunYuanMoEV1ForCausalLM", "hunyuan_v1_moe",
    fields=(
        *(rule for rule in _common() if "rope_theta" not in rule.names), rules.rope(1e4, stretches=True),
        rules.KEY_VALUE_HEADS, same("head_dim", "head_dim.kv_channels"), _NO_BIAS, _NO_MLP_BIAS,
        same("num_experts|num_local_experts", "num_experts"), rules.HUNYUAN_EXPERTS,
        rules.balancing("aux_loss_alpha"),
        must_be("use_qk_norm", True, because="queries and keys must be normalized"),
        must_be("use_mixed_mlp_moe", True, because="must be true, as in transformers' class"),
        must_be("norm_topk_prob", True, because="weights must be normalized"),
        must_be("norm_type", "rms", because="norms must be RMSNorm"),
        must_be("use_rotary_pos_emb", True, because="all layers must have the rotary embedding"),
        FieldRule(("attention_head_dim",), lambda f: {}, lambda c: {}),  # vLLM's default for `head_dim`
    ),
    tensors=(
        *t.MODEL, *t.ATTENTION, *t.experts("mlp", "gate_proj", "up_proj", "down_proj", "gate.wg"),
        TensorRule("self_attention.q_layernorm.weight", {"self_attn.query_layernorm.weight": "H"}),
        TensorRule("self_attention.k_layernorm.weight", {"self_attn.key_layernorm.weight": "H"}),
        *t.shared("shared_mlp"),
    ),
    settings={**MIXTRAL.settings, "qk_norm": True, "qk_norm_scope": "rotated"},
    traits={
        "routing": ("softmax, normalized", "softmax over all"), "qk_norm": ("rotated",),
        "heads_fill_width": _EITHER, "shared": ("as an expert",),
    },
    defaults=_DEFAULTS | {
        "rms_norm_eps": 1e-5, "max_position_embeddings": 2048, "num_key_value_heads": None,
        "attention_bias": False,
    },
    null=_AS_MANY_AS_HEADS,
)  # fmt: skip
# Constant factors in the forward pass.
_GRANITE_DEFAULTS = _DEFAULTS | {
    "max_position_embeddings": 2048, "num_key_value_heads": None, "attention_bias": False,
    "embedding_multiplier": 1.0, "residual_multiplier": 1.0, "attention_multiplier": 1.0,
    "logits_scaling": 1.0,
}  # fmt: skip
GRANITE = Architecture(
    "GraniteForCausalLM", "granite",
    fields=(*_common(), *_HEADS_BY_WIDTH, _NO_BIAS, _NO_MLP_BIAS, _DENSE_WIDTH, *rules.MULTIPLIERS),
    tensors=LLAMA.tensors,
    settings=_DENSE_MODEL,
    traits=_DENSE_TRAITS | {"multipliers": _EITHER},
    defaults=_GRANITE_DEFAULTS | {"mlp_bias": False},
    null=_AS_MANY_AS_HEADS,
)  # fmt: skip
GRANITE_MOE = Architecture(
    "GraniteMoeForCausalLM", "granitemoe",
    fields=(
        *_common(), *_HEADS_BY_WIDTH, _NO_BIAS, _ONE_WIDTH, _TOPK, *rules.MULTIPLIERS,
        same("num_local_experts|num_experts", "num_experts"), rules.balancing(),
    ),
    tensors=(*t.MODEL, *t.ATTENTION, *t.JOINED_EXPERTS),
    settings=MIXTRAL.settings,
    traits={"routing": ("softmax, normalized", "softmax over all"), "multipliers": _EITHER},
    defaults=_GRANITE_DEFAULTS | {"router_aux_loss_coef": 0.001},
    null=_AS_MANY_AS_HEADS | _NO_DROPOUT | {"router_aux_loss_coef": None},
)  # fmt: skip
GRANITE_MOE_SHARED = replace(
    GRANITE_MOE, name="GraniteMoeSharedForCausalLM", model_type="granitemoeshared",
    fields=(*GRANITE_MOE.fields, same("shared_intermediate_size", "shared_expert_size")),
    tensors=(*GRANITE_MOE.tensors, *t.JOINED_SHARED),
    traits={**GRANITE_MOE.traits, "shared": ("none", *_WHOLE, "of another width")},
    defaults={**GRANITE_MOE.defaults, "shared_intermediate_size": 0},
)  # fmt: skip

# Biases on queries, keys and values, without a field.
QWEN2 = Architecture(
    "Qwen2ForCausalLM", "qwen2",
    fields=(*_common(), *_HEADS_BY_WIDTH, _DENSE_WIDTH, rules.no_sliding_window()),
    tensors=(*t.MODEL, *t.ATTENTION, t.QKV_BIAS[0], *t.DENSE),
    settings=_DENSE_MODEL | {"qkv_bias": True},
    traits=_DENSE_TRAITS | {"qkv_bias": (True,)},
    defaults=_QWEN_DEFAULTS, null=QWEN3.null,
)  # fmt: skip
MISTRAL = Architecture(
    "MistralForCausalLM", "mistral",
    fields=(*_common(), *_HEADS, _DENSE_WIDTH, rules.no_sliding_window(switched=False)),
    tensors=(*t.MODEL, *t.ATTENTION, *t.DENSE),
    settings=_DENSE_MODEL,
    traits=_DENSE_TRAITS | {"heads_fill_width": _EITHER},
    defaults=_DEFAULTS | {
        "max_position_embeddings": 131072, "num_key_value_heads": 8, "head_dim": None, "sliding_window": 4096
    },
    null={"head_dim": None, "sliding_window": None},
)  # fmt: skip

# choose_architecture tries them in this order, after the class of an imported model
ARCHITECTURES = {
    a.name: a
    for a in (
        MIXTRAL, OLMOE, QWEN3_MOE, QWEN2_MOE, DEEPSEEK_V3, GLM4_MOE, LLAMA, QWEN3,
        DOTS1, SOLAR_OPEN, MINIMAX_M2, GLM4_MOE_LITE, DEEPSEEK_V2, HY_V3, ERNIE4_5_MOE, QWEN2, MISTRAL,
        OLMO2, FLEX_OLMO, GRANITE, GRANITE_MOE, GRANITE_MOE_SHARED, AXK1, HUNYUAN_MOE,
    )
}  # fmt: skip
# other values of `model_type`, in folders that name no class
OTHER_TYPES = {"kimi_k2": DEEPSEEK_V3}
