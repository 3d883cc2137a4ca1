"""Chooses the transformers architecture for a Config, and says why the others do not fit."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from moe_exp.checkpoint.hf.families import ARCHITECTURES, Architecture
from moe_exp.checkpoint.hf.fields import (
    LATENT_EPSILON,
    UnsupportedModel,
    groups_score_alike,
    yarn_is_expressible,
)
from moe_exp.config import Config


@dataclass(frozen=True)
class Trait:
    """A property of a model that an architecture may be able to express."""

    of: Callable[[Config], Any]  # its value
    usual: Any  # what an architecture allows unless its `traits` list other values
    settings: tuple[str, ...]  # that decide it, for error messages
    note: str = ""


def _attention(c: Config) -> str:
    if c.multi_latent_attention:
        return "latent" if c.qk_norm else "latent, without norms"
    return "grouped"


def _moe_layers(c: Config) -> str:
    layers = c.moe_layers
    if not any(layers):
        return "none"
    if all(layers):
        return "all"
    return "after the first" if all(layers[layers.index(True) :]) else "mixed"


def _routing(c: Config) -> str:
    if not c.use_moe:
        return "none"
    if c.aux_loss_type == "sinkhorn":
        return "sinkhorn"
    if c.force_routing != "none":
        return c.force_routing
    return c.router_score + (", normalized" if c.router_weights_sum is not None else "")


def _shared(c: Config) -> str:
    if not c.use_moe or not c.shared_expert_size:
        return "none"
    if c.shared_expert_gate:
        return "gated"
    return "of another width" if c.shared_expert_size % c.expert_ffn_size else "of whole experts"


TRAITS: Mapping[str, Trait] = {
    "normalization": Trait(lambda c: c.normalization, "RMSNorm", ("normalization",)),
    "activation": Trait(lambda c: c.activation, "swiglu", ("activation",)),
    "biases": Trait(lambda c: c.add_bias_linear, False, ("add_bias_linear",)),
    "drops": Trait(  # an expert never gets more than all tokens of a micro-batch
        lambda c: c.use_moe and (c.expert_capacity_factor or math.inf) * c.topk < c.num_experts, False,
        ("moe_type", "capacity_factor"), ", which may drop tokens,",
    ),
    "groups_differ": Trait(
        lambda c: c.use_moe and not groups_score_alike(c.topk, c.num_router_groups, c.router_group_topk),
        False, ("topk", "num_router_groups", "router_group_topk"),
    ),
    "attention": Trait(_attention, "grouped", ("multi_latent_attention", "qk_norm")),
    "qk_norm": Trait(
        lambda c: c.qk_norm_scope if c.qk_norm and not c.multi_latent_attention else "none", "none",
        ("qk_norm", "qk_norm_scope"),
    ),
    "qkv_bias": Trait(lambda c: c.qkv_bias, False, ("qkv_bias",)),
    "heads_fill_width": Trait(
        lambda c: c.multi_latent_attention or c.kv_channels * c.num_heads == c.hidden_size, True,
        ("head_dim", "hidden_size", "num_heads"),
    ),
    "rotates_whole_heads": Trait(lambda c: c.rotary_fraction == 1, True, ("rotary_fraction",)),
    "rope": Trait(yarn_is_expressible, True, ("rope_scaling", "yarn_mscale", "yarn_mscale_all_dim")),
    "epsilon": Trait(
        lambda c: c.multi_latent_attention and c.norm_epsilon != LATENT_EPSILON, False, ("norm_epsilon",)
    ),
    "moe_layers": Trait(_moe_layers, "all", ("use_moe", "moe_layer_freq", "first_k_dense")),
    "routing": Trait(
        _routing, "softmax",
        ("router_score", "router_pre_softmax", "router_normalize", "aux_loss_type", "force_routing"),
    ),
    "expert_bias": Trait(lambda c: c.use_moe and c.has_expert_bias, False, ("router_bias_update_rate",)),
    "groups": Trait(lambda c: c.use_moe and c.num_router_groups > 0, False, ("num_router_groups",)),
    "number": Trait(
        lambda c: c.use_moe and (c.router_top_p < 1 or c.null_experts > 0), False,
        ("router_top_p", "null_experts"),
    ),
    "latent": Trait(lambda c: c.use_moe and c.moe_latent_size > 0, False, ("moe_latent_size",)),
    "shared": Trait(_shared, "none", ("shared_expert_size", "shared_expert_gate")),
    "tied": Trait(lambda c: c.tie_embeddings, False, ("tie_embeddings",)),
}  # fmt: skip


def reasons_against(architecture: Architecture, config: Config) -> list[str]:
    """Settings of a model that an architecture cannot express; empty if it can express all."""
    return [
        " ".join(f"{setting.upper()}={getattr(config, setting)}" for setting in trait.settings) + trait.note
        for name, trait in TRAITS.items()
        if trait.of(config) not in architecture.traits.get(name, (trait.usual,))
    ]


def choose_architecture(config: Config) -> Architecture:
    """The transformers architecture that computes the same; UnsupportedModel, with reasons, if none does."""
    against = {name: reasons_against(architecture, config) for name, architecture in ARCHITECTURES.items()}
    for name, reasons in against.items():
        if not reasons:
            return ARCHITECTURES[name]
    fewest = min(len(reasons) for reasons in against.values())
    nearest = {name: reasons for name, reasons in against.items() if len(reasons) == fewest}
    first = next(iter(nearest.values()))
    if by_none := [reason for reason in first if all(reason in reasons for reasons in against.values())]:
        what = f"{', '.join(by_none)}: no architecture of transformers that is converted here has this"
    else:
        each = "; ".join(f"{name} has no {', '.join(reasons)}" for name, reasons in nearest.items())
        what = f"model: no architecture of transformers that is converted here computes this ({each})"
    raise UnsupportedModel(f"{what}. Fix: train with settings that docs/huggingface.md lists.")


def exports_as(config: Config) -> str | None:
    """The class of transformers that a model can be converted to; None if there is none."""
    try:
        return choose_architecture(config).name
    except UnsupportedModel:
        return None
