"""Rules between the fields of a config.json and our settings. A rule goes both ways and knows which fields it
speaks for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from moe_exp.config import Config

Fields = Mapping[str, Any]
Settings = dict[str, Any]

_REQUIRED = object()


class UnsupportedModel(ValueError):
    """A config.json that asks for what this package cannot compute, or the other way round."""


def refuse(name: str, value: object, rule: str, fix: str) -> UnsupportedModel:
    """The complaint about one field of a config.json."""
    return UnsupportedModel(f"config.json: {name}={value}: {rule}. Fix: {fix}.")


@dataclass(frozen=True)
class FieldRule:
    """Some fields of a config.json and the settings that say the same.

    Args:
        names: of the fields.
        read: fields -> settings; raises UnsupportedModel.
        write: settings -> fields, all of `names` or some.
    """

    names: tuple[str, ...]
    read: Callable[[Fields], Settings]
    write: Callable[[Config], dict[str, Any]]


def given(fields: Fields, name: str, default: Any = _REQUIRED) -> Any:
    """A field, or `default` where it is missing or null.

    Raises:
        UnsupportedModel: where it is missing and there is no default.
    """
    value = fields.get(name)
    if value is not None:
        return value
    if default is _REQUIRED:
        raise refuse(
            name,
            "(missing)",
            "the model cannot be built without it",
            "take the config.json that belongs to the weights",
        )
    return default


def same(names: str, setting: str) -> FieldRule:
    """A field with the meaning of one setting.

    Args:
        names: of the field, `num_experts|num_local_experts` for one with two names; the first is written.
        setting: its name. `head_dim.kv_channels`: read into the setting head_dim, written from the property
            kv_channels.
    """
    name, *others = names.split("|")
    target, _, source = setting.partition(".")

    def read(fields: Fields) -> Settings:
        other = next((fields[other] for other in others if fields.get(other) is not None), _REQUIRED)
        return {target: given(fields, name, other)}

    return FieldRule((name, *others), read, lambda c: {name: getattr(c, source or target)})


def must_be(name: str, *allowed: Any, because: str, fix: str = "convert another model") -> FieldRule:
    """A field that changes what is computed and may have these values alone; the first is written, None
    stands for a missing one.
    """

    def read(fields: Fields) -> Settings:
        value = fields.get(name)
        if value is not None and value not in allowed:
            raise refuse(name, value, because, fix)
        return {}

    return FieldRule((name,), read, lambda c: {name: allowed[0]})


def key_value_heads() -> FieldRule:
    """`num_key_value_heads`, which stands for as many as there are heads where it is missing."""
    name = "num_key_value_heads"
    return FieldRule(
        (name,),
        lambda f: {"num_query_groups": given(f, name, given(f, "num_attention_heads"))},
        lambda c: {name: c.num_query_groups},
    )


def head_dim() -> FieldRule:
    """`head_dim`, written in full, read as 0 (HIDDEN_SIZE / NUM_HEADS) where that says the same."""

    def read(fields: Fields) -> Settings:
        by_width = given(fields, "hidden_size") // given(fields, "num_attention_heads")
        size = given(fields, "head_dim", by_width)
        return {"head_dim": 0 if size == by_width else size}

    return FieldRule(("head_dim",), read, lambda c: {"head_dim": c.kv_channels})


def no_sliding_window(*, switched: bool = True) -> FieldRule:
    """Attention over a window, which Megatron's local attention does not have; a window that is switched off
    is nothing.

    Args:
        switched: whether the class has `use_sliding_window`; Mixtral's has not, and uses the window it has.
    """
    names = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")

    def read(fields: Fields) -> Settings:
        used = given(fields, "use_sliding_window") if switched else True
        window = given(fields, "sliding_window", 0) if used else 0
        if window and window < given(fields, "max_position_embeddings"):
            raise refuse(
                "sliding_window", window, "attention over a window is not supported", "convert another model"
            )
        if others := sorted({kind for kind in given(fields, "layer_types", []) if kind != "full_attention"}):
            raise refuse(
                "layer_types", ",".join(others), "only full_attention is supported", "convert another model"
            )
        return {}

    return FieldRule(names, read, lambda c: {})


def normalized_weights() -> FieldRule:
    """`norm_topk_prob` with softmax scores. Weights of softmax over all that are divided by their sum are
    softmax over the chosen.
    """
    name = "norm_topk_prob"
    return FieldRule(
        (name,),
        lambda f: {"router_pre_softmax": not given(f, name)},
        lambda c: {name: not c.router_pre_softmax or c.router_normalize == "true"},
    )


def dense_layers_by_list() -> FieldRule:
    """`mlp_only_layers` and `decoder_sparse_step` of the Qwen family."""

    def read(fields: Fields) -> Settings:
        step, dense = given(fields, "decoder_sparse_step"), set(given(fields, "mlp_only_layers", []))
        num_layers = given(fields, "num_hidden_layers")
        if step < 1 or any(layer < 0 or layer >= num_layers for layer in dense):
            raise refuse(
                "mlp_only_layers", sorted(dense), f"must name layers of {num_layers}", "mend the config.json"
            )
        return layer_settings([layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers)])

    def write(config: Config) -> dict[str, Any]:
        dense = [layer for layer, is_moe in enumerate(config.moe_layers) if not is_moe]
        return {"decoder_sparse_step": 1, "mlp_only_layers": dense}

    return FieldRule(("mlp_only_layers", "decoder_sparse_step"), read, write)


def layer_settings(is_moe: list[bool]) -> Settings:
    """The settings for layers of which some are MoE, in the shortest words."""
    if not any(is_moe):
        raise refuse(
            "mlp_only_layers", "all layers", "leaves no MoE layer", "convert it as a dense architecture"
        )
    first = is_moe.index(True)
    if all(is_moe[first:]):
        return {"moe_layer_freq": "1", "first_k_dense": first}
    return {"moe_layer_freq": ",".join(str(int(bit)) for bit in is_moe), "first_k_dense": 0}


def first_dense_layers() -> FieldRule:
    """`first_k_dense_replace` of the DeepSeek family."""
    name = "first_k_dense_replace"
    return FieldRule(
        (name,),
        lambda f: layer_settings([layer >= given(f, name) for layer in range(given(f, "num_hidden_layers"))]),
        lambda c: {name: c.moe_layers.index(True)},
    )


def shared_experts_by_number() -> FieldRule:
    """`n_shared_experts` experts of the width of a routed one, which are one of that width times their
    number.
    """
    name = "n_shared_experts"
    return FieldRule(
        (name,),
        lambda f: {"shared_expert_size": given(f, name) * given(f, "moe_intermediate_size")},
        lambda c: {name: c.shared_expert_size // c.expert_ffn_size},
    )


def limited_groups() -> FieldRule:
    """`n_group` and `topk_group`. A group counts by its two best experts there, by TOPK / ROUTER_GROUP_TOPK
    of them here.
    """

    def read(fields: Fields) -> Settings:
        groups, used = given(fields, "n_group"), given(fields, "topk_group")
        if groups <= 1:
            return {"num_router_groups": 0, "router_group_topk": 0}
        if not groups_score_alike(given(fields, "num_experts_per_tok"), groups, used):
            rule = (
                "groups of experts are compared by num_experts_per_tok / topk_group of their experts, which"
                " is not the 2 of transformers"
            )
            raise refuse(
                "topk_group", used, rule, "convert a model where num_experts_per_tok is twice topk_group"
            )
        return {"num_router_groups": groups, "router_group_topk": used}

    def write(config: Config) -> dict[str, Any]:
        return {"n_group": config.num_router_groups or 1, "topk_group": config.router_group_topk or 1}

    return FieldRule(("n_group", "topk_group"), read, write)


def groups_score_alike(topk: int, groups: int, used: int) -> bool:
    """Whether group-limited top-k chooses the same experts here and in transformers."""
    return groups <= 1 or groups == used or topk // used == 2


def sigmoid_routing() -> FieldRule:
    """Sigmoid scores with a bias for the choice, as DeepSeek-V3 has them; the bias goes on with its paper's
    step.
    """

    def read(fields: Fields) -> Settings:
        return {
            "router_score": "sigmoid",
            "router_normalize": "true" if given(fields, "norm_topk_prob") else "false",
            "router_scaling_factor": given(fields, "routed_scaling_factor"),
            "router_bias_update_rate": 1e-3,
        }

    def write(config: Config) -> dict[str, Any]:
        return {
            "norm_topk_prob": config.router_weights_sum is not None,
            "routed_scaling_factor": config.router_scaling_factor,
        }

    return FieldRule(("norm_topk_prob", "routed_scaling_factor"), read, write)


# The norms inside have this epsilon in transformers, whatever config.json says; Megatron has one for all.
LATENT_EPSILON = 1e-6


def latent_attention() -> FieldRule:
    """The sizes of multi-head latent attention. `head_dim` and `qk_head_dim` follow from the others."""
    own = {
        "kv_lora_rank": "kv_lora_rank",
        "qk_nope_head_dim": "qk_head_dim",
        "qk_rope_head_dim": "qk_pos_emb_head_dim",
        "v_head_dim": "v_head_dim",
    }

    def read(fields: Fields) -> Settings:
        heads = given(fields, "num_attention_heads")
        if (found := given(fields, "num_key_value_heads", heads)) != heads:
            raise refuse(
                "num_key_value_heads", found, "latent attention has as many as heads", "mend the config.json"
            )
        if (found := given(fields, "rms_norm_eps")) != LATENT_EPSILON:
            rule = f"transformers has {LATENT_EPSILON} inside latent attention, Megatron one for all norms"
            raise refuse("rms_norm_eps", found, rule, "convert another model")
        settings = {setting: given(fields, name) for name, setting in own.items()}
        return settings | {"q_lora_rank": given(fields, "q_lora_rank", 0), "num_query_groups": heads}

    def write(config: Config) -> dict[str, Any]:
        sizes = {name: getattr(config, setting) for name, setting in own.items()}
        return sizes | {"q_lora_rank": config.q_lora_rank or None, "num_key_value_heads": config.num_heads}

    return FieldRule((*own, "q_lora_rank", "num_key_value_heads", "head_dim", "qk_head_dim"), read, write)
