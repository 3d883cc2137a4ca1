"""Sizes of a model's parameters by checkpoint name, and the LR_GROUPS rules that match them.

Does not import torch.
"""

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence

from moe_exp.config.parsers import Rule
from moe_exp.config.sections.moe import ExpertSettings


def deciding_rules(rules: Sequence[Rule], name: str) -> tuple[Rule | None, Rule | None]:
    """Returns the rule that sets `lr` of a parameter and the rule that sets its `wd` (None: no rule).

    `name` is the parameter's name in checkpoints.
    """
    found = [rule for rule in rules if rule.matches(name)]
    return (
        next((rule for rule in found if rule.lr is not None), None),
        next((rule for rule in found if rule.wd is not None), None),
    )


def is_norm_or_bias(name: str) -> bool:
    """Whether a name belongs to a norm or bias, such as `...layernorm.weight` or `...bias1`."""
    *_, module, last = ("", *name.split("."))
    return "norm" in last or "norm" in module or last.rstrip("12").endswith(("bias", "softmax_offset"))


def useless_rules(rules: Sequence[Rule], names: Sequence[str]) -> Iterator[tuple[Rule, str, str]]:
    """Yields (rule, error, fix) for rules that affect no parameter in `names`."""
    deciding = {name: deciding_rules(rules, name) for name in names}
    by_lr = {id(of_lr) for of_lr, _ in deciding.values()}
    by_wd = {id(of_wd) for name, (_, of_wd) in deciding.items() if not is_norm_or_bias(name)}
    for rule in rules:
        is_pattern = rule.setting == "lr_groups"
        if not (matching := [name for name in names if rule.matches(name)]):
            if is_pattern:
                fix = f"use names such as {', '.join(close_names(rule.pattern, names))}"
                yield rule, "matches no parameter of this model", fix
            continue
        where = "an earlier pattern" if is_pattern else "LR_GROUPS"
        fix = "put this pattern before the earlier one" if is_pattern else "omit one of the two"
        others_have = where + " already sets the {} of every matching parameter"
        if rule.lr is not None and id(rule) not in by_lr:
            yield rule, others_have.format("lr"), fix
        if rule.wd is None or id(rule) in by_wd:
            continue
        if all(map(is_norm_or_bias, matching)):
            yield rule, "has a wd, but only matches norms and biases, which never decay", "omit the wd"
        else:
            yield rule, others_have.format("wd"), fix


def close_names(pattern: str, names: Iterable[str]) -> list[str]:
    """Returns the three names, without their layer numbers, that are most similar to a pattern."""
    words = re.findall(r"\w+", pattern.lower()) or [""]
    likeness = {
        name: sum(
            max(difflib.SequenceMatcher(None, word, other).ratio() for other in re.findall(r"\w+", name))
            for word in words
        )
        for name in dict.fromkeys(re.sub(r"\.\d+\.", ".", name) for name in names)
    }
    return sorted(likeness, key=lambda name: -likeness[name])[:3]


def parameter_sizes(c: ExpertSettings) -> dict[str, int]:
    """Returns the size of each parameter by its name in checkpoints; requires valid settings `c`."""
    table = c.padded_vocab_size * c.hidden_size
    sizes = {"embedding.word_embeddings.weight": table}
    layers = [layer_sizes(c, has_window=has_window) for has_window in (False, True)]
    for layer, (is_moe, has_window) in enumerate(zip(c.moe_layers, c.window_layers, strict=False)):
        sizes |= {f"decoder.layers.{layer}.{name}": size for name, size in layers[has_window][is_moe].items()}
    sizes |= _norm(c, "decoder.final_layernorm.", c.hidden_size)
    for layer in range(c.mtp_num_layers):
        sizes |= {f"mtp.layers.{layer}.{name}": size for name, size in mtp_sizes(c).items()}
    return sizes if c.tie_embeddings else sizes | {"output_layer.weight": table}


def layer_sizes(c: ExpertSettings, *, has_window: bool = False) -> tuple[dict[str, int], dict[str, int]]:
    """Returns the parameter sizes of a dense layer and of an MoE layer, by parameter name within the layer.
    `has_window`: whether layers use SLIDING_WINDOW. Multi-latent attention: arXiv:2405.04434, section 2.1.
    """
    attention = _latent_attention(c) if c.multi_latent_attention else _attention(c, has_window)
    placement = c.norm_placement
    dense = {} if placement == "parallel" else _input_norm(c, "mlp.linear_fc1.layer_norm_")
    dense |= _mlp(c, "mlp.", c.ffn_hidden_size, bias=c.add_bias_linear)
    after = _norm(c, "post_mlp_layernorm.", c.hidden_size)
    moe = _moe(c) | (after if placement in ("post", "around", "around_moe") else {})
    if placement in ("post", "around"):
        attention |= _norm(c, "post_self_attn_layernorm.", c.hidden_size)
        dense |= after
    return attention | dense, attention | moe


def mtp_sizes(c: ExpertSettings) -> dict[str, int]:
    """Returns the parameter sizes of a multi-token prediction layer, by parameter name within the layer
    (arXiv:2412.19437, section 2.2).
    """
    sizes = {f"transformer_layer.{name}": size for name, size in layer_sizes(c)[c.moe_layers[-1]].items()}
    for name in ("enorm.", "hnorm.", "final_layernorm."):
        sizes |= _norm(c, name, c.hidden_size)
    return sizes | _linear("eh_proj", c.hidden_size, 2 * c.hidden_size, bias=False)


def _norm(c: ExpertSettings, prefix: str, size: int) -> dict[str, int]:
    names = ("weight", "bias") if c.normalization == "LayerNorm" and c.norm_bias else ("weight",)
    return {prefix + name: size for name in names}


def _input_norm(c: ExpertSettings, prefix: str) -> dict[str, int]:
    return {} if c.norm_placement == "post" else _norm(c, prefix, c.hidden_size)


def _linear(name: str, rows: int, columns: int, *, bias: bool) -> dict[str, int]:
    return {f"{name}.weight": rows * columns} | ({f"{name}.bias": rows} if bias else {})


def _attention(c: ExpertSettings, has_window: bool) -> dict[str, int]:
    prefix, query = "self_attention.", c.num_heads * c.kv_channels
    key = ((has_window and c.window_query_groups) or c.num_query_groups) * c.kv_channels
    sizes = _input_norm(c, f"{prefix}linear_qkv.layer_norm_")
    has_bias = c.add_bias_linear or c.qkv_bias
    queries = 2 * query if c.attention_gate else query
    sizes |= _linear(f"{prefix}linear_qkv", queries + 2 * key, c.hidden_size, bias=has_bias)
    sizes |= _linear(f"{prefix}linear_proj", c.hidden_size, query, bias=c.add_bias_linear)
    if {"all": True, "windowed": has_window, "none": False}[c.attention_sinks]:
        sizes[f"{prefix}core_attention.softmax_offset"] = c.num_heads
    if c.qk_norm and c.qk_norm_scope == "all":
        return sizes | {f"{prefix}q_layernorm.weight": query, f"{prefix}k_layernorm.weight": key}
    for name in ("q_layernorm.", "k_layernorm.") if c.qk_norm else ():
        sizes |= _norm(c, prefix + name, c.kv_channels)
    return sizes


def _latent_attention(c: ExpertSettings) -> dict[str, int]:
    prefix, hidden, latent, rank = "self_attention.", c.hidden_size, c.kv_lora_rank, c.q_lora_rank
    query, value = c.num_heads * c.kv_channels, c.num_heads * c.v_head_dim
    sizes = _input_norm(c, "input_layernorm.")
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


def _mlp(c: ExpertSettings, prefix: str, ffn: int, *, bias: bool, hidden: int = 0) -> dict[str, int]:
    width, hidden = 2 * ffn if c.gated else ffn, hidden or c.hidden_size
    sizes = _linear(f"{prefix}linear_fc1", width, hidden, bias=bias)
    return sizes | _linear(f"{prefix}linear_fc2", hidden, ffn, bias=bias)


def _moe(c: ExpertSettings) -> dict[str, int]:
    sizes = {} if c.norm_placement == "parallel" else _input_norm(c, "pre_mlp_layernorm.")
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
