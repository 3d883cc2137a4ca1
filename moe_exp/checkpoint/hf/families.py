"""Tables of the supported architectures, checked against transformers 5.23 (modeling_*.py and
configuration_*.py) and, for serving, against vLLM's vllm/model_executor/models/*.py on GitHub.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from moe_exp.checkpoint.hf import fields as rules
from moe_exp.checkpoint.hf import layer_tensors as t
from moe_exp.checkpoint.hf.fields import EITHER, WHOLE, FieldRule, must_be, same
from moe_exp.checkpoint.hf.rotary_fields import rope, rotated_channels
from moe_exp.checkpoint.hf.tensor_rules import ZERO_EXPERT_SIZE, TensorRule


@dataclass(frozen=True)
class Architecture:
    """A transformers model class."""

    name: str  # class name, as in `architectures` of config.json
    model_type: str  # as in config.json; `architecture_of` also knows OTHER_TYPES
    fields: tuple[FieldRule, ...]  # rules for config.json
    tensors: tuple[TensorRule, ...]  # rules for the weights
    defaults: Mapping[str, Any]  # field defaults of its configuration class; fields with None may be null
    # values that it allows, if not those of the field rules; of other traits, only the usual value
    traits: rules.Traits = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)  # that all models of this class share
    # other fields that may be null, to the meaning of null; None: the rules decide
    null: Mapping[str, Any] = field(default_factory=dict)
    # patterns of tensors without effect, to the condition under which they have no effect
    without_effect: Mapping[str, str] = field(default_factory=dict)

    @property
    def scales(self) -> bool:
        """Whether config.json has a field for ROUTER_SCALING_FACTOR."""
        names = {name for rule in self.fields for name in rule.names}
        return bool(names & {"routed_scaling_factor", "router_scaling_factor", "route_scale"})


def _read_causal(fields: rules.Fields) -> rules.Settings:
    if not fields.get("is_causal", True):
        raise rules.refuse("is_causal", fields["is_causal"], "attention to later tokens is not supported")
    return {}


_SIZES = (
    same("num_hidden_layers", "num_layers"), same("hidden_size", "hidden_size"),
    same("num_attention_heads", "num_heads"), same("vocab_size", "vocab_size"),
    same("max_position_embeddings", "seq_len.longest_sample"), same("initializer_range", "init_std"),
    same("attention_dropout", "attention_dropout"),
    must_be("hidden_act", "silu", because="activations other than SwiGLU are not supported"),
    FieldRule(("is_causal",), _read_causal, lambda c: {}),
)  # fmt: skip


def common(
    *, theta: float = 10000.0, fraction: float | None = None, rotary: FieldRule | None = None
) -> tuple[FieldRule, ...]:
    """Rules for fields that all classes share. `rotary` replaces the usual rule for the rotary embedding."""
    epsilon, tied = same("rms_norm_eps", "norm_epsilon"), same("tie_word_embeddings", "tie_embeddings")
    return (*_SIZES, rotary or rope(theta, fraction=fraction), epsilon, tied)


HEADS = (rules.KEY_VALUE_HEADS, rules.HEAD_DIM)
# vLLM always computes the head size as width / heads, regardless of config.json
HEADS_BY_WIDTH = (rules.KEY_VALUE_HEADS, rules.HEAD_DIM_BY_WIDTH)
NO_BIAS = must_be("attention_bias", False, because="biases in the attention projections are not supported")
BIASED_QKV = replace(same("attention_bias", "qkv_bias"), traits={"qkv_bias": EITHER})
NO_MLP_BIAS = must_be("mlp_bias", False, because="biases in the MLP are not supported")
NUM_EXPERTS = same("num_experts|num_local_experts", "num_experts")
NUM_LOCAL_EXPERTS = same("num_local_experts|num_experts", "num_experts")
TOPK = same("num_experts_per_tok", "topk")
DENSE_WIDTH = same("intermediate_size", "ffn_hidden_size")
EXPERT_WIDTH = same("moe_intermediate_size", "moe_ffn_hidden_size.expert_ffn_size")
ONE_WIDTH = same("intermediate_size", "ffn_hidden_size.expert_ffn_size")

# Defaults and meanings of null in transformers' configuration classes. Sizes have no defaults here: a folder
# that omits one is unlikely to have weights of the default size.
NO_DROPOUT = {"attention_dropout": 0.0}
_DEFAULTS_OF_ERNIE = {
    "hidden_act": "silu", "initializer_range": 0.02, "rms_norm_eps": 1e-6, "tie_word_embeddings": False
}  # fmt: skip
DEFAULTS = _DEFAULTS_OF_ERNIE | NO_DROPOUT


def sized(length: int, groups: int | None = None, epsilon: float = 1e-6, **others: Any) -> dict[str, Any]:
    """DEFAULTS plus the given values; `groups`: number of key/value heads (None: one per query head)."""
    sizes = {"max_position_embeddings": length, "num_key_value_heads": groups, "rms_norm_eps": epsilon}
    return DEFAULTS | sizes | others


_QWEN_MOE_DEFAULTS = DEFAULTS | {
    "max_position_embeddings": 32768, "decoder_sparse_step": 1, "mlp_only_layers": None,
    "norm_topk_prob": False, "sliding_window": 4096, "use_sliding_window": False,
    "router_aux_loss_coef": 0.001,
}  # fmt: skip
_QWEN_DEFAULTS = sized(
    32768, 32, sliding_window=4096, use_sliding_window=False, max_window_layers=28, layer_types=None
)

SOFTMAX = {"router_score": "softmax"}
SIGMOID = {"router_score": "sigmoid", "router_normalize": "true", "router_bias_update_rate": 1e-3}
DENSE_MODEL = {"use_moe": False}
_LATENT = {"multi_latent_attention": True, "qk_norm": True}
NORMALIZED = {"routing": ("softmax, normalized", "softmax over all")}
NORMED_HEADS = {"qk_norm": ("head",)}
DENSE_TRAITS = {"moe_layers": ("none",), "routing": ("none",)}
SIGMOID_TRAITS = {"routing": ("sigmoid, normalized",), "expert_bias": EITHER}

MIXTRAL = Architecture(
    "MixtralForCausalLM", "mixtral",
    fields=(
        *common(theta=1e6), *HEADS, ONE_WIDTH, NUM_LOCAL_EXPERTS, TOPK, rules.windows(), rules.balancing(),
        # in transformers, the noise also reaches the experts
        same("router_jitter_noise", "router_jitter"),
    ),
    tensors=(*t.MODEL, *t.ATTENTION, *t.experts("block_sparse_moe", "w1", "w3", "w2")),
    settings=SOFTMAX | {"router_pre_softmax": False},
    traits=NORMALIZED,
    defaults=sized(
        131072, 8, 1e-5, head_dim=None, sliding_window=None, router_aux_loss_coef=0.001,
        router_jitter_noise=0.0,
    ),
)  # fmt: skip
OLMOE = Architecture(
    "OlmoeForCausalLM", "olmoe",
    fields=(
        *common(), *HEADS_BY_WIDTH, NO_BIAS, ONE_WIDTH, NUM_EXPERTS, TOPK,
        must_be("clip_qkv", None, because="clipped queries, keys and values are not supported"),
        rules.NORMALIZED_WEIGHTS, rules.balancing(),
    ),
    tensors=(*t.MODEL, *t.ATTENTION, *t.PROJECTION_NORMS, *t.EXPERTS),
    settings=SOFTMAX | {"qk_norm": True, "qk_norm_scope": "all"},
    traits={"qk_norm": ("all",)},
    defaults=sized(
        4096, None, 1e-5, attention_bias=False, clip_qkv=None, norm_topk_prob=False,
        router_aux_loss_coef=0.01,
    ),
)  # fmt: skip
QWEN3_MOE = Architecture(
    "Qwen3MoeForCausalLM", "qwen3_moe",
    fields=(
        *common(), *HEADS, NO_BIAS, DENSE_WIDTH, EXPERT_WIDTH, NUM_EXPERTS, TOPK, rules.NORMALIZED_WEIGHTS,
        rules.dense_layers_by_list, rules.windows(switched=True), rules.balancing(),
    ),
    tensors=(*t.MODEL, *t.ATTENTION, *t.HEAD_NORMS, *t.DENSE, *t.EXPERTS),
    settings=SOFTMAX | {"qk_norm": True},
    traits=NORMED_HEADS,
    defaults=_QWEN_MOE_DEFAULTS | {"num_key_value_heads": 4, "attention_bias": False},
    null={"sliding_window": None},
)  # fmt: skip


# transformers reports the tensors of an expert with size 0 as missing, and vLLM does not support them. A
# model without a shared expert is therefore exported with a small one of zeros, marked by a field of our own.
_WIDTH, _IS_ZERO = "shared_expert_intermediate_size", "shared_expert_is_zero"
_ZEROS = {_WIDTH: ZERO_EXPERT_SIZE, _IS_ZERO: True}


@rules.field_rule(
    _WIDTH, _IS_ZERO, write=lambda c: {_WIDTH: c.shared_expert_size} if c.shared_expert_size else _ZEROS
)
def _shared_expert(fields: rules.Fields) -> rules.Settings:
    width = rules.given(fields, _WIDTH)
    if rules.given(fields, _IS_ZERO, False):
        width = 0
    return {"shared_expert_size": width, "shared_expert_gate": width > 0}


# vLLM's class requires biases regardless of `qkv_bias`; a model without them is exported with zeros.
_WITH_BIAS = replace(same("qkv_bias", "qkv_bias"), write=lambda c: {"qkv_bias": True})
_FIRST_WINDOWS = rules.windows(
    lambda i, f: i % 2 == 0 and i < rules.given(f, "max_window_layers"), switched=True
)
QWEN2_MOE = Architecture(
    "Qwen2MoeForCausalLM", "qwen2_moe",
    fields=(
        *common(), *HEADS_BY_WIDTH, DENSE_WIDTH, EXPERT_WIDTH, _shared_expert,
        same("num_experts", "num_experts"), TOPK, _WITH_BIAS, rules.NORMALIZED_WEIGHTS,
        rules.dense_layers_by_list, _FIRST_WINDOWS, rules.balancing(),
    ),
    tensors=(
        *t.MODEL, *t.ATTENTION, *t.QKV_BIAS, *t.DENSE, *t.EXPERTS, *t.shared("shared_expert"), *t.SHARED_GATE
    ),
    settings=SOFTMAX,
    traits={"shared": ("none", "gated"), "qkv_bias": EITHER},
    without_effect={r"model\.layers\.\d+\.mlp\.shared_expert(_gate)?\..*": "no_shared"},
    defaults=_QWEN_MOE_DEFAULTS | {
        "num_key_value_heads": 16, "qkv_bias": True, "max_window_layers": 28, "layer_types": None
    },
    null={"sliding_window": None},
)  # fmt: skip
_FIRST_DENSE = rules.first_dense_layers("first_k_dense_replace")
_LAYERS_OF_VLLM = (
    must_be("moe_layer_freq", 1, because="all layers after the leading dense layers must be MoE"),
    must_be("ep_size", 1, because="must be 1 in a config.json"),
)
# Sigmoid scores with a bias for the choice, and fields of the published config.json files that vLLM reads.
BIASED_ROUTING = (
    same("n_routed_experts|num_local_experts", "num_experts"), TOPK, rules.shared_experts(),
    rules.SIGMOID_ROUTING, rules.limited_groups(2), rules.balancing("aux_loss_alpha"),
    must_be("scoring_func", "sigmoid", because="DeepSeek-V3's routing uses sigmoid scores"),
    must_be("topk_method", "noaux_tc", because="experts must be chosen by score plus bias"),
    *_LAYERS_OF_VLLM,
)  # fmt: skip
_DEEPSEEK_FIELDS = (DENSE_WIDTH, EXPERT_WIDTH, *BIASED_ROUTING, _FIRST_DENSE)
_INTERLEAVED = must_be(
    "rope_interleave", True, because="Megatron's latent attention rotates adjacent channels"
)
DEEPSEEK_V3 = Architecture(
    "DeepseekV3ForCausalLM", "deepseek_v3",
    fields=(*common(), *_DEEPSEEK_FIELDS, NO_BIAS, rules.latent_attention, _INTERLEAVED, rules.PREDICTION),
    tensors=(*t.MODEL, *t.LATENT_ATTENTION, *t.DENSE, *t.DEEPSEEK_EXPERTS, *t.PREDICTION),
    settings=_LATENT,
    defaults=sized(
        4096, 128, attention_bias=False, q_lora_rank=1536, rope_interleave=True, first_k_dense_replace=3,
        norm_topk_prob=True, routed_scaling_factor=2.5, n_group=8, topk_group=4, num_mtp_layers=1,
    ),
    null=NO_DROPOUT | {
        "num_key_value_heads": None, "q_lora_rank": None, "rope_interleave": False, "norm_topk_prob": False
    },
)  # fmt: skip
# DeepSeek-V3's MoE without latent attention.
GLM4_MOE = Architecture(
    "Glm4MoeForCausalLM", "glm4_moe",
    fields=(
        *common(fraction=0.5), *HEADS, *_DEEPSEEK_FIELDS, BIASED_QKV,
        same("use_qk_norm", "qk_norm"), rules.PREDICTION,
    ),
    tensors=(
        *t.MODEL, *t.ATTENTION, t.QKV_BIAS[0], *t.HEAD_NORMS, *t.DENSE, *t.DEEPSEEK_EXPERTS, *t.PREDICTION
    ),
    traits={"qk_norm": ("none", "head")},
    defaults=sized(
        131072, 8, 1e-5, attention_bias=False, use_qk_norm=False, first_k_dense_replace=1,
        norm_topk_prob=True, routed_scaling_factor=1.0, n_group=1, topk_group=1, num_mtp_layers=1,
    ),
)  # fmt: skip
DOTS1 = Architecture(
    "Dots1ForCausalLM", "dots1",
    fields=(
        *common(), *HEADS, *_DEEPSEEK_FIELDS, NO_BIAS,
        rules.windows(lambda i, f: i >= rules.given(f, "max_window_layers")),
    ),
    tensors=(*t.MODEL, *t.ATTENTION, *t.HEAD_NORMS, *t.DENSE, *t.DEEPSEEK_EXPERTS),
    settings={"qk_norm": True},
    traits=NORMED_HEADS,
    defaults=sized(
        2048, 32, attention_bias=False, first_k_dense_replace=0, norm_topk_prob=False,
        routed_scaling_factor=1.0, n_group=1, topk_group=1, sliding_window=4096, max_window_layers=62,
        layer_types=None,
    ),
    null=NO_DROPOUT | dict.fromkeys(("num_key_value_heads", "sliding_window", "max_window_layers")) | {
        "norm_topk_prob": False
    },
)  # fmt: skip
SOLAR_OPEN = Architecture(
    "SolarOpenForCausalLM", "solar_open",
    fields=(
        *common(theta=1e6), *HEADS, EXPERT_WIDTH, *BIASED_ROUTING, BIASED_QKV,
        FieldRule(("intermediate_size",), lambda f: {}, lambda c: {}),  # of dense layers, which it lacks
    ),
    tensors=(*t.MODEL, *t.ATTENTION, t.QKV_BIAS[0], *t.DEEPSEEK_EXPERTS),
    defaults=sized(
        131072, 8, 1e-5, head_dim=128, attention_bias=False, norm_topk_prob=True, routed_scaling_factor=1.0,
        n_group=1, topk_group=1,
    ),
)  # fmt: skip
# No shared experts; queries and keys normalized over all heads.
MINIMAX_M2 = Architecture(
    "MiniMaxM2ForCausalLM", "minimax_m2",
    fields=(
        *common(theta=5e6, fraction=1.0), *HEADS, rotated_channels, ONE_WIDTH, NUM_LOCAL_EXPERTS, TOPK,
        rules.balancing(), same("router_jitter_noise", "router_jitter"),
        must_be("scoring_func", "sigmoid", because="MiniMax-M2 uses sigmoid scores"),
        must_be("use_routing_bias", True, because="experts must be chosen by score plus bias"),
        must_be("use_qk_norm", True, because="queries and keys must be normalized"),
        must_be("qk_norm_type", "per_layer", because="queries and keys must be normalized over all heads"),
    ),
    tensors=(
        *t.MODEL, *t.ATTENTION, *t.PROJECTION_NORMS, *t.experts("block_sparse_moe", "w1", "w3", "w2"),
        *t.expert_bias("block_sparse_moe.e_score_correction_bias", alias=t.BIAS_OF_BLOCK),
    ),
    settings=SIGMOID | {"qk_norm": True, "qk_norm_scope": "all"},
    traits=SIGMOID_TRAITS | {"qk_norm": ("all",)},
    defaults=sized(196608, 8, head_dim=128, router_aux_loss_coef=0.001, router_jitter_noise=0.0),
)  # fmt: skip
# DeepSeek-V3 with another field for the dense layers.
GLM4_MOE_LITE = Architecture(
    "Glm4MoeLiteForCausalLM", "glm4_moe_lite",
    fields=(
        *common(), DENSE_WIDTH, EXPERT_WIDTH, *BIASED_ROUTING, rules.dense_layers_by_type(), NO_BIAS,
        rules.latent_attention, _INTERLEAVED, rules.PREDICTION,
    ),
    tensors=DEEPSEEK_V3.tensors,
    settings=_LATENT,
    defaults=sized(
        202752, 20, 1e-5, attention_bias=False, q_lora_rank=768, rope_interleave=True, mlp_layer_types=None,
        norm_topk_prob=True, routed_scaling_factor=1.8, n_group=1, topk_group=1,
    ),
    null={"q_lora_rank": None},
)  # fmt: skip
# GLM-4-MoE-Lite with a norm after the MoE layers.
AXK1 = replace(
    GLM4_MOE_LITE, name="AXK1ForCausalLM", model_type="axk1",
    fields=tuple(rule for rule in GLM4_MOE_LITE.fields if rule is not rules.PREDICTION),
    tensors=(*t.MODEL, *t.LATENT_ATTENTION, *t.DENSE, *t.DEEPSEEK_EXPERTS, t.NORM_AFTER_MOE),
    settings=_LATENT | {"norm_placement": "around_moe"},
    traits={"attention": ("latent",), "norm_placement": ("around_moe",)},
    defaults={
        **GLM4_MOE_LITE.defaults, "rms_norm_eps": 1e-6, "max_position_embeddings": 32768,
        "num_key_value_heads": 64, "q_lora_rank": 1536, "routed_scaling_factor": 2.5, "n_group": 8,
        "topk_group": 4,
    },
    null=NO_DROPOUT | {"rope_interleave": False, "norm_topk_prob": False},
)  # fmt: skip
# Softmax scores without a bias, never normalized. transformers ignores `norm_topk_prob`, vLLM does not.
DEEPSEEK_V2 = Architecture(
    "DeepseekV2ForCausalLM", "deepseek_v2",
    fields=(
        *common(), DENSE_WIDTH, EXPERT_WIDTH, same("n_routed_experts|num_experts", "num_experts"), TOPK,
        rules.shared_experts(), _FIRST_DENSE, rules.latent_attention, NO_BIAS, NO_MLP_BIAS,
        same("routed_scaling_factor", "router_scaling_factor"), rules.balancing("aux_loss_alpha"),
        rules.limited_groups(1, methods=("greedy", "group_limited_greedy")),
        must_be("norm_topk_prob", False, because="transformers' DeepSeek-V2 does not normalize weights"),
        must_be("scoring_func", "softmax", because="DeepSeek-V2 uses softmax scores"), *_LAYERS_OF_VLLM,
    ),
    tensors=(*t.MODEL, *t.LATENT_ATTENTION, *t.DENSE, *t.EXPERTS, *t.shared("shared_experts")),
    settings=_LATENT | SOFTMAX,
    traits={"routing": ("softmax", "softmax over all")},
    defaults=sized(
        2048, attention_bias=False, mlp_bias=False, head_dim=None, first_k_dense_replace=0, q_lora_rank=1536,
        n_group=None, topk_group=None, topk_method="greedy", norm_topk_prob=False, routed_scaling_factor=1.0,
    ),
    null=NO_DROPOUT | {"q_lora_rank": None, "norm_topk_prob": False},
)  # fmt: skip
HY_V3 = Architecture(
    "HYV3ForCausalLM", "hy_v3",
    fields=(
        *common(theta=11158840.0), *HEADS, NO_BIAS, NO_MLP_BIAS, DENSE_WIDTH, EXPERT_WIDTH, TOPK,
        NUM_EXPERTS, rules.shared_experts("num_shared_experts"),
        same("router_scaling_factor", "router_scaling_factor"), rules.dense_layers_by_type(),
        rules.balancing("aux_loss_alpha"),
        must_be("enable_moe_fp32_combine", True, False, because="must be true or false"),
    ),
    tensors=(
        *t.MODEL, *t.ATTENTION, *t.HEAD_NORMS, *t.DENSE,
        *t.experts("mlp", "gate_proj", "up_proj", "down_proj", "router.gate"),
        *t.expert_bias("mlp.expert_bias", alias=t.BIAS_OF_BLOCK), *t.shared("shared_mlp"),
    ),
    settings=SIGMOID | {"qk_norm": True},
    traits=SIGMOID_TRAITS | NORMED_HEADS,
    defaults=sized(
        131072, 8, 1e-5, initializer_range=0.006, head_dim=128, attention_bias=False, mlp_bias=False,
        router_scaling_factor=2.826, mlp_layer_types=None, enable_moe_fp32_combine=True,
    ),
)  # fmt: skip
# Softmax scores with a bias for the choice; rotates adjacent channels.
ERNIE4_5_MOE = Architecture(
    "Ernie4_5_MoeForCausalLM", "ernie4_5_moe",
    fields=(
        *(rule for rule in common(theta=5e5) if rule.names != ("attention_dropout",)), *HEADS, DENSE_WIDTH,
        EXPERT_WIDTH, same("moe_num_experts|num_experts", "num_experts"),
        same("moe_k|num_experts_per_tok", "topk"), rules.shared_experts("moe_num_shared_experts"),
        rules.first_dense_layers("moe_layer_start_index"), rules.last_layer_is_moe, rules.balancing(),
        must_be("moe_layer_interval", 1, because="all layers after the leading dense layers must be MoE"),
        must_be("use_bias", False, because="biases in all projections are not supported"),
        must_be("moe_norm_min", 1e-12, because="the sum of router weights must have no lower bound"),
    ),
    tensors=(
        *t.MODEL, *t.ADJACENT_ATTENTION, *t.DENSE, *t.EXPERTS, *t.shared("shared_experts"),
        *t.expert_bias(
            "mlp.moe_statics.e_score_correction_bias", "1 E", "mlp.gate.moe_statics.e_score_correction_bias"
        ),
    ),
    settings=SOFTMAX | {"router_normalize": "true", "router_bias_update_rate": 1e-3},
    traits=NORMALIZED | {"expert_bias": EITHER, "shared": ("none", *WHOLE)},
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
    fields=(*common(), *HEADS, NO_BIAS, NO_MLP_BIAS, DENSE_WIDTH),
    tensors=(*t.MODEL, *t.ATTENTION, *t.DENSE),
    settings=DENSE_MODEL,
    traits=DENSE_TRAITS,
    defaults=sized(2048, head_dim=None, attention_bias=False, mlp_bias=False),
    null=NO_DROPOUT,
)  # fmt: skip
_WINDOWS_OF_QWEN = rules.windows(lambda i, f: i >= rules.given(f, "max_window_layers"), switched=True)
QWEN3 = Architecture(
    "Qwen3ForCausalLM", "qwen3",
    fields=(*common(), *HEADS, NO_BIAS, DENSE_WIDTH, _WINDOWS_OF_QWEN),
    tensors=(*t.MODEL, *t.ATTENTION, *t.HEAD_NORMS, *t.DENSE),
    settings=DENSE_MODEL | {"qk_norm": True},
    traits=DENSE_TRAITS | NORMED_HEADS,
    defaults=_QWEN_DEFAULTS | {"head_dim": 128, "attention_bias": False},
    null={"num_key_value_heads": None, "sliding_window": None},
)  # fmt: skip

# Norms after attention and MLP instead of before.
OLMO_ATTENTION = (*t.MODEL, *t.ATTENTION[1:], *t.PROJECTION_NORMS, *t.OUTPUT_NORMS)
OLMO_SETTINGS = {"qk_norm": True, "qk_norm_scope": "all", "norm_placement": "post"}
OLMO_TRAITS = {"qk_norm": ("all",), "norm_placement": ("post",)}
OLMO2 = Architecture(
    "Olmo2ForCausalLM", "olmo2",
    fields=(*common(), *HEADS_BY_WIDTH, NO_BIAS, DENSE_WIDTH),
    tensors=(*OLMO_ATTENTION, *t.DENSE[1:]),
    settings=DENSE_MODEL | OLMO_SETTINGS,
    traits=DENSE_TRAITS | OLMO_TRAITS,
    defaults=sized(2048, None, 1e-5, attention_bias=False),
)  # fmt: skip
FLEX_OLMO = Architecture(
    "FlexOlmoForCausalLM", "flex_olmo",
    fields=(
        *common(theta=5e5), *HEADS_BY_WIDTH, NO_BIAS, ONE_WIDTH, TOPK, NUM_EXPERTS,
        rules.NORMALIZED_WEIGHTS, rules.balancing(),
    ),
    tensors=(*OLMO_ATTENTION, *t.EXPERTS[1:]),
    settings=SOFTMAX | OLMO_SETTINGS,
    traits=OLMO_TRAITS,
    defaults=sized(4096, attention_bias=False, norm_topk_prob=False, router_aux_loss_coef=0.01),
    null=NO_DROPOUT,
)  # fmt: skip
# Norms of queries and keys after the rotary embedding; one shared expert.
HUNYUAN_MOE = Architecture(
    "HunYuanMoEV1ForCausalLM", "hunyuan_v1_moe",
    fields=(
        *common(rotary=rope(1e4, stretches=True)), rules.KEY_VALUE_HEADS,
        same("head_dim", "head_dim.kv_channels"), NO_BIAS, NO_MLP_BIAS, NUM_EXPERTS, rules.hunyuan_experts,
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
    traits=NORMALIZED | {"qk_norm": ("rotated",), "heads_fill_width": EITHER},
    defaults=sized(2048, None, 1e-5, attention_bias=False),
)  # fmt: skip
# Constant factors in the forward pass.
_GRANITE_DEFAULTS = sized(
    2048, attention_bias=False, embedding_multiplier=1.0, residual_multiplier=1.0, attention_multiplier=1.0,
    logits_scaling=1.0,
)  # fmt: skip
GRANITE = Architecture(
    "GraniteForCausalLM", "granite",
    fields=(*common(), *HEADS_BY_WIDTH, NO_BIAS, NO_MLP_BIAS, DENSE_WIDTH, *rules.MULTIPLIERS),
    tensors=LLAMA.tensors,
    settings=DENSE_MODEL,
    traits=DENSE_TRAITS,
    defaults=_GRANITE_DEFAULTS | {"mlp_bias": False},
)  # fmt: skip
GRANITE_MOE = Architecture(
    "GraniteMoeForCausalLM", "granitemoe",
    fields=(
        *common(), *HEADS_BY_WIDTH, NO_BIAS, ONE_WIDTH, TOPK, *rules.MULTIPLIERS, NUM_LOCAL_EXPERTS,
        rules.balancing(),
    ),
    tensors=(*t.MODEL, *t.ATTENTION, *t.JOINED_EXPERTS),
    settings=MIXTRAL.settings,
    traits=NORMALIZED,
    defaults=_GRANITE_DEFAULTS | {"router_aux_loss_coef": 0.001},
    null=NO_DROPOUT | {"router_aux_loss_coef": None},
)  # fmt: skip
GRANITE_MOE_SHARED = replace(
    GRANITE_MOE, name="GraniteMoeSharedForCausalLM", model_type="granitemoeshared",
    fields=(*GRANITE_MOE.fields, same("shared_intermediate_size", "shared_expert_size")),
    tensors=(*GRANITE_MOE.tensors, *t.JOINED_SHARED),
    traits=NORMALIZED | {"shared": ("none", *WHOLE, "of another width")},
    defaults={**GRANITE_MOE.defaults, "shared_intermediate_size": 0},
)  # fmt: skip

# Biases on queries, keys and values, without a field.
QWEN2 = Architecture(
    "Qwen2ForCausalLM", "qwen2",
    fields=(*common(), *HEADS_BY_WIDTH, DENSE_WIDTH, _WINDOWS_OF_QWEN),
    tensors=(*t.MODEL, *t.ATTENTION, t.QKV_BIAS[0], *t.DENSE),
    settings=DENSE_MODEL | {"qkv_bias": True},
    traits=DENSE_TRAITS | {"qkv_bias": (True,)},
    defaults=_QWEN_DEFAULTS, null=QWEN3.null,
)  # fmt: skip
MISTRAL = Architecture(
    "MistralForCausalLM", "mistral",
    fields=(*common(), *HEADS, DENSE_WIDTH, rules.windows()),
    tensors=(*t.MODEL, *t.ATTENTION, *t.DENSE),
    settings=DENSE_MODEL,
    traits=DENSE_TRAITS,
    defaults=sized(131072, 8, head_dim=None, sliding_window=4096),
    null={"sliding_window": None},
)  # fmt: skip

# choose_architecture tries them in this order, then those of families_attention.py
TABLES = (
    MIXTRAL, OLMOE, QWEN3_MOE, QWEN2_MOE, DEEPSEEK_V3, GLM4_MOE, LLAMA, QWEN3,
    DOTS1, SOLAR_OPEN, MINIMAX_M2, GLM4_MOE_LITE, DEEPSEEK_V2, HY_V3, ERNIE4_5_MOE, QWEN2, MISTRAL,
    OLMO2, FLEX_OLMO, GRANITE, GRANITE_MOE, GRANITE_MOE_SHARED, AXK1, HUNYUAN_MOE,
)  # fmt: skip
