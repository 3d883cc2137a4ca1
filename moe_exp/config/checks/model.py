"""Constraints on settings of the model: layers, attention, position embedding, muP, FP8."""

from collections.abc import Iterator, Sequence

from moe_exp.config.checks.divisors import multiples, must_divide
from moe_exp.config.choices import OPTIMIZERS
from moe_exp.config.setting_types import as_given
from moe_exp.config.settings import Config, problem


def check_model(c: Config) -> Iterator[str]:
    """Head sizes, biases and the layers that are MoE layers."""
    if not c.multi_latent_attention:
        yield from must_divide(c, "num_query_groups", "NUM_HEADS", c.num_heads)
        if not c.head_dim:
            yield from must_divide(c, "num_heads", "HIDDEN_SIZE", c.hidden_size)
        if c.kv_channels % 2:
            rule = "rotary position embedding turns pairs of channels, the head size must be even"
            yield problem("head_dim", c.kv_channels, rule, f"set HEAD_DIM to {multiples(2, c.kv_channels)}")
    if not c.use_moe:
        return
    yield from c.problems(
        (c.add_bias_linear and c.shared_expert_size, "add_bias_linear",
         "Megatron's shared expert has no bias", "set ADD_BIAS_LINEAR=false or SHARED_EXPERT_SIZE=0"),
        (c.add_bias_linear and c.etp > 1, "add_bias_linear",
         "Megatron has expert biases with ETP=1 only", "set ADD_BIAS_LINEAR=false or ETP=1"),
    )  # fmt: skip
    if len(c.moe_layers) != c.num_layers:
        rule = f"has {len(c.moe_layers)} layers, but NUM_LAYERS={c.num_layers}"
        fix = f"give a number, or a pattern of {c.num_layers} zeros and ones"
        yield c.problem("moe_layer_freq", rule, fix)
    elif not any(c.moe_layers):
        rule = f"leaves no MoE layer of NUM_LAYERS={c.num_layers}"
        if c.first_k_dense:
            fix = f"set FIRST_K_DENSE to at most {c.num_layers - 1}, or USE_MOE=false"
            yield c.problem("first_k_dense", rule, fix)
        else:
            yield c.problem("moe_layer_freq", rule, "set a 1, or USE_MOE=false")


def check_attention(c: Config) -> Iterator[str]:
    turned, is_partial = int(c.kv_channels * c.rotary_fraction), c.rotary_fraction < 1
    below = turned // 2 * 2
    fractions = [size / c.kv_channels for size in (below, below + 2) if 0 < size <= c.kv_channels]
    yield from c.problems(
        (c.qk_norm_scope == "all" and not c.qk_norm, "qk_norm_scope",
         "has no effect while QK_NORM=false", "set QK_NORM=true, or QK_NORM_SCOPE=head"),
        (c.qk_norm_scope == "all" and c.normalization != "RMSNorm", "qk_norm_scope",
         f"there is no NORMALIZATION={c.normalization} over all heads",
         "set NORMALIZATION=RMSNorm, or QK_NORM_SCOPE=head"),
        (is_partial and not c.multi_latent_attention and (turned == 0 or turned % 2), "rotary_fraction",
         f"turns {turned} of the {c.kv_channels} channels of a head, rotary position embedding turns pairs of"
         " them", "set ROTARY_FRACTION to " + " or ".join(f"{fraction:g}" for fraction in fractions)),
        (is_partial and not c.multi_latent_attention and c.rope_scaling == "yarn", "rotary_fraction",
         "Megatron's YaRN turns all channels of a head", "set ROTARY_FRACTION=1, or ROPE_SCALING=none"),
    )  # fmt: skip
    yield from _rope_scaling(c)
    yield from _latent_attention(c)


def _without_effect(c: Config, names: Sequence[str], other: str, fix: str) -> Iterator[str]:
    """A line for each of `names` that is not at its default, while `other` makes it useless."""
    for name in names:
        if getattr(c, name) != (default := Config.model_fields[name].default):
            yield c.problem(name, f"has no effect while {other}", f"{fix}, or {name.upper()}={default:g}")


def _rope_scaling(c: Config) -> Iterator[str]:
    if c.rope_scaling == "none":
        extending = ("rope_scaling_factor", "rope_original_seq_len")
        yield from _without_effect(c, extending, "ROPE_SCALING=none", "set ROPE_SCALING")
    elif c.rope_scaling_factor == 1:
        fix = "set ROPE_SCALING_FACTOR, or ROPE_SCALING=none"
        yield c.problem("rope_scaling", "scales nothing with ROPE_SCALING_FACTOR=1", fix)
    if c.rope_scaling == "llama3" and c.rope_seq_len != 8192:
        fix = "set ROPE_ORIGINAL_SEQ_LEN=8192, or ROPE_SCALING=yarn"
        yield c.problem("rope_original_seq_len", "Megatron has the original length of Llama 3 alone", fix)
    if c.rope_scaling != "yarn":
        names = ("yarn_beta_fast", "yarn_beta_slow", "yarn_mscale", "yarn_mscale_all_dim")
        yield from _without_effect(c, names, f"ROPE_SCALING={c.rope_scaling}", "set ROPE_SCALING=yarn")
    elif c.yarn_beta_fast <= c.yarn_beta_slow:
        rule = f"is not over YARN_BETA_SLOW={c.yarn_beta_slow:g}"
        yield c.problem("yarn_beta_fast", rule, "set YARN_BETA_FAST=32 and YARN_BETA_SLOW=1")


# Settings that do not go with MULTI_LATENT_ATTENTION, and why.
_NOT_LATENT = {
    "head_dim": "QK_HEAD_DIM, QK_POS_EMB_HEAD_DIM and V_HEAD_DIM are the sizes of heads with"
    " MULTI_LATENT_ATTENTION",
    "qk_norm_scope": "QK_NORM with MULTI_LATENT_ATTENTION is of what queries and keys are projected up from,"
    " not of heads",
    "qkv_bias": "Megatron's projections of MULTI_LATENT_ATTENTION have no biases",
    "rotary_fraction": "QK_POS_EMB_HEAD_DIM says how many channels are turned with MULTI_LATENT_ATTENTION",
}


def _latent_attention(c: Config) -> Iterator[str]:
    if not c.multi_latent_attention:
        names = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
        fix = "set MULTI_LATENT_ATTENTION=true"
        yield from _without_effect(c, names, "MULTI_LATENT_ATTENTION=false", fix)
        return
    for name, rule in _NOT_LATENT.items():
        if getattr(c, name) != (default := Config.model_fields[name].default):
            fix = f"set {name.upper()}={as_given(default)}, or MULTI_LATENT_ATTENTION=false"
            yield c.problem(name, rule, fix)
    if c.rope_scaling == "llama3":
        rule = "Megatron has YaRN alone with MULTI_LATENT_ATTENTION"
        yield c.problem("rope_scaling", rule, "set ROPE_SCALING=yarn or none")
    if c.qk_pos_emb_head_dim % 2:
        fix = f"set QK_POS_EMB_HEAD_DIM={c.qk_pos_emb_head_dim + 1}"
        yield c.problem("qk_pos_emb_head_dim", "rotary position embedding turns pairs of channels", fix)


def check_parametrization(c: Config) -> Iterator[str]:
    """PARAMETRIZATION=mup: what its rules do not cover."""
    if c.parametrization == "standard":
        return
    if not c.mup_base_hidden_size:
        fix = "set it to the HIDDEN_SIZE for which LR was found"
        yield c.problem("mup_base_hidden_size", "PARAMETRIZATION=mup needs the sizes of a base model", fix)
    others = (
        (OPTIMIZERS[c.optimizer].moments != "adam", "OPTIMIZER=adam",
         f"OPTIMIZER={c.optimizer}, as its rules are for Adam"),
        (c.tie_embeddings, "TIE_EMBEDDINGS=false",
         "TIE_EMBEDDINGS=true, as embedding and output layer have different rules"),
        (c.multi_latent_attention, "MULTI_LATENT_ATTENTION=false",
         "MULTI_LATENT_ATTENTION=true, whose ranks have no rule"),
        (c.use_moe and c.moe_latent_size, "MOE_LATENT_SIZE=0",
         f"MOE_LATENT_SIZE={c.moe_latent_size}, whose projections have no rule"),
    )  # fmt: skip
    for is_set, fix, other in others:
        if is_set:
            yield c.problem("parametrization", f"does not go with {other}", f"set {fix}")


# Sizes of the FP8 matrix products are multiples of this.
SIZE_MULTIPLES = {"tensorwise": 16, "blockwise": 16, "mxfp8": 32}


def check_fp8(c: Config) -> Iterator[str]:
    """Experts compute in FP8 with our kernels or Transformer Engine (machine: launch/machine_checks.py)."""
    if c.fp8 == "none":
        return
    yield from c.problems(
        (c.is_fp8_by_kernels and (c.fp8, c.fp8_recipe) != ("e4m3", "blockwise"), "fp8",
         f"with FP8_RECIPE={c.fp8_recipe} is not computed by EXPERT_BACKEND=triton",
         "set FP8=e4m3 FP8_RECIPE=blockwise, or EXPERT_BACKEND=te"),
        (c.use_moe and c.expert_backend not in ("te", "triton"), "fp8",
         f"experts compute in FP8 with EXPERT_BACKEND=te or triton, not with {c.expert_backend}",
         "set EXPERT_BACKEND=te, or FP8=none"),
        (not c.use_moe and c.impl == "local", "fp8",
         "has no effect in a dense model with IMPL=local", "set IMPL=te, or FP8=none"),
        (c.dtype != "bf16", "fp8",
         f"is for the products of a model in bf16, but DTYPE={c.dtype}", "set DTYPE=bf16, or FP8=none"),
    )  # fmt: skip
    if c.is_fp8_by_kernels:
        return
    multiple = SIZE_MULTIPLES[c.fp8_recipe]
    if c.impl != "local" and (tokens := c.seq_len * c.mbsz // (c.cp * c.tp)) % multiple:
        rule = f"with MBSZ={c.mbsz} a rank multiplies {tokens} tokens, FP8_RECIPE={c.fp8_recipe} wants a"
        fix = "change SEQ_LEN or MBSZ, or set FP8=none"
        yield c.problem("seq_len", f"{rule} multiple of {multiple}", fix)
    is_dense = not all(c.moe_layers) and c.impl != "local" and (c.moe_ffn_hidden_size or not c.use_moe)
    sizes = (  # whether there is such a matrix product, setting, value, ranks that it is split over
        (True, "hidden_size", c.hidden_size, 1),
        (c.use_moe and c.moe_latent_size, "moe_latent_size", c.moe_latent_size, 1),
        (c.use_moe, c.expert_ffn_setting, c.expert_ffn_size, c.etp),
        (is_dense, "ffn_hidden_size", c.ffn_hidden_size, c.tp),
    )
    for is_used, name, value, ways in sizes:
        if is_used and value % (multiple * ways):
            rule = f"FP8_RECIPE={c.fp8_recipe} multiplies matrices whose sizes are multiples of {multiple}"
            rule += f" on each of {ways} ranks" if ways > 1 else ""
            fix = f"set {name.upper()} to {multiples(multiple * ways, value)}, or FP8=none"
            yield problem(name, value, rule, fix)
