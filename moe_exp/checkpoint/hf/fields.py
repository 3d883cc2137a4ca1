"""Rules that map fields of a config.json to this package's settings and back."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from moe_exp.config import Config
from moe_exp.config.setting_types import pattern_of

Fields = Mapping[str, Any]
Settings = dict[str, Any]
Traits = Mapping[str, tuple[Any, ...]]  # names of exporting.TRAITS to values

# Values of traits
EITHER = (False, True)
WHOLE = ("as an expert", "of whole experts")  # widths of a shared expert
ANY_LAYERS = ("all", "after the first", "mixed")
WINDOWS = ("none", "all", "some", "some, others dense")  # with a rotary embedding in all layers
ONLY_ROTATED = ("all", "rotated")
SIGMOID = ("sigmoid", "sigmoid, normalized")

_REQUIRED = object()


class UnsupportedModel(ValueError):
    """A config.json that this package does not support, or a model that no config.json can express."""


def refuse(name: str, value: object, rule: str, fix: str = "convert another model") -> UnsupportedModel:
    """Builds the error about one field of a config.json."""
    return UnsupportedModel(f"config.json: {name}={value}: {rule}. Fix: {fix}.")


@dataclass(frozen=True)
class FieldRule:
    """Converts fields of a config.json to settings and back."""

    names: tuple[str, ...]  # field names
    read: Callable[[Fields], Settings]  # fields -> settings; raises UnsupportedModel
    write: Callable[[Config], dict[str, Any]]  # settings -> fields, all or some of `names`
    traits: Traits = field(default_factory=dict)  # values that these fields can express


def field_rule(
    *names: str, write: Callable[[Config], dict[str, Any]], traits: Traits | None = None
) -> Callable[[Callable[[Fields], Settings]], FieldRule]:
    """Decorator: turns a function that reads the fields `names` into the FieldRule of these fields."""
    return lambda read: FieldRule(names, read, write, traits or {})


def given(fields: Fields, name: str, default: Any = _REQUIRED) -> Any:
    """Value of a field; `default` if it is missing or null. Raises UnsupportedModel if neither is given."""
    value = fields.get(name)
    if value is not None:
        return value
    if default is _REQUIRED:
        fix = "use the config.json that belongs to the weights"
        raise refuse(name, "(missing)", "the model cannot be built without it", fix)
    return default


def same(names: str, setting: str) -> FieldRule:
    """Rule for a field that means the same as a setting. The field may have several names
    (`num_experts|num_local_experts`); exports write the first name. `setting` may be a pair such
    as `head_dim.kv_channels`: the field is read into head_dim and written from kv_channels.
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
    """Rule for a field that must have one of the `allowed` values; exports write the first one."""

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
    {"mtp": ("none", "MoE")},
)
KEY_VALUE_HEADS = FieldRule(
    ("num_key_value_heads",),
    lambda f: {"num_query_groups": given(f, "num_key_value_heads", given(f, "num_attention_heads"))},
    lambda c: {"num_key_value_heads": c.num_query_groups},
)


def _read_head_dim(fields: Fields, *, is_fixed: bool = False) -> Settings:
    by_width = given(fields, "hidden_size") // given(fields, "num_attention_heads")
    size = given(fields, "head_dim", by_width)
    if is_fixed and size != by_width:
        raise refuse("head_dim", size, f"must be hidden_size / num_attention_heads={by_width}, as in vLLM")
    return {"head_dim": 0 if size == by_width else size}


HEAD_DIM = FieldRule(
    ("head_dim",), _read_head_dim, lambda c: {"head_dim": c.kv_channels}, {"heads_fill_width": EITHER}
)
HEAD_DIM_BY_WIDTH = FieldRule(("head_dim",), lambda f: _read_head_dim(f, is_fixed=True), lambda c: {})


FULL, WINDOWED = "full_attention", "sliding_attention"  # kinds of layers


def windows(
    has_window: Callable[[int, Fields], bool] | None = None, *names: str, switched: bool = False,
    rotated: bool = False, also_rotated: Callable[[int, Fields], bool] = lambda i, fields: False,
    unused: int | None = None,
) -> FieldRule:  # fmt: skip
    """Rule for sliding windows.

    Args:
        has_window: returns whether the layer with a given index has a window. It is called only if
            `layer_types` is missing and `sliding_window` is not null. None: transformers' class ignores
            `layer_types`, and either all layers have a window or no layer has one.
        names: further fields that `has_window` reads.
        switched: whether `use_sliding_window=false` disables windows.
        rotated: if true and `sliding_window` is not null, only layers with a window and layers for which
            `also_rotated` returns true have rotary embeddings.
        unused: value of `sliding_window` in models without windows, for a class that does not allow null.
    """

    def read(fields: Fields) -> Settings:
        is_off = switched and not given(fields, "use_sliding_window")
        window = None if is_off else fields.get("sliding_window")
        layers, listed = range(given(fields, "num_hidden_layers")), fields.get("layer_types")
        if listed is None or has_window is None:
            windowed = [window is not None and (not has_window or has_window(i, fields)) for i in layers]
            kinds = [WINDOWED if is_windowed else FULL for is_windowed in windowed]
            if listed not in (None, kinds):
                rule = f"must be {kinds[0]} in all layers, as transformers' class ignores this field"
                raise refuse("layer_types", listed, rule, "correct the config.json")
            listed = kinds
        if len(listed) != len(layers) or set(listed) - {FULL, WINDOWED}:
            rule = f"must be {FULL} or {WINDOWED} for each of the {len(layers)} layers"
            raise refuse("layer_types", listed, rule)
        has_windows, pattern = WINDOWED in listed, pattern_of([kind == WINDOWED for kind in listed])
        if has_windows and (not window or window < 0):
            raise refuse("sliding_window", window, "must be above 0 in layers with a window")
        settings: Settings = {"sliding_window": 0, "window_pattern": "1"}
        if has_windows:
            settings = {"sliding_window": window, "window_pattern": pattern}
        if rotated and window is not None:
            embedded = [kind == WINDOWED or also_rotated(i, fields) for i, kind in enumerate(listed)]
            is_same = has_windows and pattern == pattern_of(embedded)
            settings["rotary_layers"] = "windowed" if is_same else pattern_of(embedded)
        return settings

    def write(config: Config) -> dict[str, Any]:
        kinds = [WINDOWED if windowed else FULL for windowed in config.window_layers]
        window = config.sliding_window if WINDOWED in kinds else unused
        if rotated and not any(config.layers_without_rotary) and WINDOWED not in kinds:
            window = None
        if switched and window is None:
            return {}
        fields = {"sliding_window": window} | ({"use_sliding_window": True} if switched else {})
        return fields | ({"layer_types": kinds} if has_window else {})

    known = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types", *names)
    expressed = ONLY_ROTATED if rotated else WINDOWS if has_window else WINDOWS[:2]
    return FieldRule(known, read, write, {"windows": expressed})


@field_rule(
    "attention_multiplier",
    write=lambda c: {"attention_multiplier": c.attention_multiplier or c.kv_channels**-0.5},
    traits={"multipliers": ("none", "of logits", "of embeddings", "any")},
)
def attention_multiplier(fields: Fields) -> Settings:
    if (factor := given(fields, "attention_multiplier")) == 0:
        raise refuse("attention_multiplier", factor, "must be above 0", "correct the config.json")
    return {"attention_multiplier": factor}


# Granite
MULTIPLIERS = (
    *(same(name, name) for name in ("embedding_multiplier", "residual_multiplier", "logits_scaling")),
    attention_multiplier,
)


# Softmax weights divided by their sum are equal to a softmax over the top-k scores.
NORMALIZED_WEIGHTS = FieldRule(
    ("norm_topk_prob",),
    lambda f: {"router_pre_softmax": not given(f, "norm_topk_prob")},
    lambda c: {"norm_topk_prob": not c.router_pre_softmax or c.router_normalize == "true"},
    {"routing": ("softmax", "softmax, normalized", "softmax over all")},
)


# Qwen family
@field_rule(
    "mlp_only_layers",
    "decoder_sparse_step",
    write=lambda c: {
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i, moe in enumerate(c.moe_layers) if not moe],
    },
    traits={"moe_layers": ANY_LAYERS},
)
def dense_layers_by_list(fields: Fields) -> Settings:
    step, dense = given(fields, "decoder_sparse_step"), set(given(fields, "mlp_only_layers", []))
    num_layers = given(fields, "num_hidden_layers")
    if step < 1 or any(layer < 0 or layer >= num_layers for layer in dense):
        rule = f"must name layers from 0 to {num_layers - 1}"
        raise refuse("mlp_only_layers", sorted(dense), rule, "correct the config.json")
    return _layer_settings([layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers)])


def _layer_settings(is_moe: list[bool]) -> Settings:
    """Minimal settings that describe which layers are MoE layers."""
    if not any(is_moe):
        fix = "specify a dense architecture in config.json"
        raise refuse("mlp_only_layers", "all layers", "must leave at least one MoE layer", fix)
    first = is_moe.index(True)
    if all(is_moe[first:]):
        return {"moe_layer_freq": "1", "first_k_dense": first}
    return {"moe_layer_freq": pattern_of(is_moe), "first_k_dense": 0}


# DeepSeek family and its descendants, up to SIGMOID_ROUTING
def first_dense_layers(name: str) -> FieldRule:
    """Rule for the number of dense layers before the MoE layers."""
    return FieldRule(
        (name,),
        lambda f: _layer_settings([i >= given(f, name) for i in range(given(f, "num_hidden_layers"))]),
        lambda c: {name: c.moe_layers.index(True)},
        {"moe_layers": ANY_LAYERS[:2]},
    )


@field_rule("moe_layer_end_index", write=lambda c: {"moe_layer_end_index": c.num_layers - 1})
def last_layer_is_moe(fields: Fields) -> Settings:
    name, last = "moe_layer_end_index", given(fields, "num_hidden_layers") - 1
    if (found := given(fields, name)) not in (-1, last):
        raise refuse(name, found, "all layers after the leading dense layers must be MoE")
    return {}


def dense_layers_by_type(num_dense: Callable[[Fields], int] | None = None) -> FieldRule:
    """Rule for a field that lists the kind of each layer. If the field is missing, the first
    `num_dense(fields)` layers are dense. Without `num_dense`, only the first layer is dense, as in
    transformers (which ignores first_k_dense_replace, unlike other software).
    """

    def read(fields: Fields) -> Settings:
        num_layers, first = given(fields, "num_hidden_layers"), num_dense(fields) if num_dense else 1
        types = given(fields, "mlp_layer_types", ["dense"] * first + ["sparse"] * (num_layers - first))
        if len(types) != num_layers or set(types) - {"dense", "sparse"}:
            rule = f"must be dense or sparse for each of the {num_layers} layers"
            raise refuse("mlp_layer_types", types, rule, "correct the config.json")
        settings = _layer_settings([kind == "sparse" for kind in types])
        other = None if num_dense else given(fields, "first_k_dense_replace", None)
        if other not in (None, types.index("sparse")):
            rule = "contradicts mlp_layer_types"
            raise refuse("first_k_dense_replace", other, rule, "correct the config.json")
        return settings

    def write(config: Config) -> dict[str, Any]:
        first = config.moe_layers.index(True)
        number = {"first_k_dense_replace": first} if all(config.moe_layers[first:]) else {}
        return {"mlp_layer_types": ["sparse" if moe else "dense" for moe in config.moe_layers]} | number

    names = ("mlp_layer_types", "first_k_dense_replace")
    return FieldRule(names, read, write, {"moe_layers": ANY_LAYERS})


def shared_experts(name: str = "n_shared_experts") -> FieldRule:
    """Rule for the number of shared experts, which the settings treat as one expert of their total width."""
    return FieldRule(
        (name,),
        lambda f: {"shared_expert_size": given(f, name) * given(f, "moe_intermediate_size")},
        lambda c: {name: c.shared_expert_size // c.expert_ffn_size},
        {"shared": WHOLE},
    )


def _of_all_layers(fields: Fields, name: str, default: Any = _REQUIRED) -> Any:
    """Value of a field that may be a list with one value per layer; all values must be equal."""
    value = given(fields, name, default)
    values = value if isinstance(value, list) else [value] * given(fields, "num_hidden_layers")
    if not values or values != values[:1] * given(fields, "num_hidden_layers"):
        raise refuse(name, value, "must be the same in all layers")
    return values[0]


@field_rule(
    "intermediate_size", "moe_intermediate_size", "num_shared_expert", "moe_topk",
    write=lambda c: {
        "intermediate_size": c.expert_ffn_size, "moe_intermediate_size": c.expert_ffn_size,
        "num_shared_expert": 1, "moe_topk": c.topk,
    },
    traits={"shared": WHOLE[:1]},
)  # fmt: skip
def hunyuan_experts(fields: Fields) -> Settings:
    width = given(fields, "intermediate_size")
    for name, needed in (("moe_intermediate_size", width), ("num_shared_expert", 1)):
        if (found := _of_all_layers(fields, name, needed)) != needed:
            rule = f"must be {needed}: transformers' class has one shared expert, as wide as a routed expert"
            raise refuse(name, found, rule)
    return {"topk": _of_all_layers(fields, "moe_topk"), "ffn_hidden_size": width, "shared_expert_size": width}


def limited_groups(best: int, *, methods: tuple[str, str] | None = None) -> FieldRule:
    """Rule for group-limited top-k. The model class ranks each group by the scores of its top `best` experts.
    `methods`: values of `topk_method` for models without groups and for models with groups, in this order.
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

    names = ("n_group", "topk_group", *(["topk_method"] if methods else []))
    return FieldRule(names, read, write, {"groups": (0, best)})


def group_ranking(topk: int, groups: int, used: int, best: int = 0) -> int:
    """Number of top experts whose scores determine a group's rank; 0 if tokens may use all groups."""
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
    {"routing": SIGMOID, "expert_bias": EITHER},
)  # fmt: skip


def balancing(weight: str = "router_aux_loss_coef") -> FieldRule:
    """Rule for the coefficients of balancing loss and z-loss. DeepSeek's model class computes no
    loss, so a missing `aux_loss_alpha` means 0. If `seq_aux` is true (the default), the loss is per
    sequence, else per batch.
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


@field_rule(  # `qk_head_dim` follows from the others
    *_LATENT_SIZES, "q_lora_rank", "num_key_value_heads", "head_dim", "qk_head_dim",
    write=lambda c: (
        {name: getattr(c, setting) for name, setting in _LATENT_SIZES.items()}
        | {"q_lora_rank": c.q_lora_rank or None, "num_key_value_heads": c.num_heads}
    ),
    traits={"attention": ("latent", "latent, queries whole")},
)  # fmt: skip
def latent_attention(fields: Fields) -> Settings:
    heads = given(fields, "num_attention_heads")
    if (found := given(fields, "num_key_value_heads", heads)) != heads:
        rule = f"must be equal to num_attention_heads={heads} in latent attention"
        raise refuse("num_key_value_heads", found, rule, "correct the config.json")
    settings: Settings = {setting: given(fields, name) for name, setting in _LATENT_SIZES.items()}
    rotated = settings["qk_pos_emb_head_dim"]
    if (found := given(fields, "head_dim", rotated)) != rotated:
        raise refuse("head_dim", found, "must be equal to qk_rope_head_dim", "correct the config.json")
    epsilon = 0.0 if given(fields, "rms_norm_eps") == LATENT_EPSILON else LATENT_EPSILON
    settings |= {"q_lora_rank": given(fields, "q_lora_rank", 0), "num_query_groups": heads}
    return settings | {"qk_norm_epsilon": epsilon}
