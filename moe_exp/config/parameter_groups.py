"""Learning rate and weight decay of parameters by name: LR_GROUPS, ROUTER_LR_MULT, EXPERT_LR_MULT, muP. No
torch.

    LR_GROUPS='*.router.*:lr=0.5,wd=0;*word_embeddings*:lr=2'

A line is a shell pattern and what it multiplies: LR and MIN_LR by `lr`, WEIGHT_DECAY by `wd`. Names are those
of checkpoints, as `moe-exp ckpt info --tensors` lists them, which are the same in every layout; the number of
the layer may be left out. The experts of a layer are one parameter. Of the lines that match a parameter and
have an `lr`, the first counts, and likewise for `wd`. The two other settings are lines after those of
LR_GROUPS. Norms and biases never decay. The factors of PARAMETRIZATION=mup multiply on top.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from moe_exp.config.parametrization import factors, kind_of
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
