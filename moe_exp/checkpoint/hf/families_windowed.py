"""Tables of architectures with sliding windows, sinks or layers without rotary embedding."""

from dataclasses import replace

from moe_exp.checkpoint.hf import families as f
from moe_exp.checkpoint.hf import fields as rules
from moe_exp.checkpoint.hf import layer_tensors as t
from moe_exp.checkpoint.hf import rotary_fields as rotary
from moe_exp.checkpoint.hf.families import Architecture
from moe_exp.checkpoint.hf.fields import FieldRule, given, must_be, same

NUM_EXPERTS = same("num_experts|num_local_experts", "num_experts")


# Biases everywhere, sinks in all layers; transposed experts, gate and up alternating.
_YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
GPT_OSS = Architecture(
    "GptOssForCausalLM", "gpt_oss",
    fields=(
        *f.common(rotary=rotary.rope(150000.0, default=_YARN)), *f.HEADS, f.ONE_WIDTH,
        same("num_local_experts|num_experts", "num_experts"), rules.balancing(), f.TOPK,
        rules.windows(lambda i, fields: i % 2 == 0, unused=128),
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
# Dense, norms after attention and MLP.
EXAONE4 = Architecture(
    "Exaone4ForCausalLM", "exaone4",
    fields=(
        *f.common(), *f.HEADS, f.DENSE_WIDTH,
        rules.windows(
            lambda i, fields: (i + 1) % given(fields, "sliding_window_pattern"), "sliding_window_pattern",
            rotated=True, unused=4096,
        ),
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
        *f.common(), *f.HEADS, f.DENSE_WIDTH, f.EXPERT_WIDTH, NUM_EXPERTS, f.TOPK,
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
        *f.common(), *f.HEADS, f.NO_BIAS, f.DENSE_WIDTH, f.EXPERT_WIDTH, NUM_EXPERTS, f.TOPK, _NORMALIZED,
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
        *f.HEADS, f.NO_BIAS, f.DENSE_WIDTH, f.EXPERT_WIDTH, NUM_EXPERTS, f.TOPK, rules.NORMALIZED_WEIGHTS,
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
