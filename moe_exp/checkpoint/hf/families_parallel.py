"""Tables of architectures with other norms, parallel attention and MLP, or other value heads; and
ARCHITECTURES, all tables.
"""

from dataclasses import replace
from typing import Any

from moe_exp.checkpoint.hf import families as f
from moe_exp.checkpoint.hf import families_windowed as w
from moe_exp.checkpoint.hf import fields as rules
from moe_exp.checkpoint.hf import layer_tensors as t
from moe_exp.checkpoint.hf import rotary_fields as rotary
from moe_exp.checkpoint.hf.families import Architecture
from moe_exp.checkpoint.hf.fields import FieldRule, given, must_be, same
from moe_exp.checkpoint.hf.tensor_rules import averages
from moe_exp.config import Config

# Norms before and after attention and MLP; an output gate.
AFMOE = Architecture(
    "AfmoeForCausalLM", "afmoe",
    fields=(
        *f.common(), *f.HEADS, f.NO_BIAS, f.DENSE_WIDTH, f.EXPERT_WIDTH, w.NUM_EXPERTS, f.TOPK,
        rules.first_dense_layers("num_dense_layers"), rules.shared_experts("num_shared_experts"),
        same("route_scale", "router_scaling_factor"), rules.balancing("aux_loss_alpha"),
        rules.windows(
            lambda i, fields: (i + 1) % given(fields, "global_attn_every_n_layers") != 0,
            "global_attn_every_n_layers", rotated=True, unused=1024,
        ),
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
        _LOGIT_SCALE,
        rules.windows(
            lambda i, fields: (i + 1) % given(fields, "sliding_window_pattern", 4) != 0,
            "sliding_window_pattern", rotated=True, unused=4096,
        ),
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
        *_COHERE, *f.HEADS, f.NO_BIAS, _LOGIT_SCALE, w.NUM_EXPERTS, f.TOPK, rules.balancing("aux_loss_alpha"),
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
        _WINDOWS_OF_MIMO, rules.HEAD_DIM, same("attention_bias", "qkv_bias"), f.DENSE_WIDTH, f.EXPERT_WIDTH,
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
    traits={
        "qkv_bias": rules.EITHER, "sinks": ("some",), "window_groups": (2,), "value_heads": rules.EITHER,
        "value_scale": rules.EITHER,
    },
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
        *f.TABLES, w.EXAONE4, w.OLMO3, w.SMOLLM3, w.GPT_OSS, w.EXAONE_MOE, w.FLINT, w.GRANITE_MOE_SWA,
        w.MELLUM, COHERE2, COHERE2_MOE, AFMOE, MIMO_V2_FLASH,
    )
}  # fmt: skip
# other values of `model_type`, in folders that name no class
OTHER_TYPES = {"kimi_k2": f.DEEPSEEK_V3}
