"""Tables that map a layer's tensors in transformers to checkpoint tensors, for families*.py."""

from dataclasses import replace

from moe_exp.checkpoint.hf.tensor_rules import TensorRule

MODEL = (
    TensorRule("embedding.word_embeddings.weight", {"model.embed_tokens.weight": "V D"}, "padded", "model"),
    TensorRule("decoder.final_layernorm.weight", {"model.norm.weight": "D"}, layers="model"),
    TensorRule("output_layer.weight", {"lm_head.weight": "V D"}, "padded", "model", "untied"),
)
# a layer for multi-token prediction has these beside those of a transformer layer
PREDICTION = (
    *(
        TensorRule(f"{ours}.weight", {f"{theirs}.weight": size}, layers="mtp")
        for ours, theirs, size in (
            ("enorm", "enorm", "D"), ("hnorm", "hnorm", "D"), ("eh_proj", "eh_proj", "D 2D"),
            ("final_layernorm", "shared_head.norm", "D"),
        )
    ),
    *(
        TensorRule(f"{ours}.weight", {f"{theirs}.weight": "V D"}, "padded", "mtp", when, copy_of=original)
        for ours, theirs, when, original in (
            ("embedding.word_embeddings", "embed_tokens", "", "model.embed_tokens.weight"),
            ("output_layer", "shared_head.head", "untied", "lm_head.weight"),
            ("embedding.word_embeddings", "shared_head.head", "tied", "model.embed_tokens.weight"),
        )
    ),
)  # fmt: skip
QKV = {"self_attn.q_proj.weight": "Q D", "self_attn.k_proj.weight": "K D", "self_attn.v_proj.weight": "W D"}
ATTENTION = (
    TensorRule("self_attention.linear_qkv.layer_norm_weight", {"input_layernorm.weight": "D"}),
    TensorRule("self_attention.linear_qkv.weight", QKV, "heads"),
    TensorRule("self_attention.linear_proj.weight", {"self_attn.o_proj.weight": "D O"}, "outputs"),
)
_QKV_BIAS_NAMES = {"self_attn.q_proj.bias": "Q", "self_attn.k_proj.bias": "K", "self_attn.v_proj.bias": "W"}
QKV_BIAS = (
    TensorRule("self_attention.linear_qkv.bias", _QKV_BIAS_NAMES, "heads", when="qkv_bias"),
    TensorRule("", _QKV_BIAS_NAMES, "zeros", when="no_qkv_bias"),
)
# Afmoe
_WITH_GATE = dict.fromkeys(("self_attn.q_proj.weight", "self_attn.gate_proj.weight"), "Q D") | QKV
GATED_ATTENTION = (ATTENTION[0], replace(ATTENTION[1], theirs=_WITH_GATE), ATTENTION[2])
# Cohere, ERNIE
ADJACENT_ATTENTION = (ATTENTION[0], replace(ATTENTION[1], join="adjacent heads"), ATTENTION[2])
HEAD_NORMS = (
    TensorRule("self_attention.q_layernorm.weight", {"self_attn.q_norm.weight": "H"}, when="qk_norm"),
    TensorRule("self_attention.k_layernorm.weight", {"self_attn.k_norm.weight": "H"}, when="qk_norm"),
)
PROJECTION_NORMS = (
    TensorRule("self_attention.q_layernorm.weight", {"self_attn.q_norm.weight": "Q"}),
    TensorRule("self_attention.k_layernorm.weight", {"self_attn.k_norm.weight": "K"}),
)
LATENT_ATTENTION = (
    TensorRule("input_layernorm.weight", {"input_layernorm.weight": "D"}),
    *(
        TensorRule(f"self_attention.{ours}", {f"self_attn.{theirs}.weight": size}, when=when)
        for ours, theirs, size, when in (
            ("linear_q_proj.weight", "q_proj", "N D", "no_q_lora"),
            ("linear_q_down_proj.weight", "q_a_proj", "A D", "q_lora"),
            ("linear_q_up_proj.layer_norm_weight", "q_a_layernorm", "A", "q_lora"),
            ("linear_q_up_proj.weight", "q_b_proj", "N A", "q_lora"),
            ("linear_kv_down_proj.weight", "kv_a_proj_with_mqa", "R D", ""),
            ("linear_kv_up_proj.layer_norm_weight", "kv_a_layernorm", "B", ""),
            ("linear_kv_up_proj.weight", "kv_b_proj", "M B", ""),
            ("linear_proj.weight", "o_proj", "D O", ""),
        )
    ),
)
_DENSE_HALVES = {"mlp.gate_proj.weight": "F D", "mlp.up_proj.weight": "F D"}
DENSE = (
    TensorRule("mlp.linear_fc1.layer_norm_weight", {"post_attention_layernorm.weight": "D"}, layers="dense"),
    TensorRule("mlp.linear_fc1.weight", _DENSE_HALVES, "rows", "dense"),
    TensorRule("mlp.linear_fc2.weight", {"mlp.down_proj.weight": "D F"}, layers="dense"),
)


_OURS = "mlp.experts.experts.linear_fc"  # of all experts of a layer


def experts(block: str, gate: str, up: str, down: str, router_name: str = "gate") -> tuple[TensorRule, ...]:
    each, all_theirs = f"{block}.experts.{{expert}}", "mlp.experts."
    router, norm = {f"{block}.{router_name}.weight": "E D"}, {"post_attention_layernorm.weight": "D"}
    halves = {f"{each}.{gate}.weight": "f D", f"{each}.{up}.weight": "f D"}
    second = {f"{each}.{down}.weight": "D f"}
    return (
        TensorRule("pre_mlp_layernorm.weight", norm, layers="moe"),
        TensorRule("mlp.router.weight", router, layers="moe", alias="mlp.gate.weight"),
        TensorRule(f"{_OURS}1.weight", halves, "rows", "moe", alias=f"{all_theirs}gate_up_proj"),
        TensorRule(f"{_OURS}2.weight", second, layers="moe", alias=f"{all_theirs}down_proj", weighted=True),
    )


EXPERTS = experts("mlp", "gate_proj", "up_proj", "down_proj")
_AFTER_MLP = "post_mlp_layernorm.weight"
OUTPUT_NORMS = (
    TensorRule("post_self_attn_layernorm.weight", {"post_attention_layernorm.weight": "D"}),
    TensorRule(_AFTER_MLP, {"post_feedforward_layernorm.weight": "D"}),
)
NORM_AFTER_MOE = TensorRule(_AFTER_MLP, {_AFTER_MLP: "D"}, layers="moe", alias=f"mlp.{_AFTER_MLP}")
_BLOCK = "block_sparse_moe."
JOINED_EXPERTS = (
    EXPERTS[0],
    TensorRule(
        "mlp.router.weight", {f"{_BLOCK}router.layer.weight": "E D"}, layers="moe",
        alias=f"{_BLOCK}router.weight",
    ),
    TensorRule(
        f"{_OURS}1.weight", {f"{_BLOCK}input_linear.weight": "E G D"}, layers="moe",
        alias=f"{_BLOCK}experts.gate_up_proj",
    ),
    TensorRule(
        f"{_OURS}2.weight", {f"{_BLOCK}output_linear.weight": "E D f"}, layers="moe",
        alias=f"{_BLOCK}experts.down_proj", weighted=True,
    ),
)  # fmt: skip
# GraniteMoeSWA: published with the names that are aliases above
JOINED_EXPERTS_OF_SWA = tuple(
    replace(
        rule, theirs=dict.fromkeys([rule.alias or next(iter(rule.theirs))], *rule.theirs.values()), alias=""
    )
    for rule in JOINED_EXPERTS
)
JOINED_SHARED = tuple(
    TensorRule(f"mlp.shared_experts.linear_fc{n}.weight", {name: size}, layers="moe", when="shared")
    for n, name, size in (
        (1, "shared_mlp.input_linear.weight", "T D"), (2, "shared_mlp.output_linear.weight", "D S"),
    )
)  # fmt: skip


def expert_bias(where: str, sizes: str = "E", alias: str = "") -> tuple[TensorRule, ...]:
    name, join = {where: sizes}, "plain" if sizes == "E" else "flat"
    return (
        TensorRule("mlp.router.expert_bias", name, join, "moe", "expert_bias", alias),
        TensorRule("", name, "zeros", "moe", "no_expert_bias"),
    )


EXPERT_BIAS = expert_bias("mlp.gate.e_score_correction_bias")
BIAS_OF_BLOCK = "mlp.e_score_correction_bias"  # its name in transformers 5


def _shared_names(name: str) -> dict[str, str]:
    sizes = {"gate_proj": "S D", "up_proj": "S D", "down_proj": "D S"}
    return {f"mlp.{name}.{part}.weight": size for part, size in sizes.items()}


def shared(name: str) -> tuple[TensorRule, ...]:
    *halves, second = _shared_names(name).items()
    return (
        TensorRule("mlp.shared_experts.linear_fc1.weight", dict(halves), "rows", "moe", "shared"),
        TensorRule("mlp.shared_experts.linear_fc2.weight", dict([second]), layers="moe", when="shared"),
    )


def sinks(name: str, alias: str = "", layers: str = "all") -> TensorRule:
    """Rule for the logits of the attention sinks."""
    return TensorRule("self_attention.core_attention.softmax_offset", {name: "h"}, "plain", layers, "", alias)


# gpt-oss: transposed, gate and up alternating, with biases
GPT_OSS_EXPERTS = (
    EXPERTS[0],
    *(
        TensorRule(ours, {f"mlp.{theirs}": sizes}, join, "moe", weighted="fc2" in ours)
        for ours, theirs, sizes, join in (
            ("mlp.router.weight", "router.weight", "E D", "plain"),
            ("mlp.router.bias", "router.bias", "E", "plain"),
            (f"{_OURS}1.weight", "experts.gate_up_proj", "E D G", "pairs of columns"),
            (f"{_OURS}1.bias", "experts.gate_up_proj_bias", "E G", "pairs"),
            (f"{_OURS}2.weight", "experts.down_proj", "E f D", "columns"),
            (f"{_OURS}2.bias", "experts.down_proj_bias", "E D", "plain"),
        )
    ),
)
ATTENTION_BIAS = (
    replace(QKV_BIAS[0], when=""),
    TensorRule("self_attention.linear_proj.bias", {"self_attn.o_proj.bias": "D"}),
)
# Norms before and after attention and MLP
SANDWICH_NORMS = (
    TensorRule("post_self_attn_layernorm.weight", {"post_attention_layernorm.weight": "D"}),
    TensorRule(_AFTER_MLP, {_AFTER_MLP: "D"}),
    TensorRule("mlp.linear_fc1.layer_norm_weight", {"pre_mlp_layernorm.weight": "D"}, layers="dense"),
    TensorRule("pre_mlp_layernorm.weight", {"pre_mlp_layernorm.weight": "D"}, layers="moe"),
)
_SHARED = shared("shared_experts")
# Cohere2Moe: the mean or the sum of routed and shared experts; without their norm
AVERAGED_EXPERTS = (
    *EXPERTS[1:3], replace(EXPERTS[3], weighted=False, when="average"),
    replace(EXPERTS[3], when="no_average"), _SHARED[0],
    replace(_SHARED[1], join="halved", when="average"), replace(_SHARED[1], when="shared, no_average"),
)  # fmt: skip
DEEPSEEK_EXPERTS = (*EXPERTS, *EXPERT_BIAS, *shared("shared_experts"))  # from DeepSeek-V3 on
_GATE_NAME = {"mlp.shared_expert_gate.weight": "1 D"}
SHARED_GATE = (
    TensorRule("mlp.shared_experts.gate_weight", _GATE_NAME, layers="moe", when="shared_gate"),
    TensorRule("", _GATE_NAME | _shared_names("shared_expert"), "zeros", "moe", "no_shared"),
)
