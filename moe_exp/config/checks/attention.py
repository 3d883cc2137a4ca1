"""Constraints on attention and position embedding settings; a part of checks.py."""

from __future__ import annotations

from collections.abc import Iterator

from moe_exp.config.settings import Config, problem


def check_attention(c: Config) -> Iterator[str]:
    """Lines of all problems (name, value, rule, fix)."""
    yield from _qk_norm(c)
    yield from _rotary_fraction(c)
    yield from _rope_scaling(c)
    yield from _latent_attention(c)


def _qk_norm(c: Config) -> Iterator[str]:
    if c.qk_norm_scope == "head":
        return
    if not c.qk_norm:
        yield problem(
            "qk_norm_scope",
            "all",
            "has no effect while QK_NORM=false",
            "set QK_NORM=true, or QK_NORM_SCOPE=head",
        )
    if c.normalization != "RMSNorm":
        rule = f"there is no NORMALIZATION={c.normalization} over all heads"
        yield problem("qk_norm_scope", "all", rule, "set NORMALIZATION=RMSNorm, or QK_NORM_SCOPE=head")


def _rotary_fraction(c: Config) -> Iterator[str]:
    if c.multi_latent_attention:
        return  # see _latent_attention
    turned = int(c.kv_channels * c.rotary_fraction)
    if c.rotary_fraction < 1 and (turned == 0 or turned % 2):
        below = turned // 2 * 2
        sizes = [size for size in (below, below + 2) if 0 < size <= c.kv_channels]
        fix = "set ROTARY_FRACTION to " + " or ".join(f"{size / c.kv_channels:g}" for size in sizes)
        rule = (
            f"turns {turned} of the {c.kv_channels} channels of a head, rotary position embedding turns pairs"
            " of them"
        )
        yield problem("rotary_fraction", c.rotary_fraction, rule, fix)
    if c.rotary_fraction < 1 and c.rope_scaling == "yarn":
        rule = "Megatron's YaRN turns all channels of a head"
        yield problem(
            "rotary_fraction", c.rotary_fraction, rule, "set ROTARY_FRACTION=1, or ROPE_SCALING=none"
        )


def _rope_scaling(c: Config) -> Iterator[str]:
    if c.rope_scaling == "none":
        for name in ("rope_scaling_factor", "rope_original_seq_len"):
            if getattr(c, name) != (default := Config.model_fields[name].default):
                fix = f"set ROPE_SCALING, or {name.upper()}={default:g}"
                yield problem(name, getattr(c, name), "has no effect while ROPE_SCALING=none", fix)
    elif c.rope_scaling_factor == 1:
        yield problem(
            "rope_scaling",
            c.rope_scaling,
            "scales nothing with ROPE_SCALING_FACTOR=1",
            "set ROPE_SCALING_FACTOR, or ROPE_SCALING=none",
        )
    if c.rope_scaling == "llama3" and c.rope_seq_len != 8192:
        rule = "Megatron has the original length of Llama 3 alone"
        yield problem(
            "rope_original_seq_len",
            c.rope_original_seq_len,
            rule,
            "set ROPE_ORIGINAL_SEQ_LEN=8192, or ROPE_SCALING=yarn",
        )
    if c.rope_scaling != "yarn":
        names = ("yarn_beta_fast", "yarn_beta_slow", "yarn_mscale", "yarn_mscale_all_dim")
        for name in (name for name in names if getattr(c, name) != Config.model_fields[name].default):
            fix = f"set ROPE_SCALING=yarn, or {name.upper()}={Config.model_fields[name].default:g}"
            yield problem(name, getattr(c, name), f"has no effect while ROPE_SCALING={c.rope_scaling}", fix)
    elif c.yarn_beta_fast <= c.yarn_beta_slow:
        rule = f"is not over YARN_BETA_SLOW={c.yarn_beta_slow:g}"
        yield problem("yarn_beta_fast", c.yarn_beta_fast, rule, "set YARN_BETA_FAST=32 and YARN_BETA_SLOW=1")


def _latent_attention(c: Config) -> Iterator[str]:
    defaults = {name: field.default for name, field in Config.model_fields.items()}
    if not c.multi_latent_attention:
        for name in ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"):
            if getattr(c, name) != defaults[name]:
                fix = f"set MULTI_LATENT_ATTENTION=true, or {name.upper()}={defaults[name]}"
                yield problem(name, getattr(c, name), "has no effect while MULTI_LATENT_ATTENTION=false", fix)
        return
    not_with_it = {
        "head_dim": (
            "QK_HEAD_DIM, QK_POS_EMB_HEAD_DIM and V_HEAD_DIM are the sizes of heads with"
            " MULTI_LATENT_ATTENTION"
        ),
        "qk_norm_scope": (
            "QK_NORM with MULTI_LATENT_ATTENTION is of what queries and keys are projected up from, not of"
            " heads"
        ),
        "qkv_bias": "Megatron's projections of MULTI_LATENT_ATTENTION have no biases",
        "rotary_fraction": (
            "QK_POS_EMB_HEAD_DIM says how many channels are turned with MULTI_LATENT_ATTENTION"
        ),
    }
    for name, rule in not_with_it.items():
        if getattr(c, name) != defaults[name]:
            value, default = (
                str(x).lower() if isinstance(x, bool) else x for x in (getattr(c, name), defaults[name])
            )
            yield problem(name, value, rule, f"set {name.upper()}={default}, or MULTI_LATENT_ATTENTION=false")
    if c.rope_scaling == "llama3":
        rule = "Megatron has YaRN alone with MULTI_LATENT_ATTENTION"
        yield problem("rope_scaling", c.rope_scaling, rule, "set ROPE_SCALING=yarn or none")
    if c.qk_pos_emb_head_dim % 2:
        rule = "rotary position embedding turns pairs of channels"
        yield problem(
            "qk_pos_emb_head_dim",
            c.qk_pos_emb_head_dim,
            rule,
            f"set QK_POS_EMB_HEAD_DIM={c.qk_pos_emb_head_dim + 1}",
        )
