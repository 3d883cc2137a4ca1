"""Initial weights, learning rate and weight decay of parameters by name: LR_GROUPS, muP and so on. No torch.

    LR_GROUPS='*.router.*:lr=0.5,wd=0;*word_embeddings*:lr=2'

A line is a shell pattern and what it multiplies: LR and MIN_LR by `lr`, WEIGHT_DECAY by `wd`. Names are those
of checkpoints, as `moe-exp ckpt info --tensors` lists them, which are the same in every layout; the number of
the layer may be left out. The experts of a layer are one parameter. Of the lines that match a parameter and
have an `lr`, the first counts, and likewise for `wd`. The two other settings are lines after those of
LR_GROUPS. Norms and biases never decay. The factors of PARAMETRIZATION=mup multiply on top.

Maximal update parametrization (muP) for MoE models: sizes are relative to a base model, for which every
factor is 1, so that PARAMETRIZATION=mup with the base's own sizes is PARAMETRIZATION=standard. With
n = HIDDEN_SIZE, m = MOE_FFN_HIDDEN_SIZE and k = TOPK, each divided by the base's:

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

import difflib
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from moe_exp.config.choices import MUP_RULES
from moe_exp.config.parsers import Rule, parsed_groups
from moe_exp.config.settings import Config


class Multiples(NamedTuple):
    """Factors of LR and MIN_LR, and of WEIGHT_DECAY."""

    lr: float
    wd: float


def rules_of(config: Config) -> list[Rule]:
    """The lines in order; empty if all parameters are treated alike."""
    rules = list(parsed_groups(config.lr_groups)) if config.lr_groups else []
    for setting, pattern in (("router_lr_mult", "*.router.*"), ("expert_lr_mult", "*.mlp.experts.*")):
        if (multiple := getattr(config, setting)) != 1:
            rules.append(Rule(setting, pattern, lr=multiple))
    return rules


def deciding_rules(rules: Sequence[Rule], name: str) -> tuple[Rule | None, Rule | None]:
    """The lines with the `lr` and the `wd` of the parameter with this name in checkpoints, if any."""
    found = [rule for rule in rules if rule.matches(name)]
    return (
        next((rule for rule in found if rule.lr is not None), None),
        next((rule for rule in found if rule.wd is not None), None),
    )


def are_alike(config: Config) -> bool:
    """Whether all have one learning rate and, but for norms and biases, one weight decay."""
    return not rules_of(config) and config.parametrization == "standard"


def multiples_of(config: Config, name: str) -> Multiples:
    """The multiples of the parameter with this name in checkpoints; it decays unless it is a norm or bias."""
    deciding = zip(("lr", "wd"), deciding_rules(rules_of(config), name), strict=True)
    lr, wd = (1.0 if rule is None else float(getattr(rule, key)) for key, rule in deciding)
    if is_norm_or_bias(name):
        return Multiples(lr, 0.0)
    factor = factors(config, kind_of(name))
    return Multiples(lr * factor.lr, wd * factor.weight_decay)


def is_norm_or_bias(name: str) -> bool:
    """Matches names such as `...pre_mlp_layernorm.weight`, `...linear_qkv.layer_norm_weight`, `...bias1`."""
    *_, module, last = ("", *name.split("."))
    return "norm" in last or "norm" in module or last.rstrip("12").endswith("bias")


def close_names(pattern: str, names: Iterable[str]) -> list[str]:
    """The three names, without numbers of layers, whose words are most like those of a pattern."""
    words = re.findall(r"\w+", pattern.lower()) or [""]
    likeness = {
        name: sum(
            max(difflib.SequenceMatcher(None, word, other).ratio() for other in re.findall(r"\w+", name))
            for word in words
        )
        for name in dict.fromkeys(re.sub(r"\.\d+\.", ".", name) for name in names)
    }
    return sorted(likeness, key=lambda name: -likeness[name])[:3]


def group_lines(config: Config) -> list[str]:
    """A line per group: its patterns, number of parameters, learning rates and weight decay; none if all
    parameters are treated alike.
    """
    rules, sizes = rules_of(config), parameter_sizes(config)
    groups: dict[tuple[tuple[Rule | None, ...], str], list[str]] = {}
    for name in () if are_alike(config) else sizes:
        is_scaled = config.parametrization == "mup" and not is_norm_or_bias(name)
        kind = f"muP {kind_of(name)}" if is_scaled else ""
        groups.setdefault((deciding_rules(rules, name), kind), []).append(name)
    lines = []
    for (deciding, kind), names in sorted(
        groups.items(), key=lambda group: not any(group[0][0])
    ):  # others last
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


def parameter_sizes(c: Config) -> dict[str, int]:
    """The parameters of the whole model by their names in checkpoints, and how many values each has. `c` has
    passed config/checks.
    """
    hidden = c.hidden_size
    table = c.padded_vocab_size * hidden
    sizes = {"embedding.word_embeddings.weight": table}
    attention = _latent_attention(c) if c.multi_latent_attention else _attention(c)
    layers = (attention | _dense(c), attention | _moe(c))
    for layer, is_moe in enumerate(c.moe_layers):
        sizes |= {f"decoder.layers.{layer}.{name}": size for name, size in layers[is_moe].items()}
    sizes |= _norm(c, "decoder.final_layernorm.", hidden)
    return sizes if c.tie_embeddings else sizes | {"output_layer.weight": table}


def _norm(c: Config, prefix: str, size: int) -> dict[str, int]:
    names = ("weight", "bias") if c.normalization == "LayerNorm" else ("weight",)
    return {prefix + name: size for name in names}


def _linear(name: str, rows: int, columns: int, *, bias: bool) -> dict[str, int]:
    return {f"{name}.weight": rows * columns} | ({f"{name}.bias": rows} if bias else {})


def _attention(c: Config) -> dict[str, int]:
    prefix, query, key = "self_attention.", c.num_heads * c.kv_channels, c.num_query_groups * c.kv_channels
    sizes = _norm(c, f"{prefix}linear_qkv.layer_norm_", c.hidden_size)
    has_bias = c.add_bias_linear or c.qkv_bias
    sizes |= _linear(f"{prefix}linear_qkv", query + 2 * key, c.hidden_size, bias=has_bias)
    sizes |= _linear(f"{prefix}linear_proj", c.hidden_size, query, bias=c.add_bias_linear)
    if c.qk_norm and c.qk_norm_scope == "all":
        return sizes | {f"{prefix}q_layernorm.weight": query, f"{prefix}k_layernorm.weight": key}
    for name in ("q_layernorm.", "k_layernorm.") if c.qk_norm else ():
        sizes |= _norm(c, prefix + name, c.kv_channels)
    return sizes


def _latent_attention(c: Config) -> dict[str, int]:
    prefix, hidden, latent, rank = "self_attention.", c.hidden_size, c.kv_lora_rank, c.q_lora_rank
    query, value = c.num_heads * c.kv_channels, c.num_heads * c.v_head_dim
    sizes = _norm(c, "input_layernorm.", hidden)
    sizes |= _linear(f"{prefix}linear_proj", hidden, value, bias=c.add_bias_linear)
    if rank:
        sizes |= _linear(f"{prefix}linear_q_down_proj", rank, hidden, bias=False)
        sizes |= _linear(f"{prefix}linear_q_up_proj", query, rank, bias=False)
        sizes |= _norm(c, f"{prefix}linear_q_up_proj.layer_norm_", rank) if c.qk_norm else {}
    else:
        sizes |= _linear(f"{prefix}linear_q_proj", query, hidden, bias=False)
    sizes |= _linear(f"{prefix}linear_kv_down_proj", latent + c.qk_pos_emb_head_dim, hidden, bias=False)
    up = c.num_heads * (c.qk_head_dim + c.v_head_dim)
    sizes |= _linear(f"{prefix}linear_kv_up_proj", up, latent, bias=False)
    return sizes | (_norm(c, f"{prefix}linear_kv_up_proj.layer_norm_", latent) if c.qk_norm else {})


def _mlp(c: Config, prefix: str, ffn: int, *, bias: bool, hidden: int = 0) -> dict[str, int]:
    width, hidden = 2 * ffn if c.gated else ffn, hidden or c.hidden_size
    sizes = _linear(f"{prefix}linear_fc1", width, hidden, bias=bias)
    return sizes | _linear(f"{prefix}linear_fc2", hidden, ffn, bias=bias)


def _dense(c: Config) -> dict[str, int]:
    sizes = _norm(c, "mlp.linear_fc1.layer_norm_", c.hidden_size)
    return sizes | _mlp(c, "mlp.", c.ffn_hidden_size, bias=c.add_bias_linear)


def _moe(c: Config) -> dict[str, int]:
    sizes = _norm(c, "pre_mlp_layernorm.", c.hidden_size)
    bias, latent = c.add_bias_linear, c.moe_latent_size
    sizes |= _linear("mlp.router", c.num_router_outputs, c.hidden_size, bias=bias)
    one = _mlp(c, "mlp.experts.experts.", c.expert_ffn_size, bias=bias, hidden=c.expert_hidden_size)
    sizes |= {name: c.num_experts * size for name, size in one.items()}
    if latent:
        sizes |= _linear("mlp.fc1_latent_proj", latent, c.hidden_size, bias=bias)
        sizes |= _linear("mlp.fc2_latent_proj", c.hidden_size, latent, bias=bias)
    if c.shared_expert_size:
        sizes |= _mlp(c, "mlp.shared_experts.", c.shared_expert_size, bias=False)
        sizes |= {"mlp.shared_experts.gate_weight": c.hidden_size} if c.shared_expert_gate else {}
    return sizes


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
