"""Initialization, learning rate and weight decay of each parameter, by name (LR_GROUPS, muP).

    LR_GROUPS='*.router.*:lr=0.5,wd=0;*word_embeddings*:lr=2'

A rule is a shell pattern with one or two factors: `lr` multiplies LR and MIN_LR, `wd` multiplies
WEIGHT_DECAY. Patterns match the names in checkpoints (`moe-exp ckpt info --tensors`), which do not depend on
the layout; the layer number may be omitted. All experts of a layer are one parameter. The first matching rule
with an `lr` sets the learning rate; the first matching rule with a `wd` sets the weight decay. ROUTER_LR_MULT
and EXPERT_LR_MULT apply after the rules of LR_GROUPS. Norms and biases never decay. With PARAMETRIZATION=mup,
muP factors are applied in addition.

Maximal update parametrization (muP) for MoE models: sizes are relative to a base model. At the sizes of the
base model, all factors are 1, so PARAMETRIZATION=mup equals PARAMETRIZATION=standard. With n = HIDDEN_SIZE,
m = MOE_FFN_HIDDEN_SIZE and k = TOPK, each divided by the base model's value:

                                   initial std        learning rate    weight decay
    embedding, norms, biases       1                  1                1
    attention, dense MLP, experts
        up (rows of n values)      n^(-1/2)           n^-1             n
    experts down                   MUP_RULE           m^-1             m
    router                         n^(-1/2)           n^-1             n
    output layer                   n^-1               n^-1             n

The factors are those of Yang et al. 2022 (arXiv:2203.03466), table 8, for AdamW. In each output
of a matrix, the weight updates of all inputs add up, so the learning rate is divided by the number of inputs.
Initial weights and learning rates are scaled instead of using multipliers in the forward pass. For Adam, both
ways are equivalent (ibid., lemma J.1), and scaling leaves checkpoints and conversions unchanged. Each step
shrinks weights by weight decay times learning rate, so weight decay is raised to keep this product constant.
Does not import torch.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

from moe_exp.config.choices import MUP_RULES
from moe_exp.config.parameter_names import deciding_rules, is_norm_or_bias, parameter_sizes
from moe_exp.config.parsers import Rule
from moe_exp.config.settings import Config


class Multiples(NamedTuple):
    """Factors for a parameter: `lr` multiplies LR and MIN_LR, `wd` multiplies WEIGHT_DECAY."""

    lr: float
    wd: float


def are_alike(config: Config) -> bool:
    """Whether all parameters share the learning rate, and all but norms and biases share the weight decay."""
    return not config.parameter_rules and config.parametrization == "standard"


def multiples_of(config: Config, name: str) -> Multiples:
    """Factors for learning rate and weight decay of the parameter `name`. Norms and biases do not decay."""
    deciding = zip(("lr", "wd"), deciding_rules(config.parameter_rules, name), strict=True)
    lr, wd = (1.0 if rule is None else float(getattr(rule, key)) for key, rule in deciding)
    if is_norm_or_bias(name):
        return Multiples(lr, 0.0)
    factor = factors(config, kind_of(name))
    return Multiples(lr * factor.lr, wd * (1 / factor.lr))


def group_lines(config: Config) -> list[str]:
    """Describes each parameter group in one line: patterns, number of parameters, learning rates and weight
    decay. Returns [] if all parameters are alike (see `are_alike`).
    """
    rules, sizes = config.parameter_rules, parameter_sizes(config)
    groups: dict[tuple[tuple[Rule | None, ...], str], list[str]] = {}
    for name in () if are_alike(config) else sizes:
        is_scaled = config.parametrization == "mup" and not is_norm_or_bias(name)
        kind = f"muP {kind_of(name)}" if is_scaled else ""
        groups.setdefault((deciding_rules(rules, name), kind), []).append(name)
    lines = []
    others_last = sorted(groups.items(), key=lambda group: not any(group[0][0]))
    for (deciding, kind), names in others_last:
        patterns = " and ".join(dict.fromkeys(rule.pattern for rule in deciding if rule))
        label = ", ".join(filter(None, (patterns, kind))) or "all others"
        own = [multiples_of(config, name) for name in names]
        decay = max(config.weight_decay * multiples.wd for multiples in own)
        has_both = decay and any(not multiples.wd for multiples in own)
        lines.append(
            f"parameter group {label}: {sum(sizes[name] for name in names):,} parameters,"
            f" LR {config.lr * own[0].lr:g}, MIN_LR {config.min_lr * own[0].lr:g}, weight decay {decay:g}"
            f"{' (norms and biases 0)' if has_both else ''}"
        )
    return lines


class Factors(NamedTuple):
    """Factors on the standard deviation of initial weights and on the learning rate."""

    init: float = 1.0
    lr: float = 1.0  # weight decay is divided by it


KINDS = ("embedding", "output", "router", "expert_down", "hidden")


def kind_of(name: str) -> str:
    """Derives the kind of a matrix (see KINDS) from its name in the model or in checkpoints."""
    if ".word_embeddings." in name:
        return "embedding"
    if "output_layer." in name:
        return "output"
    if ".router." in name or name.endswith("shared_experts.gate_weight"):
        return "router"
    is_expert = ".mlp.experts." in name
    return "expert_down" if is_expert and name.endswith(("weight2", "linear_fc2.weight")) else "hidden"


def factors(config: Config, kind: str) -> Factors:
    """Returns the muP factors for parameters of a kind."""
    if config.parametrization == "standard" or kind == "embedding":
        return Factors()
    width = config.hidden_size / config.mup_base_hidden_size
    if kind == "output":
        return Factors(1 / width, 1 / width)
    if kind in ("hidden", "router"):
        return Factors(1 / math.sqrt(width), 1 / width)
    base_size = config.mup_base_moe_ffn_hidden_size
    size = config.expert_ffn_size / base_size if base_size else width
    topk = config.topk / (config.mup_base_topk or config.topk)
    init: Callable[[float, float, float], float] = MUP_RULES[config.mup_rule].expert_down
    return Factors(init(width, size, topk), 1 / size)
