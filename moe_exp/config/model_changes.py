"""Checks that a checkpoint fits a run: compares the settings that must not change on resume.

This module lets all other settings change: the layout (TP, PP, VPP, EP, ETP, CP, ranks, stages), the
micro-batch size, the choice of `moe` or `dmoe`, capacity, rounding, kernels, determinism, dispatcher, dtype,
distributed optimizer, learning rate, losses, dropout, and the storage format of the optimizer's moments (for
example their precision in Adam). `moe_exp.training.samples` compares the settings that affect the order of
samples. This module does not import torch.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from moe_exp.config.choices import OPTIMIZERS
from moe_exp.config.errors import ConfigError, problem, raise_for
from moe_exp.config.loading import known_settings
from moe_exp.config.setting_types import pattern_of
from moe_exp.config.settings import Config

logger = logging.getLogger(__name__)

Facts = dict[str, object]
OTHER_OPTIMIZER_FLAG = ", or ALLOW_OTHER_OPTIMIZER=true to continue with moments reset to zero"
_HINTS = {
    "router_bias_update_rate": "set this rate above 0 (1e-12 keeps the bias) or ROUTER_BIAS_RULE=quantile",
    "moe_layer_freq": "set MOE_LAYER_FREQ and FIRST_K_DENSE as in the checkpoint",
}


def refuse_other_model(
    config: Config, saved: Mapping[str, Any], checkpoint: str,
    *, with_optimizer: bool = True, instead: str = "",
) -> None:  # fmt: skip
    """Checks that `config` has the same model and optimizer as `saved`, the settings in the checkpoint.

    If ALLOW_OTHER_MODEL or ALLOW_OTHER_OPTIMIZER allows a difference, logs a warning instead of raising.

    Args:
        checkpoint: name of the checkpoint in messages.
        with_optimizer: whether the checkpoint contains the optimizer's moments.
        instead: text for the error if USE_MOE differs: how to start without the checkpoint.

    Raises:
        ConfigError: if a difference is not allowed; the message has one line per setting.
    """
    always, by_flag = model_changes(config, saved, checkpoint)
    lines = [c.problem(checkpoint, instead if c.name == "use_moe" else "") for c in always]
    flag = ", or ALLOW_OTHER_MODEL=true to continue with a different computation"
    other = optimizer_change(config, saved, checkpoint) if with_optimizer else None
    for change in by_flag:
        if config.allow_other_model:
            logger.warning("%s; ALLOW_OTHER_MODEL=true: continuing", change.text(checkpoint))
        else:
            lines.append(change.problem(checkpoint, flag))
    if other and config.allow_other_optimizer:
        rule = "ALLOW_OTHER_OPTIMIZER=true: continuing with moments reset to zero"
        logger.warning("%s; %s", other.text(checkpoint), rule)
    elif other:
        lines.append(other.problem(checkpoint, OTHER_OPTIMIZER_FLAG))
    raise_for(lines)


def model_changes(
    config: Config, saved: Mapping[str, Any], checkpoint: str
) -> tuple[list[Change], list[Change]]:
    """Returns two lists: changes that affect tensor shapes, and changes that affect only the computation.
    Raises ConfigError if `saved` is not valid in this version.
    """
    before = as_config(saved, checkpoint)
    shapes = list(_changes(shape_facts(config), shape_facts(before)))
    functions = list(_changes(function_facts(config), function_facts(before)))
    if any(change.name == "gated" for change in shapes):  # report it as a change of the activation
        moved = [change for change in functions if change.name == "activation"]
        shapes = [change for change in shapes if change.name != "gated"] + moved
        functions = [change for change in functions if change.name != "activation"]
    return shapes, functions


def optimizer_change(config: Config, saved: Mapping[str, Any], checkpoint: str) -> Change | None:
    """Returns the change that makes the checkpoint's moments unusable, or None. Raises ConfigError if `saved`
    is not valid in this version. adam and adam8bit can load each other's moments, in any precision.
    """
    before = as_config(saved, checkpoint)
    if OPTIMIZERS[config.optimizer].moments != OPTIMIZERS[before.optimizer].moments:
        return Change("optimizer", config.optimizer, before.optimizer)
    if config.optimizer == "sgd" and bool(config.sgd_momentum) != bool(before.sgd_momentum):
        return Change("sgd_momentum", config.sgd_momentum, before.sgd_momentum)
    return None


@dataclass(frozen=True)
class Change:
    """A setting whose value differs from the checkpoint's."""

    name: str
    value: object
    before: object

    @property
    def way_back(self) -> str:
        """How to undo the change."""
        return _HINTS.get(self.name, f"set {self.name.upper()}={self.before}")

    def text(self, checkpoint: str) -> str:
        return f"{self.name.upper()}={self.value}: {checkpoint} has {self.name.upper()}={self.before}"

    def problem(self, checkpoint: str, flag: str = "") -> str:
        rule = f"{checkpoint} has {self.name.upper()}={self.before}"
        return problem(self.name, self.value, rule, self.way_back + flag)


def _values(config: Config, *names: str) -> Facts:
    return {name: getattr(config, name) for name in names}


def shape_facts(config: Config) -> Facts:
    """Values that determine the shapes of the model's tensors, by setting name."""
    facts = _values(config, "hidden_size", "num_layers", "num_heads", "num_query_groups", "mtp_num_layers")
    has_pre_only = config.norm_placement == "around_moe" and not config.use_moe
    facts["norm_placement"] = "pre" if has_pre_only else config.norm_placement
    facts["head_dim"] = config.kv_channels
    facts |= _values(
        config, "use_moe", "normalization", "add_bias_linear", "qkv_bias", "qk_norm", "qk_norm_scope",
        "tie_embeddings", "vocab_size", "multi_latent_attention", "value_head_dim",
        "attention_gate", "gated",  # the only part of the activation that affects shapes
    )  # fmt: skip
    if config.normalization == "LayerNorm":
        facts["norm_bias"] = config.norm_bias
    if config.sliding_window:
        facts["window_query_groups"] = config.window_query_groups or config.num_query_groups
    facts["attention_sinks"] = "all" if all(config.sink_layers) else config.attention_sinks
    if not config.has_equal_attention:
        facts["window_pattern"] = pattern_of(config.window_layers)
    if config.multi_latent_attention:
        sizes = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
        facts |= _values(config, *sizes)
    if not all(config.moe_layers):
        facts["ffn_hidden_size"] = config.ffn_hidden_size
    if config.use_moe:
        names = ("num_experts", "shared_expert_size", "shared_expert_gate", "moe_latent_size", "null_experts")
        facts |= _values(config, *names)
        facts["moe_ffn_hidden_size"] = config.expert_ffn_size
        facts["moe_layer_freq"] = "".join(str(int(is_moe)) for is_moe in config.moe_layers)
        facts["router_bias_update_rate"] = "over 0" if config.has_expert_bias else 0.0
    return facts


def function_facts(config: Config) -> Facts:
    """Settings that change what the model computes, but not its tensor shapes."""
    facts = _values(
        config, "norm_epsilon", "qk_norm_epsilon", "rotary_base", "activation", "rotary_fraction",
        "rope_scaling", "embedding_multiplier", "residual_multiplier", "attention_multiplier",
        "logits_scaling", "value_scale", "sliding_window", "attention_softcap",
    )  # fmt: skip
    facts["rotary_layers"] = pattern_of([not lacks_it for lacks_it in config.layers_without_rotary])
    if config.sliding_window:
        facts["window_rotary_base"] = config.window_rotary_base
    if config.sliding_window and config.has_equal_attention:
        facts["window_pattern"] = pattern_of(config.window_layers)
    if config.rope_scaling != "none":
        facts["rope_scaling_factor"] = config.rope_scaling_factor
        facts["rope_original_seq_len"] = config.rope_seq_len
    if config.rope_scaling == "yarn":
        names = ("yarn_beta_fast", "yarn_beta_slow", "yarn_mscale", "yarn_mscale_all_dim", "yarn_truncate")
        facts |= _values(config, *names)
    if config.use_moe:
        names = ("topk", "router_score", "router_pre_softmax", "router_normalize", "router_scaling_factor")
        others = ("router_top_p", "num_router_groups", "router_group_topk", "force_routing")
        facts |= _values(config, *names, *others, "router_group_best")
        # Sinkhorn changes the routing; the other values are only losses.
        is_sinkhorn = config.aux_loss_type == "sinkhorn"
        facts["aux_loss_type"] = "sinkhorn" if is_sinkhorn else "one of the losses, or none"
    return facts


def _changes(facts: Facts, before: Facts) -> Iterator[Change]:
    """Yields the settings whose values in `facts` and `before` differ. Skips a setting that one of these
    dictionaries lacks, such as TOPK for a dense model.
    """
    implied = {"moe_layer_freq"} if facts.get("num_layers") != before.get("num_layers") else set()
    for name, value in facts.items():
        if name in before and before[name] != value and name not in implied:
            yield Change(name, value, before[name])


def as_config(saved: Mapping[str, Any], checkpoint: str) -> Config:
    """Converts settings of another version: missing settings get defaults, removed settings are dropped."""
    try:
        return Config(**known_settings(saved))
    except ValidationError as error:
        first, fix = error.errors()[0], "use the version that wrote the checkpoint"
        rule = f"value in {checkpoint} is not supported by this version"
        raise ConfigError([problem(str(first["loc"][0]), first["input"], rule, fix)]) from None
