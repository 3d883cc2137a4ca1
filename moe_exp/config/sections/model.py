"""Settings of the model without its experts: layers, attention, position embedding, initial weights, muP.

A rule between settings of several sections stands in the last of them (sections/launch.py).
"""

from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

from moe_exp.config.choices import MUP_RULES, one_of
from moe_exp.config.errors import multiples, problem
from moe_exp.config.sections.launch import LaunchSettings
from moe_exp.config.setting_types import (
    NonNegative,
    NumHeads,
    NumLayers,
    OptionalWidth,
    Positive,
    Probability,
    Rate,
    Width,
    as_given,
    model,
)

# Settings that do not go with MULTI_LATENT_ATTENTION, and why.
_NOT_LATENT = {
    "head_dim": "QK_HEAD_DIM, QK_POS_EMB_HEAD_DIM and V_HEAD_DIM are the sizes of heads with"
    " MULTI_LATENT_ATTENTION",
    "qk_norm_scope": "QK_NORM with MULTI_LATENT_ATTENTION is of what queries and keys are projected up from,"
    " not of heads",
    "qkv_bias": "Megatron's projections of MULTI_LATENT_ATTENTION have no biases",
    "rotary_fraction": "QK_POS_EMB_HEAD_DIM says how many channels are turned with MULTI_LATENT_ATTENTION",
}


class ModelSettings(LaunchSettings):
    """The section Model."""

    num_layers: NumLayers = model(24, "transformer layers")
    hidden_size: Width = model(512, "model width")
    ffn_hidden_size: Width = model(1792, "width of the dense MLP")
    num_heads: NumHeads = model(4, "attention heads")
    num_query_groups: NumHeads = model(
        1, "key/value heads (GQA); equal to NUM_HEADS: plain multi-head attention"
    )
    head_dim: OptionalWidth = model(0, "size of one head; 0: HIDDEN_SIZE / NUM_HEADS")
    multi_latent_attention: bool = model(
        False,
        "DeepSeek's attention (MLA), with the five sizes that follow; NUM_QUERY_GROUPS is then not used",
    )
    q_lora_rank: OptionalWidth = model(0, "width that queries are projected down to (MLA); 0: no projection")
    kv_lora_rank: Width = model(512, "width that keys and values are projected down to (MLA)")
    qk_head_dim: Width = model(128, "channels of a query or key head without position embedding (MLA)")
    qk_pos_emb_head_dim: Width = model(64, "channels of a query or key head with position embedding (MLA)")
    v_head_dim: Width = model(128, "channels of a value head (MLA)")
    seq_len: Positive = model(2048, "tokens per sample")
    vocab_size: Positive = model(
        128256,
        "tokens of the model's vocabulary, before padding to a multiple of 128; not given: that of the data "
        "or TOKENIZER, if it is known",
    )
    activation: Literal["swiglu", "clamped_swiglu", "geglu", "gelu", "squared_relu"] = model(
        "swiglu", "activation of MLP and experts; clamped_swiglu: that of gpt-oss, with limits of 7"
    )
    normalization: Literal["RMSNorm", "LayerNorm"] = model("RMSNorm", "norm layers")
    norm_epsilon: float = model(1e-05, "added to the variance inside a norm", gt=0, costs=False)
    add_bias_linear: bool = model(False, "biases in the linear layers, also of experts and router")
    qk_norm: bool = model(
        False, "norm on queries and keys; with MLA on the compressed vectors that they are projected up from"
    )
    qk_norm_scope: Literal["head", "all"] = model(
        "head", "what QK_NORM averages over: each head separately, or all heads together (OLMo 2, OLMoE)"
    )
    qkv_bias: bool = model(False, "biases on queries, keys and values only")
    rotary_base: float = model(100000.0, "base of the rotary position embedding", gt=0, costs=False)
    rotary_fraction: float = model(1.0, "share of each head's channels that are rotated", gt=0, le=1)
    rope_scaling: Literal["none", "llama3", "yarn"] = model(
        "none", "rotary frequencies for sequences longer than ROPE_ORIGINAL_SEQ_LEN, as in Llama 3 or by YaRN"
    )
    rope_scaling_factor: float = model(1.0, "factor by which ROPE_SCALING extends the sequence length", ge=1)
    rope_original_seq_len: NonNegative = model(
        0, "sequence length before scaling; 0: 8192 with llama3 (the only value allowed), 4096 with yarn"
    )
    yarn_beta_fast: float = model(
        32.0, "number of rotations over ROPE_ORIGINAL_SEQ_LEN from which a frequency is kept (yarn)", gt=0
    )
    yarn_beta_slow: float = model(
        1.0,
        "number of rotations over ROPE_ORIGINAL_SEQ_LEN up to which a frequency is divided by "
        "ROPE_SCALING_FACTOR (yarn)",
        gt=0,
    )
    yarn_mscale: Rate = model(
        1.0,
        "queries and keys are multiplied by f(YARN_MSCALE) / f(YARN_MSCALE_ALL_DIM), with f(m) = 1 + "
        "0.1*m*ln(ROPE_SCALING_FACTOR)",
    )
    yarn_mscale_all_dim: Rate = model(
        0.0,
        "see YARN_MSCALE; with MULTI_LATENT_ATTENTION, attention scores are multiplied by "
        "f(YARN_MSCALE_ALL_DIM)^2",
    )
    tie_embeddings: bool = model(False, "output layer shares the weights of the embedding")
    dropout: Probability = model(0.0, "dropout after attention, after the MLP and on the embedding")
    attention_dropout: Probability = model(0.0, "dropout on attention weights")
    init_std: float = model(0.02, "standard deviation of the initial weights", gt=0, costs=False)
    init_distribution: Literal["normal", "truncated_normal"] = model(
        "normal",
        "distribution of the initial weights; truncated_normal: none further than 3 standard "
        "deviations from 0",
        costs=False,
    )
    parametrization: Literal["standard", "mup"] = model(
        "standard",
        "how initial weights, learning rates and weight decay depend on the model's sizes; mup: so that LR "
        "found on a small model holds for a larger one",
        costs=False,
    )
    mup_base_hidden_size: NonNegative = model(
        0, "HIDDEN_SIZE for which LR and INIT_STD were found (PARAMETRIZATION=mup)", costs=False
    )
    mup_base_moe_ffn_hidden_size: NonNegative = model(
        0, "its MOE_FFN_HIDDEN_SIZE; 0: in proportion to HIDDEN_SIZE as in this model", costs=False
    )
    mup_base_topk: NonNegative = model(0, "its TOPK; 0: as in this model", costs=False)
    mup_rule: Annotated[str, one_of(MUP_RULES)] = model(
        "mean_field",
        "initial weights of the experts' second projection with PARAMETRIZATION=mup; "
        + ", ".join(f"{name}: {rule.text}" for name, rule in MUP_RULES.items()),
        costs=False,
    )

    @property
    def kv_channels(self) -> int:
        """Size of an attention head; with multi-latent attention, of its query and key."""
        if self.multi_latent_attention:
            return self.qk_head_dim + self.qk_pos_emb_head_dim
        return self.head_dim or self.hidden_size // self.num_heads

    @property
    def rope_seq_len(self) -> int:
        """ROPE_ORIGINAL_SEQ_LEN with the default of ROPE_SCALING filled in."""
        return self.rope_original_seq_len or (8192 if self.rope_scaling == "llama3" else 4096)

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding, padded to 128 (Megatron: 128*TP), so that TP does not change the model."""
        return -(-self.vocab_size // 128) * 128

    @property
    def gated(self) -> bool:
        """Whether the activation is gated, i.e. the first projection is doubled."""
        return self.activation in ("swiglu", "clamped_swiglu", "geglu")

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.multi_latent_attention:
            yield from self._latent_attention_problems()
        else:
            yield from self._attention_problems()
        yield from self.broken(
            (self.qk_norm_scope == "all" and not self.qk_norm, "qk_norm_scope",
             "has no effect while QK_NORM=false", "set QK_NORM=true, or QK_NORM_SCOPE=head"),
            (self.qk_norm_scope == "all" and self.normalization != "RMSNorm", "qk_norm_scope",
             f"there is no NORMALIZATION={self.normalization} over all heads",
             "set NORMALIZATION=RMSNorm, or QK_NORM_SCOPE=head"),
        )  # fmt: skip
        yield from self._rope_scaling_problems()
        if self.parametrization == "mup":
            yield from self._mup_problems()

    def _attention_problems(self) -> Iterator[str]:
        """Heads, and their channels that are rotated."""
        yield from self.must_divide("num_query_groups", "NUM_HEADS", self.num_heads)
        if not self.head_dim:
            yield from self.must_divide("num_heads", "HIDDEN_SIZE", self.hidden_size)
        channels = self.kv_channels
        if channels % 2:
            rule = "rotary position embedding turns pairs of channels, the head size must be even"
            yield problem("head_dim", channels, rule, f"set HEAD_DIM to {multiples(2, channels)}")
        turned, is_partial = int(channels * self.rotary_fraction), self.rotary_fraction < 1
        below = turned // 2 * 2
        fractions = [size / channels for size in (below, below + 2) if 0 < size <= channels]
        yield from self.broken(
            (is_partial and (turned == 0 or turned % 2), "rotary_fraction",
             f"turns {turned} of the {channels} channels of a head, rotary position embedding turns pairs of"
             " them", "set ROTARY_FRACTION to " + " or ".join(f"{fraction:g}" for fraction in fractions)),
            (is_partial and self.rope_scaling == "yarn", "rotary_fraction",
             "Megatron's YaRN turns all channels of a head", "set ROTARY_FRACTION=1, or ROPE_SCALING=none"),
        )  # fmt: skip
        names = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
        fix = "set MULTI_LATENT_ATTENTION=true"
        yield from self._without_effect(names, "MULTI_LATENT_ATTENTION=false", fix)

    def _latent_attention_problems(self) -> Iterator[str]:
        for name, rule in _NOT_LATENT.items():
            if getattr(self, name) != (default := type(self).model_fields[name].default):
                fix = f"set {name.upper()}={as_given(default)}, or MULTI_LATENT_ATTENTION=false"
                yield self.problem(name, rule, fix)
        yield from self.broken(
            (self.rope_scaling == "llama3", "rope_scaling",
             "Megatron has YaRN alone with MULTI_LATENT_ATTENTION", "set ROPE_SCALING=yarn or none"),
            (self.qk_pos_emb_head_dim % 2, "qk_pos_emb_head_dim",
             "rotary position embedding turns pairs of channels",
             f"set QK_POS_EMB_HEAD_DIM={self.qk_pos_emb_head_dim + 1}"),
        )  # fmt: skip

    def _rope_scaling_problems(self) -> Iterator[str]:
        if self.rope_scaling == "none":
            extending = ("rope_scaling_factor", "rope_original_seq_len")
            yield from self._without_effect(extending, "ROPE_SCALING=none", "set ROPE_SCALING")
        elif self.rope_scaling_factor == 1:
            fix = "set ROPE_SCALING_FACTOR, or ROPE_SCALING=none"
            yield self.problem("rope_scaling", "scales nothing with ROPE_SCALING_FACTOR=1", fix)
        if self.rope_scaling == "llama3" and self.rope_seq_len != 8192:
            rule = "Megatron has the original length of Llama 3 alone"
            fix = "set ROPE_ORIGINAL_SEQ_LEN=8192, or ROPE_SCALING=yarn"
            yield self.problem("rope_original_seq_len", rule, fix)
        if self.rope_scaling != "yarn":
            names = ("yarn_beta_fast", "yarn_beta_slow", "yarn_mscale", "yarn_mscale_all_dim")
            other = f"ROPE_SCALING={self.rope_scaling}"
            yield from self._without_effect(names, other, "set ROPE_SCALING=yarn")
        elif self.yarn_beta_fast <= self.yarn_beta_slow:
            rule = f"is not over YARN_BETA_SLOW={self.yarn_beta_slow:g}"
            yield self.problem("yarn_beta_fast", rule, "set YARN_BETA_FAST=32 and YARN_BETA_SLOW=1")

    def _without_effect(self, names: Sequence[str], other: str, fix: str) -> Iterator[str]:
        """A line for each of `names` that is not at its default, while `other` makes it useless."""
        for name in names:
            if getattr(self, name) != (default := type(self).model_fields[name].default):
                rule = f"has no effect while {other}"
                yield self.problem(name, rule, f"{fix}, or {name.upper()}={default:g}")

    def _mup_problems(self) -> Iterator[str]:
        """Settings that the rules of PARAMETRIZATION=mup do not cover."""
        return self.broken(
            (not self.mup_base_hidden_size, "mup_base_hidden_size",
             "PARAMETRIZATION=mup needs the sizes of a base model",
             "set it to the HIDDEN_SIZE for which LR was found"),
            (self.tie_embeddings, "parametrization",
             "does not go with TIE_EMBEDDINGS=true, as embedding and output layer have different rules",
             "set TIE_EMBEDDINGS=false"),
            (self.multi_latent_attention, "parametrization",
             "does not go with MULTI_LATENT_ATTENTION=true, whose ranks have no rule",
             "set MULTI_LATENT_ATTENTION=false"),
        )  # fmt: skip
