"""Rules that map fields of a config.json to this package's settings and back."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from moe_exp.config import Config

Fields = Mapping[str, Any]
Settings = dict[str, Any]

_REQUIRED = object()


class UnsupportedModel(ValueError):
    """A config.json that this package does not support, or a model that no config.json can express."""


def refuse(name: str, value: object, rule: str, fix: str = "convert another model") -> UnsupportedModel:
    """Builds the error about one field of a config.json."""
    return UnsupportedModel(f"config.json: {name}={value}: {rule}. Fix: {fix}.")


@dataclass(frozen=True)
class FieldRule:
    """Fields of a config.json and the equivalent settings."""

    names: tuple[str, ...]  # field names
    read: Callable[[Fields], Settings]  # fields -> settings; raises UnsupportedModel
    write: Callable[[Config], dict[str, Any]]  # settings -> fields, all or some of `names`


def given(fields: Fields, name: str, default: Any = _REQUIRED) -> Any:
    """Value of a field; if it is missing or null, `default`, or UnsupportedModel if there is no default."""
    value = fields.get(name)
    if value is not None:
        return value
    if default is _REQUIRED:
        fix = "use the config.json that belongs to the weights"
        raise refuse(name, "(missing)", "the model cannot be built without it", fix)
    return default


def same(names: str, setting: str) -> FieldRule:
    """Rule for a field that means the same as a setting. Of several names (`num_experts|num_local_experts`),
    the first is written. A setting such as `head_dim.kv_channels` means: read into head_dim, write from
    kv_channels.
    """
    name, *others = names.split("|")
    target, _, source = setting.partition(".")

    def read(fields: Fields) -> Settings:
        other = next((other for other in others if fields.get(other) is not None), name)
        value = given(fields, name, _REQUIRED if other == name else fields[other])
        if fields.get(other) not in (None, value):
            raise refuse(name, value, f"contradicts {other}={fields[other]}", "correct the config.json")
        return {target: value}

    return FieldRule((name, *others), read, lambda c: {name: getattr(c, source or target)})


def must_be(name: str, *allowed: Any, because: str) -> FieldRule:
    """Rule for a field that must have one of the `allowed` values; `write` uses the first value."""

    def read(fields: Fields) -> Settings:
        value = fields.get(name)
        if value is not None and value not in allowed:
            raise refuse(name, value, because)
        return {}

    return FieldRule((name,), read, lambda c: {name: allowed[0]})


# Layers beyond num_hidden_layers. An import ignores the number if the weights have none: transformers writes
# only the number.
PREDICTION = FieldRule(
    ("num_nextn_predict_layers", "num_mtp_layers"),
    lambda f: {"mtp_num_layers": int(given(f, "num_nextn_predict_layers", given(f, "num_mtp_layers", 0)))},
    lambda c: {"num_nextn_predict_layers": c.mtp_num_layers} if c.mtp_num_layers else {},
)
KEY_VALUE_HEADS = FieldRule(
    ("num_key_value_heads",),
    lambda f: {"num_query_groups": given(f, "num_key_value_heads", given(f, "num_attention_heads"))},
    lambda c: {"num_key_value_heads": c.num_query_groups},
)


def _read_head_dim(fields: Fields) -> Settings:
    by_width = given(fields, "hidden_size") // given(fields, "num_attention_heads")
    size = given(fields, "head_dim", by_width)
    return {"head_dim": 0 if size == by_width else size}


HEAD_DIM = FieldRule(("head_dim",), _read_head_dim, lambda c: {"head_dim": c.kv_channels})


def no_sliding_window(*, switched: bool = True, by_layer: bool = False) -> FieldRule:
    """Rule against sliding windows. use_sliding_window=false disables them if `switched` (not Mixtral). If
    `by_layer` (dots.llm1), only the layers from max_window_layers on have a window.
    """
    names = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")

    def read(fields: Fields) -> Settings:
        used = given(fields, "use_sliding_window") if switched else True
        if by_layer:
            is_listed = fields.get("layer_types") is not None  # checked below
            used = not is_listed and given(fields, "num_hidden_layers") > given(fields, "max_window_layers")
        window = given(fields, "sliding_window", 0) if used else 0
        if window and window < given(fields, "max_position_embeddings"):
            raise refuse("sliding_window", window, "sliding-window attention is not supported")
        if others := sorted({kind for kind in given(fields, "layer_types", []) if kind != "full_attention"}):
            raise refuse("layer_types", ",".join(others), "only full_attention is supported")
        return {}

    return FieldRule(names, read, lambda c: {} if switched else {"sliding_window": None})


def _read_attention_multiplier(fields: Fields) -> Settings:
    if (factor := given(fields, "attention_multiplier")) == 0:
        raise refuse("attention_multiplier", factor, "must be above 0", "correct the config.json")
    return {"attention_multiplier": factor}


# Granite
MULTIPLIERS = (
    *(same(name, name) for name in ("embedding_multiplier", "residual_multiplier", "logits_scaling")),
    FieldRule(
        ("attention_multiplier",),
        _read_attention_multiplier,
        lambda c: {"attention_multiplier": c.attention_multiplier or c.kv_channels**-0.5},
    ),
)


# Softmax weights divided by their sum are equal to a softmax over the top-k scores.
NORMALIZED_WEIGHTS = FieldRule(
    ("norm_topk_prob",),
    lambda f: {"router_pre_softmax": not given(f, "norm_topk_prob")},
    lambda c: {"norm_topk_prob": not c.router_pre_softmax or c.router_normalize == "true"},
)


def _read_dense_layers(fields: Fields) -> Settings:
    step, dense = given(fields, "decoder_sparse_step"), set(given(fields, "mlp_only_layers", []))
    num_layers = given(fields, "num_hidden_layers")
    if step < 1 or any(layer < 0 or layer >= num_layers for layer in dense):
        rule = f"must name layers from 0 to {num_layers - 1}"
        raise refuse("mlp_only_layers", sorted(dense), rule, "correct the config.json")
    return _layer_settings([layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers)])


# Qwen family
DENSE_LAYERS_BY_LIST = FieldRule(
    ("mlp_only_layers", "decoder_sparse_step"),
    _read_dense_layers,
    lambda c: {
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i, moe in enumerate(c.moe_layers) if not moe],
    },
)


def _layer_settings(is_moe: list[bool]) -> Settings:
    """The fewest settings that describe which layers are MoE."""
    if not any(is_moe):
        fix = "specify a dense architecture in config.json"
        raise refuse("mlp_only_layers", "all layers", "must leave at least one MoE layer", fix)
    first = is_moe.index(True)
    if all(is_moe[first:]):
        return {"moe_layer_freq": "1", "first_k_dense": first}
    return {"moe_layer_freq": ",".join(str(int(bit)) for bit in is_moe), "first_k_dense": 0}


# DeepSeek family and its descendants, up to SIGMOID_ROUTING
def first_dense_layers(name: str) -> FieldRule:
    """Rule for the number of dense layers before the MoE layers."""
    return FieldRule(
        (name,),
        lambda f: _layer_settings([i >= given(f, name) for i in range(given(f, "num_hidden_layers"))]),
        lambda c: {name: c.moe_layers.index(True)},
    )


def _read_last_layer(fields: Fields) -> Settings:
    name, last = "moe_layer_end_index", given(fields, "num_hidden_layers") - 1
    if (found := given(fields, name)) not in (-1, last):
        raise refuse(name, found, "all layers after the first dense ones must be MoE")
    return {}


LAST_LAYER_IS_MOE = FieldRule(
    ("moe_layer_end_index",), _read_last_layer, lambda c: {"moe_layer_end_index": c.num_layers - 1}
)


def _read_layer_types(fields: Fields) -> Settings:
    num_layers = given(fields, "num_hidden_layers")
    types = given(fields, "mlp_layer_types", ["dense"] + ["sparse"] * (num_layers - 1))
    if len(types) != num_layers or set(types) - {"dense", "sparse"}:
        rule = f"must be dense or sparse for each of the {num_layers} layers"
        raise refuse("mlp_layer_types", types, rule, "correct the config.json")
    settings = _layer_settings([kind == "sparse" for kind in types])
    # transformers ignores this field, which other software reads
    if (first := given(fields, "first_k_dense_replace", None)) not in (None, types.index("sparse")):
        raise refuse("first_k_dense_replace", first, "contradicts mlp_layer_types", "correct the config.json")
    return settings


def _write_layer_types(config: Config) -> dict[str, Any]:
    first = config.moe_layers.index(True)
    number = {"first_k_dense_replace": first} if all(config.moe_layers[first:]) else {}
    return {"mlp_layer_types": ["sparse" if moe else "dense" for moe in config.moe_layers]} | number


DENSE_LAYERS_BY_TYPE = FieldRule(
    ("mlp_layer_types", "first_k_dense_replace"), _read_layer_types, _write_layer_types
)


def shared_experts(name: str = "n_shared_experts") -> FieldRule:
    """Rule for the number of shared experts, which are here one expert of their total width."""
    return FieldRule(
        (name,),
        lambda f: {"shared_expert_size": given(f, name) * given(f, "moe_intermediate_size")},
        lambda c: {name: c.shared_expert_size // c.expert_ffn_size},
    )


def _of_all_layers(fields: Fields, name: str, default: Any = _REQUIRED) -> Any:
    """Value of a field that may be a list with a value per layer, which must be equal."""
    value = given(fields, name, default)
    values = value if isinstance(value, list) else [value] * given(fields, "num_hidden_layers")
    if not values or values != values[:1] * given(fields, "num_hidden_layers"):
        raise refuse(name, value, "must be the same in all layers")
    return values[0]


def _read_hunyuan(fields: Fields) -> Settings:
    width = given(fields, "intermediate_size")
    for name, needed in (("moe_intermediate_size", width), ("num_shared_expert", 1)):
        if (found := _of_all_layers(fields, name, needed)) != needed:
            rule = f"must be {needed}, as transformers' class has one shared expert, as wide as the others"
            raise refuse(name, found, rule)
    topk = _of_all_layers(fields, "moe_topk")
    return {"topk": topk, "ffn_hidden_size": width, "shared_expert_size": width}


HUNYUAN_EXPERTS = FieldRule(
    ("intermediate_size", "moe_intermediate_size", "num_shared_expert", "moe_topk"),
    _read_hunyuan,
    lambda c: {
        "intermediate_size": c.expert_ffn_size, "moe_intermediate_size": c.expert_ffn_size,
        "num_shared_expert": 1, "moe_topk": c.topk,
    },
)  # fmt: skip


def limited_groups(best: int, *, methods: tuple[str, str] | None = None) -> FieldRule:
    """Rule for group-limited top-k, if transformers ranks a group by its `best` experts. `methods`: values
    of `topk_method` without and with groups.
    """

    def read(fields: Fields) -> Settings:
        none = {"num_router_groups": 0, "router_group_topk": 0, "router_group_best": 0}
        if methods and (method := given(fields, "topk_method")) != methods[1]:
            if method != methods[0]:
                raise refuse("topk_method", method, f"must be {' or '.join(methods)}")
            return none
        groups, used = given(fields, "n_group"), given(fields, "topk_group")
        if groups <= 1:
            return none
        is_usual = group_ranking(given(fields, "num_experts_per_tok"), groups, used) in (0, best)
        settings = {"num_router_groups": groups, "router_group_topk": used}
        return settings | {"router_group_best": 0 if is_usual else best}

    def write(config: Config) -> dict[str, Any]:
        groups = config.num_router_groups
        fields = {"n_group": groups or 1, "topk_group": config.router_group_topk or 1}
        return fields | ({"topk_method": methods[groups > 1]} if methods else {})

    return FieldRule(("n_group", "topk_group", *(["topk_method"] if methods else [])), read, write)


def group_ranking(topk: int, groups: int, used: int, best: int = 0) -> int:
    """Number of best experts by which this package ranks a group; 0 if tokens may use all groups."""
    return 0 if groups <= 1 or groups == used else best or max(1, topk // used)


# DeepSeek-V3's sigmoid scores with a selection bias; the update rate is from its paper
SIGMOID_ROUTING = FieldRule(
    ("norm_topk_prob", "routed_scaling_factor"),
    lambda f: {
        "router_score": "sigmoid", "router_normalize": "true" if given(f, "norm_topk_prob") else "false",
        "router_scaling_factor": given(f, "routed_scaling_factor"), "router_bias_update_rate": 1e-3,
    },
    lambda c: {
        "norm_topk_prob": c.router_weights_sum is not None, "routed_scaling_factor": c.router_scaling_factor,
    },
)  # fmt: skip


def balancing(weight: str = "router_aux_loss_coef") -> FieldRule:
    """Rule for the coefficients of balancing loss and z-loss. DeepSeek's class computes no loss: a missing
    `aux_loss_alpha` means 0, and `seq_aux` selects a loss per sequence (true, default) or per batch (false).
    """
    is_optional = weight == "aux_loss_alpha"
    names = [weight, "router_z_loss_coef", *(("router_aux_loss_coef", "seq_aux") if is_optional else ())]

    def read(fields: Fields) -> Settings:
        coefficient = float(given(fields, weight, given(fields, "router_aux_loss_coef", 0.0)))
        kind = "seq_aux_loss" if is_optional and given(fields, "seq_aux", True) else "aux_loss"
        return {
            "aux_loss_type": kind if coefficient else "none",
            "aux_loss_coeff": str(coefficient),
            "z_loss_coeff": given(fields, "router_z_loss_coef", 0.0),
        }

    def write(config: Config) -> dict[str, Any]:
        losses = config.balancing_losses
        # All three use the formula of transformers and DeepSeek, E/(T*K) sum_e count_e mean_score_e; only T,
        # the set of tokens, differs.
        coefficient = sum(losses.get(kind, 0.0) for kind in ("aux_loss", "global_aux_loss", "seq_aux_loss"))
        fields = {} if is_optional and not coefficient else {weight: coefficient}
        fields |= {"seq_aux": "seq_aux_loss" in losses} if is_optional and fields else {}
        return fields | ({"router_z_loss_coef": config.z_loss_coeff} if config.z_loss_coeff else {})

    return FieldRule(tuple(names), read, write)


# transformers uses this epsilon in the inner norms regardless of config.json
LATENT_EPSILON = 1e-6


_LATENT_SIZES = {
    "kv_lora_rank": "kv_lora_rank", "qk_nope_head_dim": "qk_head_dim",
    "qk_rope_head_dim": "qk_pos_emb_head_dim", "v_head_dim": "v_head_dim",
}  # fmt: skip


def _read_latent_attention(fields: Fields) -> Settings:
    heads = given(fields, "num_attention_heads")
    if (found := given(fields, "num_key_value_heads", heads)) != heads:
        rule = f"must be equal to num_attention_heads={heads} in latent attention"
        raise refuse("num_key_value_heads", found, rule, "correct the config.json")
    settings: Settings = {setting: given(fields, name) for name, setting in _LATENT_SIZES.items()}
    if (found := given(fields, "head_dim", settings["qk_pos_emb_head_dim"])) != settings[
        "qk_pos_emb_head_dim"
    ]:
        raise refuse("head_dim", found, "must be equal to qk_rope_head_dim", "correct the config.json")
    epsilon = 0.0 if given(fields, "rms_norm_eps") == LATENT_EPSILON else LATENT_EPSILON
    settings |= {"q_lora_rank": given(fields, "q_lora_rank", 0), "num_query_groups": heads}
    return settings | {"qk_norm_epsilon": epsilon}


LATENT_ATTENTION = FieldRule(  # `qk_head_dim` follows from the others
    (*_LATENT_SIZES, "q_lora_rank", "num_key_value_heads", "head_dim", "qk_head_dim"),
    _read_latent_attention,
    lambda c: (
        {name: getattr(c, setting) for name, setting in _LATENT_SIZES.items()}
        | {"q_lora_rank": c.q_lora_rank or None, "num_key_value_heads": c.num_heads}
    ),
)


# Rotary embedding: transformers 4 has `rope_theta` and the dictionary `rope_scaling`, transformers 5 has the
# dictionary `rope_parameters` for both. Serving software may read either form, so both are read and written.
_LLAMA3_FACTORS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}  # fixed in Megatron, like the length 8192
_SCALED = {"factor", "original_max_position_embeddings"}
_YARN = {"beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate"}
_KNOWN = {"default": set[str](), "llama3": _SCALED | {*_LLAMA3_FACTORS}, "yarn": _SCALED | _YARN}


def rope(theta: float, *, fraction: float | None = None, stretches: bool = False) -> FieldRule:
    """Rule for the rotary embedding. Defaults: `theta` (base), `fraction` (rotated part; None: must be 1).
    `stretches`: `alpha` of kind `dynamic` multiplies the base (Hunyuan).
    """
    whole = fraction is None

    def read(fields: Fields) -> Settings:
        merged: dict[str, Any] = {}
        for name in ("rope_scaling", "rope_parameters"):
            values = given(fields, name, {})
            if not isinstance(values, dict) or any(isinstance(value, dict) for value in values.values()):
                raise refuse(name, values, "all layers must have the same rotary embedding")
            merged = merged or dict(values)  # transformers uses one of the two, not both
        for name in ("rope_theta", "partial_rotary_factor"):
            if fields.get(name) is not None:
                merged.setdefault(name, fields[name])
        partial = "partial_rotary_factor"
        if not whole and (merged if partial in merged else fields).get(partial, fraction) is None:
            raise refuse(partial, "null", "must be a number", f"omit it to use {fraction}")
        if merged.get("truncate", True) is None:  # transformers: false
            merged["truncate"] = False
        # older config.json files use `type`
        kind = merged.pop("rope_type", None) or merged.get("type", "default")
        merged.pop("type", None)
        if stretches and kind == "dynamic" and merged.get("alpha"):
            size, kind = given(fields, "head_dim"), "default"
            merged = {"rope_theta": merged.get("rope_theta", theta) * merged["alpha"] ** (size / (size - 2))}
        merged = {name: value for name, value in merged.items() if value is not None} | {"rope_type": kind}
        settings = {"rotary_base": float(merged.pop("rope_theta", theta))}
        found = merged.pop("partial_rotary_factor", fraction or 1.0)
        if found != 1 and whole:
            rule = "must be 1.0, as transformers rotates whole heads in this architecture"
            raise refuse("partial_rotary_factor", found, rule, "set this field to 1.0")
        return settings | {"rotary_fraction": found} | _read_scaling(merged, fields)

    def write(config: Config) -> dict[str, Any]:
        scaling: dict[str, Any] = {}
        if config.rope_scaling not in ("none", "llama3", "yarn"):
            rule = "config.json cannot express this scaling. Fix: set none, llama3 or yarn"
            raise UnsupportedModel(f"ROPE_SCALING={config.rope_scaling}: {rule}.")
        if config.rope_scaling != "none":
            scaling["factor"] = config.rope_scaling_factor
            scaling["original_max_position_embeddings"] = config.rope_seq_len
        if config.rope_scaling == "llama3":
            scaling |= _LLAMA3_FACTORS
        if config.rope_scaling == "yarn":
            scaling |= {"beta_fast": config.yarn_beta_fast, "beta_slow": config.yarn_beta_slow}
            if config.yarn_mscale_all_dim:
                scaling |= {"mscale": config.yarn_mscale, "mscale_all_dim": config.yarn_mscale_all_dim}
        kind = {"rope_type": config.rope_scaling if scaling else "default"}
        turned = {} if whole else {"partial_rotary_factor": config.rotary_fraction}
        return {
            "rope_theta": config.rotary_base,
            "rope_scaling": (kind | {"type": config.rope_scaling} | scaling) if scaling else None,
            "rope_parameters": kind | {"rope_theta": config.rotary_base} | scaling | turned,
            **turned,
        }

    names = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
    return FieldRule(names, read, write)


def _read_rotated_channels(fields: Fields) -> Settings:
    ropes = [given(fields, name, {}) for name in ("rope_scaling", "rope_parameters")]
    if (rotated := given(fields, "rotary_dim", 0)) and not any(
        one.get("partial_rotary_factor") is not None for one in (fields, *ropes)
    ):
        return {"rotary_fraction": rotated / given(fields, "head_dim")}
    return {}


# MiniMax: another field for the rotated part of a head, without effect beside partial_rotary_factor
ROTATED_CHANNELS = FieldRule(
    ("rotary_dim",),
    _read_rotated_channels,
    lambda c: {"rotary_dim": int(c.kv_channels * c.rotary_fraction)},
)


def _read_scaling(merged: dict[str, Any], fields: Fields) -> Settings:
    kind = merged.pop("rope_type")
    if kind not in _KNOWN:
        raise refuse("rope_type", kind, f"must be one of {', '.join(_KNOWN)}")
    if unknown := sorted(set(merged) - _KNOWN[kind] - {"original_max_position_embeddings"}):
        raise refuse(unknown[0], merged[unknown[0]], f"is unknown for rope_type={kind}")
    if kind == "default":
        return {"rope_scaling": "none"}
    original = merged.get("original_max_position_embeddings", given(fields, "max_position_embeddings"))
    if kind == "llama3":
        for name, value in (*_LLAMA3_FACTORS.items(), ("original_max_position_embeddings", 8192)):
            if (found := merged.get(name, original)) != value:
                raise refuse(name, found, f"must be {value}, as in Megatron's Llama 3 scaling")
        return {"rope_scaling": "llama3", "rope_scaling_factor": given(merged, "factor")}
    factor = {"rope_scaling_factor": given(merged, "factor"), "rope_original_seq_len": original}
    betas = {name: merged.get(f"beta_{name}", usual) for name, usual in (("fast", 32.0), ("slow", 1.0))}
    settings = {f"yarn_beta_{name}": value for name, value in betas.items()}
    for name, usual in (("attention_factor", None), ("truncate", True)):
        if merged.get(name, usual) != usual:
            raise refuse(name, merged[name], "Megatron's YaRN does not have this setting")
    mscale, all_dim = merged.get("mscale", 0), merged.get("mscale_all_dim", 0)
    if all_dim and not mscale:
        raise refuse("mscale", mscale, f"is required with mscale_all_dim={all_dim} in Megatron's YaRN")
    # transformers ignores the two unless both are set.
    scales = {"yarn_mscale": mscale if all_dim else 1.0, "yarn_mscale_all_dim": all_dim or 0.0}
    return {"rope_scaling": "yarn"} | factor | settings | scales
