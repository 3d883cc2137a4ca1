"""Maximal update parametrization (muP) for MoE models: how initial weights, learning rate and weight decay
of each parameter depend on the model's sizes. Pure functions of settings; no torch.

Sizes are relative to a base model, for which every factor is 1, so that PARAMETRIZATION=mup with the base's
own sizes is PARAMETRIZATION=standard. With n = HIDDEN_SIZE, m = MOE_FFN_HIDDEN_SIZE and k = TOPK, each
divided by the base's:

                                   initial std        learning rate    weight decay
    embedding, norms, biases       1                  1                1
    attention, dense MLP, experts
        up (rows of n values)      n^(-1/2)           n^-1             n
    experts down                   MUP_RULE           m^-1             m
    router                         n^(-1/2)           n^-1             n
    output layer                   n^-1               n^-1             n

Yang et al. 2022 (arXiv:2203.03466), table 8, for AdamW: an update of a matrix adds up over its inputs, so
its learning rate falls with their number. Factors of the forward pass are folded into weights and rates,
which for Adam is the same function (ibid., lemma J.1), so checkpoints and conversions need nothing new. The
weight decay rises so that its product with the learning rate, by which weights shrink, stays.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from moe_exp.config.choices import MUP_RULES
from moe_exp.config.settings import Config


@dataclass(frozen=True)
class Factors:
    """Factors on the standard deviation of initial weights and on the learning rate."""

    init: float = 1.0
    lr: float = 1.0

    @property
    def weight_decay(self) -> float:
        return 1 / self.lr


KINDS = ("embedding", "output", "router", "expert_down", "hidden")


def kind_of(name: str) -> str:
    """The row of the table for a matrix, by its name in the model or in checkpoints."""
    if ".word_embeddings." in name:
        return "embedding"
    if "output_layer." in name:
        return "output"
    if ".router." in name or name.endswith("shared_experts.gate_weight"):
        return "router"
    is_expert = ".mlp.experts." in name
    is_second = name.endswith(("weight2", "linear_fc2.weight"))
    return "expert_down" if is_expert and is_second else "hidden"


def factors(config: Config, kind: str) -> Factors:
    """The factors on the parameters of a kind."""
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
