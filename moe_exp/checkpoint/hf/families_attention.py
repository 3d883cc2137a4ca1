"""Tables of architectures that have sliding windows, sinks, layers without rotary embedding, nonstandard
norms, nonstandard value heads, or attention parallel to the MLP. ARCHITECTURES also includes the
architectures in families.py.
"""

from dataclasses import replace
from typing import Any

from moe_exp.checkpoint.hf import families as f
from moe_exp.checkpoint.hf import fields as rules
from moe_exp.checkpoint.hf import layer_tensors as t
from moe_exp.checkpoint.hf import rotary_fields as rotary
from moe_exp.checkpoint.hf.families import Architecture
from moe_exp.checkpoint.hf.fields import EITHER, FieldRule, given, must_be, same
from moe_exp.checkpoint.hf.tensor_rules import averages
from moe_exp.config import Config

# Biases everywhere, sinks in all layers; transposed experts, gate and up alternating.
_YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
GPT_OSS = Architecture(
    "GptOssForCausalLM", "gpt_oss",
    fields=(
        *f.common(rotary=rotary.rope(150000.0, default=_YARN)), *f.HEADS, f.ONE_WIDTH, f.NUM_LOCAL_EXPERTS,
        rules.balancing(), f.TOPK, rules.windows(lambda i, fields: i % 2 == 0, unused=128),
        must_be("attention_bias", True, because="all projections must have biases"),
        must_be("swiglu_alpha", 1.702, because="the activation has this constant"),
        must_be("swiglu_limit", 7.0, because="the activation has this constant"),
        # without effect
        FieldRule(("initial_context_length", "experts_per_token"), lambda fields: {}, lambda c: {}),
    ),
    tensors=(*t.MODEL, *t.ATTENTION, *t.ATTENTION_BIAS, t.sinks("self_attn.sinks"), *t.GPT_OSS_EXPERTS),
    settings=f.SOFTMAX | {
        "router_pre_softmax": False, "add_bias_linear": True, "activation": "clamped_swiglu",
        "attention_sinks": "all",
    },
    traits=f.NORMALIZED | {"biases": (True,), "sinks": ("all",), "activation": ("clamped_swiglu",)},
    defaults=f.sized(
        131072, 8, 1e-5, head_dim=64, sliding_window=128, layer_types=None, attention_bias=True,
        swiglu_alpha=1.702, swiglu_limit=7.0, router_aux_loss_coef=0.001,
    ),
)  # fmt: skip


def _windows_but_every(name: str, *default: int, unused: int) -> FieldRule:
    """Rule for models in which every n-th layer has no window or rotary embedding; field `name` holds n."""
    return rules.windows(
        lambda i, fields: (i + 1) % given(fields, name, *default) != 0, name, rotated=True, unused=unused
    )


# Dense, norms after attention and MLP.
EXAONE4 = Architecture(
    "Exaone4ForCausalLM", "exaone4",
    fields=(
        *f.common(), *f.HEADS, f.DENSE_WIDTH, _windows_but_every("sliding_window_pattern", unused=4096),
    ),
    tensors=(*t.MODEL, *t.ATTENTION[1:], *t.HEAD_NORMS, *t.OUTPUT_NORMS, *t.DENSE[1:]),
    settings=f.DENSE_MODEL | {"qk_norm": True, "norm_placement": "post"},
    traits=f.DENSE_TRAITS | f.NORMED_HEADS | {
        "norm_placement": ("post",), "windows": ("none", *rules.ONLY_ROTATED)
    },
    defaults=f.sized(2048, 32, 1e-5, sliding_window=4096, sliding_window_pattern=4, layer_types=None),
    null={"sliding_window": None, "sliding_window_pattern": None},
)  # fmt: skip
# transformers ignores the layer for multi-token prediction, `mtp`.
_NO_PREDICTION = {r"mtp\..*": ""}
EXAONE_MOE = Architecture(
    "ExaoneMoeForCausalLM", "exaone_moe",
    fields=(
        *f.common(), *f.HEADS, f.DENSE_WIDTH, f.EXPERT_WIDTH, f.NUM_EXPERTS, f.TOPK,
        rules.shared_experts("num_shared_experts"), rules.SIGMOID_ROUTING, rules.limited_groups(2),
        rules.balancing("aux_loss_alpha"), EXAONE4.fields[-1],
        rules.dense_layers_by_type(lambda fields: given(fields, "first_k_dense_replace")),
    ),
    tensors=(
        *t.MODEL, *t.ATTENTION, *t.HEAD_NORMS, *t.DENSE, *t.EXPERTS, *t.shared("shared_experts"),
        *t.expert_bias(t.BIAS_OF_BLOCK, alias="mlp.gate.e_score_correction_bias"),
    ),
    settings={"qk_norm": True},
    traits=f.NORMED_HEADS,
    defaults={
        **EXAONE4.defaults, "first_k_dense_replace": 1, "mlp_layer_types": None, "norm_topk_prob": True,
        "routed_scaling_factor": 2.5, "n_group": 1, "topk_group": 1,
    },
    null={"sliding_window_pattern": None},
    without_effect=_NO_PREDICTION,
)  # fmt: skip
# Sinks in all layers; sigmoid scores without bias; a shared expert without a gate.
_NORMALIZED = FieldRule(
    ("norm_topk_prob",),
    lambda fields: {"router_normalize": "true" if given(fields, "norm_topk_prob") else "false"},
    lambda c: {"norm_topk_prob": c.router_weights_sum is not None},
    {"routing": rules.SIGMOID},
)
FLINT = Architecture(
    "FlintForCausalLM", "flint",
    fields=(
        *f.common(), *f.HEADS, f.NO_BIAS, f.DENSE_WIDTH, f.EXPERT_WIDTH, f.NUM_EXPERTS, f.TOPK, _NORMALIZED,
        rules.balancing(), same("shared_expert_intermediate_size", "shared_expert_size"),
        replace(rules.dense_layers_by_list, read=lambda fields: rules.dense_layers_by_list.read(
            {**fields, "mlp_only_layers": given(fields, "mlp_only_layers", [0, 1])}
        )),
        rules.windows(
            lambda i, fields: 2 <= i < given(fields, "num_hidden_layers") - 1 and i % 4 != 1,
            rotated=True, unused=513,
        ),
    ),
    tensors=(
        *t.MODEL, *t.ATTENTION, *t.HEAD_NORMS, *t.DENSE, *t.EXPERTS, *t.shared("shared_expert"),
        t.sinks("self_attn.softmax_offset", alias="self_attn.sinks"),
    ),
    settings={"qk_norm": True, "router_score": "sigmoid", "attention_sinks": "all"},
    traits=f.NORMED_HEADS | {"sinks": ("all",), "shared": (*rules.WHOLE, "of another width")},
    defaults=f.sized(
        262144, 4, head_dim=128, sliding_window=513, layer_types=None, attention_bias=False,
        decoder_sparse_step=1, mlp_only_layers=None, norm_topk_prob=True, router_aux_loss_coef=0.0005,
    ),
)  # fmt: skip
# Dense; any layers without rotary embedding.
_ANY_WINDOWS = {"windows": (*rules.WINDOWS, "rotated", "mixed")}
SMOLLM3 = Architecture(
    "SmolLM3ForCausalLM", "smollm3",
    fields=(
        *f.common(theta=2e6), *f.HEADS, f.NO_BIAS, f.NO_MLP_BIAS, f.DENSE_WIDTH, rotary.layers_without_rope,
        rules.windows(lambda i, fields: not rotary.rotates(i, fields), switched=True),
    ),
    tensors=(*t.MODEL, *t.ATTENTION, *t.DENSE),
    settings=f.DENSE_MODEL,
    traits=f.DENSE_TRAITS | _ANY_WINDOWS,
    defaults=f.sized(
        32768, 4, attention_bias=False, mlp_bias=False, tie_word_embeddings=True, use_sliding_window=False,
        sliding_window=None, no_rope_layers=None, no_rope_layer_interval=4, layer_types=None,
    ),
    null={"num_key_value_heads": None},
)  # fmt: skip
# Granite with sinks in all layers, and a base of the rotary embedding per layer.
_THREE_OF_FOUR = rules.windows(lambda i, fields: i % 4 != 0, unused=128)
GRANITE_MOE_SWA = replace(
    f.GRANITE_MOE_SHARED, name="GraniteMoeSWAForCausalLM", model_type="granitemoe_swa",
    fields=(
        *(rule for rule in f.GRANITE_MOE_SHARED.fields if "rope_theta" not in rule.names),
        rotary.rope_by_layer(_THREE_OF_FOUR, 10000.0), _THREE_OF_FOUR,
    ),
    tensors=(*t.MODEL, *t.ATTENTION, t.sinks("self_attn.sinks"), *t.JOINED_EXPERTS_OF_SWA, *t.JOINED_SHARED),
    settings={**f.GRANITE_MOE_SHARED.settings, "attention_sinks": "all"},
    traits={**f.GRANITE_MOE_SHARED.traits, **_ANY_WINDOWS, "sinks": ("all",)},
    defaults={
        **f.GRANITE_MOE_SHARED.defaults, "sliding_window": 128, "layer_types": None, "layer_rope_theta": None
    },
)  # fmt: skip
# Rotary embeddings by kind of layer.
_LISTED = rules.windows(lambda i, fields: False, unused=1024)
MELLUM = Architecture(
    "MellumForCausalLM", "mellum",
    fields=(
        *f.common(rotary=rotary.rope_by_kind(_LISTED, full=5e5, windowed=1e4, legacy=False)), _LISTED,
        *f.HEADS, f.NO_BIAS, f.DENSE_WIDTH, f.EXPERT_WIDTH, f.NUM_EXPERTS, f.TOPK, rules.NORMALIZED_WEIGHTS,
        rules.dense_layers_by_type(lambda fields: 0), rules.balancing(),
        FieldRule(("mtp_layer_types", "mtp_mlp_layer_types"), lambda fields: {}, lambda c: {}),
    ),
    tensors=f.QWEN3_MOE.tensors,
    settings=f.QWEN3_MOE.settings,
    traits=f.QWEN3_MOE.traits,
    defaults=f.sized(
        131072, 4, head_dim=128, sliding_window=1024, layer_types=None, attention_bias=False,
        mlp_layer_types=None, norm_topk_prob=True, router_aux_loss_coef=0.001, mtp_layer_types=None,
        mtp_mlp_layer_types=None,
    ),
    null={"sliding_window": None},
    without_effect=_NO_PREDICTION,
)  # fmt: skip
_THREE_THEN_FULL = rules.windows(lambda i, fields: (i + 1) % 4 != 0, unused=4096)
OLMO3 = replace(
    f.OLMO2, name="Olmo3ForCausalLM", model_type="olmo3",
    fields=(
        *(rule for rule in f.OLMO2.fields if "rope_theta" not in rule.names),
        rotary.rope_by_kind(_THREE_THEN_FULL, full=5e5, windowed=5e5, legacy=True), _THREE_THEN_FULL,
    ),
    defaults={**f.OLMO2.defaults, "sliding_window": 4096, "layer_types": None},
)  # fmt: skip
# Norms before and after attention and MLP; an output gate.
AFMOE = Architecture(
    "AfmoeForCausalLM", "afmoe",
    fields=(
        *f.common(), *f.HEADS, f.NO_BIAS, f.DENSE_WIDTH, f.EXPERT_WIDTH, f.NUM_EXPERTS, f.TOPK,
        rules.first_dense_layers("num_dense_layers"), rules.shared_experts("num_shared_experts"),
        same("route_scale", "router_scaling_factor"), rules.balancing("aux_loss_alpha"),
        _windows_but_every("global_attn_every_n_layers", unused=1024),
        FieldRule(
            ("mup_enabled",),
            lambda fields: {
                "embedding_multiplier": given(fields, "hidden_size") ** (0.5 * given(fields, "mup_enabled"))
            },
            lambda c: {"mup_enabled": c.embedding_multiplier != 1},
        ),
    ),
    tensors=(
        *t.MODEL, *t.GATED_ATTENTION, *t.HEAD_NORMS, *t.SANDWICH_NORMS, *t.DENSE[1:],
        *t.experts("mlp", "gate_proj", "up_proj", "down_proj", "router.gate")[1:],
        *t.expert_bias("mlp.expert_bias"), *t.shared("shared_experts"),
    ),
    settings=f.SIGMOID | {"qk_norm": True, "attention_gate": True, "norm_placement": "around"},
    traits=f.SIGMOID_TRAITS | f.NORMED_HEADS | {
        "gate": (True,), "norm_placement": ("around",), "multipliers": ("none", "of embeddings")
    },
    defaults=f.sized(
        16384, None, 1e-5, head_dim=128, num_dense_layers=1, route_scale=1.0, global_attn_every_n_layers=4,
        sliding_window=1024, layer_types=None, mup_enabled=False, attention_bias=False,
    ),
    null=f.NO_DROPOUT | {"mup_enabled": False},
)  # fmt: skip
# Attention and MLP in parallel; LayerNorm without biases; rotates adjacent channels.
_LOGIT_SCALE = FieldRule(
    ("logit_scale",),
    lambda fields: {"logits_scaling": 1 / given(fields, "logit_scale")},
    lambda c: {"logit_scale": 1 / c.logits_scaling},
    {"multipliers": ("none", "of logits")},
)
_NORMS_OF_COHERE = {"normalization": "LayerNorm", "norm_bias": False, "norm_placement": "parallel"}
_COHERE = tuple(rule for rule in f.common() if "rms_norm_eps" not in rule.names)
_DEFAULTS_OF_COHERE = f.sized(
    8192, attention_bias=False, layer_norm_eps=1e-5, logit_scale=0.0625, tie_word_embeddings=True,
    sliding_window=4096, layer_types=None,
)  # fmt: skip
_DEFAULTS_OF_COHERE.pop("rms_norm_eps")
COHERE2 = Architecture(
    "Cohere2ForCausalLM", "cohere2",
    fields=(
        *_COHERE, same("layer_norm_eps", "norm_epsilon"), *f.HEADS_BY_WIDTH, f.NO_BIAS, f.DENSE_WIDTH,
        _LOGIT_SCALE, _windows_but_every("sliding_window_pattern", 4, unused=4096),
    ),
    tensors=(*t.MODEL, *t.ADJACENT_ATTENTION, *t.DENSE[1:]),
    settings=f.DENSE_MODEL | _NORMS_OF_COHERE,
    traits=f.DENSE_TRAITS | {"normalization": ("LayerNorm",), "norm_placement": ("parallel",)},
    defaults=_DEFAULTS_OF_COHERE,
)  # fmt: skip


# The mean or the sum of routed and shared experts.
_PREFIX, _FIRST = "prefix_dense_sliding_window_pattern", "first_k_dense_replace"
_COMBINED, _SCORE = "shared_expert_combination_strategy", "expert_selection_fn"


def _has_window(layer: int, fields: rules.Fields) -> bool:
    name = "sliding_window_pattern"
    if (behind := layer - given(fields, _FIRST, 0)) < 0:
        behind, name = layer, _PREFIX
    return (behind + 1) % given(fields, name) != 0


def _rotates_dense(layer: int, fields: rules.Fields) -> bool:
    types = given(fields, "mlp_layer_types", ["dense"] * given(fields, _FIRST, 0))
    return given(fields, _PREFIX) == 1 and types[layer : layer + 1] == ["dense"]


def _write_prefix(config: Config) -> dict[str, Any]:
    layers = zip(config.layers_without_rotary, config.moe_layers, strict=True)
    return {_PREFIX: 2 if any(lacks_rotary and not is_moe for lacks_rotary, is_moe in layers) else 1}


_ONE_WIDTH = "intermediate_size"


@rules.field_rule(
    _ONE_WIDTH, "prefix_dense_intermediate_size", "rms_norm_eps", "layer_norm_eps", "num_shared_experts",
    "norm_topk_prob", _COMBINED, _SCORE,
    write=lambda c: {
        _ONE_WIDTH: c.expert_ffn_size, "prefix_dense_intermediate_size": c.ffn_hidden_size,
        "rms_norm_eps" if c.normalization == "RMSNorm" else "layer_norm_eps": c.norm_epsilon,
        "num_shared_experts": c.shared_expert_size // c.expert_ffn_size,
        "norm_topk_prob": c.router_weights_sum is not None,
        _COMBINED: "average" if averages(c) else "sum", _SCORE: c.router_score,
    },
)  # fmt: skip
def _of_cohere_moe(fields: rules.Fields) -> rules.Settings:
    width, shared, score = (given(fields, name) for name in (_ONE_WIDTH, "num_shared_experts", _SCORE))
    norms = {"normalization": "RMSNorm", "norm_epsilon": fields.get("rms_norm_eps")}
    if norms["norm_epsilon"] is None:
        norms = {**_NORMS_OF_COHERE, "norm_epsilon": given(fields, "layer_norm_eps")}
    normalizes = score == "softmax" or given(fields, "norm_topk_prob")
    return norms | {
        "ffn_hidden_size": given(fields, "prefix_dense_intermediate_size", width),
        "moe_ffn_hidden_size": width, "shared_expert_size": shared * width,
        "router_score": score, "router_normalize": "true" if normalizes else "false",
        "router_scaling_factor": 0.5 if shared and given(fields, _COMBINED) == "average" else 1.0,
    }  # fmt: skip


COHERE2_MOE = replace(
    COHERE2, name="Cohere2MoeForCausalLM", model_type="cohere2_moe",
    fields=(
        *_COHERE, *f.HEADS, f.NO_BIAS, _LOGIT_SCALE, f.NUM_EXPERTS, f.TOPK, rules.balancing("aux_loss_alpha"),
        must_be("rope_scaling", None, because="transformers ignores this field, unlike rope_parameters"),
        must_be(_COMBINED, "average", "sum", because="must be average or sum"),
        must_be(_SCORE, "softmax", "sigmoid", because="must be softmax or sigmoid"), _of_cohere_moe,
        rules.dense_layers_by_type(lambda fields: given(fields, _FIRST, 0)),
        rules.windows(
            _has_window, "sliding_window_pattern", rotated=True, also_rotated=_rotates_dense, unused=4096
        ),
        FieldRule((_PREFIX,), lambda fields: {}, _write_prefix),
    ),
    tensors=(*t.MODEL, *t.ADJACENT_ATTENTION, *t.DENSE[1:], *t.AVERAGED_EXPERTS),
    settings={"norm_placement": "parallel"},
    traits={
        "normalization": ("LayerNorm", "RMSNorm"), "norm_placement": ("parallel",),
        "windows": (*rules.ONLY_ROTATED, "some, others dense", "rotated, and dense"),
        "routing": (*f.NORMALIZED["routing"], *rules.SIGMOID), "shared": ("none", *rules.WHOLE),
    },
    defaults=_DEFAULTS_OF_COHERE | {
        "head_dim": 128, "rms_norm_eps": None, "mlp_layer_types": None, _PREFIX: 1, "norm_topk_prob": True,
        "num_shared_experts": 0, _COMBINED: "average", _SCORE: "softmax", "rope_scaling": None,
        "prefix_dense_intermediate_size": None, "rope_theta": 10000.0, "sliding_window_pattern": 4,
    },
)  # fmt: skip
# Twice as many key/value heads in layers with a window, and sinks there; values with fewer channels.
_BUT_SIXTH = rules.windows(lambda i, fields: i > 0 and (i + 1) % 6 != 0, "sliding_window_size")


def _read_windows(fields: rules.Fields) -> rules.Settings:
    earlier = given(fields, "sliding_window_size", given(fields, "sliding_window") - 1)
    settings = _BUT_SIXTH.read({**fields, "sliding_window": earlier + 1})
    if settings["window_pattern"] == "1":
        raise rules.refuse("layer_types", fields.get("layer_types"), "must have both kinds of layers")
    return settings


_WINDOWS_OF_MIMO = replace(_BUT_SIXTH, read=_read_windows)
MIMO_V2_FLASH = Architecture(
    "MiMoV2FlashForCausalLM", "mimo_v2_flash",
    fields=(
        *f.common(rotary=rotary.rope_by_kind(
            _WINDOWS_OF_MIMO, full=5e6, windowed=1e4, legacy=False, fraction=0.334
        )),
        _WINDOWS_OF_MIMO, rules.HEAD_DIM, f.BIASED_QKV, f.DENSE_WIDTH, f.EXPERT_WIDTH,
        FieldRule(
            ("num_key_value_heads",),
            lambda fields: {
                "num_query_groups": given(fields, "num_key_value_heads"),
                "window_query_groups": 2 * given(fields, "num_key_value_heads"),
            },
            lambda c: {"num_key_value_heads": c.num_query_groups},
        ),
        FieldRule(
            ("v_head_dim",), lambda fields: {"value_head_dim": given(fields, "v_head_dim")},
            lambda c: {"v_head_dim": c.value_head_dim or c.kv_channels},
        ),
        same("attention_value_scale", "value_scale"),
        same("n_routed_experts|num_local_experts", "num_experts"), f.TOPK, rules.SIGMOID_ROUTING,
        rules.limited_groups(2), rules.balancing("aux_loss_alpha"), rules.dense_layers_by_type(),
    ),
    tensors=(
        *t.MODEL, *t.ATTENTION, t.QKV_BIAS[0], *t.DENSE, *t.EXPERTS, *t.EXPERT_BIAS,
        t.sinks("self_attn.attention_sink_bias", "self_attn.sinks", "windowed"),
    ),
    settings={"attention_sinks": "windowed"},
    traits={"sinks": ("some",), "window_groups": (2,), "value_heads": EITHER, "value_scale": EITHER},
    defaults=f.sized(
        131072, 4, 1e-5, head_dim=192, attention_bias=False, v_head_dim=128, sliding_window=129,
        layer_types=None, mlp_layer_types=None, attention_value_scale=0.707, routed_scaling_factor=1.0,
        n_group=1, topk_group=1, norm_topk_prob=True,
    ),
    null={"attention_value_scale": 1.0, "routed_scaling_factor": 1.0},
    without_effect={r"model\.mtp\..*": ""},
)  # fmt: skip

ARCHITECTURES = {
    table.name: table
    for table in (
        *f.TABLES, EXAONE4, OLMO3, SMOLLM3, GPT_OSS, EXAONE_MOE, FLINT, GRANITE_MOE_SWA,
        MELLUM, COHERE2, COHERE2_MOE, AFMOE, MIMO_V2_FLASH,
    )
}  # fmt: skip
# other values of `model_type`, in folders that name no class
OTHER_TYPES = {"kimi_k2": f.DEEPSEEK_V3}
